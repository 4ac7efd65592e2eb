"""K by what it is worth: lookups on a CPU verify fewer drafts where these cost more than they give."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx

import specgraph
from specgraph import ConfigError, SpeculativeDecoder
from specgraph.config import DraftConfig
from specgraph.drafters.base import Draft, Target
from specgraph.drafters.lookup import LookupDrafter
from specgraph.drafters.registry import drafter_classes
from specgraph.drafters.step import DraftStep
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.schedule.num_drafts import Choice, Worth
from specgraph.runtime.schedule.step_costs import StepCosts
from tests.capturing import captured
from tests.decoding import CONFIG, compiled, in_a_stream_and_a_session
from tests.models import VOCAB, ragged_prompts, shared_model

K = 4
PROMPTS = [torch.tensor(p) for p in ([5, 6, 5, 6, 5], [8], [1, 2, 3, 4] * 4, [7] * 9)]
PROMPTS += ragged_prompts((17, 3))


class Priced(StepCosts):
    """Costs as a decoder learns them, of a machine on which every row beyond the first costs ``price`` of a step."""

    def __init__(self, price: float) -> None:
        super().__init__()
        self.price = price

    def add(self, kind: Hashable, rows: int, seconds: float, fall: float = 0.0) -> None:
        assert seconds > 0
        super().add(kind, rows, 1 + self.price * (rows - 1))


def adaptive(
    price: float = 0.25, dtype: torch.dtype = torch.float64, kind: str = "ngram", rule: str = "strict", **draft: Any
) -> SpeculativeDecoder:
    given = {**CONFIG, "draft": {"kind": kind, **draft}, "verify": {"rule": rule}, "lowering": {"name": "eager"}}
    tested = specgraph.compile_speculative(shared_model("llama", dtype=dtype), given)
    tested._engines = dataclasses.replace(tested._engines, costs=Priced(price))
    return tested


@pytest.fixture(scope="module")
def plain() -> SpeculativeDecoder:
    return compiled(shared_model("llama", dtype=torch.float64), "none", lowering={"name": "eager"})


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """The sequences and columns of every window of the decode steps that are run."""
    found: list[tuple[int, int]] = []
    window = Runner._window

    def noted(self: Runner, rows: Tensor) -> Tensor:
        result = window(self, rows)
        found.append((result.shape[0], result.shape[1]))
        assert bool((self.state["num_rows"][rows] <= result.shape[1]).all())
        return result

    monkeypatch.setattr(Runner, "_window", noted)
    yield found


def num_rows(widths: Sequence[tuple[int, int]]) -> int:
    return sum(count * width for count, width in widths)


def at_random(worth: Worth, *_: Any) -> Choice:
    return Choice(_DICE.choice(worth.choices))


_DICE = random.Random(0)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": [*range(len(PROMPTS))]},
    {"repetition_penalty": 1.2, "return_logprobs": True},
    {"trace": True},
    {"logits_processor": [lambda ids, logits: logits.index_fill(1, torch.tensor([3]), -torch.inf)]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "greedy")
@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_tokens_are_those_of_plain_decoding_whatever_is_chosen(
    kind: str, options: dict[str, Any], plain: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the choice is a bad one."""
    common = {"max_new_tokens": 24, "eos_token_id": [], **options}
    expected = plain.generate(PROMPTS, **common).new_tokens
    tested = adaptive(kind=kind)
    for choose in (None, at_random):
        if choose is not None:
            monkeypatch.setattr(Worth, "choose", choose)
        out = tested.generate(PROMPTS, **common)
        assert all(map(torch.equal, out.new_tokens, expected))
    assert len(out.stats.steps_by_drafts) == 3 and sum(out.stats.steps_by_drafts.values()) <= out.stats.steps


def test_a_stream_and_a_session_choose_too(plain: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "choose", at_random)
    common = {"max_new_tokens": 24, "eos_token_id": []}
    expected = [tokens.tolist() for tokens in plain.generate(PROMPTS, **common).new_tokens]
    streamed, found, stats = in_a_stream_and_a_session(adaptive(), PROMPTS, **common)
    assert streamed == expected and found == expected
    assert {*stats.steps_by_drafts} == {0, 2, K}


def test_a_trace_shows_the_drafts_that_were_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "choose", lambda worth, *_: Choice(2))
    trace = adaptive().generate(PROMPTS[:4], max_new_tokens=20, eos_token_id=[], trace=True).trace
    assert trace is not None
    assert max(len(step.drafts) for step in trace) == 2
    for step in trace:
        assert step.num_accepted == len(step.tokens) - 1 or step.prompt


# Planted lookups


KNOWN: dict[str, Tensor] = {}
"""What the planted lookups propose: ``tokens`` int64 ``[S]`` by their places in a sequence."""


@dataclass(frozen=True, eq=False)
class Planted(LookupDrafter):
    """Always proposes K of the known tokens."""

    kind: ClassVar[str] = f"{__name__}.Planted"
    Config: ClassVar[type[DraftConfig]] = DraftConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        return Draft(cls(options.num_speculative_tokens))

    @classmethod
    def requiring(cls, num_speculative_tokens: int, match: int) -> Planted:
        return cls(num_speculative_tokens)

    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        return step.propose(known_tokens, length, count=self.num_speculative_tokens, name=name)


def known_tokens(length: Tensor, *, count: int) -> Tensor:
    return KNOWN["tokens"][length.unsqueeze(1) + torch.arange(count)]


NEW = 96


def planted(plain: SpeculativeDecoder, right: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """A prompt, and what plain decoding continues it with. Of each four known tokens behind it, these are right."""
    prompt = PROMPTS[0]
    (tokens,) = plain.generate([prompt], max_new_tokens=NEW, eos_token_id=[]).new_tokens
    whole = torch.cat([prompt, tokens, torch.zeros(K, dtype=torch.int64)])
    pattern = torch.tensor(right).repeat(len(whole) // len(right) + 1)[: len(whole)]
    KNOWN["tokens"] = torch.where(pattern, whole, (whole + 1) % VOCAB)
    return prompt, tokens


def test_lookups_that_are_always_wrong_cost_next_to_nothing(
    plain: SpeculativeDecoder, widths: list[tuple[int, int]]
) -> None:
    prompt, expected = planted(plain, [False])
    steps, widths[:] = len(widths), []
    assert steps == NEW - 1
    tested = adaptive(kind=Planted.kind)
    for most in (1.13, 1.05):  # while costs are unknown, and then
        out = tested.generate([prompt], max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(out.new_tokens[0], expected)
        assert len(widths) == steps and num_rows(widths) <= most * steps
        widths.clear()
    # With a K that was given, all of them are verified.
    adaptive(kind=Planted.kind, num_speculative_tokens=K).generate([prompt], max_new_tokens=NEW, eos_token_id=[])
    assert num_rows(widths) > 4 * steps


def test_lookups_that_are_always_right_are_all_verified(
    plain: SpeculativeDecoder, widths: list[tuple[int, int]]
) -> None:
    prompt, expected = planted(plain, [True])
    widths.clear()
    out = adaptive(kind=Planted.kind).generate([prompt], max_new_tokens=NEW, eos_token_id=[])
    assert torch.equal(out.new_tokens[0], expected)
    assert len(widths) <= NEW / (K + 1) + 8


def test_where_rows_are_dear_a_few_drafts_are_better_than_all(
    plain: SpeculativeDecoder, widths: list[tuple[int, int]]
) -> None:
    """Every other draft is right, which two rows of a tenth of a step are worth, and two of a whole step are not."""
    prompt, expected = planted(plain, [True, False])
    for price, favourite in ((0.1, 3), (1.0, 1)):
        widths.clear()
        out = adaptive(price, kind=Planted.kind).generate([prompt], max_new_tokens=NEW, eos_token_id=[])
        assert torch.equal(out.new_tokens[0], expected)
        settled = [width for _, width in widths[len(widths) // 4 :]]
        assert settled.count(favourite) > 0.8 * len(settled), (price, settled)


def test_where_no_lookup_matches_the_step_has_no_drafts(widths: list[tuple[int, int]]) -> None:
    """However cheap they are."""
    tested = adaptive(0.0, kind="ngram", min_ngram=4)
    tested.generate([torch.arange(12)], max_new_tokens=3, eos_token_id=[])
    assert widths == [(1, 1)] * 2


# Where it is done


def test_a_number_that_is_given_is_obeyed(widths: list[tuple[int, int]]) -> None:
    for given in ({"num_speculative_tokens": K}, {"num_speculative_tokens": {1: K}}, {"adaptive": False}):
        tested = adaptive(kind="ngram", **given)
        assert not tested._engines.adapts and "by what its drafts are worth" not in tested.report()
        tested.generate(PROMPTS[:2], max_new_tokens=8, eos_token_id=[])
        assert {width for _, width in widths} == {K + 1}
    both = adaptive(num_speculative_tokens=3, adaptive=True)
    assert both._engines.adapts and both.generate(PROMPTS[:1], max_new_tokens=9, eos_token_id=[]).stats.steps
    assert "K is chosen for each step, by what its drafts are worth (draft.adaptive): 0 in " in both.report()


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block", "synthetic"])
def test_rules_other_than_strict_adapt_when_they_are_asked_to(rule: str) -> None:
    """Under the others a seed would not repeat a run."""
    assert adaptive(rule=rule)._engines.adapts == (rule == "strict")
    assert adaptive(rule=rule, adaptive=True)._engines.adapts


def test_only_lookups_whose_steps_the_host_waits_for_adapt() -> None:
    assert {cls.kind for cls in drafter_classes() if cls.looks_up} == {"ngram", "suffix"}
    assert adaptive()._engines.adapts and not captured(adaptive())._engines.adapts
    with pytest.raises(ConfigError, match=r"how many drafts a step verifies, and the drafter none makes none"):
        adaptive(kind="none", adaptive=True)
