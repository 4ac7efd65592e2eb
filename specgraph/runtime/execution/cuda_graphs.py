"""Captures functions as CUDA graphs that share their memory."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specgraph.errors import PassError
from specgraph.kernels.peers import not_waiting

_CAPTURING = threading.Lock()
"""One capture at a time in a process; PyTorch allows no more."""


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
                    with not_waiting():
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
