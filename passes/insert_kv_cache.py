"""Traced modules get the memory that their layers ask for: ``attention(q, k, v)`` becomes ``paged_attention(q, k, v,
k_cache, v_cache, slots, ...)``.

The pass knows no kind of layer. An op that has a stateful form (:data:`~specgraph.kernels.state.STATEFUL`) says which
buffers that form asks for and what its arguments are. A module's signature grows from ``(tokens, positions)`` to
``(tokens, positions, num_rows, block_table, max_length, caches)``; ``caches`` is one tuple of all buffers, layer after
layer. Row ``r`` of a sequence is written when ``r < num_rows`` and its position is 0 or more and below
``max_length``. A module that writes no rows gets neither slots nor the inputs that only these are computed from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from specgraph.errors import ConfigError
from specgraph.ir.program import Program
from specgraph.kernels.state import STATEFUL, Buffer
from specgraph.kernels.step import row_slots
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.module_state import add_inputs, bind_target, give_state
from specgraph.passes.common.patterns import insert

STATE = {
    "num_rows": Buffer(("B",)),
    "block_table": Buffer(("B", "M"), fill=-1),
    "max_length": Buffer(("B",)),
}


@dataclass(frozen=True)
class InsertKVCache(Pass, requires={"traced", "target_only"}, ensures={"kv_cache"}, exact=False):
    """Options: ``block_size``, tokens per page."""

    block_size: int = 16

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"insert_kv_cache: block_size must be at least 1, got {self.block_size!r}.")

    def apply(self, program: Program) -> PassResult:
        """Rewrite every module that asks for state; the step graph passes the state to ``target``."""
        matches, models = 0, program.models()
        for name, module in program.modules.where(lambda graph: bool(_stateful(graph))):
            nodes = _stateful(module.graph)
            self._give_state(module, nodes, models[name].max_positions)
            matches += len(nodes)
        bind_target(program)
        return PassResult(matches, expected=sum(model.attention_layers for model in models.values()))

    def _give_state(self, module: fx.GraphModule, nodes: list[fx.Node], limit: int | None) -> None:
        """Rewrite one module. ``limit`` is the first position it does not know."""
        graph = module.graph
        inputs = add_inputs(graph, STATE, "caches")
        positions, caches = inputs["positions"], inputs["caches"]
        num_rows, block_table, max_length = (inputs[name] for name in STATE)
        places = (positions, num_rows, block_table, max_length)
        slots = insert(caches.next, row_slots, places, {"block_size": self.block_size}, "slots")
        if limit is not None:
            self._stay_inside(positions, slots, limit)
        buffers: list[Buffer] = []
        give_state(nodes, STATEFUL, caches, buffers, self.block_size, (slots, block_table, positions))
        caches.meta["state"] = tuple(buffers)
        for node in (slots, num_rows, block_table, max_length):
            if not node.users:
                graph.erase_node(node)
        graph.lint()
        module.recompile()

    def _stay_inside(self, positions: fx.Node, slots: fx.Node, limit: int) -> None:
        """Rows that are not real may lie outside of a table of learned positions: look up its first or last entry."""
        limits = {"min": 0, "max": limit - 1}
        known = insert(slots.next, torch.ops.aten.clamp.default, (positions,), limits, "known_positions")
        sizes = torch.ops.aten.sym_size.int  # reads no position, and would keep the clamp where nothing else needs it
        positions.replace_all_uses_with(known, lambda user: user not in (slots, known) and user.target is not sizes)


def _stateful(graph: fx.Graph) -> list[fx.Node]:
    """The nodes of a module that need memory, and have none yet."""
    return [node for node in graph.nodes if node.target in STATEFUL]
