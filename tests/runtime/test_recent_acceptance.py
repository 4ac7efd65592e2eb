"""K by what it is worth where the host does not know the drafts: by what was accepted lately, and what steps took."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.config import load_config
from specgraph.runtime.execution import engine
from specgraph.runtime.execution.workspace import Workspace
from specgraph.runtime.requests.request import Request
from specgraph.runtime.schedule.recent_acceptance import AGAIN, RecentAcceptance, SharedAcceptance, describe
from specgraph.runtime.schedule.sequences import ActiveSequence
from specgraph.runtime.schedule.step_costs import TypicalCosts
from tests.capturing import captured
from tests.decoding import CONFIG, choose_at_random, in_a_stream_and_a_session
from tests.drafters.test_matrix import DRAFTERS, MATCH, PROMPTS, draft, heads_exported_once, model
from tests.runtime.test_k_by_load import EACH, KINDS, plain

__all__ = ["heads_exported_once"]

K = 5


def adaptive(drafter: str, first: str | None = None, rule: str = "strict", **extra: Any) -> SpeculativeDecoder:
    """Its steps are replayed, and read one step behind, as on a GPU."""
    options = {**DRAFTERS[drafter], "num_speculative_tokens": K, "adaptive": True, "first": first, "first_match": MATCH}
    config = {**CONFIG, "draft": options, "verify": {"rule": rule}, "pipeline": {"verify": False}, **extra}
    return captured(specgraph.compile_speculative(model("llama"), config, draft=draft(drafter, "llama")))


@pytest.mark.parametrize(("drafter", "first"), KINDS)
def test_under_strict_no_token_changes_whatever_is_chosen(
    drafter: str, first: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tested = adaptive(drafter, first)
    for at_random in (False, True):
        if at_random:
            monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
        out = tested.generate(PROMPTS, eos_token_id=[], **EACH)
        assert [tokens.tolist() for tokens in out.new_tokens] == plain()
    assert len(out.stats.steps_by_drafts) > 2


def test_a_stream_and_a_session_choose_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
    common = {"max_new_tokens": 24, "eos_token_id": []}
    tested = adaptive("eagle3")
    expected = [tokens.tolist() for tokens in tested.generate(PROMPTS, **common).new_tokens]
    streamed, found, stats = in_a_stream_and_a_session(tested, PROMPTS, **common)
    assert streamed == expected and found == expected
    assert len(stats.steps_by_drafts) > 2
    report = tested.report()
    assert "by how many drafts were accepted lately" in report and "ones is accepted with a probability of 0." in report
    assert re.search(r"a step of up to \d sequences takes, by what was tried last: .*K = \d \d+\.\d\d ms", report)


def test_no_step_is_taken_to_last_as_long_as_the_capture_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told, capture = [0], list[float | None](), Workspace._capture

    def slowly(*given: Any) -> Any:
        clock[0] += 1
        return capture(*given)

    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(Workspace, "_capture", slowly)
    monkeypatch.setattr(RecentAcceptance, "choose", choose_at_random())
    monkeypatch.setattr(RecentAcceptance, "read", lambda own, step, emitted, seconds: told.append(seconds))
    adaptive("eagle3").generate(PROMPTS, max_new_tokens=24, eos_token_id=[])
    assert clock[0] > 4 and told.count(0) > 4 and {*told} == {0, None}


@pytest.mark.parametrize("given", [{"draft": {"kind": "eagle", "num_speculative_tokens": "auto"}}])
def test_auto_is_the_drafters_own_number_at_most(given: dict[str, Any]) -> None:
    own = load_config({"draft": {"kind": "eagle"}}).draft.num_speculative_tokens
    for config in (load_config(given), load_config({"draft.kind": "eagle", "draft.num_speculative_tokens": "auto"})):
        assert config.draft.adaptive is True and config.draft.num_speculative_tokens == own


# The choice alone, against steps and drafts that are made up

MOST = 7


class Machine:
    """Sequences whose drafts are accepted with given probabilities, and steps that take given times."""

    def __init__(self, acceptance: list[float], seconds: Callable[[int, int], float], *, ragged: bool = False) -> None:
        """``seconds`` takes the number of rows and K. With ``ragged``, every sequence has a number of drafts."""
        self.acceptance, self.seconds = np.array(acceptance), seconds
        self.rows, self.ragged = [*range(len(acceptance))], ragged
        self.chosen = Counter[int]()
        self._of_all = SharedAcceptance(MOST), TypicalCosts(), self.chosen
        self.start()
        self._noise = np.random.default_rng(0)
        self._sequences = [ActiveSequence(row, Request.__new__(Request), state_row=row) for row in self.rows]

    def start(self) -> None:
        """Another engine of the same decoder."""
        self.worth = RecentAcceptance(len(self.rows), *self._of_all, ragged=self.ragged)
        self.worth.begin(self.rows)

    def tokens_per_second(self, steps: int) -> float:
        """Steps are read one step behind. What no step before has made is not accepted."""
        tokens, seconds, under_way = 0, 0.0, []
        made = 0
        for _ in range(steps):
            choice = self.worth.choose("kind", self._sequences, ())
            k = MOST if choice.drafts is None else choice.drafts
            verified = np.minimum(choice.num_rows(len(self.rows), MOST), made + 1)[:, None] - 1
            drawn = self._noise.random((len(self.rows), MOST)) < self.acceptance[:, None]
            accepted = (drawn & (np.arange(MOST) < verified)).cumprod(axis=1).sum(axis=1)
            took = self.seconds(sum(choice.num_rows(len(self.rows), MOST)), k)
            under_way.append((self.worth.enqueued("kind", self.rows, 0, k, choice.each), accepted + 1, took))
            made = k
            if len(under_way) > 1:
                step, emitted, took = under_way.pop(0)
                self.worth.read(step, emitted.tolist(), took)
                tokens, seconds = tokens + int(emitted.sum()), seconds + took
        return tokens / seconds

    def of_fixed(self, k: int) -> float:
        """Tokens per second with always the same K."""
        expected = sum((self.acceptance**i).sum() for i in range(k + 1))
        return float(expected) / self.seconds(len(self.rows) * (k + 1), k)


def h200(rows: int, k: int) -> float:
    """Milliseconds of an 8B model and a small head, roughly: bytes, tiles of 128 rows, and a call per draft."""
    return 3.8 + 0.01 * min(rows, 128) + 0.13 * k + 3.0 * (-(-rows // 128) - 1)


def steep(rows: int, k: int) -> float:
    """Every row costs a third of a step."""
    return 1 + (rows - 1) / 3


@pytest.mark.parametrize("seconds", [h200, steep])
@pytest.mark.parametrize("count", [1, 8, 64])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
def test_the_choice_is_nearly_the_best_number_and_never_worse_than_none(
    seconds: Callable[[int, int], float], count: int, rate: float
) -> None:
    machine = Machine([rate] * count, seconds)
    machine.tokens_per_second(200)  # costs are tried, and the first estimate is left behind
    machine.start()
    found = machine.tokens_per_second(3000)
    best = max(machine.of_fixed(k) for k in range(MOST + 1))
    assert found > 0.98 * machine.of_fixed(0) and found > 0.95 * best


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
def test_a_host_that_reads_some_steps_late_does_not_mislead_the_choice(rate: float) -> None:
    """Those behind them then seem to have taken next to nothing."""
    seconds, dice, late = {0: 9.4, 1: 9.9, 2: 12.4, 3: 12.8, 5: 14.8, 7: 16.5}, np.random.default_rng(0), 0.0

    def read(rows: int, k: int) -> float:
        nonlocal late
        before, late = late, seconds[k] * (dice.random() < 0.02)
        return seconds[k] + late - before

    best = max(sum(rate**i for i in range(k + 1)) / took for k, took in seconds.items())
    for _ in range(6):
        machine = Machine([rate] * 32, read)
        machine.tokens_per_second(150)
        before = machine.chosen.copy()
        machine.tokens_per_second(300)
        steps = machine.chosen - before
        tokens = sum(count * sum(rate**i for i in range(k + 1)) for k, count in steps.items())
        assert tokens / sum(count * seconds[k] for k, count in steps.items()) > 0.95 * best


def test_mixed_sequences_get_a_number_of_drafts_each_where_rows_are_dear() -> None:
    machine = Machine([0.2, 0.9] * 32, h200, ragged=True)
    machine.tokens_per_second(600)  # half of the sequences are found out, and costs are tried
    found = machine.tokens_per_second(2000)
    best = max(machine.of_fixed(k) for k in range(MOST + 1))
    assert found > 1.1 * best
    rates, steps = describe(*machine._of_all[:2])
    assert "of up to 64 sequences" in steps and "K = 2 over 128 rows" in steps and rates.count(", 0.") == MOST - 1
    each = machine.worth.choose("kind", machine._sequences, ()).each
    assert each is not None and sum(each[1::2]) > 4 * sum(each[::2])


def test_a_sequence_that_verified_nothing_among_others_is_asked_again() -> None:
    machine = Machine([0.0, 0.9] * 32, h200, ragged=True)
    machine.tokens_per_second(1000)
    machine.acceptance[0] = 0.9
    machine.tokens_per_second(300)
    assert machine.worth._own[0, 0] > 0.7 and machine.worth._own[2, 0] < 0.65


@pytest.mark.parametrize("rate", [0.05, 0.6, 0.9])
@pytest.mark.parametrize("count", [1, 64])
def test_equal_sequences_lose_nothing_where_each_may_have_its_own_number(count: int, rate: float) -> None:
    machine = Machine([rate] * count, h200, ragged=True)
    machine.tokens_per_second(600)
    found = machine.tokens_per_second(3000)
    best = max(machine.of_fixed(k) for k in range(MOST + 1))
    assert found > 0.98 * machine.of_fixed(0) and found > 0.95 * best


def test_drafts_that_are_right_again_are_noticed_where_none_was_verified() -> None:
    machine = Machine([0.0] * 4, h200)
    machine.tokens_per_second(1000)
    assert machine.chosen[0] > 800
    machine.acceptance[:] = 0.9
    machine.tokens_per_second(2 * AGAIN)
    machine.chosen.clear()
    assert machine.tokens_per_second(500) > 0.9 * machine.of_fixed(MOST) and machine.chosen[MOST] > 400


def test_a_new_sequence_begins_with_what_is_known_of_all() -> None:
    machine = Machine([0.9, 0.1], h200)
    machine.tokens_per_second(2000)
    good, bad = machine.worth._own[:, 0]
    assert good > 0.75 and bad < 0.35
    machine.worth.begin([1])
    assert machine.worth._own[0, 0] == good and 0.4 < machine.worth._own[1, 0] < 0.6
    machine.start()
    assert (abs(machine.worth._own[:, 0] - 0.5) < 0.1).all()
