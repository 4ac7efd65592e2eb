"""Runs two stages of dumps on the same input, and finds the first node whose value differs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.compat import pytree
from specgraph.compiler.numerics import ROUNDING
from specgraph.dump import LoadedStage, load_stage
from specgraph.errors import ConfigError
from specgraph.explore.difference import Difference
from specgraph.ir.state import example_state, random_window

STEPS = 2
"""Steps that are run, so that what the first one wrote to the state is read."""


@dataclass(frozen=True)
class Place:
    """Where a value was computed: the step, the graph, the variable, and which call of the graph it was, all from 0."""

    step: int
    graph: str
    variable: str
    call: int


@dataclass(frozen=True)
class Deviation:
    """How much a value differs.

    Attributes:
        place: of the first version.
        other: the name of the node in the second version.
        elements: how many elements differ, of ``of``.
        largest: the largest difference of two elements.
        relative: the norm of the difference over that of the first value.
        allowed: the largest relative difference that rounding explains; 0 for integers.
    """

    place: Place
    other: str
    elements: int
    of: int
    largest: float
    relative: float
    allowed: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """The result of running both.

    Attributes:
        compared: the number of values that both computed in the same shape.
        first: the first that differs in any bit; None if all are equal.
        beyond: the first that differs by more than rounding.
    """

    compared: int
    first: Deviation | None
    beyond: Deviation | None


def compare_values(old: Path, new: Path, differences: Sequence[Difference]) -> Comparison:
    """Run the stages in two folders on the same random tokens, and compare the nodes that are in both.

    Values are compared in the order in which the first stage computes them, in float64.

    Raises:
        ConfigError: a stage cannot be loaded, as without weights, or the two do not take the same input.
    """
    names = {difference.graph: difference.renamed for difference in differences}
    recorders = Recorder(), Recorder()
    stages = [load_stage(folder, watch=recorder) for folder, recorder in zip((old, new), recorders, strict=True)]
    rows = min(stage.info["drafter"]["num_speculative_tokens"] for stage in stages) + 1
    vocab_size = min(stage.info["target"]["vocab_size"] for stage in stages)
    for folder, stage, recorder in zip((old, new), stages, recorders, strict=True):
        _run(folder, stage, recorder, rows, vocab_size)
    deviations = _deviations(recorders[0].values, recorders[1].values, names)
    found = [deviation for deviation in deviations if deviation is not None]
    beyond = next((deviation for deviation in found if not deviation.is_rounding), None)
    return Comparison(len(deviations), found[0] if found else None, beyond)


class Recorder:
    """Copies of the values of all lines, by their places in the order of the run."""

    def __init__(self) -> None:
        self.step = 0
        self.values: dict[Place, list[Tensor]] = {}
        self._calls: Counter[tuple[int, str, str]] = Counter()

    def __call__(self, graph: str, variable: str, value: Any) -> None:
        """Keep the tensors of a value, since a later line may write into them."""
        call = self._calls[self.step, graph, variable]
        self._calls[self.step, graph, variable] += 1
        tensors = [leaf.detach().clone() for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if tensors:
            self.values[Place(self.step, graph, variable, call)] = tensors


def _run(folder: Path, stage: LoadedStage, recorder: Recorder, rows: int, vocab_size: int) -> None:
    state = example_state(stage, rows, vocab_size=vocab_size, device=stage.device)
    window = random_window(rows, vocab_size=vocab_size, device=stage.device)
    try:
        for recorder.step in range(STEPS if "next_window" in state else 1):
            stage(window=window if recorder.step == 0 else state["next_window"].clone(), **state)
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{folder} cannot be run on {rows} rows ({reason}); compare other stages.") from error


def _deviations(
    old: Mapping[Place, Sequence[Tensor]], new: Mapping[Place, Sequence[Tensor]], names: Mapping[str, Mapping[str, str]]
) -> list[Deviation | None]:
    """For each value that both have in the same shape: how much it differs, or None if it does not."""
    found: list[Deviation | None] = []
    for place, tensors in old.items():
        name = names.get(place.graph, {}).get(place.variable, "")
        others = new.get(Place(place.step, place.graph, name, place.call), ())
        if [t.shape for t in tensors] == [t.shape for t in others]:
            pairs = [_deviation(place, name, a, b) for a, b in zip(tensors, others, strict=True)]
            found.append(next((pair for pair in pairs if pair is not None), None))
    return found


def _deviation(place: Place, name: str, old: Tensor, new: Tensor) -> Deviation | None:
    new = new.to(old.device)
    if torch.equal(old, new) or old.numel() == 0:
        return None
    a, b = old.double(), new.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return None
    gap = torch.where(same, 0.0, a - b)
    kinds = [t.dtype for t in (old, new) if t.is_floating_point()]
    allowed = ROUNDING * max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    norm = torch.where(a.isfinite(), a, 0.0).norm().clamp_min(1e-30)
    return Deviation(
        place, name, int((~same).sum()), old.numel(), float(gap.abs().max()), float(gap.norm() / norm), allowed
    )
