"""Training of heads: the loss against a naive one, a run that learns, a run that was killed, the command line.

All heads are trained by one loop and share the fixtures of this file, which is why it is long.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from specgraph.cli import main
from specgraph.config.drafters import trained_by
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3 import Eagle3, Eagle3Drafter
from specgraph.drafters.shifted import chain_mask
from specgraph.errors import ConfigError, InputError, SpecgraphError
from specgraph.training import HeadTrainConfig, HeadTrainReport, train_head
from specgraph.training import run as training_run
from specgraph.training.chain import ChainLoss, counted_rows
from specgraph.training.config import ChainConfig, HeadConfig, OptimConfig, RolloutConfig
from specgraph.training.data import Encoded, collate
from specgraph.training.head import build_head, start_from
from specgraph.training.loop import HeadLoop
from specgraph.training.measure import measure, walk
from specgraph.training.rollout import continue_prompts, encode_questions
from specgraph.training.teacher import Teacher, feature_layers
from tests.models import make_model

STEPS = 3


@functools.cache
def teacher(model: PreTrainedModel, layers: tuple[int, ...]) -> Teacher:
    """Tracing is most of a short run."""
    return Teacher(model, layers)


@pytest.fixture(scope="module", autouse=True)
def traced_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "Teacher", teacher)
        yield


TEXTS = [Encoded([5, 9, 14, 7, 3, 8, 21, 6, 0], 4), Encoded([11, 2, 30, 4, 17, 9, 12], 2)]


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_model("llama", vocab_size=64, num_hidden_layers=3, eos_token_id=0, pad_token_id=1, bos_token_id=None)


@pytest.fixture(scope="module")
def exact() -> PreTrainedModel:
    model: PreTrainedModel = make_model("llama", vocab_size=64, num_hidden_layers=3).double()
    return model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token per byte of the questions below."""
    entries = ["<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    entries = (
        entries[:2] + [entry for entry in entries[2:] if entry in "ĠĊ" or (entry.isascii() and entry.isalnum())][:62]
    )
    tokens = Tokenizer(models.BPE({entry: index for index, entry in enumerate(entries)}, []))
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<eos>", pad_token="<pad>")


def config(**changes: Any) -> HeadTrainConfig:
    return dataclasses.replace(HeadTrainConfig(model="target", data="data.jsonl", eval_drafts=2), **changes)


def make_head(target: PreTrainedModel, algorithm: str, **head: Any) -> DraftHead:
    torch.manual_seed(3)
    cfg = config(draft=algorithm, head=HeadConfig(**head), chain=ChainConfig(steps=STEPS))
    return build_head(target, cfg, 1, TEXTS)


def naive_losses(head: DraftHead, target: PreTrainedModel, text: Encoded) -> list[list[Tensor]]:
    """Per step the losses of one text, every chain recomputed from the start of the text, without a cache."""
    with torch.no_grad():
        said = target(input_ids=torch.tensor([text.ids]), output_hidden_states=True)
    features = [said.hidden_states[k] for k in head.features]
    losses: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for anchor in range(len(text.ids) - 2):
        hidden = head.module.combine(*(feature[:, : anchor + 1] for feature in features))
        tokens = text.ids[1 : anchor + 2]
        for step in range(STEPS):
            predicted = anchor + 2 + step
            if predicted >= len(text.ids):
                break
            rows = torch.arange(len(tokens))
            mask = rows[:, None] >= rows[None, :]
            out = head.module(torch.tensor([tokens]), rows[None], hidden, attention_mask=mask[None, None])[:, -1:]
            logits, fed = head.module.predict(out)
            wanted = said.logits[0, predicted - 1]
            vocabulary = head.module.draft_to_target
            if predicted >= text.prompt_length and (vocabulary is None or wanted.argmax() in vocabulary):
                wanted = wanted if vocabulary is None else wanted[vocabulary]
                losses[step].append(F.cross_entropy(logits[0, 0], wanted.softmax(-1)))
            if predicted < len(text.ids):
                tokens, hidden = following(head, text.ids, tokens, hidden, fed)
    return losses


def following(
    head: DraftHead, ids: list[int], tokens: list[int], hidden: Tensor, fed: Tensor
) -> tuple[list[int], Tensor]:
    """The rows of the next step: one more at the end."""
    if not head.parallel:
        return [*tokens, ids[len(tokens) + 1]], torch.cat([hidden, fed], dim=1)
    assert head.mask_token_id is not None and head.module.mask_hidden is not None
    masked = head.module.combine(*head.module.mask_hidden.view(1, 1, len(head.features), -1).unbind(2))
    return [*tokens, head.mask_token_id], torch.cat([hidden, masked], dim=1)


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("eagle3", {}),
        ("eagle3", {"layers": 2, "model_type": "qwen3", "norm_before_residual": True}),
        ("eagle3", {"draft_vocab_size": 40}),
        ("peagle", {}),
        ("peagle", {"layers": 2, "feature_layers": [0, 3]}),
        ("eagle", {"layers": 2}),
    ],
)
@pytest.mark.parametrize("rows_at_once", [1000, 5])
def test_loss_equals_a_naive_one(
    exact: PreTrainedModel, algorithm: str, changes: dict[str, Any], rows_at_once: int
) -> None:
    """Also where the loss takes a few rows of a large vocabulary at a time."""
    head = make_head(exact, algorithm, **changes)
    head.module.double()
    expected: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for text in TEXTS:
        for step, losses in enumerate(naive_losses(head, exact, text)):
            expected[step] += losses
    means = torch.stack([torch.stack(losses).mean() for losses in expected])
    wanted = torch.autograd.grad(means.sum(), trained(head.module))

    batch = collate(TEXTS, pad_id=1, question_weight=0.0)
    rows = counted_rows(batch.weights, ChainConfig(steps=STEPS))
    loss = ChainLoss(head, STEPS, chunk_size=rows_at_once * exact.config.vocab_size)
    actual = loss(batch.tokens, teacher(exact, head.features)(batch.tokens), rows)
    torch.testing.assert_close(actual, means, rtol=1e-6, atol=0)
    for ours, theirs in zip(torch.autograd.grad(actual.sum(), trained(head.module)), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def trained(module: Eagle3) -> list[Tensor]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def test_a_row_sees_the_text_before_it_and_its_own_chain() -> None:
    assert chain_mask(2, 3, torch.device("cpu")).int()[0, 0].tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


def test_only_answers_are_learned_from() -> None:
    batch = collate(TEXTS, pad_id=1, question_weight=0.0)
    rows = counted_rows(batch.weights, ChainConfig(steps=STEPS))
    width = batch.tokens.shape[1]
    predicted = [[(int(row) // width, int(row) % width + 2 + step) for row in each] for step, each in enumerate(rows)]
    assert predicted[0] == [(0, t) for t in range(4, 9)] + [(1, t) for t in range(2, 7)]
    assert predicted[2] == [(0, t) for t in range(4, 9)] + [(1, t) for t in range(4, 7)]
    drawn = counted_rows(batch.weights, ChainConfig(steps=STEPS, keep=0.5), torch.Generator().manual_seed(0))
    assert [len(each) for each in drawn] == [10, 4, 2]
    assert all(set(some.tolist()) <= set(every.tolist()) for some, every in zip(drawn, rows, strict=True))


def test_walk_imitates_decode_steps() -> None:
    hits = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1, 0]], dtype=torch.bool)
    # Rows 1, 4: the first accepts 2 drafts, the second accepts 1; nothing is predicted past the end.
    assert walk(hits, prompt_length=2, length=7) == [(2, 3), (1, 1)]
    assert walk(hits, prompt_length=4, length=7) == [(0, 1), (1, 1)]
    assert walk(hits, prompt_length=6, length=7) == []


@torch.no_grad()
@pytest.mark.parametrize("algorithm", ["eagle3", "peagle", "eagle"])
def test_measured_acceptance_equals_drafting_token_by_token(target: PreTrainedModel, algorithm: str) -> None:
    head = make_head(target, algorithm)
    ids = TEXTS[0].ids[:4]
    while len(ids) < 20:
        ids = [*ids, int(target(input_ids=torch.tensor([ids])).logits[0, -1].argmax())]
    cfg = ChainConfig(steps=STEPS)
    measured = measure(ChainLoss(head, STEPS), teacher(target, head.features), [Encoded(ids, 4)], cfg, 2, 4)
    emitted = drafted_steps(head, target, ids, 4, 2)
    assert measured.acceptance_length == pytest.approx(sum(emitted) / len(emitted))


def drafted_steps(
    head: DraftHead, target: PreTrainedModel, ids: list[int], prompt_length: int, drafts: int
) -> list[int]:
    """Tokens of every decode step of a greedy answer, each draft fed to the next one."""
    said = target(input_ids=torch.tensor([ids]), output_hidden_states=True)
    emitted, row = [], prompt_length - 1
    while row + 2 < len(ids):
        text, accepted = ids[: row + 2], 0
        hidden = head.module.combine(*(said.hidden_states[k][:, : row + 1] for k in head.features))
        tokens = text[1:]
        for _ in range(min(drafts, len(ids) - row - 2)):
            rows = torch.arange(len(tokens))
            mask = (rows[:, None] >= rows[None, :])[None, None]
            out = head.module(torch.tensor([tokens]), rows[None], hidden, attention_mask=mask)[:, -1:]
            logits, fed = head.module.predict(out)
            text = [*text, int(logits.argmax())]
            if text[-1] != ids[len(text) - 1]:
                break
            accepted += 1
            tokens, hidden = following(head, [*text, 0], tokens, hidden, fed)
        emitted.append(min(accepted + 1, len(ids) - row - 2))
        row += emitted[-1]
    return emitted


QUESTIONS = [f"Ann has {n} apples and buys {2 * n} more" for n in range(2, 14)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    path.write_text("".join(json.dumps({"question": text, "answer": "3"}) + "\n" for text in QUESTIONS))
    return path


def small(data: Path, output: Path, **optim: Any) -> HeadTrainConfig:
    settings = {
        "steps": 6,
        "batch_size": 4,
        "learning_rate": 0.01,
        "warmup_steps": 1,
        "eval_every": 2,
        "checkpoint_every": 2,
    }
    return config(
        draft="peagle", data=str(data), output=str(output), heldout=2, max_length=64, seed=5,
        chain=ChainConfig(steps=2, keep=0.5), optim=OptimConfig(**(settings | optim)),
        rollout=RolloutConfig(max_new_tokens=8, file=str(data.with_name("answers"))),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(target: PreTrainedModel, tokenizer: Any, data: Path) -> HeadTrainReport:
    return train_head(target, tokenizer, small(data, data.with_name("run")))


def test_a_run_learns_and_leaves_a_head_in_the_speculators_layout(run: HeadTrainReport, data: Path) -> None:
    folder = data.with_name("run")
    assert {path.name for path in folder.iterdir()} == {
        "config.json", "model.safetensors", "training_report.json", "loss.png"
    }  # fmt: skip
    losses = [loss for _, loss in run.progress.losses]
    assert losses[-1] < losses[0]
    assert [step for step, *_ in run.progress.measured] == [2, 4, 6]
    saved = json.loads((folder / "config.json").read_text())
    assert (saved["speculators_model_type"], saved["mask_token_id"]) == ("peagle", 1)
    assert saved["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    tensors = load_file(folder / "model.safetensors")
    assert {"fc.weight", "mask_hidden", "norm.weight", "layers.0.self_attn.q_proj.weight"} <= set(tensors)
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors), "the target has them"
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert json.loads((folder / "training_report.json").read_text())["progress"]["losses"][-1][1] == losses[-1]


def test_a_killed_run_ends_like_an_uninterrupted_one(
    run: HeadTrainReport,
    target: PreTrainedModel,
    tokenizer: Any,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original, cfg = HeadLoop._update, small(data, tmp_path)

    def killed(self: HeadLoop, batch: Any) -> Any:
        if self.progress.step == 5:
            raise KeyboardInterrupt
        return original(self, batch)

    monkeypatch.setattr(HeadLoop, "_update", killed)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, tokenizer, cfg)
    monkeypatch.undo()
    assert (tmp_path / "model.safetensors").exists(), "a checkpoint leaves a head, too"
    with pytest.raises(ConfigError, match=r"holds an unfinished run with optim\.learning_rate=0\.01: give the same"):
        train_head(target, tokenizer, small(data, tmp_path, learning_rate=0.02))
    random_state = torch.get_rng_state()
    report = train_head(target, tokenizer, cfg)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert report.progress.losses == run.progress.losses
    assert report.progress.measured == run.progress.measured
    assert (tmp_path / "model.safetensors").read_bytes() == (data.with_name("run") / "model.safetensors").read_bytes()


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash"])
def test_a_target_may_be_in_bf16_on_a_cpu(tokenizer: Any, data: Path, tmp_path: Path, algorithm: str) -> None:
    target = make_model("llama", vocab_size=64, num_hidden_layers=3, eos_token_id=0, pad_token_id=1, bos_token_id=None)
    cfg = dataclasses.replace(small(data, tmp_path), draft=algorithm, chain=ChainConfig(steps=2))
    report = train_head(target.to(torch.bfloat16), tokenizer, cfg)
    losses = [loss for _, loss in report.progress.losses]
    assert losses[-1] < losses[0]
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_a_target_in_another_dtype_is_refused_on_a_cpu(exact: PreTrainedModel, tokenizer: Any, data: Path) -> None:
    with pytest.raises(ConfigError, match=r"dtype=float64: on a CPU, .* a target in float32 or bfloat16; give one"):
        train_head(exact, tokenizer, small(data, data.with_name("none")))


def test_answers_are_those_of_the_target(exact: PreTrainedModel) -> None:
    prompts, options = [[5, 9, 14], [11, 2], [7, 30, 4, 17]], {"max_new_tokens": 6, "do_sample": False}
    torch.manual_seed(1)
    greedy, sampled = continue_prompts(exact, prompts, 6, [0.0, 1.0], 2, "answers")
    generate: Any = exact.generate
    assert greedy == [generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]
    assert sampled != greedy
    torch.manual_seed(1)
    assert continue_prompts(exact, prompts, 6, [0.0, 1.0], 2, "answers") == [greedy, sampled]


def test_a_time_limit_ends_a_run_and_its_schedule(
    target: PreTrainedModel, tokenizer: Any, data: Path, tmp_path: Path
) -> None:
    cfg = small(data, tmp_path, steps=10**6, max_seconds=1.0, eval_every=10**6, checkpoint_every=10**6)
    report = train_head(target, tokenizer, cfg)
    assert 0 < report.steps < 10**4
    assert report.seconds < 5


def test_feature_layers() -> None:
    assert feature_layers([], 32, Eagle3Drafter) == (2, 16, 29)
    assert feature_layers([], 8, Eagle3Drafter) == (2, 4, 5)
    assert feature_layers([], 2, Eagle3Drafter) == (0, 1, 2)
    assert feature_layers([1, 8], 8, Eagle3Drafter) == (1, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "data is not set: give data=path/to/questions.jsonl."),
        ({"draft": "ngram"}, "There is no draft=ngram to train; draft is dflash, dflash2, dspark, eagle,"),
        ({"eval_drafts": 9}, "eval_drafts=9 is more than chain.steps=2"),
        ({"heldout": 12}, "heldout=12 of 12 documents is out of range"),
        ({"head": HeadConfig(model_type="gpt2")}, "head.model_type='gpt2' is not known: use llama or qwen3."),
        ({"head": HeadConfig(layers=0)}, "head.layers=0 is out of range: it must be more than 0."),
        (
            {"head": HeadConfig(feature_layers=[2, 9])},
            "head.feature_layers=[2, 9]: give different indices in ascending",
        ),
        (
            {"head": HeadConfig(mask_token_id=64)},
            "head.mask_token_id=64 is outside of the target's embedding: use 0 to 63",
        ),
        ({"head": HeadConfig(draft_vocab_size=65)}, "head.draft_vocab_size=65 is more than the target's 64 tokens"),
        ({"head": HeadConfig(init="nowhere")}, "head.init=nowhere: there is no model.safetensors; give the folder of"),
        ({"head": HeadConfig(num_key_value_heads=3)}, "head: num_attention_heads=4 must be a multiple of"),
        ({"chain": ChainConfig(steps=7, decay=1.5)}, "chain.decay=1.5 is out of range: it must be 1 or less."),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(
    target: PreTrainedModel, tokenizer: Any, run: HeadTrainReport, data: Path, tmp_path: Path,
    changes: dict[str, Any], message: str,
) -> None:  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        train_head(target, tokenizer, dataclasses.replace(small(data, tmp_path), **changes))
    assert_sentence(caught.value, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense\n", "is not a file of answers (Expecting value: line 1 column 1 (char 0)); delete it"),
        ('{"ids": [900], "prompt_length": 1}\n', "has token 900, but the target's tokenizer has 64 tokens"),
        ('{"ids": [3], "prompt_length": 1}\n', "has answers to 0 of the held-out questions"),
    ],
)
def test_a_file_of_other_answers_is_refused(
    target: PreTrainedModel, tokenizer: Any, data: Path, tmp_path: Path, content: str, message: str
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(content)
    with pytest.raises(InputError) as caught:
        train_head(
            target, tokenizer, dataclasses.replace(small(data, tmp_path), rollout=RolloutConfig(file=str(answers)))
        )
    assert_sentence(caught.value, message)


def assert_sentence(error: SpecgraphError, message: str) -> None:
    assert message in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft=ngram"], "There is no draft=ngram to train; draft is dflash, dflash2, dspark, eagle, eagle3, peagle,"),
        (["draft=eagl3"], "There is no draft=eagl3 to train (did you mean 'eagle3'?)"),
        (["draft=eagle3"], "model is not set: give model=PATH"),
        (["draft=peagle", "model=./nowhere", "data=x"], "model=./nowhere: there is no such folder."),
        (["draft=eagle3", "optim.step=3"], "Unknown configuration key 'optim.step': did you mean 'optim.steps'?"),
        (["draft=eagle3", "optim.steps=few"], "optim.steps is an integer, not 'few'."),
        (["draft=draft_model", "optim.steps=3"], "There is no draft=draft_model to train"),
        (["draft=eagle3,draft_model", "-m"], "There is no draft=draft_model to train"),
    ],
)
def test_command_line_mistakes(overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *overrides]) == 2
    assert message in capsys.readouterr().err


def test_help_and_configuration_of_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "draft=peagle", "--help"]) == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m specgraph train draft={'|'.join(trained_by())} model=PATH" in shown
    assert "optim.learning_rate" in shown and "The learning rate at the end of the warm-up." in shown
    assert main(["train", "draft=peagle", "--cfg", "job"]) == 0
    assert "draft: peagle" in capsys.readouterr().out
    assert main(["train", "--help"]) == 0
    assert "distil" not in capsys.readouterr().out


def test_a_head_starts_from_a_trained_one(run: HeadTrainReport, target: PreTrainedModel, data: Path) -> None:
    folder = data.with_name("run")
    head = make_head(target, "peagle", layers=2).module
    before = head.layers[1].mlp.up_proj.weight.clone()
    start_from(head, str(folder))
    saved = load_file(folder / "model.safetensors")
    assert torch.equal(head.fc.weight, saved["fc.weight"].float())
    assert torch.equal(head.mask_hidden, saved["mask_hidden"].float().flatten())
    assert torch.equal(head.layers[1].mlp.up_proj.weight, before)
    other = make_head(target, "eagle3", intermediate_size=40).module
    with pytest.raises(ConfigError) as caught:
        start_from(other, str(folder))
    assert_sentence(caught.value, "layers.0.mlp.gate_proj.weight is [48, 32] there and [40, 32] here; train a head of")


def test_questions_are_asked_as_chats(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.chat=true needs a tokenizer with a chat template"):
        encode_questions(tokenizer, ["ab"], chat=True)
    templated = copy.deepcopy(tokenizer)
    turn, end = "{% for m in messages %}U{{ m['content'] }}{% endfor %}", "{% if add_generation_prompt %}A{% endif %}"
    templated.chat_template = turn + end
    assert encode_questions(templated, ["ab", "c"], chat=True) == tokenizer(["UabA", "UcA"])["input_ids"]
    assert encode_questions(templated, ["ab"], chat=False) == tokenizer(["Question: ab\nAnswer:"])["input_ids"]
