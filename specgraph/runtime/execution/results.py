"""The packed results of a step, and the pinned memory in which they travel to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.step.results import Unpacked, unpack_results


def num_traced(width: int) -> int:
    """The columns of a trace, where a decode step has ``width`` rows."""
    return 4 * (width - 1) + 2


class TracedRow(NamedTuple):
    """What a step says of the drafts of one sequence.

    Attributes:
        verified: the log-probabilities under the target of the drafts that it verified.
        drafts: those that it made, -1 for none.
        drawn: the log-probabilities that these were drawn with, NaN for those that were not drawn.
        last: the log-probability under the target of the last token that it emitted.
        ranks: those of the verified drafts under the target, from 1; 0 for none.
        last_rank: that of the last token that it emitted.
    """

    verified: list[float]
    drafts: list[int]
    drawn: list[float]
    last: float
    ranks: list[int]
    last_rank: int


class DraftTraceView(NamedTuple):
    """What a step says of the drafts of one sequence, as packed numbers.

    To make Python's numbers of them takes the host time, for which the next steps would have to wait.

    Attributes:
        columns: int32 ``[B, C]``, those of all sequences; see :func:`~specgraph.kernels.step.trace_columns`.
        place: that of the sequence in the step.
        made: how many of its new drafts the sequence verifies at most.
    """

    columns: Tensor
    place: int
    made: int

    def read(self) -> TracedRow:
        """What it says."""
        own, count = self.columns[self.place], self.columns.shape[1] // 4
        numbers, floats = own.tolist(), own.view(torch.float32).tolist()
        drafts, drawn, last = numbers[count : 2 * count][: self.made], floats[2 * count : 3 * count], floats[3 * count]
        return TracedRow(floats[:count], drafts, drawn, last, numbers[3 * count + 1 : -1], numbers[-1])


@dataclass
class Results:
    """The packed results of a step (see :mod:`specgraph.kernels.step.results`), on their way to ``host``.

    ``width`` is the number of rows of a decode step. If ``traced``, the last columns are those of a trace.
    """

    host: Tensor
    width: int
    ready: torch.cuda.Event | None = None
    traced: bool = False

    def read(self, count: int, *, logprobs: bool = True) -> Unpacked:
        """Wait for them, and give those of the first ``count`` sequences, with or without log-probabilities."""
        if self.ready is not None:
            self.ready.synchronize()
        columns = self.host.shape[1] - (num_traced(self.width) if self.traced else 0)
        return unpack_results(self.host[:count, :columns], self.width, logprobs=logprobs)

    def trace(self, count: int) -> Tensor:
        """What :func:`~specgraph.kernels.step.trace_columns` says of the first ``count`` sequences, after reading."""
        return self.host[:count, self.host.shape[1] - num_traced(self.width) :].clone()


class Mailbox:
    """Takes packed results to the host, behind the step that gave them and in front of the next one.

    There is room for two: the host may read the results of one step while the device writes those of the next. So
    results must be read before the second sending after their own.
    """

    def __init__(self, rows: int, width: int, columns: int, device: torch.device) -> None:
        """``width`` is the number of rows of a decode step."""
        self._width = width
        self._both = [_empty_results(rows * columns, device) for _ in range(2)]

    def send(
        self, packed: Tensor, width: int | None = None, stream: torch.cuda.Stream | None = None, *, traced: bool = False
    ) -> Results:
        """Copy int32 ``[B, C]`` without waiting: at most ``rows`` of at most ``columns``.

        ``width`` is that of a step of fewer drafts, which has fewer columns. ``stream`` is the current one, which takes
        PyTorch a while to find out.
        """
        self._both.reverse()
        space, ready = self._both[0]
        # Contiguous on both sides: another copy would make the host wait.
        host = space[: packed.numel()].view(packed.shape)
        host.copy_(packed, non_blocking=True)
        if ready is not None:
            ready.record(stream)
        return Results(host, self._width if width is None else width, ready, traced)


def _empty_results(size: int, device: torch.device) -> tuple[Tensor, torch.cuda.Event | None]:
    pinned = device.type == "cuda"
    host = torch.empty(size, dtype=torch.int32, device="cpu", pin_memory=pinned)
    return host, torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
