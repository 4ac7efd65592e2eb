"""What the passes share that give traced modules state: the inputs of a module, and the buffers of an op."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from specgraph.ir.graphs import new_module
from specgraph.ir.program import Program
from specgraph.kernels.state import Buffer


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


def operands(node: fx.Node) -> list[Tensor]:
    """The tensors that an op is given, as tracing found them."""
    values = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
    return [value for value in values if isinstance(value, Tensor)]


def take_buffers(graph: fx.Graph, state: fx.Node, first: int, names: Sequence[str], layer: int) -> list[fx.Node]:
    """The buffers of one op from number ``first`` of the tuple ``state`` on, where the graph inserts."""
    buffers = [graph.call_function(operator.getitem, (state, first + i)) for i in range(len(names))]
    for buffer, name in zip(buffers, names, strict=True):
        buffer.name = f"{name}_{layer}"
    return buffers


def bind_target(program: Program) -> None:
    """Let the step pass the target all state that it now asks for."""
    call = program.one("target")
    call.kwargs = {**call.kwargs, **program.bind("target", "target")}
    target = program.modules["target"]
    program.modules["target"] = new_module(target, target.graph, "target")
