"""Traced modules get the states that their recurrent layers ask for: ``gated_delta_rule(q, k, v, ...)`` becomes
``cached_delta_rule(q, k, v, ..., state, chunk_k, chunk_delta, chunk_g, chunk_a, span)``.

The pass knows no kind of layer. An op that has a form with a state (:data:`~specgraph.kernels.state.RECURRENT`) says
which buffers that form asks for and what its arguments are. A module's signature grows by ``rows``, ``num_rows``,
``num_forced``, ``max_length`` and ``states``, one tuple of all buffers, layer after layer. From the others it computes
``span`` once, which says for every sequence where its rows lie and which of them later calls may still take back.
"""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from specgraph.errors import UnsupportedModelError
from specgraph.ir.program import Program
from specgraph.kernels.state import RECURRENT, ROW_INDEX, ROWS, Buffer
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.common.module_state import add_inputs, bind_target, give_state
from specgraph.passes.common.patterns import insert
from specgraph.passes.insert_kv_cache import STATE

SETTLED = Buffer(("B",), indexed=True)
"""How many rows of a sequence were settled when it was last run. All layers of a module share it."""
INPUTS = {
    ROWS: ROW_INDEX,
    "num_rows": STATE["num_rows"],
    "num_forced": Buffer(("B",)),
    "max_length": STATE["max_length"],
}
"""The inputs from which the span is computed, besides the positions."""
SPAN = torch.ops.specgraph.recurrent_span.default
SETTLE = torch.ops.specgraph.settle_span.default


class InsertRecurrentState(Pass, requires={"traced", "target_only"}, exact=False):
    """No options."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite every module with recurrent layers; the step graph passes the state to ``target``.

        Raises:
            UnsupportedModelError: a drafter that makes no chain has recurrent layers. It would not say which rows of a
                call are settled.
        """
        drafter, notes, matches = program.drafter, list[str](), 0
        for name, module in program.modules.where(lambda graph: bool(recurrent_ops(graph))):
            if name != "target" and not drafter.chained:
                raise UnsupportedModelError(
                    f"{name} has recurrent layers, which a draft may have if it drafts as a chain, and {drafter.name} "
                    "does not; use a draft model, or a head whose layers are attention."
                )
            nodes = recurrent_ops(module.graph)
            # An unshifted chain runs the newest token again in the next step, so that row is not settled either.
            unsettled = drafter.num_speculative_tokens + (name != "target")
            buffers = _give_state(module, nodes, unsettled)
            notes.append(f"{name}: {len(buffers)} buffers for {len(nodes)} ops")
            matches += len(nodes)
            if name == "target":
                bind_target(program)
        return PassResult(matches, notes=tuple(notes) or ("no layer is recurrent",))


def has_recurrent_state(graph: fx.Graph) -> bool:
    """Whether a module keeps a state besides keys and values."""
    return any(graph.find_nodes(op="call_function", target=SETTLE))


def recurrent_ops(graph: fx.Graph) -> list[fx.Node]:
    """The recurrent ops of a module that have no state yet."""
    return [node for node in graph.nodes if node.target in RECURRENT]


def _give_state(module: fx.GraphModule, nodes: list[fx.Node], unsettled: int) -> list[Buffer]:
    """Rewrite one module, in whose calls at most so many rows are ``unsettled``."""
    graph = module.graph
    given = add_inputs(graph, INPUTS, "states")
    first = [*given.values()][-1].next
    settled = insert(first, operator.getitem, (given["states"], 0), name="settled")
    places = [given[name] for name in (ROWS, "positions", "num_rows", "num_forced", "max_length")]
    span = insert(first, SPAN, (settled, *places), name="span")
    buffers = [SETTLED]
    give_state(nodes, RECURRENT, given["states"], buffers, unsettled, span)
    # Where the state of an op stands follows from the settled rows, so these are copied with it.
    buffers[0] = replace(SETTLED, chunk=min(buffer.chunk for buffer in buffers if buffer.chunk is not None))
    given["states"].meta["state"] = tuple(buffers)
    insert(graph.output_node(), SETTLE, (settled, span))
    graph.lint()
    module.recompile()
    return buffers
