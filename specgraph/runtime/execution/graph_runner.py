"""Replays the CUDA graphs of a compiled step over a state."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

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
from specgraph.specialise.score_rows import ScoreRows


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

    @property
    def num_captured(self) -> int:
        """How many graphs have been captured over its state."""
        return self.space.num_captured

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """Replay a graph of the next larger shape."""
        return run_together([self.prompts(chunk)], pause)

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """Replay; the results are overwritten by the next replay, so they are sent before it."""
        return run_together([self.decoding(rows)], pause)

    def prompts(self, chunk: Chunk) -> Launch:
        """What :meth:`wide` runs."""
        count, width, rows = chunk.captured_shape(self.space.sizes.rows)
        shape = Shape(self._mode, count, width, rows)

        def fill(given: Tensor) -> None:
            given.copy_(staged(padded_inputs(chunk.inputs, count, width), given.device), non_blocking=True)

        return Launch(self, shape, lambda own: self.graph(own, GraphRunner._load), fill)

    def decoding(self, rows: Sequence[int]) -> Launch:
        """What :meth:`decode` runs."""
        count = entries(len(rows), self.space.sizes.rows)

        def fill(given: Tensor) -> None:
            if self._running.get((self._mode, count)) != rows:
                given.copy_(self._upload(rows, count))
                self._running[self._mode, count] = list(rows)

        return Launch(self, Shape(self._mode, count), lambda own: self.graph(own, GraphRunner._lay_out), fill)

    def scoring(self, pass_: ScoreRows, step: fx.GraphModule, chunk: Chunk, begins: Sequence[int]) -> Launch:
        """What :meth:`score` runs, as a graph, where several GPUs run it together."""
        count, width, _ = chunk.captured_shape(self.space.sizes.rows)
        shape = Shape(Mode(pass_.logprobs, pass_.unused), count, width, scores=True)

        def run(given: Tensor) -> Tensor:
            return torch.stack(
                [result.float() for result in self.scored(step, *self._load(given[:, :-1]), given[:, -1])]
            )

        def fill(given: Tensor) -> None:
            inputs = padded_inputs(chunk.inputs, count, width + 1)
            inputs[: len(begins), -1] = torch.tensor(begins, dtype=inputs.dtype, device="cpu")
            given.copy_(staged(inputs, given.device), non_blocking=True)

        return Launch(self, shape, lambda own: self.space.captured(own, step, run), fill)

    def graph(self, shape: Shape, read: ReadInput) -> Captured:
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

    def send(self, packed: Tensor) -> Results:
        """Let results travel to the host."""
        return self.space.mailbox.send(packed, self.width, self._stream, traced=self._mode.traced)


@dataclass(frozen=True)
class Launch:
    """A step that is about to run on one GPU.

    Attributes:
        runner: the GPU's.
        shape: that of the graph, and of its first half if the host takes part in the step.
        capture: gives the graph of a shape, which is captured if it is not there.
        fill: writes the input.
    """

    runner: GraphRunner
    shape: Shape
    capture: Callable[[Shape], Captured]
    fill: Callable[[Tensor], None]

    def graph(self, half: int = 1) -> Captured:
        """The graph of one half."""
        return self.capture(self.shape._replace(half=half))

    @property
    def paused(self) -> PausedValues:
        """What the first half leaves."""
        return self.runner.space.paused[self.shape]


def run_together(launches: Sequence[Launch], pause: Pause | None) -> Results:
    """Run one step on every GPU that shares the target, and give the results of the first.

    Graphs may wait for each other, so none is replayed before all of them are there, and the host waits for none before
    all of them are replayed. In a pause, the host changes the logits of the first GPU, and the others get these.
    """
    own = launches[0]
    graphs = graphs_of(launches)
    if pause is not None and not own.runner.space.has(own.shape._replace(half=2)):
        # What second halves are captured over must be defined. The inputs of the first ones name no sequence yet.
        _replay(launches, graphs)
    seconds = [] if pause is None else graphs_of(launches, 2)
    fill_and_replay(launches, graphs)
    if pause is None:
        return own.runner.send(graphs[0].packed)
    pause.prepare()
    changed, window = own.paused.values["for_host"], own.paused.window
    pause.apply(changed, own.paused.values["logits"], window.shape[1])
    for launch in launches[1:]:
        with launch.runner.active():
            launch.paused.values["for_host"].copy_(changed)
    _replay(launches, seconds)
    return own.runner.send(seconds[0].packed)


def graphs_of(launches: Sequence[Launch], half: int = 1) -> list[Captured]:
    """The graph of every GPU, all of which are there then."""
    graphs = []
    for launch in launches:
        with launch.runner.active():
            graphs.append(launch.graph(half))
    return graphs


def fill_and_replay(launches: Sequence[Launch], graphs: Sequence[Captured]) -> None:
    """Write the inputs of a step on every GPU, and replay its graphs."""
    for launch, graph in zip(launches, graphs, strict=True):
        with launch.runner.active():
            launch.fill(graph.given)
    _replay(launches, graphs)


def _replay(launches: Sequence[Launch], graphs: Sequence[Captured]) -> None:
    """Replay a graph on every GPU, the first one's last."""
    for launch, graph in reversed([*zip(launches, graphs, strict=True)]):
        with launch.runner.active():
            graph.replay()


ReadInput = Callable[[GraphRunner, Tensor], tuple[Tensor, Tensor]]
"""Turns the input of a graph into the row index and the window of a step."""
