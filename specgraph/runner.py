"""Runs a compiled step over the state of one request: call by call, or as a CUDA graph that is replayed.

A wide step (prompt chunks) is always a call. The decode step, which has the same shapes every time, is captured with no
active row, so that warming up and capturing change nothing; state sizes are rounded up to buckets, so that the next
request often fits. The host enqueues a step before it has read the one before: results travel to pinned memory, and an
event tells when they are there.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.program import Program
from specgraph.requests import Request
from specgraph.state import State, allocate, fill_state, new_state, state_sizes

Mode = tuple[str, tuple[str, ...]]
"""What distinguishes the variants of a step: the log-probabilities it gives, and the inputs it does without."""


@dataclass
class Results:
    """Outputs of one step on their way to the host: ``read()`` waits for them."""

    tensors: tuple[Tensor, ...]
    ready: torch.cuda.Event | None = None

    def read(self) -> tuple[list[Any], ...]:
        """The outputs as lists."""
        if self.ready is not None:
            self.ready.synchronize()
        return tuple(tensor.tolist() for tensor in self.tensors)


class Runner:
    """Runs the step call by call, and reads every result before the next one.

    Attributes:
        state: the tensors that the step reads and writes, for :class:`~specgraph.state.Prefill`.
        lag: how many steps are enqueued before the first is read.
    """

    lag = 0

    def __init__(self, step: fx.GraphModule, state: State) -> None:
        self._step = step
        self.state = state

    def wide(self, window: Tensor) -> tuple[Tensor, ...]:
        """A step over a window that holds prompt tokens."""
        outputs: tuple[Tensor, ...] = self._step(window=window, **self.state)
        return outputs

    def decode(self) -> tuple[Tensor, ...]:
        """A step over the window that the step before has laid out."""
        return self.wide(self.state["next_window"])

    def fetch(self, outputs: Sequence[Tensor]) -> Results:
        """Send outputs to the host, and with them the number of rows of the next step, which is 0 at the end."""
        return Results((*outputs, self.state["num_rows"]))

    def close(self) -> None:
        """Wait for what is under way; the state is free then."""


class GraphRunner(Runner):
    """Replays the decode step as a CUDA graph and reads results one step behind."""

    lag = 1

    def __init__(
        self, step: fx.GraphModule, state: State, device: torch.device, sizes: Mapping[str, int], mode: Mode
    ) -> None:
        super().__init__(step, state)
        self._device, self._sizes, self._mode = device, sizes, mode
        # The graph knows addresses alone, and another decoder of this model may move its parameters to other storage.
        self._weights = [tensor.detach() for tensor in (*step.parameters(), *step.buffers())]
        self._graph = torch.cuda.CUDAGraph()
        self._outputs = self._capture()
        self._pinned: dict[tuple[int, tuple[torch.Size, ...]], tuple[Tensor, ...]] = {}
        self._count = 0

    def fits(self, sizes: Mapping[str, int], mode: Mode) -> bool:
        """Whether a request of these sizes can run here: the same batch, and room for everything else."""
        room = all(self._sizes[name] >= size for name, size in sizes.items())
        return room and self._sizes["B"] == sizes["B"] and self._mode == mode

    def decode(self) -> tuple[Tensor, ...]:
        """Replay; the outputs are overwritten by the next replay, so they are fetched before it."""
        self._graph.replay()
        return self._outputs

    def fetch(self, outputs: Sequence[Tensor]) -> Results:
        """Copy to pinned memory, behind the step and in front of the next one."""
        sent = (*outputs, self.state["num_rows"])
        # Two sets: the host may still read the one while the device writes the other.
        self._count += 1
        key = (self._count % 2, tuple(tensor.shape for tensor in sent))
        if key not in self._pinned:
            self._pinned[key] = tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in sent)
        for there, here in zip(self._pinned[key], sent, strict=True):
            there.copy_(here, non_blocking=True)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(self._device))
        return Results(self._pinned[key], ready)

    def close(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def _capture(self) -> tuple[Tensor, ...]:
        """Run once so that kernels are compiled and memory is planned, then record; no row is active."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().decode()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self._graph):
            return super().decode()


@dataclass
class Runners:
    """Hands out a runner per request. The last captured one is kept for the next request that fits in; the last alone,
    because with it goes a whole KV cache."""

    program: Program
    max_batch_size: int
    _idle: GraphRunner | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, step: fx.GraphModule, request: Request, mode: Mode) -> Runner:
        """A runner whose state is that of ``request``; ``mode`` names the variant of the step."""
        device = self.program.target.device
        if not self.program.captured:
            return Runner(step, new_state(self.program, request, device))
        sizes = state_sizes(self.program, request)
        sizes = bucket(sizes, self.max_batch_size, self.program.options["block_size"])
        with self._lock:
            kept, self._idle = self._idle, None
        fits = kept is not None and kept.fits(sizes, mode)
        # Freed before the next one is allocated.
        kept = kept if fits else None
        runner = kept or GraphRunner(step, allocate(self.program, sizes, device), device, sizes, mode)
        fill_state(self.program, runner.state, request)
        return runner

    def give_back(self, runner: Runner) -> None:
        """A request has ended, well or not."""
        runner.close()
        if isinstance(runner, GraphRunner):
            with self._lock:
                self._idle = runner


def bucket(sizes: Mapping[str, int], max_batch_size: int, block_size: int) -> dict[str, int]:
    """Sizes rounded up, so that few graphs serve all requests; the largest batch is always a bucket.

    Batches are powers of two, pages per sequence too; pages in all are rounded up by at most one part in 32.
    """
    batch = min(_power_of_two(sizes["B"]), max(max_batch_size, sizes["B"]))
    pages = _power_of_two(sizes["M"])
    grain = max(1, _power_of_two(sizes["N"]) // 64)
    total = -(-sizes["N"] // grain) * grain
    return {"B": batch, "M": pages, "N": total, "S": pages * block_size, "E": _power_of_two(sizes["E"])}


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
