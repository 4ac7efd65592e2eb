"""``attention(q, k, v)`` becomes ``paged_attention(q, k, v, k_cache, v_cache, slots, ...)`` in every traced module.

A module's signature grows from ``(tokens, positions)`` to ``(tokens, positions, num_rows, block_table, max_length,
caches)``; ``caches`` is one tuple ``(k_0, v_0, k_1, v_1, ...)``. Row ``r`` of a sequence is written when
``r < num_rows`` and its position is 0 or more and below ``max_length``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from specgraph.errors import ConfigError
from specgraph.ir.graphs import calls, new_module
from specgraph.ir.program import Buffer, Program
from specgraph.kernels.step import row_slots
from specgraph.passes.base import Pass, PassResult

ATTENTION = torch.ops.specgraph.attention.default
PAGED = torch.ops.specgraph.paged_attention.default
STATE = {
    "num_rows": Buffer(("B",)),
    "block_table": Buffer(("B", "M"), fill=-1),
    "max_length": Buffer(("B",)),
}


@dataclass(frozen=True)
class InsertKVCache(Pass):
    """Options: ``block_size``, tokens per page."""

    block_size: int = 16

    name: ClassVar[str] = "insert_kv_cache"
    requires: ClassVar[frozenset[str]] = frozenset({"traced"})
    ensures: ClassVar[frozenset[str]] = frozenset({"kv_cache"})
    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"insert_kv_cache: block_size must be at least 1, got {self.block_size!r}.")

    def apply(self, program: Program) -> PassResult:
        """Rewrite every module that attends; the step graph passes the state to ``target``."""
        matches = 0
        for name, module in list(program.modules.items()):
            nodes = list(calls(module.graph, ATTENTION))
            if nodes:
                info = program.drafter.model if name != "target" and program.drafter.model else program.target
                program.options[f"{name}_caches"] = self._page(module, nodes, info.max_positions)
                matches += len(nodes)
        program.options["block_size"] = self.block_size
        if "target_caches" in program.options:
            self._pass_state(program)
        return PassResult(matches, expected=self._layers(program))

    def _layers(self, program: Program) -> int:
        return program.target.num_layers + (program.drafter.model.num_layers if program.drafter.model else 0)

    def _page(self, module: fx.GraphModule, nodes: list[fx.Node], limit: int | None) -> tuple[Buffer, ...]:
        """Rewrite one module; returns the buffers of its caches. ``limit`` is the first position it does not know."""
        graph = module.graph
        positions = next(n for n in graph.nodes if n.op == "placeholder" and n.name == "positions")
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(last):
            caches = graph.placeholder("caches")
        state: list[fx.Node] = []
        for name in reversed(STATE):
            with graph.inserting_after(last):
                state.insert(0, graph.placeholder(name))
        num_rows, block_table, max_length = state
        with graph.inserting_after(caches):
            places = (positions, num_rows, block_table, max_length)
            slots = graph.call_function(row_slots, places, {"block_size": self.block_size})
            slots.name = "slots"
        if limit is not None:
            self._stay_inside(graph, positions, slots, limit)
        buffers: list[Buffer] = []
        for layer, node in enumerate(nodes):
            buffers += self._replace(graph, node, caches, layer, (slots, block_table, positions))
        graph.lint()
        module.recompile()
        return tuple(buffers)

    def _stay_inside(self, graph: fx.Graph, positions: fx.Node, slots: fx.Node, limit: int) -> None:
        """Rows that are not real may lie outside of a table of learned positions: look up its first or last entry."""
        with graph.inserting_after(slots):
            known = graph.call_function(torch.ops.aten.clamp.default, (positions,), {"min": 0, "max": limit - 1})
        known.name = "known_positions"
        sizes = torch.ops.aten.sym_size.int  # reads no position, and would keep the clamp where nothing else needs it
        positions.replace_all_uses_with(known, lambda user: user not in (slots, known) and user.target is not sizes)

    def _replace(
        self, graph: fx.Graph, node: fx.Node, caches: fx.Node, layer: int, places: tuple[fx.Node, ...]
    ) -> list[Buffer]:
        q, k, v, *sinks = node.args
        assert isinstance(k, fx.Node) and isinstance(v, fx.Node)
        with graph.inserting_before(node):
            cache = [graph.call_function(operator.getitem, (caches, 2 * layer + i)) for i in range(2)]
            for part, prefix in zip(cache, "kv", strict=True):
                part.name = f"{prefix}_cache_{layer}"
            paged = graph.call_function(PAGED, (q, k, v, *cache, *places, *sinks), dict(node.kwargs))
        # A hidden state may be this very node; what a later pass reads from it must survive.
        paged.meta.update({key: node.meta[key] for key in ("hidden_state",) if key in node.meta})
        node.replace_all_uses_with(paged)
        graph.erase_node(node)
        values = (k.meta["val"], v.meta["val"])
        return [Buffer(("N", self.block_size, int(x.shape[1]), int(x.shape[3])), x.dtype) for x in values]

    def _pass_state(self, program: Program) -> None:
        caches = program.options["target_caches"]
        call = program.one("target")
        state = {name: program.placeholder(name, buffer) for name, buffer in STATE.items()}
        state["caches"] = program.placeholder("target_caches", caches)
        call.kwargs = {**call.kwargs, **state}
        target = program.modules["target"]
        program.modules["target"] = new_module(target, target.graph, "target")
