"""Replaces reductions of floating-point numbers by ops whose order of summation does not depend on the number of rows.

A library may sum in another order when there are more rows. Our kernels sum a row in an order that follows from its
width alone. A sum of few terms becomes a chain of additions, whose order the graph fixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import arguments
from specgraph.passes.common.patterns import aten, insert_valued, is_float, replace

Rule = Callable[[fx.Graph, fx.Node], fx.Node | None]
"""Inserts the replacement of a node before it and returns it; None if there is no replacement for this node."""

MAX_TERMS = 32
"""Sums of at most this many terms are written out as additions."""


def lower_reductions(graph: fx.Graph, rules: Mapping[Any, Rule], chosen: Counter[str]) -> None:
    """Rewrite every floating-point node that a rule covers; ``chosen`` counts the rewrites by the rule's name."""
    for node in list(graph.nodes):
        rule = rules.get(node.target)
        if rule is None or node.kwargs or not is_float(node) or not all(map(is_float, node.all_input_nodes)):
            continue
        with graph.inserting_before(node):
            new = rule(graph, node)
        if new is not None:
            replace(node, new)
            chosen[rule.__name__.strip("_")] += 1


def _mean(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    given = arguments(node)
    x = given["self"]
    if given["dim"] not in ([-1], [x.meta["val"].dim() - 1]) or not given["keepdim"]:
        return None
    return graph.call_function(torch.ops.specgraph.row_mean.default, (x,))


def _layer_norm(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    given = arguments(node)
    if len(given["normalized_shape"]) != 1:
        return None
    operands = given["input"], given["weight"], given["bias"]
    return graph.call_function(torch.ops.specgraph.layer_norm.default, operands, {"eps": given["eps"]})


def _sum(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    given = arguments(node)
    x, dims = given["self"], given["dim"]
    terms = x.meta["val"].shape[dims[0]] if len(dims) == 1 else None
    if not isinstance(terms, int) or terms > MAX_TERMS:
        return None
    dtype = x.meta["val"].dtype
    wide = dtype if dtype.itemsize > 2 else torch.float32  # rounded once, as the sum is
    x = x if wide == dtype else insert_valued(node, aten.to.dtype, x, wide)
    total, *others = (insert_valued(node, aten.select.int, x, dims[0], i) for i in range(terms))
    for term in others:
        total = insert_valued(node, aten.add.Tensor, total, term)
    total = total if wide == dtype else insert_valued(node, aten.to.dtype, total, dtype)
    return insert_valued(node, aten.unsqueeze.default, total, dims[0]) if given["keepdim"] else total


def _outer(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """A matrix product whose sum has one term; rotary embeddings compute the angles of all positions in this way."""
    a, b = arguments(node).values()
    if min(a.meta["val"].dim(), b.meta["val"].dim()) < 2 or a.meta["val"].shape[-1] != 1:
        return None
    return graph.call_function(aten.mul.Tensor, (a, b))


ONE_LAUNCH: dict[Any, Rule] = {
    aten.mean.dim: _mean,
    aten.layer_norm.default: _layer_norm,
    aten.matmul.default: _outer,
    aten.bmm.default: _outer,
}
"""Rules for reductions that take one launch before and after they are replaced."""
ORDERED: dict[Any, Rule] = {**ONE_LAUNCH, aten.sum.dim_IntList: _sum}
"""The rules of :data:`ONE_LAUNCH` and the rule for sums. Each addition is a launch, so a library's sum is faster."""
