"""The bytes that one decode step cannot avoid to read, counted on the step graph before it is lowered.

Every call of a module reads its weights once, for all rows of the batch together, and of every cache the context of
each sequence, or its window. An embedding table is looked up, not read, and what is small beside these (activations,
logits, new keys and values, state) is left out. Experts of an MoE layer all count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from specgraph.graphs import calls, get_attribute
from specgraph.program import Buffer, Program

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


def step_traffic(program: Program, batch: int, context: float) -> Traffic:
    """What a step of ``batch`` sequences reads whose contexts are ``context`` tokens long on average."""
    target, draft, cache = 0, 0, 0.0
    for node in program.graph.nodes:
        if node.op != "call_module":
            continue
        module, size = program.modules[node.target], weight_bytes(program.modules[node.target])
        target, draft = (target + size, draft) if node.target in TARGET else (target, draft + size)
        caches = node.kwargs.get("caches")
        if caches is not None:
            buffers = program.inputs[caches.name]
            assert isinstance(buffers, tuple)
            cache += batch * cache_bytes(module, buffers, context)
    return Traffic(target, draft, round(cache))


def weight_bytes(module: fx.GraphModule) -> int:
    """The distinct tensors a graph reads in full."""
    found = {}
    for node in module.graph.nodes:
        if node.op == "get_attr" and any(not _looks_up(user, node) for user in node.users):
            tensor = get_attribute(module, node.target)
            found[tensor.data_ptr(), tensor.shape] = tensor.numel() * tensor.element_size()
    return sum(found.values())


def _looks_up(user: fx.Node, table: fx.Node) -> bool:
    return user.target == torch.ops.aten.embedding.default and user.args[0] is table


def cache_bytes(module: fx.GraphModule, buffers: Sequence[Buffer], context: float) -> float:
    """What the attention layers of a graph read of the caches of one sequence; two buffers belong to each of them."""
    layers = list(calls(module.graph, torch.ops.specgraph.paged_attention.default))
    total = 0.0
    for index, node in enumerate(layers):
        window = node.kwargs.get("window")
        seen = context if window is None else min(context, float(window))  # type: ignore[arg-type]
        total += seen * sum(_per_token(buffer) for buffer in buffers[2 * index : 2 * index + 2])
    return total


def _per_token(buffer: Buffer) -> int:
    """``[N, block_size, H, D]`` to bytes of one row."""
    return math.prod(int(size) for size in buffer.shape[2:]) * buffer.dtype.itemsize
