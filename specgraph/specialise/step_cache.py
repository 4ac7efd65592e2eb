"""The variants of a step that a decoder has met: made by passes when a request first needs them, and kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator, MutableMapping, MutableSequence, Sequence
from dataclasses import replace

from torch import fx

from specgraph.config.errors import did_you_mean
from specgraph.errors import UnknownStageError
from specgraph.ir.program import Program
from specgraph.kernels.state import MAX_DRAFTS
from specgraph.passes.base import Pass
from specgraph.passes.insert_processors import OPTIONS
from specgraph.passes.pipeline import Callback, StageReport, run_passes, unique
from specgraph.specialise.complete_rows import CompleteRows
from specgraph.specialise.end_chains import StepModule, ending_chains
from specgraph.specialise.mode import Mode
from specgraph.specialise.pack_rows import PackRows
from specgraph.specialise.pause_step import PauseStep, halves
from specgraph.specialise.process_drafts import ProcessDrafts
from specgraph.specialise.score_rows import ScoreRows
from specgraph.specialise.specialise_step import SpecialiseStep
from specgraph.specialise.trace_step import TraceStep


class StepCache:
    """Makes each variant once, from whichever thread.

    A variant is a stage like the others: verified, reported and dumped.

    Attributes:
        steps: those that decode, so far.
    """

    def __init__(
        self, program: Program, stages: MutableMapping[str, Program], reports: MutableSequence[StageReport],
        callbacks: Sequence[Callback],
    ) -> None:  # fmt: skip
        """``program`` is what they are made from; ``stages`` and ``reports`` grow with every one."""
        self._program, self._stages, self._reports, self._callbacks = program, stages, reports, callbacks
        self._compiled = program.compile_modules()
        self._lock = threading.Lock()
        self.steps: dict[Mode, StepModule] = {}
        self._scoring: dict[ScoreRows, fx.GraphModule] = {}

    def step(self, mode: Mode) -> StepModule:
        """The step for one kind of log-probabilities and one K, without the sampling options that are off.

        One that pauses for the host is cut in two. Where the host chooses how many drafts are verified, only the width
        of the window differs, so one step serves all numbers.
        """
        mode = mode._replace(drafts=None) if mode.ahead else mode
        with self._lock:
            if mode not in self.steps:
                program = self._make([*self._passes(mode)])
                self._compiled = program.compile_modules(self._compiled)
                whole = program.executable(self._compiled)
                step: StepModule = halves(whole, program.one("logits").name) if mode.paused else whole
                ends = mode.ahead and not mode.traced  # a trace has a place for every draft that could be made
                self.steps[mode] = ending_chains(step, packed=mode.packed) if ends else step
            return self.steps[mode]

    def _passes(self, mode: Mode) -> Iterator[Pass]:
        if "processors" in self._program.facts and not OPTIONS.keys() <= {*mode.unused}:
            yield ProcessDrafts()
        unused = mode.unused if mode.packed else (*mode.unused, MAX_DRAFTS)  # of packed rows, sequences have their own
        yield SpecialiseStep(mode.logprobs, unused, mode.drafts, mode.plain)
        if mode.traced:
            yield TraceStep(mode.unused)
        if mode.completed:
            yield CompleteRows()
        if mode.packed:
            yield PackRows()
        if mode.paused:
            yield PauseStep()

    def scoring(self, pass_: ScoreRows) -> fx.GraphModule:
        """The step that gives the log-probabilities of given tokens."""
        with self._lock:
            if pass_ not in self._scoring:
                self._scoring[pass_] = self._make([pass_]).executable(self._compiled)
            return self._scoring[pass_]

    def _make(self, passes: Sequence[Pass]) -> Program:
        stages, reports = run_passes(self._program, passes, self._callbacks)
        for pass_ in passes:
            self._stages[unique(pass_.name, self._stages)] = stages[pass_.name]
        base = next(name for name, stage in self._stages.items() if stage is self._program)
        self._reports += [replace(reports[0], base=base), *reports[1:]]
        return stages[passes[-1].name]


class Stages(dict[str, Program]):
    """Programs by the names of their stages, in the order of the passes: a dictionary whose ``[]`` helps with names."""

    def __missing__(self, name: object) -> Program:
        raise UnknownStageError(f"There is no stage {name!r}{did_you_mean(name, self)}; there are {', '.join(self)}.")
