"""Exported programs without in-place ops, which FX could reorder or remove."""

from __future__ import annotations

import operator

import torch
from torch import fx

from specgraph.compat import DispatchKey, OpOverload
from specgraph.ir.known_shapes import storages


def functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program without in-place ops; its graph may be changed for that.

    Most models that have any write into the result of an op that nothing else has a view of, such as the weights of the
    experts. This op is replaced by the one that returns its result instead. For all others the program is traced again,
    which takes up to three times as long as the export.
    """
    in_place = [node for node in exported.graph.nodes if _is_mutable(node)]
    if all(_replace(node) for node in in_place):
        return exported
    return exported.run_decompositions({})


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _replace(node: fx.Node) -> bool:
    """Let an op return its result instead of writing it, if nothing else could see what it writes."""
    assert isinstance(node.target, OpOverload)  # only these are mutable
    twin, written = _twin(node.target), node.args[0] if node.args else None
    if twin is None or not isinstance(written, fx.Node) or not _is_alone(written, node):
        return False
    node.target = twin
    written.replace_all_uses_with(node, lambda user: user > node)
    return True


def _twin(op: OpOverload) -> OpOverload | None:
    """The op that returns what ``op`` writes into its first argument, such as ``div.Tensor`` for ``div_.Tensor``."""
    arguments, returns = op._schema.arguments, op._schema.returns
    writes = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    twin = getattr(packet, op._overloadname, None)
    if writes[0] and not any(writes[1:]) and len(returns) == 1 and name.endswith("_") and twin is not None:
        same = [(a.name, str(a.type)) for a in twin._schema.arguments] == [(a.name, str(a.type)) for a in arguments]
        return twin if same and not twin._schema.is_mutable else None
    return None


def _is_alone(written: fx.Node, writer: fx.Node) -> bool:
    """Whether no node before ``writer`` has the memory of ``written``, which the graph computes.

    The tensors that the export noted for its nodes are fake, but share their storages as real ones would.
    """
    own = storages(written.meta.get("val"))
    parents = [written, *(written.all_input_nodes if written.target is operator.getitem else [])]
    near = [*parents, *(user for user in written.users if user < writer)]
    if written.op != "call_function" or len(own) != 1 or not all(map(_tells_aliases, near)):
        return False
    others = (node for node in written.graph.nodes if node < writer and node not in parents)
    return all(own.isdisjoint(storages(node.meta.get("val"))) for node in others)


def _tells_aliases(node: fx.Node) -> bool:
    """Whether a result that is a view of an argument, or that argument, is known to be one.

    A composite op whose schema names no view may still return its argument, as dropout does that is off, where the fake
    tensors say that it does not.
    """
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    composite = node.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    return not composite or any(one.alias_info is not None for one in node.target._schema.returns)
