"""Replays the CUDA graphs of a compiled step over a state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specgraph.runtime.execution.inputs import load_inputs, padded_inputs
from specgraph.runtime.execution.pause import Pause
from specgraph.runtime.execution.results import Results
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.execution.workspace import Captured, PausedValues, Shape, Workspace
from specgraph.runtime.memory.state_rows import staged
from specgraph.runtime.schedule.prefill import Chunk
from specgraph.runtime.schedule.prompt_shapes import entries
from specgraph.specialise.mode import Mode
from specgraph.specialise.pause_step import PausedStep


class GraphRunner(Runner):
    """Replays steps as CUDA graphs and reads results one step behind.

    Attributes:
        space: whose state it runs on.
    """

    lag = 1

    def __init__(self, space: Workspace) -> None:
        super().__init__(space)
        self.space = space
        self._running: dict[tuple[Mode, int], list[int]] = {}

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """Replay a graph of the next larger shape."""
        return self.prompts_ready(chunk, pause)()

    def prompts_ready(self, chunk: Chunk, pause: Pause | None = None) -> Callable[[], Results]:
        """What :meth:`wide` does once everything is captured that it needs."""
        count, width, rows = chunk.captured_shape(self.space.sizes.rows)
        shape = Shape(self._mode, count, width, rows)
        first, second = self._graphs(shape, GraphRunner._load, pause)
        inputs = padded_inputs(chunk.inputs, count, width)
        first.given.copy_(staged(inputs, first.given.device), non_blocking=True)
        return functools.partial(self._replay, shape, first, second, pause)

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """Replay; the results are overwritten by the next replay, so they are sent before it."""
        return self.decode_ready(rows, pause)()

    def decode_ready(self, rows: Sequence[int], pause: Pause | None = None) -> Callable[[], Results]:
        """What :meth:`decode` does once everything is captured that it needs."""
        count = entries(len(rows), self.space.sizes.rows)
        shape = Shape(self._mode, count)
        first, second = self._graphs(shape, GraphRunner._lay_out, pause)
        if self._running.get((self._mode, count)) != rows:
            first.given.copy_(self._upload(rows, count))
            self._running[self._mode, count] = list(rows)
        return functools.partial(self._replay, shape, first, second, pause)

    def _replay(self, shape: Shape, first: Captured, second: Captured | None, pause: Pause | None) -> Results:
        first.replay()
        if pause is None or second is None:
            return self._send(first.packed)
        pause.prepare()
        paused = self.space.paused[shape]
        pause.apply(paused.values["for_host"], paused.values["logits"], paused.window.shape[1])
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
            return self._call(rows, window, capacity=shape.capacity)
        values = self._step.before(made={}, **self._given(rows, window, shape.capacity))
        self.space.paused[shape] = PausedValues(rows, window, values)
        return values["for_host"]

    def _second(self, shape: Shape, read: object, given: Tensor) -> Tensor:
        """The second half of a step, over what its first half has left."""
        assert isinstance(self._step, PausedStep), "only a step that pauses has halves"
        rows, window, values = self.space.paused[shape._replace(half=1)]
        return self._pack(self._step.after(made=values, **self._given(rows, window, shape.capacity)), rows)

    def _load(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        return load_inputs(self.state, inputs)

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
