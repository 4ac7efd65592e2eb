"""Writes measurements as tables, JSON and plots."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from specgraph.bench.cpu import CpuRow
from specgraph.bench.first_token import FirstTokenRow
from specgraph.bench.kernels import KernelRow
from specgraph.bench.options import OPTION_COLUMNS, OptionRow
from specgraph.bench.sessions import SESSION_COLUMNS, SessionRow
from specgraph.bench.steps import StepRow
from specgraph.bench.tune import TUNE_COLUMNS, TuneRow
from specgraph.plots import draw_acceptance, draw_times, new_figure, save
from specgraph.tables import text_table

LimitedRow = StepRow | KernelRow | FirstTokenRow | SessionRow | TuneRow
"""A measurement beside the time that its bytes take."""
Limited = Sequence[StepRow] | Sequence[KernelRow] | Sequence[FirstTokenRow] | Sequence[SessionRow] | Sequence[TuneRow]
Row = LimitedRow | CpuRow | OptionRow
Rows = Limited | Sequence[CpuRow] | Sequence[OptionRow]

STEP_COLUMNS = {
    "batch": "batch",
    "k": "K",
    "ms": "ms/step",
    "tokens_per_step": "tokens/step",
    "tokens_per_second": "tokens/s",
    "target_bytes": "target GB",
    "draft_bytes": "draft GB",
    "cache_bytes": "cache GB",
    "state_bytes": "state GB",
    "sequence_bytes": "state GB/seq",
    "limit_ms": "limit ms",
    "ratio": "ms/limit",
    "compile_s": "compile s",
    "peak_bytes": "peak GB",
}
FIRST_TOKEN_COLUMNS = {
    "prompt_length": "prompt",
    "batch": "batch",
    "ms": "ms",
    "bytes_ms": "bytes ms",
    "flops_ms": "FLOPs ms",
    "ratio": "ms/limit",
    "first_ms": "first call ms",
    "peak_bytes": "peak GB",
}
KERNEL_COLUMNS = {
    "kernel": "kernel",
    "shape": "shape",
    "us": "us",
    "bytes": "bytes",
    "limit_us": "limit us",
    "ratio": "us/limit",
    "library_us": "library us",
    "library": "library",
}
CPU_COLUMNS = {
    "threads": "threads",
    "decoder": "decoder",
    "tokens_per_second": "tokens/s",
    "to_generate": "x generate",
    "to_assisted": "x assisted",
    "tokens_per_step": "tokens/step",
    "equal": "equal",
    "first_s": "first s",
}
_DIGITS = {
    "tokens_per_step": 2,
    "tokens_per_second": 1,
    "ratio": 2,
    "compile_s": 1,
    "first_s": 1,
    "to_generate": 2,
    "to_assisted": 2,
    "us": 2,
    "limit_us": 2,
    "library_us": 2,
    "acceptance_length": 2,
    "seconds": 2,
    "speedup": 2,
    "limit_s": 2,
    "share": 2,
    "over": 1,
    "error": 2,
    "to_plain": 2,
}


def columns_of(row: Row) -> Mapping[str, str]:
    """The fields of a row that a table shows, with the names of their columns."""
    if isinstance(row, CpuRow):
        return CPU_COLUMNS
    if isinstance(row, OptionRow):
        return OPTION_COLUMNS
    if isinstance(row, SessionRow):
        return SESSION_COLUMNS
    if isinstance(row, FirstTokenRow):
        return FIRST_TOKEN_COLUMNS
    if isinstance(row, TuneRow):
        return TUNE_COLUMNS
    return STEP_COLUMNS if isinstance(row, StepRow) else KERNEL_COLUMNS


def table(rows: Rows) -> str:
    """A table with a line for every row, below the names of the columns."""
    columns = columns_of(rows[0])
    cells = [[_cell(name, getattr(row, name)) for name in columns] for row in rows]
    return text_table(cells, list(columns.values()), align="right")


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{_DIGITS.get(name, 3)}f}"
    if name.endswith("_bytes"):
        return f"{value / 1e9:.3f}"
    return f"{value:,}" if name == "bytes" else str(value)


def write_json(path: str, about: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write one JSON object, with what was measured on what, and all fields of all rows."""
    written = {**about, "rows": [dataclasses.asdict(row) for row in rows]}
    Path(path).expanduser().write_text(json.dumps(written, indent=1) + "\n")


def plot(path: str, title: str, rows: Limited) -> None:
    """Draw the measured times beside the limit of each.

    Steps are drawn in milliseconds, and the acceptance of several drafts beside them. Others are drawn as the ratio to
    their limits, since they differ by orders of magnitude.
    """
    if isinstance(rows[0], TuneRow):
        _plot_tuning(path, title, cast(Sequence[TuneRow], rows))
        return
    figure = new_figure(7, 1 + 0.3 * len(rows))
    axes = figure.subplots()
    if isinstance(rows[0], StepRow):
        steps = cast(Sequence[StepRow], rows)
        draw_times(axes, [_label(row) for row in steps], [row.ms for row in steps], [row.limit_ms for row in steps])
    else:
        _draw_ratios(axes, rows)
    axes.set(title=title)
    save(figure, path)


def _draw_ratios(axes: Any, rows: Limited) -> None:
    places = range(len(rows))
    axes.barh(places, [row.ratio for row in rows], color="tab:blue")
    axes.axvline(1.0, color="tab:red", linestyle="--")
    for place in places:
        axes.text(rows[place].ratio, place, f" {_time(rows[place])}", va="center")
    axes.set(xlabel="time over its limit", yticks=places)
    axes.set_yticklabels([_label(row) for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)


def _plot_tuning(path: str, title: str, rows: Sequence[TuneRow]) -> None:
    """Acceptance by position for each draft and rule at the largest K, and the step times of everything."""
    figure = new_figure(12, max(4, 1 + 0.25 * len(rows)))
    left, right = figure.subplots(1, 2)
    longest = sorted((row for row in rows if row.k), key=lambda row: row.k)
    names = {f"{Path(row.draft).name}, {row.rule}": row.acceptance for row in longest}
    draw_acceptance(left, dict(sorted(names.items())))
    draw_times(right, [_label(row) for row in rows], [row.ms for row in rows], [row.limit_ms for row in rows])
    figure.suptitle(title)
    save(figure, path)


def _label(row: LimitedRow) -> str:
    if isinstance(row, TuneRow):
        return f"batch {row.batch}, {Path(row.draft).name}" + (f", K = {row.k}, {row.rule}" if row.k else "")
    if isinstance(row, SessionRow):
        return f"{row.how}, K = {row.k}"
    if isinstance(row, FirstTokenRow):
        return f"{row.prompt_length} tokens x {row.batch}"
    return f"batch {row.batch}, K = {row.k}" if isinstance(row, StepRow) else f"{row.kernel}, {row.shape}"


def _time(row: LimitedRow) -> str:
    if isinstance(row, SessionRow):
        return f"{row.seconds:.3g} s"
    return f"{row.us:.3g} us" if isinstance(row, KernelRow) else f"{row.ms:.3g} ms"
