"""What it takes to read a program, for those that a program itself calls."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import fx

from specgraph.ir.model_info import ModelInfo
from specgraph.kernels.state import Input


class ProgramView(Protocol):
    """The parts of a :class:`~specgraph.ir.program.Program` that shapes and source are made of."""

    @property
    def graph(self) -> fx.Graph: ...
    @property
    def modules(self) -> Mapping[str, fx.GraphModule]: ...
    @property
    def inputs(self) -> Mapping[str, Input]: ...
    @property
    def target(self) -> ModelInfo: ...
