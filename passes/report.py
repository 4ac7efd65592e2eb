"""The report of a compilation: what every pass did, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specgraph.ir.program import Program
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
