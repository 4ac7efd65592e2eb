"""Runs the steps of several GPUs that share a target: the same step on each, from a graph of its own.

The host decides everything once: sequences, pages and the row index are the same on all GPUs, and so are the tokens,
since every GPU computes the same logits. Results are read from the first GPU alone. Steps wait for each other on the
GPUs (:mod:`specgraph.kernels.peers`), so no GPU is given one before all of them can run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from specgraph.kernels.peers import exchanging
from specgraph.runtime.execution.graph_runner import GraphRunner, run_together
from specgraph.runtime.execution.pause import Pause
from specgraph.runtime.execution.results import Results
from specgraph.runtime.execution.workspace import Workspace
from specgraph.runtime.memory.state_rows import Admission
from specgraph.runtime.schedule.prefill import Chunk
from specgraph.specialise.end_chains import StepModule
from specgraph.specialise.mode import Mode


class RanksRunner(GraphRunner):
    """The runner of the first GPU, which lets those of the others do the same."""

    def __init__(self, space: Workspace, steps: Sequence[Callable[[Mode], StepModule]]) -> None:
        """``space`` is the first GPU's and has those of the others, whose steps come from ``steps``, by mode."""
        super().__init__(space)
        self._others = [GraphRunner(other) for other in space.others]
        self._steps = steps

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        assert self.space.group is not None, "several GPUs have a group"
        with exchanging(self.space.group), super()._entered():
            yield

    def admit(self, entering: Sequence[Admission]) -> None:
        """On every GPU."""
        super().admit(entering)
        for other in self._others:
            other.admit(entering)

    def stop(self, rows: Sequence[int]) -> None:
        """On every GPU."""
        super().stop(rows)
        for other in self._others:
            other.stop(rows)

    def use(self, mode: Mode, step: StepModule) -> None:
        """On every GPU, the variant of its own step."""
        super().use(mode, step)
        for other, make_step in zip(self._others, self._steps, strict=True):
            with other.active():
                other.use(mode, make_step(mode))

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """On every GPU."""
        return run_together([runner.prompts(chunk) for runner in (self, *self._others)], pause)

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """On every GPU."""
        return run_together([runner.decoding(rows) for runner in (self, *self._others)], pause)

    def keep_drafts(self, rows: Sequence[int], count: int) -> None:
        """On every GPU."""
        super().keep_drafts(rows, count)
        for other in self._others:
            with other.active():
                other.keep_drafts(rows, count)

    def close(self) -> None:
        """Wait for all GPUs."""
        super().close()
        for other in self._others:
            other.close()
