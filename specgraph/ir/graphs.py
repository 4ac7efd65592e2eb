"""Helpers for FX graphs and modules that all parts of the compiler use."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from specgraph.compat import LazyGraphModule, OpOverload, pytree
from specgraph.errors import UnsupportedModelError

DEVICE = "device"
"""The key under which ``node.meta`` has the number of the one device that a node runs on, if several share the work.

A node without it runs on every device, with the same values."""


def set_attribute(root: nn.Module, target: str, tensor: torch.Tensor) -> None:
    """Register a tensor under a dotted name, creating empty modules on the way."""
    *path, leaf = target.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        root.register_parameter(leaf, tensor)
    else:
        root.register_buffer(leaf, tensor)


def get_attribute(root: nn.Module, target: str) -> torch.Tensor:
    """The tensor under a dotted name."""
    return operator.attrgetter(target)(root)


def replace_tensors(module: fx.GraphModule, new: dict[int, torch.Tensor]) -> None:
    """Replace every tensor ``old`` that the graph names by ``new[id(old)]``, if there is one."""
    for node in module.graph.find_nodes(op="get_attr"):
        old = id(get_attribute(module, node.target))
        if old in new:
            set_attribute(module, node.target, new[old])


def new_module(root: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A GraphModule over the attributes of ``root``.

    Dead-code elimination keeps calls of it, because they may write a cache.
    """
    graph.lint()
    return _impure_module(root, graph, name)


def _impure_module(root: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    # Every pass gets a copy of every module, and few of the copies are ever called. This class generates the Python
    # code of its graph when it is first called or read, and not when it is made.
    module = LazyGraphModule(root, graph, name)
    module._is_impure = True  # type: ignore[assignment]
    return module.eval()


def copy_module(module: fx.GraphModule) -> fx.GraphModule:
    """A copy whose graph can be changed freely; parameters and submodules are shared."""
    return _impure_module(module, copy_graph(module.graph), type(module).__name__)


def copy_graph(source: fx.Graph) -> fx.Graph:
    """A copy of a graph, node by node.

    ``Graph.node_copy`` looks for symbolic numbers in all arguments, which takes a third of its time.
    """
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in source.nodes:
        new[node] = own = graph.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        if node.args:
            own.args = fx.node.map_arg(node.args, new.__getitem__)
        if node.kwargs:
            own.kwargs = fx.node.map_arg(node.kwargs, new.__getitem__)
        own.meta.update(node.meta)
    return graph


MADE = "made"
"""The input of a part of a module that has what the parts before it have made."""


def cut(whole: fx.GraphModule, places: Sequence[fx.Node], also: Iterable[str] = ()) -> list[fx.GraphModule]:
    """A module in parts, the first of which ends with the first of ``places``, and so on.

    Each part takes the inputs of the whole and :data:`MADE`, a mapping of what the parts before it have made, by the
    names of the nodes. The last one returns what the whole does. Each other one gives such a mapping, of what later
    parts read and of the nodes named in ``also``. A part may be cut again.
    """
    nodes = [*whole.graph.nodes]
    inputs = [node for node in nodes if node.op == "placeholder"]
    bounds = [0, *(nodes.index(place) + 1 for place in places), len(nodes)]
    parts = [[n for n in nodes[a:b] if n.op != "placeholder"] for a, b in itertools.pairwise(bounds)]
    return [_part(whole, inputs, own, {*also}, last=own is parts[-1]) for own in parts]


def _part(
    whole: fx.GraphModule, inputs: Sequence[fx.Node], nodes: Sequence[fx.Node], also: Container[str], *, last: bool
) -> fx.GraphModule:
    graph, inside = fx.Graph(), {*nodes}
    own = {node: graph.node_copy(node) for node in inputs}
    made = next((own[node] for node in inputs if node.name == MADE), None) or graph.placeholder(MADE)
    for node in nodes:
        for given in node.all_input_nodes:
            if given not in own:
                item = (made, given.name)
                own[given] = graph.create_node("call_method", "__getitem__", item, name=f"{MADE}_{given.name}")
        own[node] = graph.node_copy(node, own.__getitem__)
    if not last:
        graph.output({n.name: own[n] for n in nodes if n.name in also or not inside.issuperset(n.users)})
    return new_module(whole, graph, type(whole).__name__)


def remove_dead_code(module: fx.GraphModule) -> bool:
    """Erase unused nodes and submodules, and say whether there were such nodes. Inputs and nodes with side effects are
    kept."""
    changed = module.graph.eliminate_dead_code()
    module.delete_all_unused_submodules()
    module.recompile()
    return changed


def calls(graph: fx.Graph, target: object) -> Iterator[fx.Node]:
    """The nodes that call ``target``, which is a function, an op, or the name of a submodule."""
    return (node for node in graph.nodes if node.op.startswith("call_") and node.target == target)


def written_by(node: fx.Node, declared: Mapping[Callable[..., object], tuple[str, ...]]) -> list[fx.Node]:
    """The arguments that a call writes in place.

    ``declared`` names them for every function that writes any; the schema of an op says it by itself.
    """
    names: tuple[str, ...] = ()
    if isinstance(node.target, OpOverload):
        parameters = node.target._schema.arguments
        names = tuple(a.name for a in parameters if a.alias_info is not None and a.alias_info.is_write)
    elif callable(node.target):
        names = declared.get(node.target, ())
    given = arguments(node) if names else {}
    values = pytree.tree_leaves([given[name] for name in names])
    return [value for value in values if isinstance(value, fx.Node)]


def arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of a function or an op by the names of its parameters, with defaults where none is given.

    Raises:
        TypeError: the call does not fit the function.
    """
    if isinstance(node.target, OpOverload):
        parameters = node.target._schema.arguments
        defaults = {a.name: a.default_value for a in parameters if a.has_default_value()}
        given = {a.name: value for a, value in zip(parameters, node.args, strict=False)}
        return {**defaults, **given, **node.kwargs}
    bound = inspect.signature(node.target).bind(*node.args, **node.kwargs)  # type: ignore[arg-type]
    bound.apply_defaults()
    return bound.arguments


def set_argument(node: fx.Node, name: str, value: Any) -> None:
    """Give a call of a function another value for its parameter ``name``."""
    place = [*inspect.signature(node.target).parameters].index(name)  # type: ignore[arg-type]
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)


def is_no_op(node: fx.Node) -> bool:
    """Whether the node converts to the dtype and device that its input already has, or is a dropout that is off."""
    if str(node.target) == "aten.dropout.default":
        return not arguments(node)["train"]
    if str(node.target) not in ("aten.to.dtype", "aten.to.device", "aten._to_copy.default"):
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(before.dtype == after.dtype and before.device == after.device)


def unlift(exported: torch.export.ExportedProgram, prefix: str = "") -> fx.GraphModule:
    """The exported graph as a module whose parameters are attributes, which are the original module's own tensors.

    Only the inputs of the forward remain inputs. ``ExportedProgram.module()`` is not used because it would add guards,
    hooks and a calling convention of its own.
    """
    signature = exported.graph_signature
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        changed = sorted(signature.buffers_to_mutate.values())
        raise UnsupportedModelError(f"The model's forward changes its own buffers ({', '.join(changed)}).")
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers,
             **signature.inputs_to_lifted_tensor_constants}  # fmt: skip
    tensors = {**dict(exported.named_parameters()), **dict(exported.named_buffers()), **exported.constants}
    root, graph = nn.Module(), fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            target = names[node.name].removeprefix(prefix)
            set_attribute(root, target, tensors[names[node.name]])
            mapping[node] = graph.get_attr(target)
            mapping[node].meta = dict(node.meta)
        elif is_no_op(node):
            mapping[node] = mapping[node.all_input_nodes[0]]
        elif "_assert" not in str(node.target):
            # Assertions about metadata count as impure, so they would keep the unused causal mask alive.
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
    module = new_module(root, graph, "exported")
    remove_dead_code(module)
    return module


def constant(tensor: torch.Tensor, name: str) -> fx.GraphModule:
    """A module without inputs that returns ``tensor``. Constants enter the step graph in this way, since it may hold no
    tensors of its own.
    """
    root, graph = nn.Module(), fx.Graph()
    set_attribute(root, "value", tensor)
    graph.output(graph.get_attr("value"))
    return new_module(root, graph, name)


def splice(graph: fx.Graph, root: nn.Module, module: fx.GraphModule, mapping: dict[fx.Node, fx.Node]) -> Any:
    """Copy a module's nodes to the end of ``graph``, and its tensors to ``root``.

    ``mapping`` gives the nodes that take the place of the module's placeholders; every copied node is added to it.
    Returns the copies of the module's outputs, a node or a tuple of nodes.
    """
    for node in module.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], mapping.__getitem__)
        if node not in mapping:
            mapping[node] = graph.node_copy(node, mapping.__getitem__)
            if node.op == "get_attr":
                set_attribute(root, node.target, get_attribute(module, node.target))
    raise AssertionError("a graph without an output")
