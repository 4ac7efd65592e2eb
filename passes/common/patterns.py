"""Helpers with which passes recognise chains of ATen nodes. Patterns are read from the last node towards the inputs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from specgraph.compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    detect_fake_mode,
    pytree,
    statically_known_true,
)
from specgraph.ir.graphs import arguments, calls
from specgraph.ir.program import Program
from specgraph.ir.shapes import LAYOUT
from specgraph.passes.base import NearMiss, PassResult

T = TypeVar("T")
aten = torch.ops.aten
RMS_NORM = torch.ops.specgraph.rms_norm.default
CASTS = (aten.to.dtype, aten.type_as.default, aten._to_copy.default)
PARTS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
"""Ops that cut a tensor into several along a dimension."""
CONVERSIONS = (*CASTS, aten.to.device, aten.to.dtype_layout)
"""Ops that change how elements are stored, and no value beyond the rounding to a dtype."""


class Mismatch(Exception):
    """Raised where a candidate does not match a pattern. Its text becomes the reason of a near miss."""


def rewrite(program: Program, target: object, fuse: Callable[[fx.Node], None]) -> PassResult:
    """Call ``fuse`` on every node of the modules that calls ``target``.

    ``fuse`` raises :class:`Mismatch` before it has changed anything, and the reason becomes a near miss.
    """
    matches, misses = 0, []
    for name, module in program.modules.where(lambda graph: any(calls(graph, target))):
        for node in list(calls(module.graph, target)):
            try:
                fuse(node)
                matches += 1
            except Mismatch as reason:
                misses.append(NearMiss(f"{name}.{node.name}", str(reason)))
        module.recompile()
    return PassResult(matches, near_misses=tuple(misses))


def grouped(members: Iterable[T], fits: Callable[[list[T]], bool]) -> Iterator[list[T]]:
    """The members in lists of consecutive ones, each as long as it ``fits``; a list of one always does."""
    group: list[T] = []
    for member in members:
        if group and not fits([*group, member]):
            yield group
            group = []
        group.append(member)
    if group:
        yield group


def producer(value: Any, *targets: object) -> fx.Node | None:
    """``value`` if it is a node that calls one of ``targets``, else None.

    Calls of ATen ops with keyword arguments do not count, because these change what the op computes. Casts are an
    exception.
    """
    if not isinstance(value, fx.Node) or value.op != "call_function" or value.target not in targets:
        return None
    keywords = value.kwargs and value.target not in CONVERSIONS and getattr(value.target, "namespace", "") == "aten"
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
    """The ops that run when ``node`` is called: its own op, those into which PyTorch decomposes it, or, if the node
    calls a function, those that the function calls.

    This resolves aliases, since ``concat`` runs ``cat``. Only fake tensors are used, so nothing is computed. If an
    input of the node has no ``val``, the result is the node's own target.
    """
    inputs = node.all_input_nodes
    if any("val" not in n.meta for n in inputs):
        return [node.target]
    mode = detect_fake_mode([n.meta["val"] for n in inputs]) or FakeTensorMode()

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else value

    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: pytree.tree_map(fake, n.meta["val"]))
    with torch.no_grad(), _Dispatched() as noted:
        node.target(*args, **kwargs)  # type: ignore[operator]
    return noted.ops


def operands(node: fx.Node, target: object) -> Iterator[tuple[fx.Node, Any]]:
    """The operands ``(x, y)`` of a binary node, in each order in which ``x`` calls ``target``."""
    for x, y in (node.args[:2], node.args[1::-1]):
        found = producer(x, target)
        if found is not None:
            yield found, y


def before_cast(value: Any) -> Any:
    """The input of ``value`` if that is a conversion of the dtype, else ``value`` itself."""
    cast_node = producer(value, *CASTS)
    return value if cast_node is None else cast_node.args[0]


def weight_name(value: Any) -> str | None:
    """The name of the attribute that ``value`` reads, or None if it reads none."""
    return str(value.target) if isinstance(value, fx.Node) and value.op == "get_attr" else None


def only_user(node: fx.Node) -> fx.Node | None:
    """The node that reads ``node`` if it is the only one, else None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def value_of(node: Any) -> Tensor | None:
    """The tensor that tracing noted for ``node``.

    None for a node that a pass has made, unless :func:`keep_meta` gave it what tracing noted for another node.
    """
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def dtype_of(node: Any) -> torch.dtype | None:
    """The dtype of :func:`value_of`, if that is known."""
    value = value_of(node)
    return None if value is None else value.dtype


def is_last(dim: Any, value: Any) -> bool:
    """Whether ``dim`` is the last dimension of the tensor that ``value`` has."""
    tensor = value_of(value)
    return tensor is not None and dim in (-1, tensor.dim() - 1)


def same_sizes(shape: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two shapes are known to be equal, without asking symbols for more than they tell."""
    return len(shape) == len(other) and all(statically_known_true(a == b) for a, b in zip(shape, other, strict=True))


def is_float(node: fx.Node) -> bool:
    """Whether one of the results that tracing noted for ``node`` is a floating-point tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(v, Tensor) and v.is_floating_point() for v in values)


def keep_meta(new: fx.Node, old: fx.Node) -> fx.Node:
    """Copy the notes of ``old`` to ``new``: the traced value, its shape and, if it is one, which hidden state it is."""
    new.meta.update({key: old.meta[key] for key in ("val", "hidden_state", LAYOUT) if key in old.meta})
    return new


def insert(before: fx.Node, op: Any, args: Sequence[Any], options: Any = None, name: str | None = None) -> fx.Node:
    """A call of ``op`` in front of the node ``before``."""
    with before.graph.inserting_before(before):
        return before.graph.create_node("call_function", op, tuple(args), options, name=name)


def half_of(value: Any) -> tuple[fx.Node, int] | None:
    """``x`` and ``i`` of ``x.chunk(2, -1)[i]``, or of a split into equal halves; None for any other value."""
    part = producer(value, operator.getitem)
    split = None if part is None else producer(part.args[0], *PARTS)
    if part is None or split is None:
        return None
    given, half = arguments(split), value_of(part)
    x, whole = given["self"], value_of(given["self"])
    if whole is None or half is None or not is_last(given["dim"], x):
        return None
    in_two = same_sizes([2 * half.shape[-1]], whole.shape[-1:])
    return (x, part.args[1]) if in_two else None  # type: ignore[return-value]


def insert_valued(before: fx.Node, op: Any, *args: Any) -> fx.Node:
    """A call of ``op`` in front of the node ``before``, with the ``val`` that follows from those of its arguments."""
    node = insert(before, op, args)
    with torch.no_grad():
        node.meta["val"] = op(*fx.map_arg(args, lambda n: n.meta["val"]))
    return node


def insert_weight(before: fx.Node, read: fx.Node) -> fx.Node:
    """A node in front of ``before`` that reads the same weight as the node ``read``, which may come later."""
    with before.graph.inserting_before(before):
        return keep_meta(before.graph.get_attr(str(read.target)), read)


def items(before: fx.Node, several: fx.Node, names: int | Sequence[str]) -> list[fx.Node]:
    """The first results of the node ``several``, in front of the node ``before``: so many, or one for each name."""
    named = [None] * names if isinstance(names, int) else names
    return [insert(before, operator.getitem, (several, index), name=name) for index, name in enumerate(named)]


def replace(old: fx.Node, new: fx.Node) -> None:
    """Let everything that reads ``old`` read ``new``, and erase the nodes that nothing reads any more."""
    old.replace_all_uses_with(keep_meta(new, old))
    erase_unused(old)


def replace_by(old: fx.Node, op: Any, args: Sequence[Any], options: Any = None, name: str | None = None) -> None:
    """Put a call of ``op`` in the place of a node."""
    replace(old, insert(old, op, args, options, name))


def erase_unused(node: fx.Node) -> None:
    """Erase ``node`` if nothing reads it, and then the inputs that only it read. Nodes that write are kept."""
    if node._erased or node.users or node.op in ("placeholder", "output") or node.is_impure():
        return
    inputs = node.all_input_nodes
    node.graph.erase_node(node)
    for value in inputs:
        erase_unused(value)
