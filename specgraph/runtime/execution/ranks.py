"""Runs the steps of several GPUs that share a target: the same step on each, from a graph of its own.

The host decides everything once: sequences, pages and the row index are the same on all GPUs, and so are the tokens,
since every GPU computes the same logits. Results are read from the first GPU alone. Steps wait for each other on the
GPUs (:mod:`specgraph.kernels.peers`), so no GPU is given one before all of them can run it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor, fx

from specgraph.errors import NumericsError
from specgraph.kernels.peers import exchanging
from specgraph.runtime.execution.graph_runner import GraphRunner, fill_and_replay, graphs_of, run_together
from specgraph.runtime.execution.pause import Pause
from specgraph.runtime.execution.results import Results
from specgraph.runtime.execution.workspace import Workspace
from specgraph.runtime.memory.state_memory import Reached
from specgraph.runtime.memory.state_rows import Admission
from specgraph.runtime.schedule.prefill import Chunk
from specgraph.specialise.end_chains import StepModule
from specgraph.specialise.mode import Mode
from specgraph.specialise.score_rows import ScoreRows
from specgraph.specialise.step_cache import StepCache


class RanksRunner(GraphRunner):
    """The runner of the first GPU, which lets those of the others do the same."""

    def __init__(self, space: Workspace, steps: Sequence[StepCache]) -> None:
        """``space`` is the first GPU's and has those of the others, whose steps are in ``steps``."""
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
        for other, own in zip(self._others, self._steps, strict=True):
            with other.active():
                other.use(mode, own.step(mode))

    def wide(self, chunk: Chunk, pause: Pause | None = None) -> Results:
        """On every GPU."""
        return run_together([runner.prompts(chunk) for runner in (self, *self._others)], pause)

    def decode(self, rows: Sequence[int], pause: Pause | None = None) -> Results:
        """On every GPU."""
        return run_together([runner.decoding(rows) for runner in (self, *self._others)], pause)

    def score(self, pass_: ScoreRows, step: fx.GraphModule, chunk: Chunk, begins: Sequence[int]) -> tuple[Tensor, ...]:
        """On every GPU, as a graph; all results are float32."""
        runners, steps = [self, *self._others], [step, *(own.scoring(pass_) for own in self._steps)]
        launches = [runner.scoring(pass_, own, chunk, begins) for runner, own in zip(runners, steps, strict=True)]
        graphs = graphs_of(launches)
        fill_and_replay(launches, graphs)
        return graphs[0].packed.clone().unbind()  # the next step overwrites them

    def keep_states(self, reached: Iterable[Reached], *, target_only: bool = False) -> dict[int, int]:
        """On every GPU, of the same rows."""
        taken = super().keep_states(reached, target_only=target_only)
        for other in self._others if taken else ():
            assert other.memory.snapshots is not None, "all GPUs have room for the same ones"
            with other.active():
                other.memory.snapshots.save(taken)
        return taken

    def keep_drafts(self, rows: Sequence[int], count: int) -> None:
        """On every GPU."""
        super().keep_drafts(rows, count)
        for other in self._others:
            with other.active():
                other.keep_drafts(rows, count)

    def not_a_number(self, number: int, unless: str = "") -> NumericsError:
        """The error says so if a GPU has waited in vain. No other request gets its workspace then."""
        group = self.space.group
        assert group is not None, "several GPUs have a group"
        late = group.waited_in_vain()
        if not late:
            return super().not_a_number(number, unless)
        self.space.broken = True
        return NumericsError(
            f"Sequence {number} has no tokens any more: {', '.join(map(str, late))} waited in vain for what another "
            f"GPU of {', '.join(map(str, group.devices))} should have sent. Look what else runs on these GPUs, and "
            "whether they report errors (nvidia-smi); the next call begins anew."
        )

    def close(self) -> None:
        """Wait for all GPUs."""
        super().close()
        for other in self._others:
            other.close()
