"""Every drafter with every lookup in front, target, rule and K, fixed or not: tokens, acceptance, history, batches.

A test run takes a pairwise cover of the combinations. ``SPECGRAPH_MATRIX=full`` takes all of them, which is about two
hours on one core.

A case decodes a ragged batch, half of it greedily and half at temperature 1, with its own verification, and records
every step. The vocabulary is small, so that random drafts are accepted often enough for histories to be mixed.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.bench.models import random_head
from specgraph.config import load_config
from specgraph.config.draft import LOOKUPS
from specgraph.config.drafters import drafter_kinds
from specgraph.config.groups import group_choices
from specgraph.drafters import dflash, dflash2, dspark
from specgraph.ir.verifier import verify_program
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance
from tests.capturing import captured
from tests.decoding import CONFIG, assert_same_tokens, choose_at_random, compiled, reference_greedy
from tests.detectors import check_fresh_drafts
from tests.drafters.test_other_family import loaded
from tests.harness import Options, Run, real_run
from tests.models import make_model, ragged_prompts
from tests.pairwise import Case, cover, pairs, product

VOCAB, MATCH, NEW_TOKENS = 11, 2, 12
MASK = 5

DRAFTERS: dict[str, dict[str, Any]] = {
    "early_exit": {"kind": "early_exit", "exit_layer": 1},
    "ngram": {"kind": "ngram"},
    "suffix": {"kind": "suffix"},
    "draft_model": {"kind": "draft_model"},
    "draft_model, other tokens": {"kind": "draft_model"},
    "pard": {"kind": "draft_model", "parallel": True, "mask_token_id": MASK},
    "eagle": {"kind": "eagle"},
    "eagle3": {"kind": "eagle3"},
    "peagle": {"kind": "eagle3", "parallel": True},
    "medusa": {"kind": "medusa"},
    "mtp, 1": {"kind": "mtp", "num_modules": 1},  # both families are the same with one module
    "mtp, 3 chained": {"kind": "mtp", "num_modules": 3, "family": "chained"},
    "mtp, 3 target-fed": {"kind": "mtp", "num_modules": 3, "family": "target"},
    "dflash": {"kind": "dflash"},
    "dflash2": {"kind": "dflash2"},
    "dspark": {"kind": "dspark"},
}
"""The keys of ``draft`` for every drafter. Heads are random, as ``bench`` makes them."""

TARGETS = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_5_text", "qwen3", "glm4_moe")
COVERED = ("llama", "gpt_oss", "deepseek_v3", "qwen3_5_text")
RECURRENT = "qwen3_5_text"
"""The targets of the cover. The layers of DeepSeek have the experts of GLM's; windows are those of GPT-OSS, too, and
``test_heads.py`` has the other Gemma. ``tests/frontend/test_architectures.py`` and ``test_mtp_layouts.py`` run the
others."""

GREEDY, SEEDED = (0, 1, 2), (3, 4, 5)
RULES: dict[str, tuple[int, ...]] = {
    "strict": (*GREEDY, *SEEDED),
    "probabilistic": GREEDY,
    "block": GREEDY,
    "typical": GREEDY,
    "synthetic": (),
}
"""The sequences of the batch that must be those of plain decoding. The other rules keep the distribution of a seeded
sequence (``typical`` and ``synthetic`` do not) and not its tokens."""

FULL = os.environ.get("SPECGRAPH_MATRIX") == "full"
FIXED, AUTO = "fixed", "auto"
AXES = {
    "drafter": (*DRAFTERS,), "first": (None, *LOOKUPS), "target": TARGETS, "rule": (*RULES,), "k": (1, 3, 7),
    "numbers": (FIXED, AUTO),
}  # fmt: skip


SIBLINGS = (
    "suffix", "draft_model, other tokens", "early_exit", "pard", "peagle", "mtp, 1", "mtp, 3 target-fed", "dflash2",
    "dspark",
)  # fmt: skip
"""Drafters that read the same of a target, and give verification the same, as one beside them. They meet a target
with attention and one with recurrent layers, the rule that keeps all tokens and one that reads draft logits."""
MET = {"target": ("llama", "qwen3_5_text"), "rule": ("strict", "probabilistic")}


def possible(drafter: str, first: str | None, **others: Any) -> bool:
    """A lookup has nothing that another lookup could stand in front of, and a recurrent target is not left early; both
    are refused."""
    return (first is None or drafter not in LOOKUPS) and (drafter, others["target"]) != ("early_exit", RECURRENT)


def covered(drafter: str, first: str | None, **others: Any) -> bool:
    met = drafter not in SIBLINGS or all(others[axis] in values for axis, values in MET.items())
    return met and possible(drafter, first, **others)


ALL = product(AXES, possible)
COVER = cover(product({**AXES, "target": COVERED}, covered), (2, 3))  # fewest cases, of all pairs to begin with
CASES = ALL if FULL else COVER

PROMPTS = ragged_prompts((3, 9, 5), vocab=VOCAB) * 2
OPTIONS = Options((0.0,) * 3 + (1.0,) * 3, (0,) * 6, (11, 12, 13, -5, 1 << 40, 7))
LIMITS = [len(prompt) + NEW_TOKENS for prompt in PROMPTS]


EXPORT_BLOCK = functools.cache(dflash.export_block)


@pytest.fixture(scope="module", autouse=True)
def heads_exported_once() -> Iterator[None]:
    """Random block heads are exported once for each K."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (dflash, dflash2, dspark):
            patch.setattr(module, "export_block", EXPORT_BLOCK)
        yield


@functools.cache
def model(architecture: str) -> PreTrainedModel:
    return make_model(architecture, dtype=torch.float64, vocab_size=VOCAB, eos_token_id=None)


@functools.cache
def draft_model() -> PreTrainedModel:
    return make_model("llama", seed=1, dtype=torch.float64, vocab_size=VOCAB, num_hidden_layers=1)


@functools.cache
def other_draft() -> PreTrainedModel:
    """A draft model that knows eight of the target's tokens, by other ids, and others."""
    sizes = {"vocab_size": 12, "num_hidden_layers": 1}
    return loaded(make_model("llama", seed=2, dtype=torch.float64, eos_token_id=None, **sizes), "a few letters")


@functools.cache
def draft(drafter: str, architecture: str) -> Any:
    options = load_config({"draft": {**DRAFTERS[drafter], "num_speculative_tokens": max(AXES["k"])}}).draft
    if drafter == "draft_model, other tokens":
        loaded(model(architecture), "letters")
        return other_draft()
    if options.kind == "draft_model":
        return draft_model()
    head = random_head(model(architecture), options)
    if head is not None and isinstance(head.module, dflash.DFlash):
        outweigh_the_mask(head.module)
    return head


@torch.no_grad()
def outweigh_the_mask(module: Any) -> None:
    """Let the layers of a head add more than the embedding of its mask token, which a tied projection reads again.

    Else a random head drafts its mask token forever, of which nothing is accepted.
    """
    for layer in module.layers:
        layer.mlp.down_proj.weight.mul_(30)


def decoder(
    drafter: str, first: str | None, target: str, rule: str, k: int | dict[int, int], numbers: str = FIXED, **extra: Any
) -> SpeculativeDecoder:
    lookup = {"first": first, "first_match": MATCH}
    options = {**DRAFTERS[drafter], "num_speculative_tokens": k, "adaptive": numbers == AUTO, **lookup}
    config = {**CONFIG, "draft": options, "verify": {"rule": rule}, "pipeline": {"verify": False}, **extra}
    return specgraph.compile_speculative(model(target), config, draft=draft(drafter, target))


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_stage_of_every_drafter_is_well_formed(name: str) -> None:
    for program in decoder(name, None, "llama", "block", 3).stages.values():
        verify_program(program)


def generate(tested: SpeculativeDecoder, rows: tuple[int, ...]) -> Any:
    options = {"temperature": [OPTIONS.temperature[row] for row in rows], "seed": [OPTIONS.seeds[row] for row in rows]}
    return tested.generate([PROMPTS[row] for row in rows], max_new_tokens=NEW_TOKENS, **options)


@functools.cache
def plain(target: str) -> list[torch.Tensor]:
    tested = compiled(model(target), "none", 1, pipeline={"verify": False})
    tokens: list[torch.Tensor] = generate(tested, GREEDY + SEEDED).new_tokens
    return tokens


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_combination(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, target, rule, _, numbers = case
    tested = decoder(*case)
    run = real_run(tested, PROMPTS, LIMITS, options=OPTIONS)
    check_tokens(run, target, RULES[rule])
    if numbers == FIXED:
        check_alone(run, tested, SEEDED[1])
    else:
        monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
        check_any_choice(captured(tested), target, RULES[rule])
    check_acceptance(run)
    check_fresh_drafts(run, times=3)
    assert first is None or {has_match(tokens) for step in run.steps for tokens in step.accepted} == {True, False}


def test_drafts_that_depend_on_history_are_caught() -> None:
    """Tokens and batches do not show this bug."""
    order = ["expose_features", "insert_kv_cache", "insert_draft", "plant_bug", "insert_verify"]
    passes = {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": "catch-up skips the last row, shifted"}}
    pipeline = {"order": order, "verify": False}
    tested = decoder("eagle3", None, "llama", "strict", 3, pipeline=pipeline, passes=passes)
    run = real_run(tested, PROMPTS, LIMITS, options=OPTIONS)
    check_tokens(run, "llama", RULES["strict"])
    check_alone(run, tested, SEEDED[1])
    with pytest.raises(AssertionError, match="step"):
        check_fresh_drafts(run, times=3)


def test_a_drafter_that_nothing_is_accepted_of_is_caught() -> None:
    run = real_run(decoder("mtp, 1", None, "llama", "strict", 1), PROMPTS, LIMITS, options=OPTIONS)
    check_acceptance(run)
    for counts in ([0, 0], [1, 1]):
        run.accept_counts = counts
        with pytest.raises(AssertionError):
            check_acceptance(run)


def test_a_number_of_drafts_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecentAcceptance, "choose", lambda *_: Choice())
    with pytest.raises(AssertionError):
        check_any_choice(captured(decoder("mtp, 1", None, "llama", "strict", 1, AUTO)), "llama", ())


def new_tokens(run: Run, row: int) -> torch.Tensor:
    return torch.tensor(run.steps[-1].accepted[row][len(PROMPTS[row]) :])


def check_tokens(run: Run, target: str, rows: tuple[int, ...]) -> None:
    """The tokens of these sequences are those of plain decoding."""
    found, expected = [new_tokens(run, row) for row in rows], [plain(target)[row] for row in rows]
    assert_same_tokens(model(target), [PROMPTS[row] for row in rows], found, expected)


def check_alone(run: Run, tested: SpeculativeDecoder, row: int) -> None:
    """A sequence alone, by the public call, has the same tokens in the same steps as in the batch."""
    out = generate(tested, (row,))
    assert out.new_tokens[0].tolist() == new_tokens(run, row).tolist()
    steps = [step.num_emitted[row] for step in run.steps if step.start[row] >= len(PROMPTS[row])]
    assert out.stats.emitted_per_step[0] == [count for count in steps if count]


def check_any_choice(tested: SpeculativeDecoder, target: str, rows: tuple[int, ...]) -> None:
    """The tokens of these sequences are those of plain decoding, with another K in every step."""
    out = generate(tested, GREEDY + SEEDED)
    assert [out.new_tokens[row].tolist() for row in rows] == [plain(target)[row].tolist() for row in rows]
    assert len(out.stats.steps_by_drafts) > 1


def check_acceptance(run: Run) -> None:
    """Some step accepted a draft, and some step did not accept all."""
    assert max(run.accept_counts) > 0 and min(run.accept_counts) < run.k


def has_match(tokens: list[int]) -> bool:
    """Whether the last ``MATCH`` tokens have occurred before, so that a lookup in front proposes."""
    return any(tokens[end - MATCH : end] == tokens[-MATCH:] for end in range(MATCH, len(tokens)))


@pytest.mark.parametrize("target", TARGETS if FULL else COVERED)
def test_plain_greedy_tokens_are_those_of_transformers(target: str) -> None:
    expected = reference_greedy(model(target), [PROMPTS[row] for row in GREEDY], NEW_TOKENS)
    assert [tokens.tolist() for tokens in plain(target)[:3]] == [tokens.tolist() for tokens in expected]


def test_every_two_values_meet_in_the_cover() -> None:
    names = [*AXES]
    values = {**AXES, "target": COVERED}
    wanted = {(i, a, j, b) for i, one in enumerate(names) for j, other in enumerate(names) if i < j
              for a in values[one] for b in values[other]}  # fmt: skip
    impossible = {(0, lookup, 1, first) for lookup in LOOKUPS for first in LOOKUPS} | {(0, "early_exit", 2, RECURRENT)}
    left_out = {(0, drafter, names.index(axis), value) for drafter in SIBLINGS for axis, met in MET.items()
                for value in {*values[axis]} - {*met}}  # fmt: skip
    assert pairs(COVER) == wanted - impossible - left_out
    each = max(len(COVERED), len(RULES))  # a drafter meets all targets and all rules, each in a case of its own
    assert len(COVER) < 1.2 * ((len(DRAFTERS) - len(SIBLINGS)) * each + len(SIBLINGS) * len(MET["target"]))


def test_every_drafter_and_every_rule_has_its_line() -> None:
    assert {options["kind"] for options in DRAFTERS.values()} == {*drafter_kinds()} - {"none"}
    assert {*RULES} == {*group_choices("verify")}
