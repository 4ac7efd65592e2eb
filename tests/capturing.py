"""Decoders on a CPU that replay their steps, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specgraph import SpeculativeDecoder


class Calls:
    """A pool that replays a graph by calling the function again, into the tensor that the first call gave."""

    num_bytes = 3_000_000

    def __init__(self, device: torch.device) -> None:
        self.captured: list[Callable[[], None]] = []

    def capture(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        packed = function()

        def replay() -> None:
            packed.copy_(function())

        self.captured.append(replay)
        return replay, packed


def captured(tested: SpeculativeDecoder) -> SpeculativeDecoder:
    """Its decode steps are replayed, and read one step behind."""
    tested._program.captured = True
    tested._runners.make_pool = Calls
    return tested
