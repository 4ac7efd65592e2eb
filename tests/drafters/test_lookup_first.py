"""``draft.first``: a lookup in front of every drafter that has drafts of its own.

The detectors see the choice itself: which sequences take looked-up drafts, and that it depends on accepted tokens
alone. Equal tokens, which speculation gives even when the choice is broken, find none of the planted bugs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters.base import DraftHead
from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.kernels.step import writes
from tests import harness
from tests.decoding import CONFIG, assert_same_tokens, compiled
from tests.detectors import check_fresh_start, check_slots, expected_drafts
from tests.drafters import test_draft_model, test_heads, test_medusa, test_registry
from tests.drafters.lookup_contract import check_history
from tests.drafters.test_ngram import looked_up
from tests.harness import Run, forced_run
from tests.kernels.step.test_suffix import searched
from tests.models import double_model, make_head, make_model, ragged_prompts
from tests.once import once
from tests.runtime.test_distribution import LENGTH, PROMPT, VOCAB, exact_joint, model, opposite, p_value

LIMITS = (48, 41, 23)
ALPHABET = 5
MATCH = 2
ORDER = ["expose_features", "insert_kv_cache", "insert_draft", "parallel_draft", "lookup_first"]
LOOKUPS: dict[str, Callable[[list[int], int], list[int]]] = {
    "ngram": lambda tokens, k: looked_up(tokens, k) if enough(tokens) else [-1] * k,
    "suffix": lambda tokens, k: searched(tokens, k, 24, MATCH, 8.0, 0.0, 0.1),
}
"""What each lookup proposes for accepted tokens."""


def enough(tokens: list[int]) -> bool:
    """Whether the last ``MATCH`` tokens have occurred before."""
    return any(tokens[end - MATCH : end] == tokens[-MATCH:] for end in range(MATCH, len(tokens)))


@functools.cache
def target() -> PreTrainedModel:
    return test_heads.target()


HEADS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "draft_model": (lambda: double_model("llama", 1, num_hidden_layers=1), {}),
    "pard": (test_heads.pard, {"kind": "draft_model", "mask_token_id": test_heads.MASK, "parallel": True}),
    "eagle3": (lambda: test_heads.head("plain"), {"parallel": False}),
    "peagle": (lambda: test_heads.head("plain"), {"parallel": True}),
    "smaller vocabulary": (lambda: test_heads.head("two qwen3 layers"), {"parallel": False}),
    "medusa": (lambda: DraftHead(test_medusa.as_module(test_medusa.random_tensors(7)).module, (3,)), {}),
    "own, without a distribution": (lambda: None, {"_target_": test_registry.OWN, "stride": 2}),
}
"""A draft, and the keys of ``draft`` that it needs."""


@once
def decoder(
    name: str, k: int, rule: str = "strict", first: str | None = "ngram", bug: str | None = None
) -> SpeculativeDecoder:
    draft, options = HEADS[name]
    order = [*ORDER, *["plant_bug"] * (bug is not None), "insert_verify"]
    config = {
        **CONFIG,
        "draft": {**options, "num_speculative_tokens": k, "first": first, "first_match": MATCH},
        "verify": {"rule": rule},
        "pipeline": {"order": order, "verify": bug is None},
        "passes": {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}} if bug else {},
    }
    return specgraph.compile_speculative(target(), config, draft=draft())


def stage(tested: SpeculativeDecoder) -> Program:
    """The stage behind the choice, with a planted bug if there is one."""
    return tested.stages.get("plant_bug") or tested.stages["lookup_first"]


@once
def run(name: str, k: int, rule: str = "strict", first: str = "ngram", bug: str | None = None) -> Run:
    """A history over few tokens, in which some sequences repeat themselves and others do not yet."""
    prompts = ragged_prompts((3, 19, 5), vocab=ALPHABET)
    return forced_run(stage(decoder(name, k, rule, first, bug)), prompts, LIMITS, seed=0, alphabet=ALPHABET)


def check_choice(recorded: Run, first: str, name: str, rule: str) -> tuple[int, int, int]:
    """Every sequence has the looked-up drafts if there are any, and the drafter's own ones if not.

    Returns the number of looked-up and of own proposals, and in how many steps there were both.
    """
    counts = [0, 0, 0]
    for one in recorded.steps:
        kinds = set()
        for row in (row for row, count in enumerate(one.num_emitted) if count > 0):
            tokens = one.accepted[row]
            usable, wanted = recorded.usable(row, len(tokens)), LOOKUPS[first](tokens, recorded.k)
            found = wanted[0] >= 0
            if not found:
                wanted = own_drafts(recorded, name, rule, row, tokens)
            assert one.drafts[row, :usable].tolist() == wanted[:usable], f"sequence {row}: {tokens}"
            if "point_mass" in one.kept:
                assert bool(one.kept["point_mass"][row]) == found
            counts[0 if found else 1] += 1
            kinds.add(found)
        counts[2] += len(kinds) == 2
    return counts[0], counts[1], counts[2]


def own_drafts(recorded: Run, name: str, rule: str, row: int, tokens: list[int]) -> list[int]:
    """The drafter's own proposals, by an oracle without a cache."""
    if name == "draft_model":
        oracle = test_draft_model.oracle(HEADS[name][0]())
    else:
        oracle = test_heads.oracle({"pard": "pard, parallel", "peagle": "plain, parallel"}.get(name, "plain"))
    drafts: list[int] = expected_drafts(oracle, [tokens], [row], recorded, rule)[0][0].tolist()
    return drafts


@pytest.mark.parametrize(
    ("name", "k", "rule", "first"),
    [("draft_model", 3, "strict", "ngram"), ("draft_model", 1, "block", "suffix"), ("eagle3", 3, "block", "ngram"),
     ("eagle3", 7, "strict", "suffix"), ("peagle", 3, "probabilistic", "suffix"), ("pard", 7, "strict", "ngram")],
)  # fmt: skip
def test_the_choice_depends_on_accepted_tokens_alone(name: str, k: int, rule: str, first: str) -> None:
    recorded = run(name, k, rule, first)
    check_history(recorded)
    looked, own, mixed = check_choice(recorded, first, name, rule)
    assert looked > 3 and own > 3 and mixed > 1
    check_fresh_start(recorded)
    check_slots(recorded)
    assert ("point_mass" in recorded.steps[0].kept) == (rule != "strict")


@writes("history", final=False)
def _records_the_window_(history: Tensor, window: Tensor, emitted: Tensor, *rest: Any) -> None:
    following = torch.cat([window[:, 1:], window[:, :1]], dim=1)
    step.record_accepted_(history, window, torch.where(emitted >= 0, following, -1), *rest)


def _prefers_the_others_find(found: Tensor, *others: Tensor) -> Tensor:
    return step.prefer_found(found.roll(1, 0), *others)


def _needs_all_drafts(found: Tensor, *others: Tensor) -> Tensor:
    return torch.where(found[:, -1:] >= 0, found, torch.cat(others, dim=1))


def _nothing_found(found: Tensor) -> Tensor:
    return torch.zeros_like(found[:, 0], dtype=torch.bool)


BUGS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "window instead of emitted": (step.record_accepted_, _records_the_window_, "history"),
    "the find of another sequence": (step.prefer_found, _prefers_the_others_find, "choice"),
    "only whole finds": (step.prefer_found, _needs_all_drafts, "choice"),
    "finds pass for drawn": (step.any_found, _nothing_found, "choice"),
}
"""What stands in the place of which function, and which check finds it."""


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong, check = BUGS[bug]
    monkeypatch.setitem(harness.BUGS, bug, lambda program: harness._replace(program, right, wrong))
    recorded = run("draft_model", 3, "block", "ngram", bug)
    with pytest.raises(AssertionError):
        check_history(recorded) if check == "history" else check_choice(recorded, "ngram", "draft_model", "block")
    if check == "choice":
        check_history(recorded)


def repetitive(lengths: tuple[int, ...]) -> list[Tensor]:
    """Prompts of which every other one repeats itself."""
    prompts = ragged_prompts(lengths)
    return [torch.cat([p, p]) if index % 2 else p for index, p in enumerate(prompts)]


PROMPTS = repetitive((4, 17, 8, 1))


@functools.cache
def plain(seeded: bool) -> list[Tensor]:
    return list(compiled(target(), "none", 1).generate(PROMPTS, **options(seeded)).new_tokens)


def options(seeded: bool) -> dict[str, Any]:
    temperature = [0.0, 0.4, 1.0, 0.8] if seeded else 0.0
    return {"max_new_tokens": 24, "eos_token_id": [], "temperature": temperature, "seed": [1, -2, 3, 1 << 40]}


@pytest.mark.parametrize(
    ("name", "k", "seeded"),
    [("smaller vocabulary", 7, True), ("smaller vocabulary", 3, False), ("own, without a distribution", 1, False),
     ("own, without a distribution", 3, True), ("own, without a distribution", 7, False)],
)  # fmt: skip
def test_strict_decoding_emits_what_the_model_alone_does(name: str, k: int, seeded: bool) -> None:
    """By drafters that ``test_matrix`` does not have."""
    out = decoder(name, k, "strict", "suffix" if k == 7 else "ngram").generate(PROMPTS, **options(seeded))
    assert_same_tokens(target(), PROMPTS, out.new_tokens, plain(seeded))


@pytest.mark.parametrize("rule", ["probabilistic", "block", "typical"])
def test_greedy_sequences_are_those_of_the_model_alone_by_every_rule(rule: str) -> None:
    out = decoder("eagle3", 3, rule).generate(PROMPTS, **options(False))
    assert_same_tokens(target(), PROMPTS, out.new_tokens, plain(False))


def test_lowered_for_a_gpu_it_gives_the_same_tokens() -> None:
    """By a rule that reads logits of drafts, which finds do not have."""
    model = make_model("llama", num_hidden_layers=3)
    draft = {"kind": "eagle3", "num_speculative_tokens": 3, "first": "ngram", "first_match": MATCH, "max_context": 20}
    found = []
    for name in ("eager", "gpu"):
        config = {**CONFIG, "draft": draft, "verify": {"rule": "block"}, "lowering": {"name": name}}
        made = specgraph.compile_speculative(model, config, draft=make_head(model))
        found.append(made.generate(PROMPTS, **options(True)).new_tokens)
    assert_same_tokens(model, PROMPTS, found[1], found[0])


BATCH, DRAWS = 4096, 6


def small(rule: str, bug: str | None = None, first: str | None = "ngram", **options: Any) -> SpeculativeDecoder:
    """A target of five tokens and a draft that likes what the target does not, so that rules have work to do."""
    order = [*ORDER, *["plant_bug"] * (bug is not None), "insert_verify"]
    draft = {"kind": "draft_model", "num_speculative_tokens": 2, "first": first, "first_match": 1, **options}
    planted = {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}} if bug else {}
    extra = {"verify": {"rule": rule}, "pipeline": {"order": order}, "passes": planted, "max_batch_size": BATCH}
    return specgraph.compile_speculative(model(0), {**CONFIG, "draft": draft, **extra}, draft=opposite())


def p_value_of(tested: SpeculativeDecoder, draws: int = DRAWS) -> float:
    """Of the chi-square test of emitted tokens against the target's joint distribution."""
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.float64)
    weights = torch.tensor([VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH)])
    for seed in range(draws):
        out = tested.generate(
            PROMPT.expand(BATCH, -1), max_new_tokens=LENGTH, temperature=1.0, seed=seed, eos_token_id=[]
        )
        counts += torch.bincount((torch.stack(out.new_tokens) * weights).sum(1), minlength=VOCAB**LENGTH)
    return p_value(counts, exact_joint(1.0, 0))


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_the_joint_distribution_is_the_targets(rule: str) -> None:
    assert p_value_of(small(rule)) > 1e-3


def test_finds_that_pass_for_drawn_drafts_bias_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two draws are enough, since the counts are far off."""
    right, wrong, _ = BUGS["finds pass for drawn"]
    monkeypatch.setitem(harness.BUGS, "finds pass for drawn", lambda p: harness._replace(p, right, wrong))
    assert p_value_of(small("probabilistic", "finds pass for drawn"), 2) < 1e-9


def test_the_lookup_helps_a_drafter_that_is_always_wrong() -> None:
    """Greedily, a target of five tokens soon repeats itself."""
    lengths = {}
    for first in (None, "ngram"):
        out = small("strict", first=first).generate([PROMPT], max_new_tokens=12, eos_token_id=[])
        lengths[first] = out.stats.acceptance_length
    assert lengths[None] == 1.0 and lengths["ngram"] > 1.2


@pytest.mark.parametrize("kind", ["none", "ngram", "suffix"])
def test_a_drafter_without_drafts_of_its_own_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError) as caught:
        specgraph.compile_speculative(target(), {**CONFIG, "draft": {"kind": kind, "first": "ngram"}})
    assert str(caught.value) == (
        f"draft.first=ngram looks for drafts before another drafter makes its own, and draft.kind is {kind!r}, which "
        "makes none; choose a draft model or a head as the draft, or leave draft.first out."
    )


def test_a_given_draft_decides_about_the_kind() -> None:
    """The kind in the configuration is the default, ``ngram``; the head makes it ``eagle3``."""
    config = {**CONFIG, "draft": {"first": "ngram", "num_speculative_tokens": 2}}
    made = specgraph.compile_speculative(target(), config, draft=make_head(target()))
    assert made.config.draft.kind == "eagle3" and "ngram first, where 8 tokens match" in made.report()
