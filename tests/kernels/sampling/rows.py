"""Rows of logits that are hard to process and to draw from, for the forms that must equal the definition."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Rows = dict[str, Callable[[int, torch.Generator], Tensor]]


def _normal(size: int, random: torch.Generator) -> Tensor:
    return torch.randn(size, generator=random) * 3


def _replaced(share: float, value: float) -> Callable[[int, torch.Generator], Tensor]:
    """A row of which some logits have one value."""
    return lambda size, random: torch.where(torch.rand(size, generator=random) < share, value, _normal(size, random))


def _one(value: float, others: float) -> Callable[[int, torch.Generator], Tensor]:
    """A row whose last logit differs from all others."""

    def row(size: int, random: torch.Generator) -> Tensor:
        logits = torch.full((size,), others)
        logits[-1] = value
        return logits

    return row


ROWS: Rows = {
    "normal": _normal,
    "flat": lambda size, random: torch.randn(size, generator=random) * 0.01,
    "peaked": lambda size, random: torch.randn(size, generator=random) * 40,
    "falling": lambda size, random: -torch.arange(size) * 0.01,
    "ties": lambda size, random: torch.randint(-2, 3, (size,), generator=random).float(),
    "halves": lambda size, random: -torch.arange(size).clamp(max=100) * math.log(2),
    "equal": lambda size, random: torch.full((size,), -7.5),
    "zero": lambda size, random: torch.zeros(size),
    "one": _one(30.0, -30.0),
    "one alone": _one(2.0, -math.inf),
    "masked": _replaced(0.99, -math.inf),
    "partly masked": _replaced(0.3, -math.inf),
    "nothing": lambda size, random: torch.full((size,), -math.inf),
    "nan": _replaced(0.001, math.nan),
    "nothing but nan": lambda size, random: torch.full((size,), math.nan),
    "infinite": _replaced(0.002, math.inf),
    "huge": lambda size, random: _normal(size, random) * 1e38,
    "huge and negative": lambda size, random: torch.full((size,), -3e38),
}
"""Rows ``[size]`` in float32, by what they are like."""
