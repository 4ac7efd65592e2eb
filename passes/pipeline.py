"""Runs a list of passes, top to bottom, and lets one callback watch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from specgraph.errors import PassError
from specgraph.ir.graphs import replace_tensors
from specgraph.ir.program import Program
from specgraph.passes import PASSES
from specgraph.passes.base import Pass, PassResult


@dataclass(frozen=True)
class StageReport:
    """What one pass did, for reports: seconds, its result, nodes per graph before and after."""

    name: str
    seconds: float
    result: PassResult
    before: dict[str, int]
    after: dict[str, int]


Callback = Callable[[Pass, Program, Program, StageReport], None]
"""Called after every pass with the pass, the program before, the program after, and the report."""


def run_passes(
    program: Program, passes: Sequence[Pass], callbacks: Iterable[Callback] = ()
) -> tuple[dict[str, Program], list[StageReport]]:
    """Apply ``passes`` in order, each to a copy of what the one before left.

    Returns the program after every pass, by stage name (``trace`` is the first), and a report per pass. The stage of a
    pass that its options switch off is that of the pass before. A pass that
    fails leaves its predecessors' stages untouched.

    Raises:
        PassError: a requirement does not hold (the message names the pass to run first), a rewrite matched an
            unexpected number of times, or the pass itself gave up.
    """
    stages, reports = {"trace": program}, []
    for pass_ in passes:
        if pass_.skipped is not None:
            stages[unique(pass_.name, stages)] = program
            counts = program.num_nodes()
            reports.append(StageReport(pass_.name, 0.0, PassResult(0, notes=(pass_.skipped,)), counts, counts))
            continue
        check_requirements(pass_, program)
        report, after = apply(pass_, program)
        for callback in callbacks:
            callback(pass_, program, after, report)
        release(stages.values(), report.result)
        stages[unique(pass_.name, stages)] = after
        reports.append(replace(report, result=replace(report.result, equal_tensors=())))
        program = after
    return stages, reports


def apply(pass_: Pass, program: Program) -> tuple[StageReport, Program]:
    """One pass on a copy: facts, provenance and match count are dealt with here, once for all passes."""
    after = program.copy()
    begin = time.perf_counter()
    result = pass_.apply(after)
    seconds = time.perf_counter() - begin
    check_matches(pass_, result)
    after.facts = program.facts | pass_.ensures
    after.mark_provenance(pass_.name)
    return StageReport(pass_.name, seconds, result, program.num_nodes(), after.num_nodes()), after


def release(stages: Iterable[Program], result: PassResult) -> None:
    """Let earlier stages use the tensors that replaced their equals, and the old ones go."""
    new = {id(old): new for old, new in result.equal_tensors}
    for program in stages if new else ():
        for module in program.modules.values():
            replace_tensors(module, new)


def check_requirements(pass_: Pass, program: Program) -> None:
    """Name the pass that must run first, if one must."""
    for fact in sorted(pass_.requires - program.facts):
        makers = sorted(cls.name for cls in PASSES.values() if fact in cls.ensures)
        first = f"put {' or '.join(makers)} before it in pipeline.order" if makers else "no known pass establishes it"
        raise PassError(f"{pass_.name} needs {fact!r}, which does not hold yet: {first}.")


def check_matches(pass_: Pass, result: PassResult) -> None:
    """A requested rewrite that matched nothing, or too often, is an error that says why."""
    if result.expected is not None and result.matches != result.expected:
        reasons = "; ".join(f"{miss.where}: {miss.reason}" for miss in result.near_misses) or "nothing came close"
        raise PassError(
            f"{pass_.name} matched {result.matches} places, expected {result.expected} ({reasons}). "
            f"Fix the graph or take {pass_.name} out of pipeline.order."
        )


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_2`` and so on if a pass runs more than once."""
    names, count = set(taken), 1
    while (candidate := name if count == 1 else f"{name}_{count}") in names:
        count += 1
    return candidate
