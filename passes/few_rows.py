"""Linear layers on a CPU run a product that is faster for the few rows of a decode step, if their scheme has one.

:mod:`specgraph.kernels.linear.few_rows` says why for dense weights. Only float32 gains: PyTorch gives lower precision
to another library, and float64 is for checking.
"""

from __future__ import annotations

from specgraph.ir.linear import linears
from specgraph.ir.program import Program
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.common.patterns import dtype_of


class FewRows(Pass, invalidates={"traced"}, exact=False):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Let every linear layer call the form for few rows that its scheme has, if the target is on a CPU."""
        if program.target.device.type != "cpu":
            return PassResult(0, notes=("the target is not on a CPU",))
        matches, misses = 0, []
        for name, module in program.modules.where(lambda graph: any(linear.is_traced for linear in linears(graph))):
            for linear in linears(module.graph):
                dtype = dtype_of(linear.node)
                if not linear.is_traced or dtype is None or not linear.scheme.wants_few_rows(dtype):
                    continue
                if linear.scheme.few_rows is None:
                    misses.append(NearMiss(f"{name}.{linear.node.name}", f"{linear.scheme.name} has no such product"))
                    continue
                linear.node.target = linear.scheme.few_rows
                matches += 1
            module.recompile()
        return PassResult(matches, near_misses=tuple(misses))
