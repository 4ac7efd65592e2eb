"""DFlash2 heads: layouts, misfits, the formula, another implementation, equal tokens, history, files, distribution.

What DFlash2 shares with DFlash is tested in ``test_dflash``. The oracle of the detectors is the published formula in
plain PyTorch, without a cache, which is given the drafts before each one. Each planted bug, and what caught it here
(``test_planted_bugs_are_caught`` asserts the hits; tokens would stay equal):

==================================  ===========  ======
bug                                 fresh start  oracle
==================================  ===========  ======
the anchor before every draft       missed       caught
candidates of the first draft       missed       caught
noise off by one position           missed       caught
==================================  ===========  ======
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specgraph.bench.models import random_head
from specgraph.config import load_config
from specgraph.drafters import dflash2
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash2 import CANDIDATES, SELECTOR, DFlash2DraftConfig, DFlash2Drafter
from specgraph.drafters.dflash2_module import DFlash2
from specgraph.drafters.dflash_module import BlockMask
from specgraph.drafters.registry import open_checkpoint
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from tests import harness
from tests.checkpoints.layouts import VOCAB, Written
from tests.checkpoints.running import info
from tests.decoding import assert_same_tokens, compiled, reference_greedy
from tests.detectors import NextLogits
from tests.drafters import test_dflash, test_dflash_others
from tests.drafters.contract import Case, Planted, by_rule
from tests.drafters.dflash2_formula import RANK, TOP_K, WALKED, additions, walked
from tests.drafters.dflash2_formula import dflash2 as written
from tests.drafters.dflash_formula import BLOCK, DRAFT_VOCAB, all_rows, context_of, target
from tests.drafters.dflash_formula import tensors as plain_tensors
from tests.drafters.dspark_formula import without
from tests.drafters.files_contract import FilesContract, check_parameters
from tests.harness import drafting_stage
from tests.models import make_model
from tests.runtime import test_distribution

SELECTORS = functools.cache(dflash2.export_selector)
PROMPTS = test_dflash.TestDrafts.PROMPTS


@pytest.fixture(autouse=True)
def cached_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Export every head once for each K."""
    monkeypatch.setattr(dflash2, "export_block", test_dflash.EXPORT)
    monkeypatch.setattr(dflash2, "export_selector", SELECTORS)


# Layouts


@functools.cache
def head(name: str) -> DraftHead:
    """One of ``WALKED`` by way of its files, computing in float64 throughout."""
    return TestFiles.exact(WALKED[name].written.save)


@pytest.mark.parametrize("name", WALKED)
def test_a_layout_is_recognised_and_loaded(name: str, tmp_path: Path) -> None:
    given = WALKED[name]
    found = open_checkpoint(given.written.save(tmp_path))
    layout = "speculators" if "speculators" in name else "z-lab"
    assert (found.kind, found.layout, found.algorithm) == ("dflash2", layout, "dflash2")
    loaded = TestFiles.load(tmp_path)
    module: DFlash2 = loaded.module
    assert (loaded.features, module.config.sample_from_anchor) == ((1, 3), given.shifted)
    assert module.config.masks == tuple(BlockMask(s.window, s.causal, s.anchored) for s in given.seen)
    check_parameters(module, given.written.tensors)


def test_options_say_where_they_come_from(tmp_path: Path) -> None:
    def options(given: Written) -> dict[str, tuple[Any, str]]:
        return TestFiles.choices(given.save(tmp_path))

    found = options(WALKED["z-lab"].written)
    assert found["conv_kernel_size"] == (2, "dflash_config") and found["selector_top_k"] == (TOP_K, "dflash_config")
    assert found["block_size"] == (BLOCK, "dflash_config") and found["causal"] == (False, "is_causal")
    found = options(WALKED["speculators"].written)
    assert found["selector_rank"] == (RANK, "config.json")
    found = options(WALKED["selector alone"].written)
    assert found["selector_rank"] == (RANK, "tensors") and found["selector_top_k"] == (16, "default")
    assert found["conv_kernel_size"] == (0, "tensors") and "conv_group_size" not in found
    found = options(written(additions(), is_causal=None, architectures=None))
    assert found["causal"] == (False, "default"), "and a head without a class is known by its tensors"


def _reduced() -> Written:
    given = additions() | {key: plain_tensors(draft_vocab=DRAFT_VOCAB)[key] for key in ("lm_head.weight", "d2t", "t2d")}
    return written(given, draft_vocab_size=DRAFT_VOCAB)


MISFITS: dict[str, tuple[Callable[[], Written], str]] = {
    "another rank": (
        lambda: written(additions(), {"selector_rank": RANK + 1}),
        r"predecessor_codebook has the shape \[101, 12\], but the target Llama and config.json need \[101, 13\]",
    ),
    "a part of the selector": (
        lambda: without(WALKED["z-lab"].written, "candidate_selector.successor_codebook"),
        "lacks candidate_selector.successor_codebook; download it again or correct its config.json",
    ),
    "too few tokens": (
        lambda: written(additions() | {"candidate_selector.predecessor_codebook": torch.zeros(60, RANK)}),
        "predecessor_codebook has 60 rows, but the target Llama has a vocabulary of 101",
    ),
    "a reduced vocabulary": (
        _reduced, "it drafts 60 tokens, but the target Llama has 101, all of which a DFlash2 head drafts",
    ),
    "too many candidates": (
        lambda: written(additions(), {"selector_top_k": 200}),
        "selector_top_k is 200, but the target Llama has a vocabulary of 101",
    ),
    "groups of another size": (
        lambda: written(additions(), {"conv_group_size": 5}),
        "conv_group_size is 5, but the target Llama has 32 channels",
    ),
    "no candidates": (
        lambda: written(additions(), {"selector_top_k": 0}),
        "selector_top_k of .* is 0; it must be an integer of 1 or more",
    ),
    "convolutions that are not declared": (
        lambda: written(additions(), {"conv_kernel_size": 0}),
        "holds layers.0.attention_conv.base_kernel, layers.0.attention_conv.kernel_projection.weight, layers.0",
    ),
    "another scale": (
        lambda: written(additions(), {"output_multiplier": 0.5}),
        "has output_multiplier=0.5, a variant of DFlash2 that specgraph does not run; it runs heads with",
    ),
}  # fmt: skip


# The detectors


@functools.cache
def rows_behind(name: str, accepted: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        given = WALKED[name]
        return all_rows(given, context_of(accepted), accepted[-1], BLOCK - (not given.shifted))


def oracle(name: str) -> NextLogits:
    """Next logits by the formula: context, block and walk again from the first token."""

    def logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        pairs = zip(accepted, drafted, strict=True)
        return torch.cat([walked(name, rows_behind(name, tuple(known))[len(drafts) :], [*known, *drafts][-1:])
                          for known, drafts in pairs])  # fmt: skip

    return logits


def _first(*names: str) -> Callable[[Program], int]:
    """The inputs of the selector's first call in all of its calls."""

    def plant(program: Program) -> int:
        first, *others = calls(program.graph, SELECTOR)
        for node in others:
            node.kwargs = {**node.kwargs, **{name: first.kwargs[name] for name in names}}
        return len(others)

    return plant


BUGS: dict[str, tuple[Callable[[Program], int], set[str]]] = {
    "the anchor before every draft": (_first("tokens"), {"oracle"}),
    "candidates of the first draft": (_first(*CANDIDATES), {"oracle"}),
    "noise off by one position": (harness.BUGS["noise off by one position"], {"oracle"}),
}


class PlantBug(harness.PlantBug):
    """Breaks the drafter on purpose, with a bug of this file."""

    bugs: ClassVar = {name: bug[0] for name, bug in BUGS.items()}


class TestDrafts(test_dflash.TestDrafts):
    KIND = "dflash2"
    draft = staticmethod(head)
    oracle = staticmethod(oracle)
    CASES = (Case("z-lab", 7),)
    """``test_dflash2_training.py`` compares all heads with the formula."""
    REAL = by_rule("z-lab", 7)
    SEEDED = (Case("z-lab", 7), Case("convolutions alone", 3))
    POISONED = (Case("z-lab", 7, "probabilistic"),)
    BUGS = tuple(Planted(bug, Case("z-lab", 7), caught) for bug, (_, caught) in BUGS.items())
    BUG_PASS = PlantBug


# Another implementation


@pytest.mark.parametrize("name", [name for name in WALKED if "speculators" in name])
@torch.no_grad()
def test_scores_are_those_of_speculators(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates and scores behind given tokens, in float64, by their draft model and by the formula."""
    pytest.importorskip("speculators", reason="make installs it")
    from speculators.models.dflash import core
    from speculators.models.dflash2 import DFlash2SpeculatorConfig
    from speculators.models.dflash2.core import DFlash2DraftModel

    features, tokens = test_dflash_others.example()
    model = test_dflash_others.loaded(DFlash2DraftModel, DFlash2SpeculatorConfig, WALKED[name], tmp_path)
    hidden, logits = test_dflash_others.run_backbone(model, core, features, tokens, monkeypatch)
    first = not WALKED[name].shifted
    before = torch.tensor([tokens[-1], 5, 60, 17, 99, 3, 42, 8])[: BLOCK - first]
    ids, scores = model.candidate_selector.select(logits[0, first:], hidden[0, first:], before)
    expected = torch.full((len(before), VOCAB), -torch.inf, dtype=torch.float64).scatter(1, ids, scores)
    rows = all_rows(WALKED[name], features, tokens[-1], len(before))
    torch.testing.assert_close(walked(name, rows, before.tolist()), expected, **test_dflash_others.CLOSE)
    assert (expected > -torch.inf).sum(1).eq(TOP_K).all()


# The distribution


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_the_joint_distribution_is_the_targets(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three tokens, two are candidates: what is drafted has no third token, and what is emitted has."""
    monkeypatch.setattr(test_distribution, "BATCH", 4096)
    own, draft = test_distribution.model(0), {"kind": "dflash2", "num_speculative_tokens": 2}
    made = random_head(own, load_config({"draft": draft}).draft)
    assert made is not None
    generator = torch.Generator().manual_seed(2)
    for name, parameter in made.module.named_parameters():
        if name.startswith(("layers", "candidate_selector")):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    made.module.config = replace(made.module.config, selector_top_k=2)
    tested = compiled(own, "dflash2", 2, made, verify={"rule": rule}, max_batch_size=4096)
    counts, last = test_distribution.sampled(tested, 1, 1.0, 0)
    assert test_distribution.p_value(counts, test_distribution.exact_joint(1.0, 0)) > 1e-3
    assert 1.2 < last.acceptance_length < 2.8, "drafts are accepted and rejected"


# What a user sees


def test_candidates_that_are_all_forbidden_are_no_error() -> None:
    """As a schema may forbid them. The target draws its own token in the place of such a draft."""
    tested = compiled(target(), "dflash2", 7, head("z-lab"), verify={"rule": "probabilistic"})
    given: dict[str, Any] = {"max_new_tokens": 9, "suppress_tokens": sorted({*range(VOCAB)} - {3, 60}),
                             "temperature": [0.0, 0.8, 1.3], "seed": [1, 2, 3], "eos_token_id": []}  # fmt: skip
    found, plain = (each.generate(PROMPTS, **given).new_tokens for each in (tested, TestDrafts.plain()))
    assert {token for row in found for token in row.tolist()} == {3, 60}
    assert torch.equal(found[0], plain[0])


def test_the_graph_has_one_block_and_a_walk_over_its_drafts() -> None:
    program = drafting_stage(TestDrafts.decoder(Case("z-lab", 7)))
    assert len(program.with_role("draft")) == 1 and len(list(calls(program.graph, SELECTOR))) == 7
    program = drafting_stage(TestDrafts.decoder(Case("convolutions alone", 3)))
    assert SELECTOR not in program.modules and len(program.with_role("drafts")) == 1


class TestFiles(FilesContract):
    DRAFTS = TestDrafts
    DRAFTER = DFlash2Drafter
    MISFITS = MISFITS
    SAVED = tuple(name for name in WALKED if "anchor" not in name)
    """The layout of z-lab cannot express windows that are counted from the anchor."""
    LAYOUT = "z-lab"
    INSPECTED = (
        ["layout", "z-lab"],
        ["selector_top_k", "6", "dflash_config"],
        ["conv_kernel_size", "2", "dflash_config"],
    )
    UNFIT = (lambda: make_model("llama"), "of a target with 2 layers")

    @classmethod
    def example(cls, folder: Path) -> Path:
        return WALKED["z-lab"].written.save(folder)

    @classmethod
    def stored(cls, name: str) -> set[str]:
        return {*WALKED[name].written.tensors}

    def check_saved(self, again: DraftHead, given: DraftHead) -> None:
        found, expected = ({key: value for key, value in vars(each.module.config).items() if key != "layers"}
                           for each in (again, given))  # fmt: skip
        assert found == expected


def test_a_head_is_lowered_with_its_target(tmp_path: Path) -> None:
    """No token changes, and nothing of the head has rows that depend on other rows."""
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=4)
    checkpoint = open_checkpoint(WALKED["z-lab"].written.save(tmp_path))
    made = DFlash2Drafter.load(checkpoint, DFlash2DraftConfig(), model, info(model))
    tested = compiled(model, "dflash2", 3, made, lowering={"name": "gpu"})
    found = tested.generate(PROMPTS, max_new_tokens=14).new_tokens
    assert_same_tokens(model, PROMPTS, found, reference_greedy(model, PROMPTS, 14))
    ops = [str(node.target) for node in tested.stages["index_rows"].modules["draft"].graph.nodes]
    assert ops.count("specgraph.block_conv.default") == 2 * 2 * 2, "two around both sublayers of both layers"
