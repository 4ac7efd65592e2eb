"""What steps cost, and how often drafts are right: the two estimates behind K by what it is worth."""

from __future__ import annotations

import pytest

from specgraph.runtime.schedule.acceptance import Outlook, Survival
from specgraph.runtime.schedule.step_costs import FALL, TYPICAL_FALL, StepCosts, TypicalCosts


def priced(*steps: tuple[int, float]) -> StepCosts:
    costs = StepCosts()
    for rows, seconds in steps:
        costs.add("kind", rows, seconds)
    return costs


def test_a_cost_is_known_from_the_second_step_on_and_the_best_counts() -> None:
    costs = priced((5, 30.0))  # which has compiled
    assert costs.of("kind", 5) is None
    costs.add("kind", 5, 2.0)
    assert costs.of("kind", 5) == 2.0 and costs.of("other", 5) is None
    costs.add("kind", 5, 100.0)
    assert costs.of("kind", 5) == pytest.approx(2.5)  # a step that others have held up counts little
    costs.add("kind", 5, 1.0)
    assert costs.of("kind", 5) == 1.0


def test_what_was_not_tried_is_the_least_that_may_be_true() -> None:
    costs = priced((4, 2.0), (4, 2.0))
    assert costs.of("kind", 9) == 2.0 and costs.of("kind", 3) == 1.5 and costs.of("kind", 1) == 0.5
    for _ in range(2):
        costs.add("kind", 8, 4.0)
    assert costs.of("kind", 6) == pytest.approx(3.0, rel=0.01) and costs.of("kind", 8) == 4.0


def test_more_rows_never_cost_less() -> None:
    costs = priced((4, 2.0), (4, 2.0), (8, 1.0), (8, 1.0))
    assert costs.of("kind", 4) == costs.of("kind", 8) == costs.of("kind", 6) == pytest.approx(2.0, rel=0.01)


def test_a_cost_that_is_not_renewed_falls() -> None:
    costs = priced((1, 1.0), (1, 1.0), (5, 3.0), (5, 3.0))
    for _ in range(200):
        costs.add("kind", 1, 1.0)
    assert costs.of("kind", 5) == pytest.approx(3.0 * (1 - FALL) ** 200)


def outlook(rate: float = 0.5) -> Outlook:
    return Outlook.beginning(Survival([rate] * 3, 0.5))


def test_drafts_are_judged_by_the_tokens_that_come_later() -> None:
    own = outlook()
    own.propose(2, [7, 8, 9])
    own.judge([1, 1])
    assert own.own.rates == [0.5] * 3
    own.judge([1, 1, 7])
    assert own.own.rates == [0.625, 0.5, 0.5] and own.shared.rates == [0.75, 0.5, 0.5]
    own.propose(3, [8])
    own.judge([1, 1, 7, 8, 0])
    assert own.own.rates == [0.71875, 0.625, 0.375]
    own.judge([1, 1, 7, 8, 0, 9])
    assert own.own.rates == [0.71875, 0.625, 0.375]


def test_behind_a_wrong_draft_all_are_wrong() -> None:
    own = outlook()
    own.propose(0, [7, 8, 9])
    own.judge([6, 8, 9])
    assert own.own.rates == [0.375] * 3


def test_a_new_sequence_begins_with_what_is_known_of_all() -> None:
    own = outlook(0.2)
    own.propose(0, [7])
    own.judge([7])
    later = Outlook.beginning(own.shared)
    assert later.own.rates == own.shared.rates == [pytest.approx(0.6), 0.2, 0.2]


def test_a_later_draft_is_not_expected_more_often_than_an_earlier_one() -> None:
    survival = Survival([0.5, 0.75, 0.25], 0.5)
    assert [survival.expected(count) for count in range(5)] == [0.0, 0.5, 1.0, 1.25, 1.25]


def test_a_typical_cost_is_the_median_of_the_last_steps() -> None:
    costs = TypicalCosts()
    for seconds, known in ((20.0, {}), (0.5, {}), (10.0, {5: 10.0}), (10.0, {5: 10.0}), (19.0, {5: 10.0})):
        costs.add("kind", 5, seconds)
        assert costs.known("kind") == known
    for _ in range(8):
        costs.add("kind", 5, 12.0)
    assert costs.known("kind") == {5: 12.0} and costs.kinds() == ["kind"]


def test_a_typical_cost_that_has_fallen_is_forgotten_when_it_is_tried_again() -> None:
    costs = TypicalCosts()
    for rows in (1, 5):
        for _ in range(3):
            costs.add("kind", rows, 30.0 if rows == 5 else 1.0)
    for _ in range(300):
        costs.add("kind", 1, 1.0)
    assert costs.known("kind")[5] == pytest.approx(30.0 * (1 - TYPICAL_FALL) ** 300)
    costs.add("kind", 5, 2.0)
    assert {*costs.known("kind")} == {1}
    for _ in range(2):
        costs.add("kind", 5, 2.0)
    assert costs.known("kind")[5] == 2.0
