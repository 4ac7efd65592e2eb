"""Training: a whole run of tiny models, what it leaves on disk, its measurement, and bad input."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.tiny_models.__main__ import main
from benchmarks.tiny_models.acceptance import decode_steps, measure_acceptance
from benchmarks.tiny_models.config import AcceptanceConfig, OptimConfig, TrainConfig
from benchmarks.tiny_models.documents import encode_documents, format_document
from benchmarks.tiny_models.run import TrainReport, run_training
from specgraph.errors import ConfigError, InputError, SpecgraphError
from specgraph.training.data import Document, Encoded, collate, format_question, shuffled, split_documents
from specgraph.training.measure import Step
from specgraph.training.rollout import split_text
from specgraph.training.updates import lr_factor

DOCUMENTS = [
    Document(
        f"Ann has {n} red apples and buys {2 * n}. How many?", f"She has {n}+{2 * n}=<<{n}+{2 * n}={3 * n}>>{3 * n}."
    )
    for n in range(7, 27)
]
SMALL = [
    "heldout=4", "max_length=96", "device=cpu", "tokenizer.vocab_size=300",
    "target.model.hidden_size=48", "target.model.num_hidden_layers=2", "target.model.head_dim=16",
    "target.model.num_attention_heads=2", "target.model.num_key_value_heads=1", "target.model.intermediate_size=64",
    "target.optim.steps=3", "target.optim.batch_size=4", "target.optim.warmup_steps=1", "target.optim.eval_every=1",
    "target.optim.learning_rate=0.01",
    "draft.model.hidden_size=32", "draft.model.num_hidden_layers=1", "draft.model.head_dim=16",
    "draft.model.model_type=qwen3", "draft.model.intermediate_size=48",
    "draft.optim.steps=3", "draft.optim.batch_size=4", "draft.optim.warmup_steps=1", "draft.optim.eval_every=1",
    "draft.rollout.sampled_questions=2", "draft.rollout.max_new_tokens=8",
    "acceptance.max_questions=3", "acceptance.max_new_tokens=12",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
    report: TrainReport
    folder: Path
    data: Path


def train(data: Path, folder: Path, *overrides: str) -> TrainReport:
    return main([f"data={data}", f"output={folder}", *SMALL, *overrides])


def write_jsonl(path: Path, documents: list[Document]) -> Path:
    path.write_text("".join(json.dumps(dataclasses.asdict(d)) + "\n" for d in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("training")
    data = write_jsonl(folder / "data.jsonl", DOCUMENTS)
    return Run(train(data, folder / "models"), folder / "models", data)


def load(run: Run, name: str) -> tuple[Any, Any]:
    model = AutoModelForCausalLM.from_pretrained(run.folder / name)
    return model, AutoTokenizer.from_pretrained(run.folder / name)


@pytest.mark.parametrize("name", ["target", "draft"])
def test_saved_models_load_with_transformers_alone(run: Run, name: str) -> None:
    model, tokenizer = load(run, name)
    assert model.dtype == torch.bfloat16
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert model.config.vocab_size == len(tokenizer) == run.report.vocab_size
    ends = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ends
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id) == (*ends, None)
    assert sum(p.numel() for p in model.parameters()) == getattr(run.report, name).parameters


def test_target_and_draft_have_one_tokenizer(run: Run) -> None:
    target, draft = (load(run, name)[1] for name in ("target", "draft"))
    assert target.get_vocab() == draft.get_vocab()


@pytest.mark.parametrize("text", ["a 12 b", "x  \n\ty", "<<48/2=24>>24", "čtyři 🦆 € 日本", " lead", "", "\x00\x7f"])
def test_tokenizer_gives_the_text_back(run: Run, text: str) -> None:
    _, tokenizer = load(run, "target")
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_one_token(run: Run) -> None:
    _, tokenizer = load(run, "target")
    assert [tokenizer.decode([token]) for token in tokenizer("2024")["input_ids"]] == ["2", "0", "2", "4"]
    assert not [entry for entry in tokenizer.get_vocab() if sum(c.isdigit() for c in entry) and len(entry) > 1]


def test_losses_fall(run: Run) -> None:
    for stage in (run.report.target, run.report.draft):
        assert [step for step, *_ in stage.curve] == [1, 2, 3]
        assert stage.curve[-1][2] < stage.curve[0][2]
        assert stage.heldout_loss == pytest.approx(min(held for *_, held in stage.curve), abs=1e-4)


def test_report_is_saved_and_adds_up(run: Run) -> None:
    saved = json.loads((run.folder / "training_report.json").read_text())
    assert saved["acceptance"] == dataclasses.asdict(run.report.acceptance)
    assert saved["documents"] == 16
    assert saved["heldout"] == 4
    assert saved["rollout_documents"] >= 32
    accepted = run.report.acceptance
    assert accepted.questions == 3
    assert 1 <= accepted.acceptance_length <= 5
    assert "agreement" in str(run.report)


def test_same_seed_gives_the_same_models_and_leaves_the_generator_alone(run: Run, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    train(run.data, tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    for name in ("target/tokenizer.json", "target/model.safetensors", "draft/model.safetensors"):
        assert (tmp_path / name).read_bytes() == (run.folder / name).read_bytes(), name


def test_draft_of_an_earlier_target(run: Run, tmp_path: Path) -> None:
    report = train(run.data, tmp_path, f"target.checkpoint={run.folder / 'target'}", "seed=0")
    assert not (tmp_path / "target").exists()
    assert (report.target.steps, report.draft.steps) == (0, 3)
    assert report.target.parameters == run.report.target.parameters
    assert report.target.heldout_loss == pytest.approx(run.report.target.heldout_loss, abs=0.02)  # rounded to bf16
    assert "loaded" in str(report)


def test_a_hybrid_target_alone(run: Run, tmp_path: Path) -> None:
    """An architecture with options of its own, and no draft."""
    options = "linear_num_key_heads=1 linear_num_value_heads=2 linear_key_head_dim=16 linear_value_head_dim=8"
    kind = ["model_type=qwen3_5_text", *(f"options.{option}" for option in options.split())]
    report = train(run.data, tmp_path, "draft.enabled=false", *(f"target.model.{setting}" for setting in kind))
    assert sorted(os.listdir(tmp_path)) == ["target", "training_report.json"]
    assert report.draft is report.acceptance is None
    assert str(report).startswith("target: ") and "draft" not in str(report)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    assert model.config.layer_types == ["linear_attention", "linear_attention"]
    assert model.config.linear_num_value_heads == 2
    assert report.target.curve[-1][2] < report.target.curve[0][2]


def test_acceptance_equals_drafting_token_by_token(run: Run) -> None:
    (target, tokenizer), (draft, _) = load(run, "target"), load(run, "draft")
    target, draft = target.double().eval(), draft.double().eval()
    prompts = tokenizer([format_question(d.question) for d in DOCUMENTS[:3]])["input_ids"]
    report = measure_acceptance(target, target, prompts, AcceptanceConfig(3, 12, 3))
    assert report.agreement == 1
    report = measure_acceptance(target, draft, prompts, AcceptanceConfig(3, 12, 3))
    steps = [step for prompt in prompts for step in drafted_steps(target, draft, prompt, 3, 12)]
    assert report.acceptance_length == sum(step.emitted for step in steps) / len(steps)
    assert report.per_position == [sum(step.accepted > i for step in steps) / len(steps) for i in range(3)]


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """``count`` more tokens, the whole sequence recomputed for each; stops after EOS."""
    new: list[int] = []
    while len(new) < count and model.config.eos_token_id not in new:
        new.append(int(model(input_ids=torch.tensor([ids + new])).logits[0, -1].argmax()))
    return new


@torch.no_grad()
def drafted_steps(target: Any, draft: Any, prompt: list[int], k: int, count: int) -> list[Step]:
    text = greedy(target, prompt, count)
    steps, at = [], 1
    while at < len(text):
        drafts = greedy(draft, prompt + text[:at], k)
        accepted = 0
        while accepted < min(len(drafts), len(text) - at) and drafts[accepted] == text[at + accepted]:
            accepted += 1
        steps.append(Step(accepted, min(accepted + 1, len(text) - at)))
        at += steps[-1].emitted
    return steps


@pytest.mark.parametrize(
    ("agreed", "expected"),
    [
        ("", []),
        ("1", []),
        ("01", [(1, 1)]),
        ("000", [(0, 1), (0, 1)]),
        ("0111", [(2, 3)]),
        ("0110101", [(2, 3), (1, 2), (1, 1)]),
    ],
)
def test_decode_steps(agreed: str, expected: list[tuple[int, int]]) -> None:
    assert decode_steps([mark == "1" for mark in agreed], 2) == expected


def test_documents_are_encoded_as_prompt_and_continuation(run: Run) -> None:
    _, tokenizer = load(run, "target")
    (encoded,) = encode_documents(DOCUMENTS[:1], tokenizer, 96)
    assert tokenizer.decode(encoded.ids[: encoded.prompt_length]) == format_question(DOCUMENTS[0].question)
    assert encoded.ids == [*tokenizer(format_document(DOCUMENTS[0]))["input_ids"], tokenizer.eos_token_id]
    (cut,) = encode_documents(DOCUMENTS[:1], tokenizer, 5)
    assert cut == Encoded(encoded.ids[:5], 5)


def test_collate_weighs_what_is_predicted() -> None:
    batch = collate([Encoded([5, 6, 7, 8, 0], 2), Encoded([5, 6, 7], 3)], pad_id=1, question_weight=0.25)
    assert batch.tokens.shape == (2, 32)
    assert batch.tokens[:, :6].tolist() == [[5, 6, 7, 8, 0, 1], [5, 6, 7, 1, 1, 1]]
    assert batch.weights[:, :5].tolist() == [[0.25, 1, 1, 1, 0], [0.25, 0.25, 0, 0, 0]]
    assert batch.weights.sum() == 3.75


def test_shuffled_covers_every_document_once_per_epoch() -> None:
    documents = [Encoded([index, *[1] * (index % 7)], 1) for index in range(10, 47)]
    batches = shuffled(documents, 4, 1, seed=3)
    for _ in range(2):
        seen = [int(row[0]) for _ in range(10) for row in next(batches).tokens]
        assert sorted(seen) == list(range(10, 47))


def test_split_holds_out_without_overlap() -> None:
    train_set, heldout = split_documents(DOCUMENTS, 4, seed=0)
    assert len(heldout) == 4
    assert {d.question for d in train_set} | {d.question for d in heldout} == {d.question for d in DOCUMENTS}
    assert split_documents(DOCUMENTS, 4, seed=1)[1] != heldout


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_document(DOCUMENTS[0]), DOCUMENTS[0]),
        ("Question: half a", None),
        ("Question: \nAnswer: 3", None),
        ("Question: a\nAnswer: b\nAnswer: c", None),
        ("What?\nAnswer: 3", None),
    ],
)
def test_split_text(text: str, expected: Document | None) -> None:
    assert split_text(text) == expected


def test_learning_rate_rises_then_falls() -> None:
    cfg = OptimConfig(steps=100, warmup_steps=10, final_lr_ratio=0.1)
    factors = [lr_factor(step, cfg) for step in range(101)]
    assert factors[0] == 0.1
    assert factors[9] == factors[10] == 1
    assert factors[100] == pytest.approx(0.1)
    assert factors[10:] == sorted(factors[10:], reverse=True)


def test_config_is_structured() -> None:
    cfg = OmegaConf.structured(TrainConfig)
    assert OmegaConf.to_object(cfg) == TrainConfig()
    with pytest.raises(ConfigKeyError):
        OmegaConf.merge(cfg, {"draft": {"optim": {"step": 3}}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "data={path}: there is no such file; give the path of a jsonl file."),
        ("\n", "data={path}: the file has no documents; it needs one JSON object per line."),
        (
            '{"question": "a", "answer": "b"}\n{"quest',
            "{path}:2: not JSON (Unterminated string starting at); each line",
        ),
        ('{"question": "a"}', '{path}:1: the field "answer" is missing or not a text; each line must look like'),
        ('{"question": 3, "answer": "b"}', '{path}:1: the field "question" is missing or not a text; each line must'),
        ("[1]", '{path}:1: the field "question" is missing or not a text; each line must look like {"question"'),
    ],
)
def test_bad_data_is_refused_in_one_sentence(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "data.jsonl"
    if content is not None:
        path.write_text(content)
    assert_refused(InputError, TrainConfig(data=str(path)), message.replace("{path}", str(path)))


def test_eval_data_is_named_when_it_is_missing(run: Run) -> None:
    assert_refused(InputError, TrainConfig(data=str(run.data), eval_data="no.jsonl"), "eval_data=no.jsonl: there is no")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data=''", "data is not set: give data=path/to/file.jsonl, one question and answer per line."),
        ("heldout=20", "heldout=20 of 20 documents is out of range: hold out at least 1 and leave at least 1"),
        ("heldout=0", "heldout=0 of 20 documents is out of range"),
        ("device=tpu9", "device='tpu9' is not a device: use auto, cpu or cuda."),
        ("tokenizer.vocab_size=257", "tokenizer.vocab_size=257 is too small: 256 bytes and 2 special tokens need"),
        ("target.optim.steps=0", "target.optim.steps=0 is out of range: it must be more than 0."),
        ("draft.question_weight=-1", "draft.question_weight=-1.0 is out of range: it must be 0 or more."),
        ("draft.optim.learning_rate=nan", "draft.optim.learning_rate=nan is out of range"),
        ("target.model.model_type=lama", "target.model.model_type='lama' is no causal LM of transformers: use llama"),
        ("target.model.model_type=gpt2", "target.model.num_key_value_heads is no setting of model_type=gpt2; use"),
        (
            "target.model.options.mlp_bia=true",
            "target.model.options.mlp_bia is no setting of model_type=llama; did you",
        ),
        ("draft.model.hidden_size=33", "draft.model: hidden_size=33 must be a multiple of num_attention_heads=2"),
        ("draft.model.num_key_value_heads=3", "draft.model: num_attention_heads=2 must be a multiple of"),
        ("draft.model.max_position_embeddings=64", "draft.model.max_position_embeddings=64 is less than max_length=96"),
        ("target.checkpoint=nowhere", "target.checkpoint=nowhere: there is no config.json; give the folder"),
        (f"output={__file__}", "is a file: give output=path/of/a/folder."),
        ("draft.enabled=false target.checkpoint=t", "draft.enabled=false and target.checkpoint=t leave nothing to"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(run: Run, override: str, message: str) -> None:
    dotlist = [f"data={run.data}", *SMALL, *override.split()]
    cfg = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), OmegaConf.from_dotlist(dotlist)))
    assert_refused(ConfigError, cfg, message)


def assert_refused(kind: type[SpecgraphError], cfg: Any, message: str) -> None:
    with pytest.raises(kind) as caught:
        run_training(cfg)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
