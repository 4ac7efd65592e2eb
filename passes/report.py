"""The report of a compilation: what every pass did, as Markdown and as plain values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specgraph.ir.program import Program
from specgraph.ir.traffic import STAGE, step_reads
from specgraph.passes.pipeline import StageReport
from specgraph.tables import markdown_table

_COLUMNS = ("pass", "seconds", "matches", "nodes before", "nodes after", "near misses", "bytes shared")


def render_report(
    stages: Mapping[str, Program], reports: Sequence[StageReport], notes: Sequence[str] = (),
    running: Sequence[str] = (),
) -> str:  # fmt: skip
    """Markdown: a table of all passes, followed by the notes and the near misses of each pass.

    ``notes`` are about checks, and ``running`` about what was captured, and what waited for the host.
    """
    program = list(stages.values())[-1]
    drafter = program.drafter
    lines = [
        f"# {program.target.name}, drafted by {drafter.name}, K = {drafter.num_speculative_tokens}",
        "",
        markdown_table([_row(report) for report in reports], _COLUMNS),
    ]
    for report in reports:
        details = [f"- {note}" for note in report.result.notes]
        details += [f"- near miss at {miss.where}: {miss.reason}" for miss in report.result.near_misses]
        if details:
            lines += ["", f"## {report.name}", *details]
    for title, remarks in (("checks", notes), ("while running", running)):
        if remarks:
            lines += ["", f"## {title}", *(f"- {remark}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def report_record(
    stages: Mapping[str, Program], reports: Sequence[StageReport], notes: Sequence[str], rule: str
) -> dict[str, Any]:
    """The report as plain values, which a dump keeps beside the graphs: what was compiled, and what every pass did.

    ``reads`` says what every call of a module in a step must move; see :mod:`specgraph.ir.traffic`.
    """
    program = list(stages.values())[-1]
    names = [*stages]
    passes = [
        _pass_record(report, name, report.base or before)
        for report, before, name in zip(reports, names, names[1:], strict=False)
    ]
    return {
        "target": program.target.name,
        "vocab_size": program.target.vocab_size,
        "drafter": program.drafter.name,
        "num_speculative_tokens": program.drafter.num_speculative_tokens,
        "rule": rule,
        "device": str(program.target.device),
        "reads": [call.to_record() for call in step_reads(stages[STAGE])] if STAGE in stages else [],
        "notes": [*notes],
        "passes": passes,
    }


def _pass_record(report: StageReport, stage: str, before: str) -> dict[str, Any]:
    """The report of one pass. Its nodes carry its name; ``before`` is the stage that it was given."""
    result = asdict(report.result)
    del result["equal_tensors"]
    return {
        "stage": stage,
        "before": before,
        "pass": report.name,
        "about": report.about,
        "seconds": report.seconds,
        **result,
    }


def _row(report: StageReport) -> list[str]:
    result = report.result
    matches = str(result.matches) if result.expected is None else f"{result.matches} of {result.expected}"
    nodes = [_nodes(report.before), _nodes(report.after)]
    return [
        report.name,
        f"{report.seconds:.3f}",
        matches,
        *nodes,
        str(len(result.near_misses)),
        f"{result.bytes_shared:,}",
    ]


def _nodes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
