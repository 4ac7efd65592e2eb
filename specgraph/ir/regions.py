"""Cuts a traced model into regions at its layers, so that layers that are alike share one region.

A model of 24 equal layers is traced as one graph in which the nodes of a layer stand 24 times. A compiler would work on
each copy. :func:`cut_at_layers` finds the layers by the hidden states between them, which tracing has marked, and gives
each its own graph. The weights of a layer become inputs of its graph, so equal layers have equal graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import SymInt, Tensor, fx, nn

from specgraph.ir.graphs import get_attribute, new_module

Make = Callable[[Hashable, fx.GraphModule, int], nn.Module]
"""Makes the module that regions share, from their key, their graph, and how many of its last inputs are weights."""


class Region(nn.Module):
    """A region with the weights of one place in the model. It is called with all other inputs."""

    def __init__(self, shared: nn.Module, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.shared, self.weights = shared, [*weights]

    def __call__(self, *values: Any) -> Any:
        """Call the region, which returns a tuple. Torch's own ``__call__`` would look for hooks, which it never has."""
        return self.shared(*values, *self.weights)


@dataclass
class _Part:
    """The nodes of a region in order, what they read from elsewhere, and what others read of them."""

    nodes: list[fx.Node]
    values: list[fx.Node]
    weights: list[fx.Node]
    outputs: list[fx.Node]


def cut_at_layers(module: fx.GraphModule, make: Make) -> fx.GraphModule:
    """``module`` with a call of a :class:`Region` for every layer, for what is in front of them and for what is behind.

    ``make`` is called once for each key of this module. Equal keys mean equal graphs, also if they come from different
    modules. If no two layers are alike, the whole module is one region. One that computes nothing is returned as it is.
    """
    parts = _parts(module)
    if not parts:
        return module
    described = [_describe(module, part, f"region_{index}") for index, part in enumerate(parts)]
    if len({key for key, _ in described}) == len(parts):
        inside = {node for part in parts for node in part.nodes}
        parts = [_part([node for node in module.graph.nodes if node in inside])]
        described = [_describe(module, parts[0], "region_0")]
    shared: dict[Hashable, nn.Module] = {}
    root, graph = nn.Module(), fx.Graph()
    own: dict[fx.Node, fx.Node] = {}

    def outer(node: fx.Node) -> fx.Node:
        if node not in own:
            own[node] = graph.node_copy(node, outer)
        return own[node]

    for node in module.graph.find_nodes(op="placeholder"):
        outer(node)
    for index, (part, (key, alone)) in enumerate(zip(parts, described, strict=True)):
        if key not in shared:
            shared[key] = make(key, alone, len(part.weights))
        weights = [get_attribute(module, str(node.target)) for node in part.weights]
        root.add_module(f"region_{index}", Region(shared[key], weights))
        result = graph.call_module(f"region_{index}", tuple(map(outer, part.values)))
        for place, node in enumerate(part.outputs):
            own[node] = graph.call_function(operator.getitem, (result, place))
    graph.output(fx.map_arg(module.graph.output_node().args[0], outer))
    return new_module(root, graph, type(module).__name__)


def _parts(module: fx.GraphModule) -> list[_Part]:
    """The nodes that depend on no hidden state, those of every layer, and those behind the last one, if any."""
    levels: dict[fx.Node, int] = {}
    groups: dict[int, list[fx.Node]] = {}
    for node in module.graph.nodes:
        level = max((levels[read] for read in node.all_input_nodes), default=-1)
        if not _is_outside(node) and not _is_size(node):
            groups.setdefault(level, []).append(node)
        levels[node] = max(level, node.meta.get("hidden_state", -1))
    _sink(groups)
    return [_part(groups[level]) for level in sorted(groups)]


def _sink(groups: dict[int, list[fx.Node]]) -> None:
    """Move what depends on no hidden state into the layer that reads it, if only one does.

    Of the angles of rotary embeddings, for instance, every layer makes views of its own.
    """
    layer_of = {node: level for level, nodes in groups.items() for node in nodes}
    for node in reversed(groups.get(-1, [])):
        readers = {layer_of.get(user, -1) for user in node.users if not _is_size(user)}
        if len(readers) == 1 and "hidden_state" not in node.meta:
            (layer_of[node],) = readers
    groups.clear()
    for node, level in layer_of.items():
        groups.setdefault(level, []).append(node)


def _is_outside(node: fx.Node) -> bool:
    """Whether the node computes nothing: it is an input, a weight, the output, or one item of an input."""
    if node.op != "call_function":
        return True
    return node.target is operator.getitem and all(read.op == "placeholder" for read in node.all_input_nodes)


def _is_size(node: fx.Node) -> bool:
    """Whether the node is a number that follows from sizes. Every region computes these again from its own inputs."""
    return isinstance(node.meta.get("val"), SymInt | int)


def _part(nodes: list[fx.Node]) -> _Part:
    inside = set(nodes)
    read = [node for node in dict.fromkeys(read for node in nodes for read in _read(node)) if node not in inside]
    outputs = [node for node in nodes if any(user not in inside and not _is_size(user) for user in node.users)]
    weights = [node for node in read if node.op == "get_attr"]
    return _Part(nodes, [node for node in read if node.op != "get_attr"], weights, outputs)


def _read(node: fx.Node) -> Iterable[fx.Node]:
    """The inputs of a node; the input of a size stands for the size itself."""
    for read in node.all_input_nodes:
        yield from _read(read) if _is_size(read) else (read,)


def _describe(module: fx.GraphModule, part: _Part, name: str) -> tuple[Hashable, fx.GraphModule]:
    """A region as a module without weights, and a key that regions share exactly if they compute the same."""
    graph, key = fx.Graph(), list[Hashable]()
    own: dict[fx.Node, fx.Node] = {}
    for node in part.values:
        own[node] = graph.placeholder(f"value_{len(own)}")
        own[node].meta["val"] = node.meta.get("val")
        key.append(_kind(node.meta.get("val")))
    for node in part.weights:
        own[node] = graph.placeholder(f"weight_{len(own)}")
        key.append(_kind(get_attribute(module, str(node.target))))

    def copied(node: fx.Node) -> fx.Node:
        """The copy of a node, whose name follows from the order of the copies, as keys need it."""
        if node not in own:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copied)
            own[node] = graph.create_node(node.op, node.target, args, kwargs, type_expr=node.type)
            own[node].meta.update(node.meta)
            key.append((node.target, repr(args), repr(kwargs)))
        return own[node]

    for node in part.nodes:
        copied(node)
    graph.output(tuple(own[node] for node in part.outputs))
    key.append(tuple(own[node].name for node in part.outputs))
    return tuple(key), new_module(nn.Module(), graph, name)


def _kind(value: Any) -> Hashable:
    """The properties of an input on which compiled code relies. Symbolic sizes are all alike, since they may change."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    if any(isinstance(size, SymInt) for size in value.shape):
        return value.dtype, value.device, tuple(size if isinstance(size, int) else None for size in value.shape)
    return type(value), value.dtype, value.device, tuple(value.shape), value.stride(), value.requires_grad
