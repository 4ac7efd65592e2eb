"""Shows measurements as tables, JSON and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specgraph.bench.config import BenchConfig
from specgraph.config import Config
from specgraph.drafters.registry import drafter_class
from specgraph.plots import draw_times, new_figure, save
from specgraph.tables import text_table

GB, MB = 1e9, 1e6


class Cell(NamedTuple):
    """A value of a measurement, and how a table shows it.

    Attributes:
        value: a number, a text or a list of these. JSON has all values.
        title: of the column in a table. Without a title, tables leave the value out.
        spec: the format of the cell, in Python's language of formats.
        unit: the cell shows the value as a multiple of this.
    """

    value: Any
    title: str = ""
    spec: str = ""
    unit: float = 1

    @property
    def text(self) -> str:
        """The value as a table shows it."""
        if self.value is None:
            return "-"
        return format(self.value if self.unit == 1 else self.value / self.unit, self.spec)


@dataclass(frozen=True)
class Row:
    """A measurement: what was measured, the time or the speed with its unit, and all values by their names."""

    label: str
    time: str
    cells: dict[str, Cell]

    def __getitem__(self, name: str) -> Any:
        return self.cells[name].value

    @property
    def values(self) -> dict[str, Any]:
        """All values by their names."""
        return {name: cell.value for name, cell in self.cells.items()}


Plot = Callable[[str, str, Sequence[Row]], None]
"""Draws rows to a file, below a title."""


def table(rows: Sequence[Row]) -> str:
    """A table with a line for every row, below the titles of the columns."""
    shown = [[cell for cell in row.cells.values() if cell.title] for row in rows]
    return text_table([[cell.text for cell in cells] for cells in shown], [c.title for c in shown[0]], align="right")


def gather(rows: Iterable[Row]) -> list[Row]:
    """All rows. A line about each is printed as soon as it has been measured."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        print(f"{row.label}: {row.time}", flush=True)
    return found


def about_run(
    options: BenchConfig, device: torch.device, dtype: torch.dtype, bandwidth: float | None = None
) -> dict[str, Any]:
    """The facts that stand above every table and in every JSON file."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "what": options.what,
        "target": options.target,
        "device": name,
        "torch": torch.__version__,
        "dtype": str(dtype).removeprefix("torch."),
        **({} if bandwidth is None else {"bandwidth_gb_per_s": bandwidth / GB}),
    }


def about_repeats(options: BenchConfig) -> dict[str, Any]:
    """The number of repetitions, and the length of the context."""
    return {"prompt_length": options.prompt_length, "steps": options.steps}


def about_decoder(config: Config) -> dict[str, Any]:
    """The options on which the steps of a decoder depend."""
    return {
        "draft": draft_name(config),
        "verify": config.verify.rule,
        "acceptance_rate": config.verify.acceptance_rate,
        "lowering": config.lowering.name,
        "numerics": config.numerics,
    }


def draft_name(config: Config) -> str:
    """The checkpoint of a draft, or the name of the drafter."""
    if config.draft.model is not None:
        return config.draft.model
    drafter = drafter_class(config.draft.kind)
    name = drafter.called(bool(getattr(config.draft, "parallel", None)))
    return name if drafter.head is None else f"{name} (random)"


def finish(
    options: BenchConfig, about: Mapping[str, Any], rows: Sequence[Row], plot: Plot | None = None
) -> None:  # fmt: skip
    """Print the facts about a measurement and the table, and write the JSON and the plot if they were asked for.

    The configuration refuses plots where there is no ``plot``.
    """
    print("\n" + heading(about))
    print("\n" + table(rows))
    if options.json is not None:
        write_json(options.json, about, [row.values for row in rows])
    if options.plot is not None and plot is not None:
        plot(options.plot, f"{about['target']}, {about['dtype']}, {about['device']}", rows)


def heading(about: Mapping[str, Any]) -> str:
    """The facts about a measurement, as text."""
    return text_table([(name, f"{value:,.1f}" if "_per_s" in name else str(value)) for name, value in about.items()])


def write_json(path: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one JSON object, with the facts about the measurement and all values of all rows."""
    written = {**about, "rows": rows}
    Path(path).expanduser().write_text(json.dumps(written, indent=1) + "\n")


def plot_times(path: str, title: str, rows: Sequence[Row]) -> None:
    """Draw the measured times beside the limit of each, in milliseconds."""
    figure = new_figure(7, 1 + 0.3 * len(rows))
    axes = figure.subplots()
    draw_times(axes, [row.label for row in rows], [row["ms"] for row in rows], [row["limit_ms"] for row in rows])
    axes.set(title=title)
    save(figure, path)


def plot_ratios(path: str, title: str, rows: Sequence[Row]) -> None:
    """Draw the ratios of times to their limits, where the times differ by orders of magnitude."""
    figure = new_figure(7, 1 + 0.3 * len(rows))
    axes = figure.subplots()
    labels, ratios = [row.label for row in rows], [row["ratio"] for row in rows]
    bars = axes.barh(range(len(rows)), ratios, color="tab:blue", tick_label=labels)
    axes.bar_label(bars, [f" {row.time}" for row in rows])
    axes.axvline(1.0, color="tab:red", linestyle="--")
    axes.set(xlabel="time over its limit", title=title)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    save(figure, path)
