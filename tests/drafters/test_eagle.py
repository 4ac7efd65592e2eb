"""EAGLE-1 and EAGLE-2 as a chain: layouts, misfits, the formula, equal tokens, history, a dump, a bench, training.

A head has one test file, so this one is longer than others.
The oracle of the detectors is the published formula in plain PyTorch, without a cache. Each planted bug, and what
caught it here (``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

====================================  ===========  ======  ======
bug                                   fresh start  oracle  slots
====================================  ===========  ======  ======
noise off by one position             missed       caught  missed
window instead of emitted             missed       caught  missed
target hidden in the chain            missed       caught  missed
chained position off by one           caught       caught  caught
chained rows not written              missed       caught  caught
catch-up skips the last row           caught       caught  caught
rejected rows written                 missed       missed  caught
proposals from the row before         caught       caught  missed
====================================  ===========  ======  ======
"""

from __future__ import annotations

import copy
import functools
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench import run as bench_run
from specgraph.bench.models import random_head
from specgraph.cli import main
from specgraph.config.drafters import drafter_kinds
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle import Eagle, EagleDraftConfig, EagleDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError, PassError
from specgraph.training import HeadTrainConfig, train_head
from specgraph.training import run as training_run
from specgraph.training.config import ChainConfig, HeadConfig, OptimConfig, RolloutConfig
from specgraph.training.head import bf16_copy, build_head
from specgraph.training.loop import HeadLoop
from specgraph.training.teacher import Teacher
from tests.checkpoints.layouts import HEAD_DIM, HIDDEN, VOCAB, Written
from tests.checkpoints.running import info
from tests.decoding import CONFIG, assert_same_tokens, compiled, reference_greedy
from tests.detectors import NextLogits, caught_by, check_fresh_start, check_oracle, check_slots
from tests.drafters.eagle_formula import EPS, HEADS_WRITTEN, behind, formula, project, target, written
from tests.dump.test_dump import assert_runs_alike
from tests.harness import Run, drafting_config, drafting_stage, forced_run, real_run
from tests.models import exact_norms, make_model, ragged_prompts

QUICK: dict[str, Any] = {"pipeline": {"verify": False}}
PROMPTS = ragged_prompts((3, 9, 5))
LIMITS = (48, 41, 23)


# Layouts


def load(folder: Path, **options: Any) -> DraftHead:
    return EagleDrafter.load(open_checkpoint(folder), EagleDraftConfig(**options), target(), info(target()))


@functools.cache
def head(name: str) -> DraftHead:
    """One of ``HEADS_WRITTEN`` by way of its files, computing in float64 throughout."""
    with tempfile.TemporaryDirectory() as folder:
        made = load(HEADS_WRITTEN[name][0].save(Path(folder)))
    exact_norms(made.module)
    return made


def logits_of(module: Any, tokens: Sequence[int], hidden: Tensor) -> Tensor:
    """Logits ``[T, V]`` of rows that run ``tokens`` beside ``hidden`` ``[T, H]``."""
    rows = module(torch.tensor([tokens]), torch.arange(len(tokens))[None], hidden[None])
    logits: Tensor = module.predict(rows)[0][0]
    return logits


@torch.no_grad()
def example_rows() -> tuple[list[int], Tensor]:
    """Tokens behind the first, and the target's last hidden state of all but the last."""
    ids = ragged_prompts((8,), seed=5)[0]
    known = target()(input_ids=ids[None, :-1], output_hidden_states=True).hidden_states[-1][0]
    return ids[1:].tolist(), known


@torch.no_grad()
@pytest.mark.parametrize("container", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("name", HEADS_WRITTEN)
def test_a_layout_is_recognised_and_loaded(name: str, container: str, tmp_path: Path) -> None:
    given, theta = HEADS_WRITTEN[name]
    given.save(tmp_path)
    if container == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
        computed = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # some files have it
        torch.save({n: t.half() for n, t in given.tensors.items()} | computed, tmp_path / container)
    found = open_checkpoint(tmp_path)
    assert (found.kind, found.layout, found.algorithm, found.parallel) == ("eagle", "eagle", "eagle", False)
    loaded = load(tmp_path)
    assert (loaded.features, loaded.mask_token_id, loaded.parallel) == ((3,), None, False)
    module = loaded.module
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert parameters.keys() == given.tensors.keys() | {"embed_tokens.weight", "lm_head.weight"}
    rounded = {n: t if container == "model.safetensors" else t.half() for n, t in given.tensors.items()}
    assert all(torch.equal(parameters[name], tensor.double()) for name, tensor in rounded.items())
    assert module.config.layers.rope_parameters["rope_theta"] == theta
    assert torch.equal(module.rotary.inv_freq, 1.0 / theta ** (torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM))
    assert module.lm_head.weight is target().get_output_embeddings().weight


@pytest.mark.parametrize("tensor", ["embed_tokens", "lm_head"])
def test_a_tensor_is_the_targets_own_only_if_it_is_equal(tensor: str, tmp_path: Path) -> None:
    own = target().get_parameter({"embed_tokens": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}[tensor])
    for name, change, shared in (("missing", None, True), ("equal", 0.0, True), ("moved", 1e-3, False)):
        given = written()
        if change is not None:
            given.tensors[f"{tensor}.weight"] = own.detach().clone()
            given.tensors[f"{tensor}.weight"][7, 3] += change
        loaded = load(given.save(tmp_path / name))
        parameter = loaded.module.get_parameter(f"{tensor}.weight")
        assert (parameter is own) is shared
        assert torch.equal(parameter, given.tensors.get(f"{tensor}.weight", own))
        saved = EagleDrafter.save_head(loaded, tmp_path / "saved", target_name="", algorithm="eagle",
                                       num_speculative_tokens=3, shared=target().parameters())  # fmt: skip
        assert (f"{tensor}.weight" in open_checkpoint(saved).tensors) is not shared


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    def options(given: Written, **changed: Any) -> dict[str, tuple[Any, str]]:
        checkpoint = open_checkpoint(given.save(tmp_path))
        return {c.name: (c.value, c.source) for c in EagleDrafter.choices(checkpoint, EagleDraftConfig(**changed), 3)}

    found = options(written("fc", layers=2, rope_parameters={"rope_theta": 7.0}, bias=False))
    assert found == {
        "biases": (True, "tensors"), "embed_tokens": ("the target's", "tensors"), "layer_type": ("llama", "tensors"),
        "lm_head": ("the target's", "tensors"), "num_layers": (2, "tensors"),
        "rope_theta": (7.0, "rope_parameters.rope_theta"),
    }  # fmt: skip
    assert options(written(rope_theta=8.0))["rope_theta"] == (8.0, "rope_theta")
    assert options(written())["rope_theta"] == (10000.0, "default")
    assert options(written(rope_theta=8.0), rope_theta=9.0)["rope_theta"] == (9.0, "draft.rope_theta")
    assert load(tmp_path, rope_theta=9.0).module.config.layers.rope_parameters["rope_theta"] == 9.0


def _with(given: Written, **tensors: tuple[int, ...]) -> Written:
    named = {name.replace("__", "."): torch.zeros(shape) for name, shape in tensors.items()}
    return replace(given, tensors=given.tensors | named)


def _without(given: Written, name: str) -> Written:
    return replace(given, tensors={key: value for key, value in given.tensors.items() if key != name})


MISFITS: dict[str, tuple[Callable[[], Written], str]] = {
    "another target": (
        lambda: written(hidden_size=64, num_attention_heads=8),
        "does not fit: it has the hidden size 64, but the target Llama has 32",
    ),
    "sizes that contradict each other": (
        lambda: written(intermediate_size=40),
        r"mlp.gate_proj.weight has the shape \[48, 32\], but the target Llama and config.json need \[40, 32\]",
    ),
    "a features' projection": (
        lambda: _with(written(), fc__weight=(32, 96)),
        r"fc.weight has the shape \[32, 96\], but the target Llama and config.json need \[32, 64\]",
    ),
    "another vocabulary": (
        lambda: _with(written(), embed_tokens__weight=(99, 32)),
        r"embed_tokens.weight has the shape \[99, 32\], but the target Llama and config.json need \[101, 32\]",
    ),
    "a missing tensor": (
        lambda: _without(written(), "layers.0.mlp.up_proj.weight"),
        "lacks layers.0.mlp.up_proj.weight; download it again or correct its config.json",
    ),
    "no projection": (lambda: _without(written(), "fc.weight"), "lacks fc.weight; download it again or correct"),
    "a missing layer": (
        lambda: _with(written(), layers__2__mlp__up_proj__weight=(48, 32)),
        "lacks layers.1.self_attn.q_proj.weight, layers.1.self_attn.k_proj.weight, .* and 14 more;",
    ),
    "a last norm": (
        lambda: _with(written(), norm__weight=(32,)),
        "holds norm.weight, which an EAGLE head with its configuration does not use; correct the .* or remove them",
    ),
    "a bias of a norm": (
        lambda: _with(written(), layers__0__post_attention_layernorm__bias=(32,)),
        "holds layers.0.post_attention_layernorm.bias, which an EAGLE head",
    ),
    "a bias of the projection": (
        lambda: _with(written(), lm_head__bias=(101,)),
        "holds lm_head.bias, which an EAGLE head with its configuration does not use",
    ),
    "a bias of another size": (
        lambda: _with(written(), fc__bias=(31,)),
        r"fc.bias has the shape \[31\], but the target Llama and config.json need \[32\]",
    ),
    "a rotary embedding that is unknown": (
        lambda: written(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "has the rope_type 'dynamic', which specgraph does not run in a head; it runs default",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_get_one_sentence(case: str, tmp_path: Path) -> None:
    make, message = MISFITS[case]
    make().save(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: _with(_without(given, "fc.weight"), norm__weight=(32,)),
         r"is no draft that specgraph knows \(architectures \['LlamaModel'\], .*; it reads .*EAGLE-1 and EAGLE-2"),
        (lambda given: replace(given, config=given.config | {"speculators_model_type": "xpress"}), "is a xpress head"),
        (lambda given: replace(given, config=given.config | {"speculators_model_type": "eagle"}),
         "is an EAGLE-1 head in the layout of speculators, which specgraph does not read; it reads DFlash heads"),
        (lambda given: _with(given, layers__0__hidden_norm__weight=(32,)), "eagle3"),
        (lambda given: _with(given, hidden_norm__weight=(32,)), "dflash"),
    ],
)  # fmt: skip
def test_other_heads_are_told_apart(change: Callable[[Written], Written], words: str, tmp_path: Path) -> None:
    change(written(architectures=["LlamaModel"])).save(tmp_path)
    if words in drafter_kinds():
        assert open_checkpoint(tmp_path).kind == words
    else:
        with pytest.raises(ConfigError, match=words):
            open_checkpoint(tmp_path)


def test_a_causal_lm_is_no_head(tmp_path: Path) -> None:
    target().save_pretrained(tmp_path)
    assert open_checkpoint(tmp_path).kind == "draft_model"


@torch.no_grad()
@pytest.mark.parametrize("name", HEADS_WRITTEN)
def test_forward_is_the_published_formula(name: str) -> None:
    tokens, known = example_rows()
    expected = project(formula(name, tokens, known))
    torch.testing.assert_close(logits_of(head(name).module, tokens, known), expected, rtol=0, atol=1e-5)


def _other_halves(module: Eagle) -> None:
    module.fc.weight.data = module.fc.weight.roll(HIDDEN, dims=1)


def _first_norm(module: Eagle) -> None:
    module.layers[0].input_layernorm = nn.RMSNorm(HIDDEN, EPS, dtype=torch.float64)


def _last_norm(module: Eagle) -> None:
    module.lm_head = nn.Sequential(nn.RMSNorm(HIDDEN, EPS, dtype=torch.float64), module.lm_head)  # type: ignore[assignment]


def _no_bias(module: Eagle) -> None:
    module.fc.bias = None


def _not_causal(module: Eagle) -> None:
    module.layers[0].self_attn.is_causal = False


@torch.no_grad()
@pytest.mark.parametrize("change", [_other_halves, _first_norm, _last_norm, _no_bias, _not_causal])
def test_other_formulas_are_told_apart(change: Callable[[Eagle], None]) -> None:
    tokens, known = example_rows()
    module = copy.deepcopy(head("bias of fc").module)
    change(module)
    expected = project(formula("bias of fc", tokens, known))
    assert (logits_of(module, tokens, known) - expected).abs().max() > 0.1


# The detectors


@functools.cache
def decoder(name: str, k: int, rule: str = "strict", bug: str | None = None) -> SpeculativeDecoder:
    config = drafting_config({"kind": "eagle", "num_speculative_tokens": k}, rule, bug)
    return specgraph.compile_speculative(target(), config, draft=head(name))


@functools.cache
def forced(name: str, k: int, rule: str = "strict", bug: str | None = None) -> Run:
    return forced_run(drafting_stage(decoder(name, k, rule, bug)), PROMPTS, LIMITS, seed=0)


def oracle(name: str) -> NextLogits:
    """Next logits by the formula: every row again from the first token, no cache, no module of ours."""

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        pairs = zip(map(tuple, accepted), map(tuple, drafted), strict=True)
        return torch.stack([project(behind(name, *pair)[-1]) for pair in pairs])

    return next_logits


DETECTED = ("plain", "biases, own embedding", "two layers", "norms of queries and keys")
cases = pytest.mark.parametrize(
    ("name", "k", "rule"),
    [("plain", k, "strict") for k in (1, 3, 7, 16)] + [(name, 3, "probabilistic") for name in DETECTED],
)


@cases
def test_drafts_do_not_depend_on_history(name: str, k: int, rule: str) -> None:
    run = forced(name, k, rule)
    assert run.program.drafter.shifted and not run.parallel
    check_fresh_start(run)


@cases
def test_drafts_are_those_of_the_formula_without_a_cache(name: str, k: int, rule: str) -> None:
    check_oracle(forced(name, k, rule), oracle(name), rule)


@cases
def test_only_own_and_real_slots_are_written(name: str, k: int, rule: str) -> None:
    check_slots(forced(name, k, rule))


@pytest.mark.parametrize("k", [3, 7])
def test_histories_accept_none_and_all_and_reach_the_end(k: int) -> None:
    run = forced("plain", k)
    assert {0, k} <= set(run.accept_counts)
    assert len(run.steps[-1].accepted[2]) == LIMITS[2]


@pytest.mark.parametrize("name", ["plain", "two layers"])
def test_rejected_rows_are_never_read(name: str) -> None:
    run = forced_run(drafting_stage(decoder(name, 3)), PROMPTS, LIMITS, seed=0, poison=True)
    check_oracle(run, oracle(name), "strict")


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_real_decoding_passes_every_detector(rule: str) -> None:
    run = real_run(decoder("two layers", 3, rule), ragged_prompts((3, 17, 8)), (30, 41, 23))
    assert [len(tokens) for tokens in run.steps[-1].accepted] == [30, 41, 23]
    assert caught_by(run, oracle("two layers"), rule) == set()


BUGS: dict[str, set[str]] = {
    "noise off by one position": {"oracle"},
    "window instead of emitted, shifted": {"oracle"},
    "target hidden in the chain": {"oracle"},
    "chained position off by one": {"fresh start", "oracle", "slots"},
    "chained rows not written": {"oracle", "slots"},
    "catch-up skips the last row, shifted": {"fresh start", "oracle", "slots"},
    "rejected rows written, shifted": {"slots"},
    "proposals from the row before": {"fresh start", "oracle"},
}


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    assert caught_by(forced("plain", 3, bug=bug), oracle("plain"), "strict") >= BUGS[bug]


def tokens_of(tested: SpeculativeDecoder, **changed: Any) -> list[list[int]]:
    options: dict[str, Any] = {"temperature": [0.0, 0.8, 1.3], "seed": [11, -5, 7], **changed}
    out = tested.generate(PROMPTS, max_new_tokens=18, eos_token_id=[], **options)
    return [tokens.tolist() for tokens in out.new_tokens]


@functools.cache
def plain_tokens() -> list[list[int]]:
    return tokens_of(compiled(target(), "none", 1, **QUICK))


# Equal tokens


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_greedy_tokens_are_those_of_transformers(rule: str) -> None:
    found = decoder("plain", 3, rule).generate(PROMPTS, max_new_tokens=18)
    assert_same_tokens(target(), PROMPTS, found.new_tokens, reference_greedy(target(), PROMPTS, 18))


@pytest.mark.parametrize("name", ["plain", "two layers"])
def test_seeded_tokens_are_those_without_drafts(name: str) -> None:
    assert tokens_of(decoder(name, 7)) == plain_tokens()


def test_one_sequence_of_one_token() -> None:
    outs = [d.generate([torch.tensor([5])], max_new_tokens=12, temperature=1.0, seed=[3], eos_token_id=[])
            for d in (decoder("plain", 3), compiled(target(), "none", 1, **QUICK))]  # fmt: skip
    assert outs[0].new_tokens[0].tolist() == outs[1].new_tokens[0].tolist()
    assert outs[0].new_tokens[0].numel() == 12


def test_tokens_are_those_of_plain_decoding() -> None:
    """With a random head, as ``bench`` makes it, for a target that caps its logits."""
    model = make_model("gemma2", dtype=torch.float64)
    made: Any = random_head(model, EagleDraftConfig())
    tested, plain = compiled(model, "eagle", 3, draft=made, **QUICK), compiled(model, "none", 1, **QUICK)
    for temperature in (0.0, 1.0):
        options: dict[str, Any] = {"max_new_tokens": 9, "temperature": temperature, "seed": [3, 1, 4]}
        found, expected = (each.generate(PROMPTS, **options).new_tokens for each in (tested, plain))
        assert_same_tokens(model, PROMPTS, found, expected)


# What a user sees of it


def test_a_step_calls_the_head_k_times() -> None:
    program = decoder("plain", 7).stages["insert_draft"]
    assert program.drafter.features == (3,) and program.drafter.name == "eagle"
    assert len(program.with_role("draft")) == len(program.with_role("drafts")) == 7


def test_a_chain_cannot_be_drafted_in_parallel() -> None:
    config = {**CONFIG, "draft": {"kind": "eagle", "parallel": True}}
    with pytest.raises(PassError, match="this eagle has no mask_hidden and a mask token, so it was not trained to"):
        specgraph.compile_speculative(target(), config, draft=head("plain"))


def test_a_checkpoint_by_its_folder_and_the_report(tmp_path: Path) -> None:
    tested = specgraph.compile_speculative(target(), CONFIG | QUICK, draft=written().save(tmp_path))
    assert tested.stages["trace"].drafter.kind == "eagle"
    assert tokens_of(tested) == plain_tokens()
    lines, size = tested.report().splitlines(), f"{VOCAB * HIDDEN * 8:,} bytes (the checkpoint has none)"
    assert f"- draft: eagle in the eagle layout, {tmp_path}" in lines
    for name, own in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        assert f"- shared while loading: draft.{name}.weight is target.{own}.weight, {size}" in lines


def test_a_dump_runs_bit_for_bit_as_the_decoder(tmp_path: Path) -> None:
    tested = decoder("two layers", 3, "probabilistic")
    folder = tested.dump(tmp_path / "graphs")
    for index, (name, program) in enumerate(tested.stages.items()):
        if name in ("insert_draft", "insert_verify"):
            assert_runs_alike(specgraph.load_dump(folder / f"{index:02d}_{name}"), program)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    given = head("biases, own embedding")
    own = [*target().parameters()]
    folder = EagleDrafter.save_head(given, tmp_path, target_name="target", algorithm="eagle", num_speculative_tokens=3,
                                    shared=own)  # fmt: skip
    config = json.loads((folder / "config.json").read_text())
    assert (config["bias"], config["rope_theta"], config["num_hidden_layers"]) == (True, 50.0, 1)
    assert open_checkpoint(folder).tensors.keys() == HEADS_WRITTEN["biases, own embedding"][0].tensors.keys()
    again = load(folder).module
    exact_norms(again)
    tokens, known = example_rows()
    assert torch.equal(logits_of(again, tokens, known), logits_of(given.module, tokens, known))


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target().save_pretrained(tmp_path / "target")
    written("fc", rope_theta=5e5).save(tmp_path / "head")
    assert main(["inspect", str(tmp_path / "head"), f"target={tmp_path / 'target'}"]) == 0
    cells = [[cell.strip() for cell in row.split("  ") if cell] for row in capsys.readouterr().out.splitlines()]
    for expected in (
        ["kind", "eagle"], ["layout", "eagle"], ["drafts in parallel", "no"], ["size", "10 tensors, 39.2 kB"],
        ["fits the target", "yes"], ["biases", "yes", "tensors"], ["embed_tokens", "the target's", "tensors"],
        ["rope_theta", "500000.0", "rope_theta"], ["fc.weight", "[32, 64]", "float32", "1", "8.2 kB"],
    ):  # fmt: skip
        assert expected in cells, expected
    make_model("llama", hidden_size=64).save_pretrained(tmp_path / "other")
    assert main(["inspect", str(tmp_path / "head"), f"target={tmp_path / 'other'}"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].endswith("it has the hidden size 32, but the target LlamaForCausalLM has 64.")


def test_bench_with_a_random_head(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_run, "measure_bandwidth", lambda device: 1e9)
    options = ["device=cpu", "batch_sizes=[2]", "num_speculative_tokens=[2]", "steps=2", "warmup=1", "prompt_length=9",
               "pipeline.verify=false", "debug.self_check=false"]  # fmt: skip
    assert main(["bench", "target=tiny-shape", "draft=eagle", *options]) == 0
    assert "eagle (random)" in capsys.readouterr().out


# Training

WORDS = ["<eos>", "<pad>", "<unk>", "Ann", "has", "apples", "and", "buys", "more", *map(str, range(2, 40))]


@functools.cache
def small_target(architecture: str = "llama") -> PreTrainedModel:
    return make_model(architecture, vocab_size=len(WORDS), eos_token_id=0, pad_token_id=1, bos_token_id=None)


@functools.cache
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def run_of(folder: Path) -> HeadTrainConfig:
    texts = [{"question": f"Ann has {n} apples and buys {n + 9} more", "answer": "3"} for n in range(2, 14)]
    (folder / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    optim = OptimConfig(steps=6, batch_size=4, learning_rate=0.01, warmup_steps=1, eval_every=2,
                            checkpoint_every=2)  # fmt: skip
    return HeadTrainConfig(
        model="target", draft="eagle", data=str(folder / "data.jsonl"), output=str(folder / "head"), heldout=2,
        eval_drafts=2, max_length=64, chain=ChainConfig(steps=2), optim=optim,
        rollout=RolloutConfig(max_new_tokens=8, file=str(folder / "answers")),
    )  # fmt: skip


def test_training_lowers_the_loss_and_the_saved_head_is_the_trained_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, saved, original = small_target(), [], HeadLoop._update
    monkeypatch.setattr(training_run, "Teacher", functools.cache(Teacher))
    monkeypatch.setattr(training_run, "bf16_copy", lambda given: saved.append(bf16_copy(given)) or saved[-1])
    report = train_head(model, tokenizer(), run_of(tmp_path))
    losses = [loss for _, loss in report.progress.losses]
    assert losses[-1] < losses[0]
    checkpoint = open_checkpoint(tmp_path / "head")
    assert checkpoint.kind == "eagle" and checkpoint.tensors.keys() == written().tensors.keys()
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.bfloat16}
    loaded = EagleDrafter.load(checkpoint, EagleDraftConfig(), model, info(model)).module
    known = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
    assert torch.equal(logits_of(loaded, [3, 4, 20, 5, 6], known),
                       logits_of(saved[-1].module.float().eval(), [3, 4, 20, 5, 6], known))  # fmt: skip
    tested = specgraph.compile_speculative(model, CONFIG | QUICK, draft=tmp_path / "head")
    prompts = [torch.tensor([3, 4, 9, 5]), torch.tensor([6])]
    found = tested.generate(prompts, max_new_tokens=9).new_tokens
    assert_same_tokens(model, prompts, found, reference_greedy(model, prompts, 9))

    def killed(self: HeadLoop, batch: Any) -> Any:
        if self.progress.step == 5:
            raise KeyboardInterrupt
        return original(self, batch)

    again = replace(run_of(tmp_path), output=str(tmp_path / "again"))
    monkeypatch.setattr(HeadLoop, "_update", killed)
    with pytest.raises(KeyboardInterrupt):
        train_head(model, tokenizer(), again)
    monkeypatch.setattr(HeadLoop, "_update", original)
    assert train_head(model, tokenizer(), again).progress.losses == report.progress.losses
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("head", "again")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab_size": 20}, "An EAGLE head drafts the whole vocabulary; leave head.draft_vocab_size out."),
        ({"feature_layers": [1]}, "reads the target's last hidden state, hs[2]; leave head.feature_layers out."),
        ({"norm_before_residual": True}, "has no norm of its hidden state; leave head.norm_before_residual out."),
    ],
)
def test_settings_without_a_place_are_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    cfg = replace(run_of(tmp_path), head=HeadConfig(**changes))
    with pytest.raises(ConfigError, match=re.escape(words)):
        build_head(small_target(), cfg, 1, [])


def test_train_is_told_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "draft=eagle", "--cfg", "job"]) == 0
    assert "draft: eagle\n" in capsys.readouterr().out
