"""The replay of the choice of K: what repeats gains, and what does not repeat loses nothing."""

from __future__ import annotations

import pytest
import torch

from benchmarks.replay_k import Prices, drafts_behind, ratios

PROMPT = torch.arange(100, 110)


def replayed(new: list[int], **points: list[float]) -> float:
    (ratio,) = ratios([(new, drafts_behind(PROMPT, new, 4))], 1, Prices(**points), 4, len(new))
    return ratio


def test_what_repeats_gains_up_to_its_drafts() -> None:
    free = replayed([1, 2, 3, 4, 5] * 20, rows=[1, 5], seconds=[1.0, 1.0])
    assert 3.5 < free <= 5
    assert 1 < replayed([1, 2, 3, 4, 5] * 20, rows=[1, 5], seconds=[1.0, 2.0]) < free


def test_what_never_repeats_costs_what_plain_decoding_does() -> None:
    assert replayed([*range(64)], rows=[1, 3, 5], seconds=[1.0, 1.42, 1.65]) == pytest.approx(1.0)


def test_drafts_are_those_behind_the_last_occurrence() -> None:
    assert drafts_behind(PROMPT, [7, 8, 9, 7, 8], 2) == [[], [], [], [], [8, 9], [9, 7]]
