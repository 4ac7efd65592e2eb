"""Draws measurements with matplotlib, which is optional."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specgraph.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(path: str) -> None:
    """Refuse a file that cannot be drawn, before anything is measured.

    Raises:
        ConfigError: the file has another ending, its folder does not exist, or there is no matplotlib.
    """
    if Path(path).suffix not in SUFFIXES:
        raise ConfigError(f"plot={path}: a plot ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}.")
    if not Path(path).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"plot={path}: there is no folder for that file; create it first.")
    if find_spec("matplotlib") is None:
        raise ConfigError(f"plot={path} needs matplotlib: pip install -e '.[plot]', or leave plot out.")


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches, which no window shows. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=100, layout="constrained")


def save(figure: Figure, path: str) -> None:
    """Write a figure to a file, in the format of its ending."""
    figure.savefig(Path(path).expanduser())


def plot_acceptance(path: str, title: str, curves: Mapping[str, Sequence[float]]) -> None:
    """Draw :func:`draw_acceptance` alone."""
    figure = new_figure(7, 4)
    draw_acceptance(figure.subplots(), curves)
    figure.suptitle(title)
    save(figure, path)


def draw_acceptance(axes: Axes, curves: Mapping[str, Sequence[float]]) -> None:
    """The share of decode steps that accepted each draft position, a curve for each name."""
    for name, shares in curves.items():
        axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    longest = max(map(len, curves.values()), default=1)
    axes.set(xlabel="draft", ylabel="share of steps that accepted it", ylim=(0, 1), xticks=range(1, longest + 1))
    axes.grid(alpha=0.3)
    if any(curves.values()):
        axes.legend(fontsize="small")


def draw_times(axes: Axes, labels: Sequence[str], ms: Sequence[float], limits: Sequence[float]) -> None:
    """Bars for times in milliseconds, from top to bottom, each with a mark at its limit."""
    places = range(len(labels))
    axes.barh(places, ms, color="tab:blue", tick_label=labels, label="measured")
    axes.scatter(limits, places, marker="|", s=200, color="tab:red", zorder=3, label="limit")
    for place, value, limit in zip(places, ms, limits, strict=True):
        ratio = "" if math.isnan(limit) else f" ({value / limit:.2f} x limit)"
        axes.text(value, place, f" {value:.3g}{ratio}", va="center", fontsize="small")
    axes.set(xlabel="ms per step")
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.legend(fontsize="small", loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
