"""Traced modules get the states that their recurrent layers ask for: ``gated_delta_rule(q, k, v, ...)`` becomes
``anchored_delta_rule(q, k, v, ..., state, keys, errors, gates, inverse, span)``.

The pass knows no kind of layer. An op that has a form with a state (:data:`~specgraph.kernels.state.RECURRENT`) says
which buffers that form asks for and what its arguments are. A module's signature grows by ``rows``, ``num_rows``,
``num_forced``, ``max_length`` and ``states``, one tuple of all buffers, layer after layer. From the others it computes
``span`` once, which says for every sequence where its rows lie and which of them later calls may still take back.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

import specgraph.kernels.recurrent.conv
import specgraph.kernels.recurrent.delta_rule
import specgraph.kernels.recurrent.scan  # noqa: F401  (all register ops and their forms with a state)
from specgraph.errors import UnsupportedModelError
from specgraph.ir.program import Program
from specgraph.kernels.state import RECURRENT, ROW_INDEX, ROWS, Buffer
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.insert_kv_cache import STATE
from specgraph.passes.module_state import add_inputs, bind_target, operands, take_buffers

SETTLED = Buffer(("B",), indexed=True)
"""How many rows of a sequence were settled when it was last run. All layers of a module share it."""
INPUTS = {
    ROWS: ROW_INDEX,
    "num_rows": STATE["num_rows"],
    "num_forced": Buffer(("B",)),
    "max_length": STATE["max_length"],
}
"""What the span is computed from, besides the positions."""
SPAN = torch.ops.specgraph.recurrent_span.default
SETTLE = torch.ops.specgraph.settle_span.default


@dataclass(frozen=True)
class InsertRecurrentState(Pass):
    """No options."""

    name: ClassVar[str] = "insert_recurrent_state"
    requires: ClassVar[frozenset[str]] = frozenset({"traced"})
    ensures: ClassVar[frozenset[str]] = frozenset({"recurrent_state"})
    exact: ClassVar[bool] = False

    def apply(self, program: Program) -> PassResult:
        """Rewrite the target; the step graph passes the state to it.

        Raises:
            UnsupportedModelError: a module of the drafter's has recurrent layers.
        """
        found = {name: recurrent_ops(module.graph) for name, module in program.modules.unchanged.items()}
        others = [name for name, nodes in found.items() if nodes and name != "target"]
        if others:
            raise UnsupportedModelError(
                f"The draft's {others[0]} has recurrent layers, which are supported in a target alone so far; use a "
                "draft whose layers are attention, or a head."
            )
        if not found["target"]:
            return PassResult(0, notes=("no layer is recurrent",))
        target = program.modules["target"]
        nodes = recurrent_ops(target.graph)
        buffers = _give_state(target, nodes, program.drafter.num_speculative_tokens)
        bind_target(program)
        return PassResult(len(nodes), notes=(f"{len(buffers)} buffers for {len(nodes)} ops",))


def has_recurrent_state(program: Program) -> bool:
    """Whether the target keeps a state besides keys and values."""
    return any(node.target is SETTLE for node in program.modules.unchanged["target"].graph.nodes)


def recurrent_ops(graph: fx.Graph) -> list[fx.Node]:
    """The recurrent ops of a module that have no state yet."""
    return [node for node in graph.nodes if node.target in RECURRENT]


def _give_state(module: fx.GraphModule, nodes: list[fx.Node], unsettled: int) -> list[Buffer]:
    """Rewrite one module, in whose calls at most so many rows are ``unsettled``."""
    graph = module.graph
    given = add_inputs(graph, INPUTS, "states")
    with graph.inserting_after([*given.values()][-1]):
        settled = graph.call_function(operator.getitem, (given["states"], 0))
    places = [given[name] for name in (ROWS, "positions", "num_rows", "num_forced", "max_length")]
    with graph.inserting_after(settled):
        span = graph.call_function(SPAN, (settled, *places))
    settled.name, span.name = "settled", "span"
    buffers = [SETTLED]
    for number, node in enumerate(nodes):
        form = RECURRENT[node.target]  # type: ignore[index]
        with graph.inserting_before(node):
            state = take_buffers(graph, given["states"], len(buffers), form.names, number)
            new = graph.call_function(form.op, form.arguments(node.args, state, span), dict(node.kwargs))
        buffers += form.buffers(operands(node), unsettled)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    # Where the state of an op stands follows from the settled rows, so these are copied with it.
    buffers[0] = replace(SETTLED, chunk=min(buffer.chunk for buffer in buffers if buffer.chunk is not None))
    given["states"].meta["state"] = tuple(buffers)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(SETTLE, (settled, span))
    graph.lint()
    module.recompile()
    return buffers
