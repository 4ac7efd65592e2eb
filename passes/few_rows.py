"""Linear layers on a CPU run a product that is faster for the few rows of a decode step, if their scheme has one.

:mod:`specgraph.kernels.linear.few_rows` says why for dense weights. Only float32 gains there: PyTorch gives lower
precision to another library, and float64 is for checking. :mod:`specgraph.kernels.packed.few_rows` has the form of
packed weights, for which their tensors are laid out anew.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from specgraph.ir.graphs import set_attribute
from specgraph.ir.linear import Linear, linears
from specgraph.ir.program import Program
from specgraph.passes.base import NearMiss, Pass, PassResult
from specgraph.passes.common.patterns import dtype_of, replace_by


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
                reason = _replace(module, linear, dtype)
                matches += reason is None
                if reason is not None:
                    misses.append(NearMiss(f"{name}.{linear.node.name}", reason))
            module.recompile()
        return PassResult(matches, near_misses=tuple(misses))


def _replace(module: fx.GraphModule, linear: Linear, dtype: torch.dtype) -> str | None:
    """Let a layer call the form for few rows; or why it cannot."""
    if linear.scheme.few_rows is not None:  # takes the weight as it is, also one that the graph computes
        linear.node.target = linear.scheme.few_rows
        return None
    form = linear.scheme.few_rows_form(linear.tensors(module)[: len(linear.weight)], dtype)
    if form is None:
        return f"{linear.scheme.name} has no such product"
    run, tensors = form
    with module.graph.inserting_before(linear.node):
        constants = [_laid_out_anew(module, node, tensor) for node, tensor in zip(linear.weight, tensors, strict=True)]
    replace_by(linear.node, run, (linear.x, *constants, linear.bias))
    return None


def _laid_out_anew(module: fx.GraphModule, constant: fx.Node, tensor: Tensor) -> fx.Node:
    """A node that reads a tensor in the place of ``constant``."""
    target = f"{constant.target}_for_few_rows"
    set_attribute(module, target, tensor)
    node = module.graph.get_attr(target)
    node.meta["val"] = tensor
    return node
