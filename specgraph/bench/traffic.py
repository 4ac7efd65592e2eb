"""Counts the bytes that one decode step must read, on the step graph before it is lowered.

Every call of a module reads its weights once, for all rows of the batch together. From every cache it reads the context
of each sequence, or as much of it as the sliding window covers. Of an embedding table only a few rows are read, so it
does not count, and neither do small tensors (activations, logits, new keys and values, state). Of the experts of a
layer, those count that the rows use on average, if rows choose independently and all experts are equally likely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import fx

from specgraph.ir.graphs import get_attribute
from specgraph.ir.program import Program
from specgraph.kernels.state import STATEFUL, Buffer, buffers_of

STAGE = "insert_verify"
"""The last stage before passes join or fuse anything."""
TARGET = ("target", "lm_head")


@dataclass(frozen=True)
class Traffic:
    """The bytes that one step must read."""

    target_weights: int
    draft_weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.target_weights + self.draft_weights + self.cache


def step_traffic(program: Program, batch: int, context: float, num_speculative_tokens: int) -> Traffic:
    """The bytes that a step reads for ``batch`` sequences whose contexts have ``context`` tokens on average.

    A draft call counts as if it had one row for each sequence, which matters only for the number of experts it uses.
    """
    target, draft, cache = 0, 0, 0.0
    for node in program.graph.nodes:
        if node.op != "call_module":
            continue
        module, of_target = program.modules[node.target], node.target in TARGET
        size = weight_bytes(module, batch * (num_speculative_tokens + 1) if of_target else batch)
        target, draft = (target + size, draft) if of_target else (target, draft + size)
        cache += batch * cache_bytes(module, context)
    return Traffic(target, draft, round(cache))


def weight_bytes(module: fx.GraphModule, rows: int) -> int:
    """The bytes of the distinct tensors that a graph reads for ``rows`` rows; of experts, the average share counts."""
    found: dict[tuple[int, torch.Size], float] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            tensor = get_attribute(module, node.target)
            share = max((_share(user, node, tensor, rows) for user in node.users), default=0.0)
            size = tensor.numel() * tensor.element_size() * share
            place = tensor.data_ptr(), tensor.shape
            found[place] = max(found.get(place, 0.0), size)
    return round(sum(found.values()))


def _share(user: fx.Node, node: fx.Node, tensor: torch.Tensor, rows: int) -> float:
    """The share of a tensor that one of its users reads."""
    if user.target == torch.ops.aten.embedding.default and user.args[0] is node:
        return 0.0
    if user.target == torch.ops.specgraph.expert_linear.default and node in user.args[1:3]:
        return 1 - (1 - experts_per_row(user) / len(tensor)) ** rows
    return 1.0


def experts_per_row(product: fx.Node) -> int:
    """The number of experts that a row meets in an ``expert_linear``."""
    weight, _, ids = cast(Sequence[Any], product.args[1:4])
    size = ids.meta["val"].shape[0]  # batch times rows, which are symbols, times a number
    count = int(size.node.expr.as_coeff_Mul()[0])
    assert 0 < count <= len(weight.meta["val"]), f"{product.name} has {size} rows"
    return count


def cache_bytes(module: fx.GraphModule, context: float) -> float:
    """The bytes that a graph reads from the page pools for one sequence, with the rows of the context that ops see."""
    total = 0.0
    for node in module.graph.find_nodes(op="placeholder"):
        for index, buffer in enumerate(buffers_of(node.meta.get("state", ()))):
            if buffer.owner == "pages":
                total += _rows_seen(node, index, context) * _per_token(buffer)
    return total


def _rows_seen(caches: fx.Node, index: int, context: float) -> float:
    """The number of rows that an op reads from the buffer that it takes: the context, or its sliding window.

    An op that only writes reads none.
    """
    items = (item for item in caches.users if item.args[1:] == (index,))
    writers = [form.op for form in STATEFUL.values() if not form.reads]
    windows = [user.kwargs.get("window") for item in items for user in item.users if user.target not in writers]
    return max((context if window is None else min(context, float(window)) for window in windows), default=0.0)  # type: ignore[arg-type]


def _per_token(buffer: Buffer) -> int:
    """The bytes of one row of a buffer ``[N, block_size, H, D]``."""
    return math.prod(int(size) for size in buffer.shape[2:]) * buffer.dtype.itemsize
