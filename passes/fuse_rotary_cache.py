"""Rotary embedding in front of ``paged_attention`` moves into it: ``rotary_attention`` rotates, writes and attends.

The rotation is that of transformers' llama, ``x * cos + rotate_half(x) * sin`` over the whole head. Others (partial,
interleaved) are left as they are and reported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import specgraph.kernels.attention  # noqa: F401  (registers the ops)
from specgraph.passes.base import LoweringPass, PassResult
from specgraph.passes.patterns import Mismatch, aten, erase_unused, keep_meta, operands, producer, rewrite
from specgraph.program import Program

PAGED = torch.ops.specgraph.paged_attention.default


@dataclass(frozen=True)
class FuseRotaryCache(LoweringPass):
    """Options: ``enabled``."""

    name: ClassVar[str] = "fuse_rotary_cache"
    requires: ClassVar[frozenset[str]] = frozenset({"kv_cache"})
    ensures: ClassVar[frozenset[str]] = frozenset({"rotary_fused"})

    def apply(self, program: Program) -> PassResult:
        """Rewrite every attention whose queries and keys are both rotated."""
        return rewrite(program, PAGED, _fuse)


def _fuse(graph: fx.Graph, node: fx.Node) -> None:
    q, k, *others = node.args
    (q, *q_angles), (k, *k_angles) = _unrotated(q), _unrotated(k)
    if q_angles != k_angles:
        raise Mismatch("queries and keys are rotated by different angles")
    with graph.inserting_before(node):
        arguments = (q, k, others[0], *q_angles, *others[1:])
        fused = graph.create_node("call_function", torch.ops.specgraph.rotary_attention.default, arguments,
                                  dict(node.kwargs), name="rotary_attention")  # fmt: skip
    # The node writes caches, so it counts as used; what led to it is dropped by hand.
    inputs = node.all_input_nodes
    node.replace_all_uses_with(keep_meta(fused, node))
    graph.erase_node(node)
    for value in inputs:
        erase_unused(graph, value)


def _unrotated(value: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """What ``x * cos + rotate_half(x) * sin`` rotates, and its ``cos`` and ``sin`` ``[B, T, D]``."""
    total = producer(value, aten.add.Tensor)
    if total is None:
        raise Mismatch(f"{value} is not rotated")
    for turned, straight in operands(total, aten.mul.Tensor):
        straight = producer(straight, aten.mul.Tensor)
        for half, sin in operands(turned, aten.cat.default):
            x = _halves(half)
            if straight is not None and x is not None and x in straight.args:
                cos = straight.args[1] if straight.args[0] is x else straight.args[0]
                return x, _per_row(cos), _per_row(sin)
    raise Mismatch(f"{total.name} is not the rotation of whole heads by halves")


def _halves(cat: fx.Node) -> fx.Node | None:
    """``x`` of ``cat([-x[..., D/2:], x[..., :D/2]], -1)``."""
    parts = cat.args[0]
    if not isinstance(parts, list | tuple) or len(parts) != 2:
        return None
    negated = producer(parts[0], aten.neg.default)
    upper = producer(negated.args[0], aten.slice.Tensor) if negated is not None else None
    lower = producer(parts[1], aten.slice.Tensor)
    if upper is None or lower is None or upper.args[0] is not lower.args[0]:
        return None
    if cat.args[1:] not in ((-1,), (3,)) or any(len(s.args) != 4 or s.args[1] not in (-1, 3) for s in (upper, lower)):
        return None
    x = upper.args[0]
    if not isinstance(x, fx.Node) or "val" not in x.meta:
        return None
    size = x.meta["val"].shape[-1]
    whole = lower.args[2] == 0 and lower.args[3] == upper.args[2] == size // 2 and upper.args[3] >= size
    return x if whole and size % 2 == 0 else None


def _per_row(angles: Any) -> fx.Node:
    """``[B, T, D]`` behind ``[B, 1, T, D]``."""
    node = producer(angles, aten.unsqueeze.default)
    if node is None or node.args[1] != 1 or not isinstance(node.args[0], fx.Node):
        raise Mismatch(f"{angles} does not give every head the same angles")
    return node.args[0]
