"""The bytes that one decode step cannot avoid to read, counted on the step graph before it is lowered.

Every call of a module reads its weights once, for all rows of the batch together, and of every cache the context of
each sequence, or its window. An embedding table is looked up, not read, and what is small beside these (activations,
logits, new keys and values, state) is left out. Of an MoE layer those experts count that its rows meet on average, if
rows choose independently and every expert is equally likely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import get_attribute
from specgraph.ir.program import Program
from specgraph.kernels.state import Buffer, buffers_of

STAGE = "insert_verify"
"""The last stage in which every weight and every call still stands by itself."""
TARGET = ("target", "lm_head")


@dataclass(frozen=True)
class Traffic:
    """Bytes per step."""

    target_weights: int
    draft_weights: int
    cache: int

    @property
    def total(self) -> int:
        return self.target_weights + self.draft_weights + self.cache


def step_traffic(program: Program, batch: int, context: float, num_speculative_tokens: int) -> Traffic:
    """What a step of ``batch`` sequences reads whose contexts are ``context`` tokens long on average.

    A draft call counts as one of a single row for each sequence, which only matters for the experts that it meets.
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
    """The distinct tensors that a graph reads for ``rows`` rows, of experts the part that is met on average."""
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
    """How much of a tensor one of its users reads."""
    if user.target == torch.ops.aten.embedding.default and user.args[0] is node:
        return 0.0
    if user.target == torch.ops.specgraph.expert_linear.default and node in user.args[1:3]:
        ids: Any = user.args[3]
        size = ids.meta["val"].shape[0]  # a number times batch times rows, which are symbols
        experts_per_row = int(size.node.expr.as_coeff_Mul()[0])
        assert 0 < experts_per_row <= len(tensor), f"{user.name} has {size} rows"
        return 1 - (1 - experts_per_row / len(tensor)) ** rows
    return 1.0


def cache_bytes(module: fx.GraphModule, context: float) -> float:
    """What a graph reads of the page pools of one sequence: of each, the rows that its op sees of the context."""
    total = 0.0
    for node in module.graph.find_nodes(op="placeholder"):
        for index, buffer in enumerate(buffers_of(node.meta.get("state", ()))):
            if buffer.owner == "pages":
                total += _rows_seen(node, index, context) * _per_token(buffer)
    return total


def _rows_seen(caches: fx.Node, index: int, context: float) -> float:
    """Rows of a buffer that the op reads which takes it: the context, or its sliding window."""
    items = (item for item in caches.users if item.args[1:] == (index,))
    windows = [user.kwargs.get("window") for item in items for user in item.users]
    return max((context if window is None else min(context, float(window)) for window in windows), default=0.0)  # type: ignore[arg-type]


def _per_token(buffer: Buffer) -> int:
    """``[N, block_size, H, D]`` to bytes of one row."""
    return math.prod(int(size) for size in buffer.shape[2:]) * buffer.dtype.itemsize
