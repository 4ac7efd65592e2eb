"""The token that is drawn with little noise is the one that the definition draws with all of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling import draw
from specgraph.kernels.sampling.constants import STREAM_RESIDUAL, STREAM_TARGET
from specgraph.kernels.sampling.draw import Noise, draw_row
from specgraph.kernels.sampling.sample import clean_logits, sample
from tests.kernels.sampling.rows import ROWS

SEEDS = 20


def assert_drawn(weights: Tensor, seed: int, ids: Tensor | None = None, stream: int = STREAM_TARGET) -> None:
    seeds, key = torch.tensor([seed * 2**33 + seed]), torch.tensor([[seed % 7 + (seed % 3) * 2**32]])
    row = None if stream == STREAM_TARGET else torch.tensor([[seed % 5]])
    expected = int(sample(weights.view(1, 1, -1), seeds, key, row, stream, ids))
    assert draw_row(weights, Noise(seeds, stream, key, row), ids) == expected


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [1, 7, 1030, 9001])
def test_it_is_the_definition(name: str, size: int) -> None:
    weights = clean_logits(ROWS[name](size, torch.Generator().manual_seed(size)))
    for seed in range(SEEDS):
        assert_drawn(weights, seed)
        assert_drawn(weights, seed, stream=STREAM_RESIDUAL)


@pytest.mark.parametrize("name", ["normal", "flat", "peaked", "ties", "equal", "masked", "nothing"])
def test_a_vocabulary_of_its_own(name: str) -> None:
    random = torch.Generator().manual_seed(0)
    weights, ids = clean_logits(ROWS[name](1500, random)), torch.randperm(9000, generator=random)[:1500]
    for seed in range(SEEDS):
        assert_drawn(weights, seed, ids)


def test_exact_ties_give_the_first_token() -> None:
    """At this size all noise is lost in rounding."""
    weights = torch.full((5000,), -1e30)
    weights[3000:4000] = 1e30
    for seed in range(5):
        assert_drawn(weights, seed)
    assert draw_row(weights, Noise(torch.tensor([3]), 0, torch.tensor([[1]]))) == 3000


def test_without_noise_it_is_the_first_of_the_largest() -> None:
    assert draw_row(torch.tensor([1.0, 3.0, 3.0]), None) == 1
    assert draw_row(torch.full((9,), -math.inf), None) == 0


@pytest.mark.parametrize(("most", "calls"), [(draw.MOST, False), (40, True)])
def test_more_tokens_that_may_win_than_are_scored_first(
    most: int, calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Tokens of equal weight can all win, and the others cannot."""
    dense: list[Tensor] = []

    def spy(*given: Any) -> Tensor:
        dense.append(sample(*given))
        return dense[-1]

    monkeypatch.setattr(draw, "FIRST", 8)
    monkeypatch.setattr(draw, "MOST", most)
    monkeypatch.setattr(draw, "sample", spy)
    weights = torch.full((16_000,), -60.0)
    weights[torch.arange(2000) * 8 + torch.arange(2000) % 8] = 0.0
    for seed in range(SEEDS):
        assert_drawn(weights, seed)
        assert_drawn(weights, seed, stream=STREAM_RESIDUAL)
    assert len(dense) == 2 * SEEDS * calls


def test_no_noise_exceeds_the_most() -> None:
    """The largest noise is that of the word 0."""
    assert draw.MOST_NOISE - 0.1 < -math.log(2.0**-33) < draw.MOST_NOISE
    noise = Noise(torch.tensor([3]), STREAM_TARGET, torch.tensor([[9]]))
    assert float(noise.of_tokens(torch.arange(100_000)).max()) < draw.MOST_NOISE
