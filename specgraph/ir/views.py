"""The part of a program's interface that is needed to read it, for modules that ``program`` itself imports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import fx

from specgraph.ir.model_info import ModelInfo
from specgraph.ir.modules import Modules
from specgraph.kernels.state import Input


class ProgramView(Protocol):
    """The parts of a :class:`~specgraph.ir.program.Program` that :mod:`~specgraph.ir.shapes` and ``source`` read."""

    @property
    def graph(self) -> fx.Graph: ...
    @property
    def modules(self) -> Modules: ...
    @property
    def inputs(self) -> Mapping[str, Input]: ...
    @property
    def target(self) -> ModelInfo: ...
