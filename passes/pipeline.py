"""Runs a list of passes in order, and calls callbacks after each pass."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from specgraph.errors import PassError
from specgraph.ir.graphs import replace_tensors
from specgraph.ir.program import FACTS, Program
from specgraph.passes import PASSES
from specgraph.passes.base import Pass, PassResult


@dataclass(frozen=True)
class StageReport:
    """The report of one pass.

    Attributes:
        name: of the pass.
        seconds: the time it took.
        result: what it says itself.
        before, after: the number of nodes of every graph before and after it.
        about: what it turns into what, in one paragraph.
        base: the stage whose program it was given; None if that is the stage before it.
    """

    name: str
    seconds: float
    result: PassResult
    before: dict[str, int]
    after: dict[str, int]
    about: str = ""
    base: str | None = None


Callback = Callable[[Pass, Program, Program, StageReport], None]
"""Called after every pass with the pass, the program before, the program after, and the report."""


def run_passes(
    program: Program, passes: Sequence[Pass], callbacks: Iterable[Callback] = ()
) -> tuple[dict[str, Program], list[StageReport]]:
    """Apply ``passes`` in order, each to a copy of the program that the pass before it left.

    Returns the program after every pass, by stage name (``trace`` is the first), and a report per pass. A pass that its
    options switch off has the same stage as the pass before it. A pass that fails does not change earlier stages.

    Raises:
        PassError: a requirement does not hold (the message names the pass to run first), a rewrite matched an
            unexpected number of times, or the pass itself gave up.
    """
    stages, reports = {"trace": program}, []
    for pass_ in passes:
        if pass_.skipped is not None:
            stages[unique(pass_.name, stages)] = program
            counts = program.num_nodes()
            result = PassResult(0, notes=(pass_.skipped,))
            reports.append(StageReport(pass_.name, 0.0, result, counts, counts, pass_.about()))
            continue
        check_requirements(pass_, program)
        report, after = apply(pass_, program)
        for callback in callbacks:
            callback(pass_, program, after, report)
        after.modules.share()
        release(stages.values(), report.result)
        stages[unique(pass_.name, stages)] = after
        reports.append(replace(report, result=replace(report.result, equal_tensors=())))
        program = after
    return stages, reports


def apply(pass_: Pass, program: Program) -> tuple[StageReport, Program]:
    """Run one pass on a copy; its facts, the provenance of its nodes and its match count are handled here for all."""
    after = program.copy()
    begin = time.perf_counter()
    result = pass_.apply(after)
    seconds = time.perf_counter() - begin
    check_matches(pass_, result)
    after.facts = program.facts - pass_.invalidates | pass_.ensures
    after.undone = {**program.undone, **dict.fromkeys(program.facts & pass_.invalidates, pass_.name)}
    after.mark_provenance(pass_.name)
    report = StageReport(pass_.name, seconds, result, program.num_nodes(), after.num_nodes(), pass_.about())
    return report, after


def release(stages: Iterable[Program], result: PassResult) -> None:
    """Let earlier stages use the tensors that replaced equal ones, so that the memory of the old ones can be freed."""
    new = {id(old): new for old, new in result.equal_tensors}
    for program in stages if new else ():
        for module in program.modules.unchanged.values():
            replace_tensors(module, new)


def check_requirements(pass_: Pass, program: Program) -> None:
    """Raise ``PassError`` if a required fact does not hold, with the pass that must run before which other one."""
    for fact in sorted(pass_.requires - program.facts):
        if fact in program.undone:
            other = program.undone[fact]
            how = f"put {pass_.name} before {other} in" if other != pass_.name else f"leave the second {other} out of"
            meaning = f" ({FACTS[fact]})" if fact in FACTS else ""
            raise PassError(f"{pass_.name} needs {fact!r}{meaning}, which {other} has undone: {how} pipeline.order.")
        makers = sorted(cls.name for cls in PASSES.values() if fact in cls.ensures)
        first = f"put {' or '.join(makers)} before it in pipeline.order" if makers else "no known pass establishes it"
        raise PassError(f"{pass_.name} needs {fact!r}, which does not hold yet: {first}.")


def check_matches(pass_: Pass, result: PassResult) -> None:
    """Raise ``PassError`` if a pass did not match the number of places that it expected, with the near misses."""
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
