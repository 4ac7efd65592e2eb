"""How passes recognise a chain of ATen nodes: small questions about one node, read from its end upward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from specgraph.ir.graphs import calls, get_attribute
from specgraph.ir.program import Program
from specgraph.passes.base import NearMiss, PassResult

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten.type_as.default, aten._to_copy.default)


class Mismatch(Exception):
    """Why a candidate is not the pattern; becomes the reason of a near miss."""


def rewrite(program: Program, target: object, fuse: Callable[[fx.Graph, fx.Node], None]) -> PassResult:
    """Call ``fuse`` on every node of the modules that calls ``target``.

    Where it raises :class:`Mismatch` it has changed nothing, and the reason is reported.
    """
    matches, misses = 0, []
    for name, module in program.modules.items():
        for node in list(calls(module.graph, target)):
            try:
                fuse(module.graph, node)
                matches += 1
            except Mismatch as reason:
                misses.append(NearMiss(f"{name}.{node.name}", str(reason)))
        module.recompile()
    return PassResult(matches, near_misses=tuple(misses))


def producer(value: Any, *targets: object) -> fx.Node | None:
    """``value`` if it is a node that calls one of ``targets``; no ATen op with keywords, which change what it does."""
    if not isinstance(value, fx.Node) or value.op != "call_function" or value.target not in targets:
        return None
    keywords = value.kwargs and value.target not in CASTS and getattr(value.target, "namespace", "") == "aten"
    return None if keywords else value


class _Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the ops that PyTorch's dispatcher calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace != "prim":  # those ask a tensor for its device or its sizes
            self.ops.append(func)
        return func(*args, **(kwargs or {}))


def dispatched(node: fx.Node) -> list[Any]:
    """The ops that run when ``node`` is called: its own, or those that PyTorch writes it in.

    So an alias is seen through: ``concat`` runs ``cat``. Nothing is computed. A node that has inputs without ``val``
    stands for itself.
    """
    inputs = node.all_input_nodes
    if not isinstance(node.target, torch._ops.OpOverload) or any("val" not in n.meta for n in inputs):
        return [node.target]
    mode = detect_fake_mode([n.meta["val"] for n in inputs]) or FakeTensorMode()

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: tree_map(fake, n.meta["val"]))
    with torch.no_grad(), _Dispatched() as noted:
        node.target(*args, **kwargs)
    found: list[Any] = noted.ops
    return found


def operands(node: fx.Node, target: object) -> Iterator[tuple[fx.Node, Any]]:
    """Both orders ``(x, y)`` of the operands of a binary node in which ``x`` calls ``target``."""
    for x, y in (node.args[:2], node.args[1::-1]):
        found = producer(x, target)
        if found is not None:
            yield found, y


def before_cast(value: Any) -> Any:
    """``value``, or what it was before a conversion of its dtype."""
    cast_node = producer(value, *CASTS)
    return value if cast_node is None else cast_node.args[0]


def weight_name(value: Any) -> str | None:
    """The attribute that ``value`` reads, if it reads one."""
    return str(value.target) if isinstance(value, fx.Node) and value.op == "get_attr" else None


def weight(module: fx.GraphModule, value: Any) -> Tensor | None:
    """The tensor that ``value`` reads from the module, if it reads one."""
    name = weight_name(value)
    return None if name is None else get_attribute(module, name)


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that reads ``node``, if there is just one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype that tracing found; None for a node that a pass has made, unless it stands for one that was there."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.dtype if isinstance(value, Tensor) else None


def is_float(node: fx.Node) -> bool:
    """Whether one of the results that tracing found is a floating-point tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def keep_meta(new: fx.Node, old: fx.Node) -> fx.Node:
    """Let ``new`` stand where ``old`` stood: its value and, if it is one, its hidden state."""
    new.meta.update({key: old.meta[key] for key in ("val", "hidden_state", "shape") if key in old.meta})
    return new


def replace(graph: fx.Graph, old: fx.Node, new: fx.Node) -> None:
    """Read ``new`` wherever ``old`` was read, and drop what nothing reads any more."""
    old.replace_all_uses_with(keep_meta(new, old))
    erase_unused(graph, old)


def erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Drop ``node`` if nothing reads it, and then what only it read; nodes that write stay."""
    if node._erased or node.users or node.op in ("placeholder", "output") or node.is_impure():
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for value in inputs:
        erase_unused(graph, value)
