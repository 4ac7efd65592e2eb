"""Exported programs without in-place ops, which FX could reorder or remove."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from specgraph.compat import DispatchKey, OpOverload
from specgraph.ir.known_shapes import storages

_ATEN = torch.ops.aten
_COPY, _SLICE = _ATEN.copy_.default, _ATEN.slice.Tensor


def functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The same program without in-place ops; its graph may be changed for that.

    Most models that have any write where nothing else looks: into the result of an op, such as the weights of the
    experts, or into slices of it, such as keys that are put together. Such an op is replaced by ops that return what it
    writes. For all others the program is traced again, which takes up to three times as long as the export.
    """
    in_place = [node for node in exported.graph.nodes if _is_mutable(node)]
    if all(_replace(node) or _replace_slice(node) for node in in_place):
        return exported
    return exported.run_decompositions({})


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _replace(node: fx.Node) -> bool:
    """Let an op return its result instead of writing it, if nothing else could see what it writes."""
    assert isinstance(node.target, OpOverload)  # only these are mutable
    twin, written = _twin(node.target), node.args[0] if node.args else None
    if twin is None or not isinstance(written, fx.Node) or not _is_unseen(written, node):
        return False
    node.target = twin
    written.replace_all_uses_with(node, lambda user: user > node)
    return True


def _replace_slice(node: fx.Node) -> bool:
    """Let what is copied into a slice of a tensor make another tensor, if nothing else could see what is written."""
    written: Any = node.args[0] if node.target is _COPY and not node.users else None
    if getattr(written, "target", None) is not _SLICE or len(written.users) > 1:
        return False
    whole, *place = written.args
    if not _is_unseen(whole, node):
        return False
    with node.graph.inserting_before(node):
        part = node.graph.call_function(_ATEN.copy.default, node.args)
        new = node.graph.call_function(_ATEN.slice_scatter.default, (whole, part, *place))
    # The other tensor stands for the memory of the whole, which views of it that come later are noted to have.
    part.meta["val"], new.meta["val"] = written.meta["val"].clone(), whole.meta["val"]
    whole.replace_all_uses_with(new, lambda user: user > node)
    node.graph.erase_node(node)
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


def _is_unseen(written: fx.Node, writer: fx.Node) -> bool:
    """Whether no node behind ``writer`` reads the memory of ``written``, which the graph computes, by another node.

    The tensors that the export noted for its nodes are fake, but share their storages as real ones would.
    """
    own = storages(written.meta.get("val"))
    before = [node for node in written.graph.nodes if node < writer]
    sharing = [node for node in before if not own.isdisjoint(storages(node.meta.get("val")))]
    near = {*sharing, *(user for node in sharing for user in node.users if user < writer)}
    if len(own) != 1 or any(node.op != "call_function" for node in near) or not all(map(_tells_aliases, near)):
        return False
    return not any(user > writer for node in sharing if node is not written for user in node.users)


def _tells_aliases(node: fx.Node) -> bool:
    """Whether a result that is a view of an argument, or that argument, is known to be one.

    A composite op whose schema names no view may still return its argument, as dropout does that is off, where the fake
    tensors say that it does not.
    """
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    composite = node.target.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    return not composite or any(one.alias_info is not None for one in node.target._schema.returns)
