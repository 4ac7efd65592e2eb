"""The part of a program that is needed to read it, for modules that ``program`` itself imports."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from specgraph.ir.model_info import ModelInfo
from specgraph.ir.modules import Modules
from specgraph.kernels.state import Input


@dataclass
class ProgramView:
    """What :mod:`~specgraph.ir.shapes` and ``source`` read of a :class:`~specgraph.ir.program.Program`."""

    graph: fx.Graph
    modules: Modules
    inputs: dict[str, Input]
    target: ModelInfo
