"""Helpers of passes about what modules read: the inputs of a module, the buffers of an op, the target's tensors."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, fx

from specgraph.ir.graphs import DEVICE, calls, get_attribute, new_module
from specgraph.ir.program import TARGET_MODULES, Program
from specgraph.kernels.state import Buffer, Stateful
from specgraph.passes.common.patterns import insert, value_of


def add_inputs(graph: fx.Graph, shared: Mapping[str, Buffer], own: str) -> dict[str, fx.Node]:
    """The inputs of a module by name, with those that all modules share and ``own``, which belongs to this one.

    What is not there yet is added behind the others.
    """
    inputs = {node.name: node for node in graph.find_nodes(op="placeholder")}
    for name in (*shared, own):
        if name in inputs:
            continue
        with graph.inserting_after([*inputs.values()][-1]):
            inputs[name] = graph.placeholder(name)
        if name in shared:
            inputs[name].meta.update({"state": shared[name], "shared": True})
    return inputs


def give_state(
    nodes: Sequence[fx.Node], forms: Mapping[Any, Stateful], state: fx.Node, buffers: list[Buffer], size: int,
    places: Any,
) -> None:  # fmt: skip
    """Put the forms with state of ``nodes`` in their places.

    What they keep is appended to ``buffers``, which describe the input ``state``. ``size`` and ``places`` are what a
    form asks for besides: the tokens per page and the nodes of the rows, or the rows that may be taken back and the
    node of the span.
    """
    for layer, node in enumerate(nodes):
        form = forms[node.target]
        values = [value for value in map(value_of, node.args) if value is not None]
        own = [insert(node, operator.getitem, (state, len(buffers) + i)) for i in range(len(form.names))]
        for buffer, name in zip(own, form.names, strict=True):
            buffer.name = f"{name}_{layer}"
        new = insert(node, form.op, form.arguments(node.args, own, places), node.kwargs)
        buffers += form.buffers(values, size)
        # A hidden state may be this very node; what a later pass reads from it must survive.
        new.meta.update({key: node.meta[key] for key in ("hidden_state", DEVICE) if key in node.meta})
        for buffer in own if DEVICE in node.meta else ():
            buffer.meta[DEVICE] = node.meta[DEVICE]
        node.replace_all_uses_with(new)
        node.graph.erase_node(node)


def bind_target(program: Program) -> None:
    """Let the step pass the target all state that it now asks for."""
    for call in [node for name in TARGET_MODULES for node in calls(program.graph, name)]:
        name = str(call.target)
        if bound := program.bind(name, name):
            call.kwargs = {**call.kwargs, **bound}
            module = program.modules[name]
            program.modules[name] = new_module(module, module.graph, name)


def target_tensors(program: Program) -> Iterator[tuple[str, fx.Node, Tensor]]:
    """The tensors that the target reads: with the module, and the node that names them."""
    for name in (name for name in TARGET_MODULES if name in program.modules):
        module = program.modules.unchanged[name]
        for node in module.graph.find_nodes(op="get_attr"):
            yield name, node, get_attribute(module, str(node.target))
