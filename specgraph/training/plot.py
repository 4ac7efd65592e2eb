"""Draws the loss curve of a run."""

from __future__ import annotations

from pathlib import Path

from specgraph.plots import new_figure
from specgraph.training.loop import HeadProgress


def plot_losses(progress: HeadProgress, title: str, path: Path) -> bool:
    """Draw the losses and the acceptance length over the steps to a PNG. Returns False if there is no matplotlib."""
    try:
        figure = new_figure(7, 4)
    except ImportError:
        return False
    left = figure.subplots()
    right = left.twinx()
    left.plot(*zip(*progress.losses, strict=True), label="training loss", color="tab:blue")
    steps, losses, lengths = zip(*progress.measured, strict=True)
    left.plot(steps, losses, label="held-out loss", color="tab:orange")
    right.plot(steps, lengths, label="acceptance length (right)", color="tab:green", linestyle="--")
    left.set(title=title, xlabel="step", ylabel="nats per token")
    right.set(ylabel="tokens per decode step")
    figure.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
    return True
