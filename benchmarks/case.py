"""A kernel at one shape, as ``kernels.py`` measures it, and the random inputs that it is measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.bench.timing import Call

Make = Callable[[], tuple[Call, dict[str, Call]]]


@dataclass(frozen=True)
class Case:
    """One kernel at one shape. ``make`` makes new inputs and returns our call and the calls of libraries.

    ``bytes`` are those that the call must read and write.
    """

    kernel: str
    shape: str
    bytes: int
    make: Make


@dataclass(frozen=True)
class Place:
    """Makes random inputs on a device, since nothing should be timed on zeros."""

    device: torch.device
    dtype: torch.dtype

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) * scale

    def full(self, shape: Sequence[int], value: float, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.full(tuple(shape), value, device=self.device, dtype=dtype)

    def size(self, *counts: int) -> int:
        return sum(counts) * self.dtype.itemsize
