"""Counts the floating-point operations that reading a prompt needs, on the step graph before it is lowered.

A product with a weight takes two operations for each of its elements and each row. Attention takes two for each element
of a key and of a value, for every row, head and position that the row sees. What a recurrent op needs for a row by its
definition is declared beside it (:data:`~specgraph.kernels.state.RECURRENT`); a kernel that computes rows in chunks
needs more. All rows of a prompt go through the target, and only the last one through its vocabulary projection. What a
drafter runs does not count, and neither do operations on single elements.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import calls
from specgraph.ir.linear import linears
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.ir.traffic import experts_per_row
from specgraph.kernels.ops import find
from specgraph.kernels.state import RECURRENT

WEIGHT = {torch.ops.aten.mm.default: 1, torch.ops.aten.addmm.default: 2}
"""Which argument of a product that is no linear layer is the weight."""
ATTENTION = torch.ops.specgraph.paged_attention.default


def prompt_flops(program: Program, length: int) -> float:
    """The operations that a prompt of ``length`` tokens needs up to its first new token."""
    modules = program.modules.unchanged
    layers = [modules[name] for name in TARGET_MODULES if name in modules and name != "lm_head"]
    rows = sum(_of_products(own) + _of_recurrence(own) for own in layers)
    return length * rows + sum(_of_attention(own, length) for own in layers) + _of_products(modules["lm_head"])


def _of_products(module: fx.GraphModule) -> float:
    """The operations of one row in products with weights."""
    weights = [node.args[place] for op, place in WEIGHT.items() for node in calls(module.graph, op)]
    elements = sum(_value(weight).numel() for weight in weights)
    for linear in linears(module.graph):
        matrices = 1 if linear.expert_ids is None else experts_per_row(linear)
        elements += math.prod(linear.features) * matrices
    return 2.0 * elements


def _of_recurrence(module: fx.GraphModule) -> int:
    """The operations of one row in recurrent ops of every kind."""
    found = ((form, node) for form in RECURRENT.values() for node in calls(module.graph, form.op))
    return sum(form.operations(_arguments(node)) for form, node in found)


def _arguments(node: fx.Node) -> Any:
    """The arguments of a recurrent op in a graph, as an object of the class that declares them.

    Its buffers have no values there, and neither has its span; both are None.
    """
    op = find(node.target)
    assert op is not None, f"{node.target} is not declared"
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda given: given.meta.get("val"))
    return op.arguments(*args, **kwargs)


def _of_attention(module: fx.GraphModule, length: int) -> float:
    """The operations of all rows of a prompt in attention."""
    total = 0.0
    for node in calls(module.graph, ATTENTION):
        query, value = _value(node.args[0]), _value(node.args[2])
        pairs = _pairs(length, node.kwargs.get("window"))
        total += 2.0 * query.shape[1] * (query.shape[3] + value.shape[3]) * pairs
    return total


def _pairs(length: int, window: Any) -> int:
    """How many positions the rows of a prompt see, all together."""
    seen = length if window is None else min(length, int(window))
    return seen * (seen + 1) // 2 + (length - seen) * seen


def _value(node: Any) -> torch.Tensor:
    return node.meta["val"]
