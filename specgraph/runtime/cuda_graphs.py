"""Functions captured as CUDA graphs, and the pinned memory that their results travel to."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specgraph.errors import PassError
from specgraph.kernels.step.results import Unpacked, unpack_results

_CAPTURING = threading.Lock()
"""One capture at a time in a process; PyTorch allows no more."""


class Pool(Protocol):
    """Where a :class:`~specgraph.runtime.runner.Workspace` has its steps captured."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that the captured functions share."""

    def capture(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Something that runs ``function`` again, and the tensor its result lies in from then on."""


class GraphPool:
    """Captures functions as CUDA graphs that share their memory, so only one of them may run at a time.

    They are freed together, with the pool: PyTorch 2.11 fails in a capture into memory of which a graph was freed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    @property
    def num_bytes(self) -> int:
        """Bytes that tensors of the captured functions lie in. What the driver keeps for each graph is not known."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        return sum(part["total_size"] for part in segments if tuple(part["segment_pool_id"]) == tuple(self._handle))

    def capture(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Run ``function`` once, so that kernels are compiled and memory is planned, then record it.

        Other threads may use the device meanwhile, on other streams than this pool's own.

        Raises:
            PassError: it ran, but cannot be captured; says what to set.
        """
        outside = torch.cuda.current_stream(self._device)
        with _CAPTURING:
            self._stream.wait_stream(outside)
            # A capture that fails leaves its stream the current one: this puts the right one back.
            with torch.cuda.stream(self._stream):
                try:
                    function()
                finally:  # whoever frees what it used must not do so while it runs
                    outside.wait_stream(self._stream)
                return self._record(function)

    def _record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph = torch.cuda.CUDAGraph()
        before = sys.exception()
        try:
            with (
                _no_collection(),
                torch.cuda.graph(graph, self._handle, self._stream, capture_error_mode="thread_local"),
            ):
                result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise PassError(
                f"capture_cuda_graph: the step runs, but not as a CUDA graph: {first_error(error, before)} Set "
                "lowering.cuda_graph=false."
            ) from error
        return graph.replay, result


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """While the context lasts, Python collects no garbage: to free a graph or an event may invalidate a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def first_error(error: BaseException, before: BaseException | None = None) -> str:
    """The first line of the error that came before all others: ending a broken capture raises once more.

    ``before`` is what was being handled already, and is no part of it.
    """
    while error.__context__ is not None and error.__context__ is not before:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".") + "."


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


class TracedRows(NamedTuple):
    """What a step says of the drafts of its sequences, as packed numbers.

    To make Python's numbers of them takes the host time, for which the next steps would have to wait.

    Attributes:
        columns: int32 ``[B, C]``; see :func:`~specgraph.kernels.step.trace_columns`.
        drafts: how many drafts of a sequence the step verified and made at most.
    """

    columns: Tensor
    drafts: int

    def row(self, place: int, *, made: int) -> TracedRow:
        """What it says of one sequence, which verifies ``made`` of its new drafts at most."""
        own, count = self.columns[place], self.drafts
        numbers, floats = own.tolist(), own.view(torch.float32).tolist()
        drafts, drawn, last = numbers[count : 2 * count][:made], floats[2 * count : 3 * count], floats[3 * count]
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

    def trace(self, count: int) -> TracedRows:
        """What :func:`~specgraph.kernels.step.trace_columns` says of the first ``count`` sequences, after reading."""
        return TracedRows(self.host[:count, self.host.shape[1] - num_traced(self.width) :].clone(), self.width - 1)


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
