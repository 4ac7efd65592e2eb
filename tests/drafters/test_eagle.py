"""EAGLE-1 and EAGLE-2 as a chain: layouts, misfits, the formula, equal tokens, history, a dump, a bench, training.

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
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import specgraph
from specgraph.bench.models import random_head
from specgraph.config.drafters import drafter_kinds
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle import Eagle, EagleDraftConfig, EagleDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError, PassError
from specgraph.ir.program import Program
from tests.checkpoints.layouts import HEAD_DIM, HIDDEN, Written
from tests.decoding import CONFIG
from tests.detectors import NextLogits
from tests.drafters.contract import (
    SHIFTED_CHAIN_BUGS,
    CachedDraftContract,
    Case,
    by_rule,
    planted,
    tokens_are_those_of_plain_decoding,
)
from tests.drafters.eagle_formula import EPS, HEADS_WRITTEN, behind, formula, project, target, written
from tests.drafters.files_contract import FilesContract
from tests.drafters.training_contract import Trained, TrainingContract, small_target
from tests.models import exact_norms, make_model, ragged_prompts


@functools.cache
def head(name: str) -> DraftHead:
    """One of ``HEADS_WRITTEN`` by way of its files, computing in float64 throughout."""
    with tempfile.TemporaryDirectory() as folder:
        made = TestFiles.load(HEADS_WRITTEN[name][0].save(Path(folder)))
    exact_norms(made.module)
    return made


# The detectors


class TestDrafts(CachedDraftContract):
    KIND = "eagle"
    target = staticmethod(target)
    draft = staticmethod(head)
    CASES = (
        *(Case("plain", k) for k in (1, 3, 7, 16)), Case("plain", 3, "probabilistic"),
        Case("biases, own embedding", 3, "probabilistic"), Case("two layers", 3, "probabilistic"),
        Case("norms of queries and keys", 3, "probabilistic"),
    )  # fmt: skip
    REAL = by_rule("two layers", 3)
    SEEDED = (Case("plain", 7), Case("two layers", 3))
    POISONED = (Case("plain", 3), Case("two layers", 3))
    BUGS: ClassVar = planted(Case("plain", 3), SHIFTED_CHAIN_BUGS)

    @classmethod
    def oracle(cls, name: str) -> NextLogits:
        """Next logits by the formula: every row again from the first token, no cache, no module of ours."""

        @torch.no_grad()
        def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
            pairs = zip(map(tuple, accepted), map(tuple, drafted), strict=True)
            return torch.stack([project(behind(name, *pair)[-1]) for pair in pairs])

        return next_logits

    def check_program(self, case: Case, program: Program) -> None:
        assert program.drafter.shifted and (program.drafter.name, program.drafter.features) == ("eagle", (3,))
        assert len(program.with_role("draft")) == len(program.with_role("drafts")) == case.k


def test_tokens_are_those_of_plain_decoding() -> None:
    """With a random head, as ``bench`` makes it, for a target that caps its logits."""
    model = make_model("gemma2", dtype=torch.float64)
    tokens_are_those_of_plain_decoding("eagle", model, random_head(model, EagleDraftConfig()), 3)


def test_a_chain_cannot_be_drafted_in_parallel() -> None:
    config = {**CONFIG, "draft": {"kind": "eagle", "parallel": True}}
    with pytest.raises(PassError, match="this eagle has no mask_hidden and a mask token, so it was not trained to"):
        specgraph.compile_speculative(target(), config, draft=head("plain"))


# Layouts


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
    loaded = TestFiles.load(tmp_path)
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
        loaded = TestFiles.load(given.save(tmp_path / name))
        parameter = loaded.module.get_parameter(f"{tensor}.weight")
        assert (parameter is own) is shared
        assert torch.equal(parameter, given.tensors.get(f"{tensor}.weight", own))
        saved = EagleDrafter.save_head(loaded, tmp_path / "saved", target_name="", algorithm="eagle",
                                       num_speculative_tokens=3, shared=target().parameters())  # fmt: skip
        assert (f"{tensor}.weight" in open_checkpoint(saved).tensors) is not shared


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    def options(given: Written, **changed: Any) -> dict[str, tuple[Any, str]]:
        return TestFiles.choices(given.save(tmp_path), 3, **changed)

    found = options(written("fc", layers=2, rope_parameters={"rope_theta": 7.0}, bias=False))
    assert found == {
        "biases": (True, "tensors"), "embed_tokens": ("the target's", "tensors"), "layer_type": ("llama", "tensors"),
        "lm_head": ("the target's", "tensors"), "num_layers": (2, "tensors"),
        "rope_theta": (7.0, "rope_parameters.rope_theta"),
    }  # fmt: skip
    assert options(written(rope_theta=8.0))["rope_theta"] == (8.0, "rope_theta")
    assert options(written())["rope_theta"] == (10000.0, "default")
    assert options(written(rope_theta=8.0), rope_theta=9.0)["rope_theta"] == (9.0, "draft.rope_theta")
    assert TestFiles.load(tmp_path, rope_theta=9.0).module.config.layers.rope_parameters["rope_theta"] == 9.0


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


class TestFiles(FilesContract):
    DRAFTS = TestDrafts
    DRAFTER = EagleDrafter
    MISFITS = MISFITS
    SAVED = ("plain", "bias of fc", "biases, own embedding", "two layers")
    LAYOUT = "eagle"
    INSPECTED = (
        ["layout", "eagle"], ["drafts in parallel", "no"], ["size", "10 tensors, 39.2 kB"],
        ["biases", "yes", "tensors"], ["embed_tokens", "the target's", "tensors"],
        ["rope_theta", "500000.0", "rope_theta"], ["fc.weight", "[32, 64]", "float32", "1", "8.2 kB"],
    )  # fmt: skip
    UNFIT = (
        lambda: make_model("llama", hidden_size=64),
        "it has the hidden size 32, but the target LlamaForCausalLM has 64.",
    )

    @classmethod
    def example(cls, folder: Path) -> Path:
        return written("fc", rope_theta=5e5).save(folder)

    @classmethod
    def stored(cls, name: str) -> set[str]:
        return {*HEADS_WRITTEN[name][0].tensors}

    def check_saved(self, again: DraftHead, given: DraftHead) -> None:
        exact_norms(again.module)
        tokens, known = example_rows()
        assert torch.equal(logits_of(again.module, tokens, known), logits_of(given.module, tokens, known))


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


# Training


class TestTraining(TrainingContract):
    KIND = LAYOUT = "eagle"
    DRAFTER = EagleDrafter
    CHOICES: ClassVar = {"num_layers": 1, "embed_tokens": "the target's", "lm_head": "the target's"}
    REFUSED = (
        ({"draft_vocab_size": 20}, "An EAGLE head drafts the whole vocabulary; leave head.draft_vocab_size out."),
        ({"feature_layers": [1]}, "reads the target's last hidden state, hs[2]; leave head.feature_layers out."),
        ({"norm_before_residual": True}, "has no norm of its hidden state; leave head.norm_before_residual out."),
    )

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        assert trained.checkpoint.tensors.keys() == written().tensors.keys()
        known = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(0))
        copied = copy.deepcopy(trained.saved.module).float().eval()
        found, expected = (logits_of(module, [3, 4, 20, 5, 6], known) for module in (loaded.module, copied))
        assert torch.equal(found, expected)
        assert loaded.module.lm_head.weight is small_target().get_output_embeddings().weight
