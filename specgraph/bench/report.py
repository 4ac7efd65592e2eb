"""Shows measurements as tables, JSON and plots.

A measurement is an object of a dataclass that is a :class:`Row`. A table shows the fields whose metadata is a
:func:`column`; JSON has all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from specgraph.bench.config import BenchConfig
from specgraph.config import Config
from specgraph.drafters.registry import drafter_class
from specgraph.errors import ConfigError
from specgraph.plots import draw_times, new_figure, save
from specgraph.tables import text_table

GB = 1e9
Plot = Callable[[str, str, Sequence[Any]], None]
"""Draws rows to a file, below a title."""


class Row(Protocol):
    """A measurement: what was measured, and the time or the speed with its unit."""

    @property
    def label(self) -> str: ...
    @property
    def time(self) -> str: ...


R = TypeVar("R", bound=Row)


def column(title: str, spec: str = "", unit: float = 1) -> dict[str, Any]:
    """The metadata of a field that tables show below ``title``, in a format of Python's, as a multiple of ``unit``."""
    return {"title": title, "spec": spec, "unit": unit}


def table(rows: Sequence[Any]) -> str:
    """A table with a line for every row, below the titles of the columns."""
    shown = [field for field in dataclasses.fields(rows[0]) if field.metadata]
    cells = [[_cell(getattr(row, field.name), **field.metadata) for field in shown] for row in rows]
    return text_table(cells, titles(rows[0]), align="right")


def titles(row: Any) -> list[str]:
    """The titles of the columns of a row, or of a class of rows."""
    return [field.metadata["title"] for field in dataclasses.fields(row) if field.metadata]


def _cell(value: Any, title: str, spec: str, unit: float) -> str:
    if value is None:
        return "-"
    return format(value if unit == 1 else value / unit, spec)


def gather(rows: Iterable[R]) -> list[R]:
    """All rows. A line about each is printed as soon as it has been measured."""
    found: list[R] = []
    for row in rows:
        found.append(row)
        print(f"{row.label}: {row.time}", flush=True)
    return found


def about_run(
    options: BenchConfig, device: torch.device, dtype: torch.dtype, bandwidth: float | None = None
) -> dict[str, Any]:
    """What every measurement says of itself."""
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
    """How often something was measured, and behind how many tokens."""
    return {"prompt_length": options.prompt_length, "steps": options.steps}


def about_decoder(config: Config) -> dict[str, Any]:
    """What decides the steps of a decoder."""
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
    options: BenchConfig, about: Mapping[str, Any], rows: Sequence[Any], plot: Plot | None = None
) -> None:  # fmt: skip
    """Print what was measured and the table, and write the JSON and the plot if they were asked for.

    The configuration refuses plots where there is no ``plot``.
    """
    print("\n" + heading(about))
    if not rows:
        raise ConfigError("None of the kernels is installed; install specgraph again.")
    print("\n" + table(rows))
    if options.json is not None:
        write_json(options.json, about, rows)
    if options.plot is not None and plot is not None:
        plot(options.plot, f"{about['target']}, {about['dtype']}, {about['device']}", rows)


def heading(about: Mapping[str, Any]) -> str:
    """What was measured on what, as text."""
    return text_table([(name, f"{value:,.1f}" if "_per_s" in name else str(value)) for name, value in about.items()])


def write_json(path: str, about: Mapping[str, Any], rows: Sequence[Any]) -> None:
    """Write one JSON object, with what was measured on what, and all fields of all rows."""
    written = {**about, "rows": [dataclasses.asdict(row) for row in rows]}
    Path(path).expanduser().write_text(json.dumps(written, indent=1) + "\n")


def plot_times(path: str, title: str, rows: Sequence[Any]) -> None:
    """Draw the measured times beside the limit of each, in milliseconds."""
    figure = new_figure(7, 1 + 0.3 * len(rows))
    axes = figure.subplots()
    draw_times(axes, [row.label for row in rows], [row.ms for row in rows], [row.limit_ms for row in rows])
    axes.set(title=title)
    save(figure, path)


def plot_ratios(path: str, title: str, rows: Sequence[Any]) -> None:
    """Draw the ratios of times to their limits, where the times differ by orders of magnitude."""
    figure = new_figure(7, 1 + 0.3 * len(rows))
    axes = figure.subplots()
    places = range(len(rows))
    axes.barh(places, [row.ratio for row in rows], color="tab:blue")
    axes.axvline(1.0, color="tab:red", linestyle="--")
    for place in places:
        axes.text(rows[place].ratio, place, f" {rows[place].time}", va="center")
    axes.set(xlabel="time over its limit", yticks=places)
    axes.set_yticklabels([row.label for row in rows])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(title=title)
    save(figure, path)
