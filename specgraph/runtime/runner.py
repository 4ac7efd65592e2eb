"""Runs a compiled step over a state: call by call, or as a CUDA graph that is replayed.

Every step runs a subset of the sequences whose state is kept, which its row index names. On a GPU every step is a
graph (:mod:`specgraph.runtime.workspace`), captured when a session first needs its shape, because launching the kernels
one by one takes the host several times as long as they run. While a step is warmed up and captured, its row index names
no sequence, so that nothing changes. A graph that has more entries than there are sequences runs the others as
inactive, and tokens behind the real rows of a window are padding. The host enqueues a step before it has read the one
before: results travel to pinned memory, and an event tells when they are there.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.config import CacheConfig
from specgraph.ir.program import Program
from specgraph.ir.state import State, allocate
from specgraph.kernels.launch import counts_arrivals_in, new_counters, own_counters
from specgraph.kernels.state import CONFIDENCE, ROWS
from specgraph.kernels.step import gather_state
from specgraph.kernels.step.results import pack_results
from specgraph.passes.insert_recurrent_state import has_recurrent_state
from specgraph.passes.pack_rows import ROOM
from specgraph.passes.pause_step import PausedStep
from specgraph.runtime.cuda_graphs import GraphPool, Pool, Results
from specgraph.runtime.memory import Footprint, limited, page_size
from specgraph.runtime.pages import PagePool, Reservation
from specgraph.runtime.pause import Pause
from specgraph.runtime.prefill import Chunk
from specgraph.runtime.prompt_shapes import captured_width, entries, padded_rows
from specgraph.runtime.snapshots import SnapshotPool, Snapshots, boundaries, snapshot_bytes, snapshots_of
from specgraph.runtime.state import Admission, SlotInitializer, load_block, load_chunk, padded_block, staged, uploaded
from specgraph.runtime.workspace import PATIENCE, Captured, Mode, PausedValues, Shape, Workspace, bucket, room

StepModule = fx.GraphModule | PausedStep
"""A step, or one that pauses for the host."""


class Runner:
    """Runs the step call by call, and reads every result before the next one.

    Attributes:
        state: the tensors that the step reads and writes, of all sequences.
        sizes: what the state has room for, by the letters of :class:`~specgraph.kernels.state.Buffer`.
        pages: those of its KV cache.
        snapshots: copies of recurrent state; None if the target has none, or nothing is shared.
        lag: how many steps are enqueued before the first is read.
    """

    lag = 0

    def __init__(
        self, state: State, sizes: Mapping[str, int], pages: PagePool, admit: Callable[[Sequence[Admission]], None],
        footprint: Footprint, counters: Tensor | None = None, least: int = 1, snapshots: Snapshots | None = None,
    ) -> None:  # fmt: skip
        """``admit`` begins sequences in ``state``, as :meth:`SlotInitializer.admit` does. ``least`` is the smallest
        number of sequences in a call; inactive ones make up for what is missing. ``snapshots`` and ``footprint`` are
        those of ``state``."""
        self._step: StepModule | None = None
        self._mode = Mode()
        self._least = least
        self.state = state
        self.sizes = sizes
        self.pages = pages
        self.snapshots = snapshots
        self.footprint = footprint
        self._begin = admit
        start: Tensor = state["start"]
        cuda = start.device.type == "cuda"
        self._stream = torch.cuda.current_stream(start.device) if cuda else None
        self._counters = new_counters(start.device) if cuda and counters is None else counters

    def active(self) -> contextlib.AbstractContextManager[None]:
        """To be entered for whatever touches the state: it stays on the stream where the session began.

        Where it is entered already, nothing is done, since to find that out from PyTorch takes as long as a small step.
        """
        inside = self._counters is None or counts_arrivals_in(self._counters)
        return contextlib.nullcontext() if inside else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with own_counters(self._counters), torch.cuda.stream(self._stream):
            yield

    def admit(self, entering: Sequence[Admission]) -> None:
        """Begin sequences, each in its row, with the state that it shares."""
        self._begin(entering)
        if self.snapshots is not None:
            self.snapshots.load([(new.snapshot, new.row) for new in entering if new.snapshot is not None])

    def keep_states(
        self, reached: Iterable[tuple[Reservation, Tensor, int, int]], *, target_only: bool = False
    ) -> None:
        """Take snapshots behind the last step that was enqueued.

        For each: what a sequence has reserved, its prompt, its row, and the boundary at which that step left its state.
        """
        if self.snapshots is None:
            return
        # Where a snapshot made room for another one in the same step, only the last is written.
        taken = {
            snapshot: row
            for reserved, prompt, row, boundary in reached
            if (snapshot := self.pages.take_snapshot(reserved, prompt, boundary, target_only=target_only)) is not None
        }
        self.snapshots.save(taken)

    def use(self, mode: Mode, step: StepModule) -> None:
        """Run ``step`` from now on, the variant of ``mode``."""
        self._step, self._mode = step, mode
        if mode.drafts is not None and not mode.ahead:
            # The last steps may have made more drafts. Those beyond its window are not verified.
            with self.active():
                self.state["num_rows"].clamp_(max=self.width)

    @property
    def width(self) -> int:
        """Rows of a decode step: K + 1, with the K of the mode in use."""
        drafts = self._mode.drafts
        return int(self.state["next_window"].shape[1]) if drafts is None else drafts + 1

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """A step over a window of prompt tokens. A step that pauses is given what the host does meanwhile."""
        return self._send(self._call(*self.load(chunk), pause, chunk.num_rows))

    def load(self, chunk: Chunk) -> tuple[Tensor, Tensor]:
        """Set the row counts of a chunk's sequences, and give its row index and its windows, both on the device."""
        return load_chunk(self.state, chunk, self._least)

    def run(self, step: fx.GraphModule, rows: Tensor, window: Tensor) -> Any:
        """What a variant of the step returns that is run as it is, whatever is captured."""
        return step(**self._given(rows, window))

    def _given(self, rows: Tensor, window: Tensor, room: int | None = None) -> dict[str, Any]:
        """All inputs of a step."""
        given = {"window": window, **self.state, ROWS: rows}
        return given if room is None else given | {ROOM: window.new_empty(room)}

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """A step of the sequences ``rows``, over the windows that their last steps have laid out."""
        index = self._upload(rows, max(len(rows), self._least))
        return self._send(self._call(index, self._window(index), pause))

    def drafts(self, rows: Sequence[int]) -> list[list[int]]:
        """What the next decode step verifies of the sequences ``rows``. Waits for the steps before it."""
        index = self._upload(rows, len(rows))
        drafts: list[list[int]] = self.state["next_window"][index, 1 : self.width].tolist()
        return drafts

    def real_drafts(self, rows: Sequence[int]) -> list[list[int]]:
        """The drafts that the last steps of the sequences ``rows`` have found. Waits for these steps."""
        index = self._upload(rows, len(rows))
        windows, counts = self.state["next_window"][index].tolist(), self.state["num_rows"][index].tolist()
        return [window[1:count] for window, count in zip(windows, counts, strict=True)]

    def keep_drafts(self, rows: Sequence[int], count: int) -> None:
        """Let the next step verify no more than ``count`` drafts of each of the sequences ``rows``."""
        index, num_rows = self._upload(rows, len(rows)), self.state["num_rows"]
        num_rows[index] = num_rows[index].clamp(max=count + 1)

    def close(self) -> None:
        """Wait for what is under way; the state is free then.

        Its memory goes at once, since a closed session may be held for long.
        """
        self.state.clear()

    def _upload(self, rows: Sequence[int], count: int) -> Tensor:
        """The row index of a call of ``count`` sequences, int64 ``[count]``."""
        device = self.state["num_rows"].device
        index = torch.tensor([*rows, *[-1] * (count - len(rows))], dtype=torch.int64, device="cpu")
        return uploaded(index, device)

    def _window(self, rows: Tensor) -> Tensor:
        """The windows that their last steps have laid out for sequences."""
        (window,) = gather_state(rows, [self.state["next_window"]], [0])
        return window[:, : self.width].contiguous()

    def _call(self, rows: Tensor, window: Tensor, pause: Pause | None = None, room: int | None = None) -> Tensor:
        """Run the step, and pack what it returns. ``room`` is the number of packed rows, if it runs these."""
        assert self._step is not None, "Runner.use comes first"
        given = self._given(rows, window, room)
        if not isinstance(self._step, PausedStep):
            return self._pack(self._step(**given), rows)
        kept = self._step.begin(**given)
        if pause is not None:
            pause.prepare()
            pause.apply(kept["for_host"], kept["logits"], window.shape[1])
        return self._pack(self._step.finish(kept, **given), rows)

    def _pack(self, results: tuple[Tensor, ...], rows: Tensor) -> Tensor:
        """What a step returns with the number of rows of the next one, which is 0 at the end."""
        emitted, num_emitted, logprobs, bad, *traced = results
        left, confidence = self.state["num_rows"], self.state.get(CONFIDENCE)
        return pack_results(emitted, num_emitted, logprobs, bad, left, self.width, rows, confidence, *traced)

    def _send(self, packed: Tensor) -> Results:
        return Results(packed.cpu(), self.width, traced=self._mode.traced)


class GraphRunner(Runner):
    """Replays steps as CUDA graphs and reads results one step behind.

    Attributes:
        space: whose state it runs on.
    """

    lag = 1

    def __init__(self, space: Workspace) -> None:
        super().__init__(
            space.state, space.sizes, space.pages, space.admit, space.footprint, space.counters,
            snapshots=space.snapshots,
        )  # fmt: skip
        self.space = space
        self._running: dict[tuple[Mode, int], list[int]] = {}

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """Replay a graph of the next larger shape."""
        count = entries(len(chunk.rows), self.space.sizes["B"])
        width = captured_width(chunk.block.shape[1] - 3, count)
        rows = padded_rows(chunk.num_rows, joint=len(chunk.rows) > len(chunk.forced))
        shape = Shape(self._mode, count, width, rows)
        first, second = self._graphs(shape, GraphRunner._load, pause)
        block = padded_block(chunk.block, count, width)
        first.given.copy_(staged(block, first.given.device), non_blocking=True)
        return self._replay(shape, first, second, pause)

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """Replay; the results are overwritten by the next replay, so they are sent before it."""
        count = entries(len(rows), self.space.sizes["B"])
        shape = Shape(self._mode, count)
        first, second = self._graphs(shape, GraphRunner._lay_out, pause)
        if self._running.get((self._mode, count)) != rows:
            first.given.copy_(self._upload(rows, count))
            self._running[self._mode, count] = list(rows)
        return self._replay(shape, first, second, pause)

    def _replay(self, shape: Shape, first: Captured, second: Captured | None, pause: Pause | None) -> Results:
        first.replay()
        if pause is None or second is None:
            return self._send(first.packed)
        pause.prepare()
        kept = self.space.kept[shape]
        pause.apply(kept.values["for_host"], kept.values["logits"], kept.window.shape[1])
        second.replay()
        return self._send(second.packed)

    def _graphs(self, shape: Shape, read: ReadInput, pause: Pause | None) -> tuple[Captured, Captured | None]:
        """The graph of a shape, and that of the second half of a step that pauses."""
        first, behind = self._graph(shape, read), shape._replace(half=2)
        if pause is None:
            return first, None
        if not self.space.has(behind):
            # What the second half is captured over must be defined. The input of the first names no sequence yet.
            first.replay()
        return first, self._graph(behind, read)

    def _graph(self, shape: Shape, read: ReadInput) -> Captured:
        """The graph of a shape. ``read`` turns its input into row index and window."""
        assert self._step is not None, "Runner.use comes first"
        # A graph keeps the step and the width with which it was captured; so does whatever stands in for one.
        fixed = self if self.space.has(shape) else copy.copy(self)
        function = functools.partial(fixed._second if shape.half == 2 else fixed._first, shape, read)
        return self.space.captured(shape, self._step, function)

    def _first(self, shape: Shape, read: ReadInput, given: Tensor) -> Tensor:
        """A step, or its first half, whose results are kept."""
        rows, window = read(self, given)
        if not isinstance(self._step, PausedStep):
            return self._call(rows, window, room=shape.room)
        values = self._step.begin(**self._given(rows, window, shape.room))
        self.space.kept[shape] = PausedValues(rows, window, values)
        logits: Tensor = values["for_host"]
        return logits

    def _second(self, shape: Shape, read: object, given: Tensor) -> Tensor:
        """The second half of a step, over what its first half has left."""
        assert isinstance(self._step, PausedStep), "only a step that pauses has halves"
        rows, window, values = self.space.kept[shape._replace(half=1)]
        return self._pack(self._step.finish(values, **self._given(rows, window, shape.room)), rows)

    def _load(self, block: Tensor) -> tuple[Tensor, Tensor]:
        return load_block(self.state, block)

    def _lay_out(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows, self._window(rows)

    def close(self) -> None:
        """Wait for the stream; by an event, which a caller's ``set_sync_debug_mode`` takes for intended."""
        if self._stream is not None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(self._stream)
            done.synchronize()

    def _send(self, packed: Tensor) -> Results:
        return self.space.mailbox.send(packed, self.width, self._stream, traced=self._mode.traced)


ReadInput = Callable[[GraphRunner, Tensor], tuple[Tensor, Tensor]]
"""Turns the input of a graph into the row index and the window of a step."""


@dataclass
class RunnerPool:
    """Hands out a runner to every session, of which a ``generate`` call is one.

    One workspace is kept for the next, because with it goes a whole KV cache; sessions side by side have one each. It
    grows with what sessions need, and then everything is captured anew; it shrinks as :func:`room` says.
    """

    program: Program
    max_batch_size: int
    cache: CacheConfig = field(default_factory=CacheConfig)
    make_pool: Callable[[torch.device], Pool] = GraphPool
    idle: Workspace | None = None
    _recent: deque[Mapping[str, int]] = field(default_factory=lambda: deque(maxlen=PATIENCE))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def block_size(self) -> int:
        """The number of tokens of a page; found once, because every request asks for it."""
        return page_size(self.program, self.cache)

    @functools.cached_property
    def _weights(self) -> list[Tensor]:
        return list(self.program.tensors())

    def take(self, sizes: Mapping[str, int]) -> Runner:
        """A runner over a state in which no sequence is active, and which has room for ``sizes``.

        There may be fewer pages and rows, as many as there is memory for.

        Raises:
            InputError: there is no memory for a single page.
        """
        kept = self.idle
        if kept is None or any(kept.sizes[name] < sizes[name] for name in ("B", "N")):
            kept_bytes = 0 if kept is None else kept.num_bytes
            sizes = limited(self.program, self._cache, sizes, self.max_batch_size, kept_bytes)
        else:
            sizes = {**sizes, "C": kept.sizes["C"]}
        if not self.program.captured:
            # torch.compile takes a size of 1 for a constant, and would compile anew for the last sequence of a batch.
            least = 2 if self.program.compiled and sizes["B"] > 1 else 1
            state = allocate(self.program, sizes, self.program.target.device)
            pages, admit = self._pages(sizes), SlotInitializer(self.program, state).admit
            snapshots = snapshots_of(self.program, state, pages.snapshots)
            footprint = Footprint.of(self.program, state, pages)
            return Runner(state, sizes, pages, admit, footprint, least=least, snapshots=snapshots)
        wanted = bucket(sizes, self.max_batch_size, self.block_size)
        return GraphRunner(self._workspace(wanted))

    @contextlib.contextmanager
    def lend(self, sizes: Mapping[str, int]) -> Iterator[Runner]:
        """A runner as :meth:`take` gives it, until the end of the block."""
        runner = self.take(sizes)
        try:
            yield runner
        finally:
            self.give_back(runner)

    def give_back(self, runner: Runner) -> None:
        """A session has ended, well or not."""
        runner.close()
        if isinstance(runner, GraphRunner):
            with self._lock:
                if self.idle is None or self.idle.sizes["N"] < runner.space.sizes["N"]:
                    self.idle = runner.space

    def forget_prefixes(self) -> None:
        """What the pages of the kept workspace hold is of no use any more."""
        with self._lock:
            if self.idle is not None:
                self.idle.pages.forget()

    def describe(self) -> list[str]:
        """Lines for the report: what is captured in the workspace that is kept for the next request."""
        if not self.program.captured:
            return []
        kept = self.idle
        first_use = "every step is a CUDA graph, captured when a request first needs its shape"
        return [first_use] if kept is None else [first_use, kept.describe()]

    def _workspace(self, sizes: Mapping[str, int]) -> Workspace:
        with self._lock:
            space, self.idle = self.idle, None
            self._recent.append(sizes)
            wanted = dict(sizes) if space is None else room(space.sizes, space.num_bytes, list(self._recent))
        if space is None or space.sizes != wanted:
            space = None  # freed before the next one is allocated
            pool = self.make_pool(self.program.target.device)
            space = Workspace(self.program, wanted, self._pages(wanted), pool)
        return space

    @property
    def _cache(self) -> CacheConfig:
        """The cache as it was asked for, but that nothing is shared if a draft has a recurrent state.

        A snapshot stands where the target's rows are settled, and a draft model settles its own one later.
        """
        modules = self.program.modules.unchanged.items()
        alone = not any(has_recurrent_state(module.graph) for name, module in modules if name != "target")
        return self.cache if alone else dataclasses.replace(self.cache, reuse_prefixes=False)

    def _pages(self, sizes: Mapping[str, int]) -> PagePool:
        reuse, lookahead = self._cache.reuse_prefixes, self.program.drafter.lookahead
        places = boundaries(self.program, self.block_size)
        snapshots = None if places is None else SnapshotPool(sizes["C"], places, snapshot_bytes(self.program))
        return PagePool(sizes["N"], self.block_size, lookahead, reuse=reuse, weights=self._weights, snapshots=snapshots)
