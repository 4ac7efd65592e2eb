"""Runs a compiled step over the state of one request: call by call, or as a CUDA graph that is replayed.

A wide step (prompt chunks) is always a call. The decode step has the same shapes every time, so it is captured, with no
active row: warming up and capturing change nothing. A :class:`Workspace` is one state with room for the largest request
so far, and a graph for each mode and bucket of batch sizes over the first rows of it. The host enqueues a step before
it has read the one before: results travel to pinned memory, and an event tells when they are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, fx

from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate, first_sequences, num_bytes
from specgraph.kernels.launch import new_counters, own_counters
from specgraph.kernels.step.results import NUM_COUNTS, pack_results
from specgraph.runtime.cuda_graphs import GraphPool, Mailbox, Pool, Results
from specgraph.runtime.requests import Request
from specgraph.runtime.state import clear_state, fill_state, new_state, state_sizes

Mode = tuple[str, tuple[str, ...]]
"""What distinguishes the variants of a step: the log-probabilities it gives, and the inputs it does without."""
PATIENCE = 8
"""A state shrinks when it is this many requests since one needed more than a quarter of its pages."""
SHRINK_BYTES = 1 << 30
"""Smaller states are kept: capturing again costs more than they are worth."""


class Runner:
    """Runs the step call by call, and reads every result before the next one.

    Attributes:
        state: the tensors that the step reads and writes, for :class:`~specgraph.runtime.state.Prefill`.
        lag: how many steps are enqueued before the first is read.
    """

    lag = 0

    def __init__(self, step: fx.GraphModule, state: State, counters: Tensor | None = None) -> None:
        self._step = step
        self.state = state
        start: Tensor = state["start"]
        cuda = start.device.type == "cuda"
        self._stream = torch.cuda.current_stream(start.device) if cuda else None
        self._counters = new_counters(start.device) if cuda and counters is None else counters

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """To be entered for whatever touches the state: it stays on the stream where the request began."""
        with own_counters(self._counters), torch.cuda.stream(self._stream):
            yield

    def wide(self, window: Tensor) -> Results:
        """A step over a window that holds prompt tokens."""
        return self._send(self._call(window))

    def decode(self) -> Results:
        """A step over the window that the step before has laid out."""
        return self._send(self._call(self.state["next_window"]))

    def close(self) -> None:
        """Wait for what is under way; the state is free then."""

    def _call(self, window: Tensor) -> Tensor:
        """Run the step, and pack what it returns with the number of rows of the next one, which is 0 at the end."""
        emitted, num_emitted, logprobs, bad = self._step(window=window, **self.state)
        width = self.state["next_window"].shape[1]
        return pack_results(emitted, num_emitted, logprobs, bad, self.state["num_rows"], width)

    def _send(self, packed: Tensor) -> Results:
        return Results(packed.cpu())


class _Captured(NamedTuple):
    """A step as a graph: it is replayed, and leaves ``packed``.

    The graph knows addresses alone, and another decoder of this model may move its parameters to other storage; so
    ``weights`` keeps what they were.
    """

    replay: Callable[[], None]
    packed: Tensor
    weights: list[Tensor]


class Workspace:
    """A state and the graphs captured over it; serves one request at a time.

    Attributes:
        sizes: what the state has room for, by the letters of :class:`~specgraph.kernels.state.Buffer`.
        state: its tensors.
        counters: arrival counters of its launches, which other streams must not touch.
        mailbox: where results of its steps go.
    """

    def __init__(self, program: Program, sizes: Mapping[str, int], pool: Pool) -> None:
        device = program.target.device
        self.sizes = dict(sizes)
        self.state = allocate(program, sizes, device)
        self.counters = new_counters(device)
        self.mailbox = Mailbox(sizes["B"], 2 * self.state["next_window"].shape[1] + NUM_COUNTS, device)
        self._pool = pool
        self._program = program
        self._graphs: dict[tuple[Mode, int], _Captured] = {}

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    @property
    def num_bytes(self) -> int:
        """Bytes of the state."""
        return num_bytes(self._program, self.state)

    def has(self, mode: Mode, batch: int) -> bool:
        """Whether that graph is there."""
        return (mode, batch) in self._graphs

    def captured(self, key: tuple[Mode, int], step: fx.GraphModule, function: Callable[[], Tensor]) -> _Captured:
        """The graph of ``key``, a mode and a batch size; ``function`` runs ``step`` if it is yet to be captured."""
        if key not in self._graphs:
            weights = [tensor.detach() for tensor in (*step.parameters(), *step.buffers())]
            self._graphs[key] = _Captured(*self._pool.capture(function), weights)
        return self._graphs[key]


class GraphRunner(Runner):
    """Replays the decode step as a CUDA graph and reads results one step behind.

    Attributes:
        space: whose first ``batch`` sequences it runs.
    """

    lag = 1

    def __init__(self, step: fx.GraphModule, program: Program, space: Workspace, batch: int, mode: Mode) -> None:
        super().__init__(step, first_sequences(program, space.state, batch), space.counters)
        self.space = space
        with self.active():
            if not space.has(mode, batch):  # an interrupted request may have left rows active: they would run now
                clear_state(program, self.state)
            window = self.state["next_window"]
            self._captured = space.captured((mode, batch), step, lambda: self._call(window))

    def decode(self) -> Results:
        """Replay; the results are overwritten by the next replay, so they are sent before it."""
        self._captured.replay()
        return self._send(self._captured.packed)

    def close(self) -> None:
        """Wait for the stream; by an event, which a caller's ``set_sync_debug_mode`` takes for intended."""
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()

    def _send(self, packed: Tensor) -> Results:
        return self.space.mailbox.send(packed)


@dataclass
class Runners:
    """Hands out a runner per request.

    One workspace is kept for the next request, because with it goes a whole KV cache; requests side by side have one
    each. It grows with what requests need, and then everything is captured anew; it shrinks as :func:`room` says.
    """

    program: Program
    max_batch_size: int
    make_pool: Callable[[torch.device], Pool] = GraphPool
    idle: Workspace | None = None
    _recent: deque[Mapping[str, int]] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, step: fx.GraphModule, request: Request, mode: Mode) -> Runner:
        """A runner whose state is that of ``request``; ``mode`` names the variant of the step."""
        if not self.program.captured:
            return Runner(step, new_state(self.program, request, self.program.target.device))
        sizes = state_sizes(self.program, request)
        sizes = bucket(sizes, self.max_batch_size, self.program.block_size)
        runner = GraphRunner(step, self.program, self._workspace(sizes), sizes["B"], mode)
        with runner.active():
            fill_state(self.program, runner.state, request)
        return runner

    def give_back(self, runner: Runner) -> None:
        """A request has ended, well or not."""
        runner.close()
        if isinstance(runner, GraphRunner):
            with self._lock:
                if self.idle is None or self.idle.sizes["N"] < runner.space.sizes["N"]:
                    self.idle = runner.space

    def _workspace(self, sizes: Mapping[str, int]) -> Workspace:
        with self._lock:
            space, self.idle = self.idle, None
            self._recent.append(sizes)
            wanted = dict(sizes) if space is None else room(space.sizes, space.num_bytes, list(self._recent))
        if space is None or space.sizes != wanted:
            space = None  # freed before the next one is allocated
            space = Workspace(self.program, wanted, self.make_pool(self.program.target.device))
        return space


def room(kept: Mapping[str, int], kept_bytes: int, recent: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The sizes of a state that serves the last of the ``recent`` requests, where one of sizes ``kept`` is there.

    As before if it fits in, and larger if it does not. If the state is large, and the last ``PATIENCE`` requests needed
    at most a quarter of its pages, what was the most for them.
    """
    lately = _largest(recent)
    if len(recent) >= PATIENCE and kept_bytes >= SHRINK_BYTES and 4 * lately["N"] <= kept["N"]:
        return lately
    return _largest([kept, recent[-1]])


def _largest(many: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: max(sizes[name] for sizes in many) for name in many[0]}


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
