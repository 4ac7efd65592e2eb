"""Linear layers on a CPU run a product that is faster for the few rows of a decode step.

:mod:`specgraph.kernels.linear.few_rows` says why. Only float32 gains: PyTorch gives lower precision to another library,
and float64 is for checking.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.kernels.linear.few_rows import few_rows_linear
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.patterns import aten, dtype_of

LINEAR = aten.linear.default


@dataclass(frozen=True)
class FewRows(Pass):
    """No options."""

    name: ClassVar[str] = "few_rows"
    invalidates: ClassVar[frozenset[str]] = frozenset({"traced"})
    exact: ClassVar[bool] = False

    def apply(self, program: Program) -> PassResult:
        """Let every linear layer in float32 call ``few_rows_linear``, if the target is on a CPU."""
        if program.target.device.type != "cpu":
            return PassResult(0, notes=("the target is not on a CPU",))
        matches = 0
        for _, module in program.modules.where(lambda graph: any(calls(graph, LINEAR))):
            for node in calls(module.graph, LINEAR):
                if dtype_of(node) == torch.float32:
                    node.target = few_rows_linear
                    matches += 1
            module.recompile()
        return PassResult(matches)
