"""Reads values that repeat along a dimension once, and leaves out writes of what is there already.

A model may compute something for several rows because the rows differ in some of its uses. Qwen3.5 computes the angles
of its rotary embeddings for three rows of positions (time, height and width in pictures), and then takes some
frequencies from one row and some from another. For text, all three rows are the same positions, expanded.

A value repeats along a dimension if every index of it gives the same values: an expanded tensor does, and so do
pointwise functions and outer products of values that repeat. Two nodes are the same value if they call the same op on
the same values; of a value that repeats, all indices are the same. A scatter that writes to a place the value that is
there already gives the tensor that it writes to. What is left reads one index, so it is computed without that
dimension. No bit changes, since every element is still computed by the same operations from the same numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from specgraph.ir.graphs import calls, written_by
from specgraph.kernels.step import WRITES
from specgraph.passes.patterns import CONVERSIONS, aten, erase_unused, same_sizes

SELECT, SLICE, EXPAND, UNSQUEEZE = aten.select.int, aten.slice.Tensor, aten.expand.default, aten.unsqueeze.default
TRANSPOSE, MATMUL = aten.transpose.int, aten.matmul.default
SCATTERS: dict[Any, Any] = {aten.select_scatter.default: SELECT, aten.slice_scatter.default: SLICE}
"""The ops that write to a place of a tensor, and those that read it. Their arguments behind the values are the same."""


def has_scatters(graph: fx.Graph) -> bool:
    """Whether the graph has anything that :func:`read_once` may leave out."""
    return any(any(calls(graph, target)) for target in SCATTERS)


def read_once(graph: fx.Graph) -> int:
    """Leave out scatters that change nothing, and compute what they wrote to for one index of repeated dimensions.

    Returns the number of scatters that were left out.
    """
    unchanged = _Numbering().unchanged(graph)
    for node, base in unchanged.items():
        node.replace_all_uses_with(base)
    for node in reversed(unchanged):
        erase_unused(graph, node)
    reader = _Reader(graph)
    for base in dict.fromkeys(unchanged.values()):
        if not base._erased:
            reader.replace_selects(base)
    return len(unchanged)


@dataclass
class _Repeats:
    """Tells along which dimensions values repeat. ``same`` maps nodes to others that have the same value."""

    same: dict[fx.Node, fx.Node] = field(default_factory=dict)
    known: dict[tuple[fx.Node, int], bool] = field(default_factory=dict)

    def __call__(self, node: fx.Node, dim: int) -> bool:
        """Whether ``node`` has the same values at all indices of ``dim``."""
        node = self.same.get(node, node)
        if (node, dim) not in self.known:
            value, sources = _value(node), _sources(node, dim)
            one = value is not None and isinstance(value.shape[dim], int) and value.shape[dim] == 1
            self.known[node, dim] = one or (sources is not None and all(self(x, at) for x, at in sources.items()))
        return self.known[node, dim]


class _Numbering:
    """Gives nodes that have the same value the same number, which is the first of these nodes."""

    def __init__(self) -> None:
        self.same: dict[fx.Node, fx.Node] = {}
        self.repeats = _Repeats(self.same)
        self.first: dict[Hashable, fx.Node] = {}

    def unchanged(self, graph: fx.Graph) -> dict[fx.Node, fx.Node]:
        """The scatters that write what is there already, and what they write to."""
        found, changing = {}, _written(graph)
        for node in graph.nodes:
            if node in changing or changing & set(node.all_input_nodes):
                changing.add(node)  # it may be a view of what is written, so it matters when it is read
                continue
            base = self._base(node)
            if base is not None:
                found[node] = self.same[node] = base
            elif node.target is aten.copy.default and _alike(*node.args[:2]):
                self.same[node] = self._number(node.args[1])
            elif node.target in (SELECT, SLICE, EXPAND, UNSQUEEZE) or _is_pointwise(node):
                self.same[node] = self.first.setdefault(self._key(node.target, node.args, node.kwargs), node)
        return found

    def _base(self, node: fx.Node) -> fx.Node | None:
        """What a scatter writes to, if it writes what is there already; None for all other nodes."""
        reads = SCATTERS.get(node.target)
        if reads is None or node.kwargs:
            return None
        base, written, *place = node.args
        there = self.first.get(self._key(reads, (base, *place), {}))
        return self._number(base) if there is not None and there is self._number(written) else None

    def _key(self, target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        args = self._place(target, *args) if target in (SELECT, SLICE) else args
        return target, self._frozen(args), self._frozen(tuple(sorted(kwargs.items())))

    def _place(self, target: object, x: Any, dim: int = 0, *place: Any) -> tuple[Any, ...]:
        """The arguments of a select or a slice, the same for all spellings; index 0 of what repeats."""
        value = _value(x)
        dim = dim if value is None else dim % value.dim()
        if target is SELECT:
            return x, dim, 0 if value is not None and self.repeats(x, dim) else place[0]
        bounds = [*place, *(None, None, 1)[len(place) :]]
        begin, end = (other if bound is None else bound for bound, other in zip(bounds, (0, sys.maxsize), strict=False))
        return x, dim, begin, end, bounds[2]

    def _frozen(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            return self._number(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._frozen, value))
        return type(value), repr(value)  # 1, 1.0 and True are equal, and products with them may not be

    def _number(self, node: Any) -> fx.Node:
        return self.same.get(node, node)  # type: ignore[no-any-return]


class _Reader:
    """Computes values for one index of a dimension along which they repeat."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.repeats = graph, _Repeats()
        self.made: dict[tuple[fx.Node, int], fx.Node] = {}

    def replace_selects(self, node: fx.Node) -> None:
        """Replace what selects an index of ``node``, if nothing else reads it, by what is computed for that index."""
        selects = [user for user in node.users if user.target is SELECT]
        value = _value(node)
        if value is None or len(selects) < len(node.users):
            return
        dims: list[Any] = [user.args[1] % value.dim() for user in selects]  # type: ignore[operator]
        if all(self.repeats(node, dim) for dim in dims):
            for user, dim in zip(selects, dims, strict=True):
                user.replace_all_uses_with(self._read(node, dim))
                erase_unused(self.graph, user)

    def _read(self, node: fx.Node, dim: int) -> fx.Node:
        """``node.select(dim, 0)``, for a ``node`` that repeats along ``dim``."""
        if (node, dim) not in self.made:
            self.made[node, dim] = self._computed(node, dim) or self._call(node, dim, SELECT, (node, dim, 0))
        return self.made[node, dim]

    def _computed(self, node: fx.Node, dim: int) -> fx.Node | None:
        sources, value, args, kwargs = _sources(node, dim), _value(node), node.args, node.kwargs
        # Without a dimension, a vector would be a scalar, and scalars do not take part in type promotion.
        scalar = _is_pointwise(node) and any(_rank(x) < 2 for x in sources or ())
        if sources is None or value is None or scalar or node.target is SELECT:
            return None
        inner = {x: self._read(x, at) for x, at in sources.items()}
        if node.target is EXPAND:
            args = (args[0], [size for at, size in enumerate(args[1]) if at != dim])  # type: ignore[arg-type]
        elif node.target in (UNSQUEEZE, SLICE):
            given: Any = (*args, 0) if len(args) == 1 else args
            x, place, *rest = given
            place %= value.dim()
            if place == dim:
                read: fx.Node = inner.get(x, x)
                return read
            args = (x, place - (dim < place), *rest)
        elif node.target is TRANSPOSE:
            places: list[Any] = [at % value.dim() for at in args[1:]]  # type: ignore[operator]
            if dim in places:
                return None
            args = (args[0], *(at - (dim < at) for at in places))
        return self._call(node, dim, node.target, *fx.map_arg((args, kwargs), lambda x: inner.get(x, x)))

    def _call(self, node: fx.Node, dim: int, target: Any, args: Any, kwargs: Any = None) -> fx.Node:
        """A call behind ``node`` that gives ``node.select(dim, 0)``."""
        with self.graph.inserting_after(node):
            new = self.graph.call_function(target, args, kwargs)
        new.meta["val"] = node.meta["val"].select(dim, 0)
        return new


def _sources(node: fx.Node, dim: int) -> dict[fx.Node, int] | None:
    """The tensors whose values ``node`` has along its dimension ``dim``, and which of their dimensions that is.

    Tensors that are the same for all indices are left out. The result is None for other ops than views and pointwise
    ones.
    """
    value, x = _value(node), node.args[0] if node.args else None
    if value is None or not isinstance(x, fx.Node):
        return None
    if node.target is UNSQUEEZE:
        place: Any = node.args[1] % value.dim()  # type: ignore[operator]
        return {} if place == dim else {x: dim - (dim > place)}
    if node.target is SELECT:
        place = node.args[1] % (value.dim() + 1)  # type: ignore[operator]
        return {x: dim + (dim >= place)}
    if node.target is SLICE or node.target in CONVERSIONS:
        return {x: dim}
    if node.target is TRANSPOSE:
        places: list[Any] = [at % value.dim() for at in node.args[1:]]  # type: ignore[operator]
        return {x: places[1 - places.index(dim)] if dim in places else dim}
    inputs = [n for n in node.all_input_nodes if _value(n) is not None]
    outer = _is_outer(node) and dim < value.dim() - 2
    if x not in inputs or not (node.target is EXPAND or outer or _is_pointwise(node)):
        return None
    aligned = {n: dim - (value.dim() - _rank(n)) for n in inputs}
    return {n: at for n, at in aligned.items() if at >= 0}


def _is_outer(node: fx.Node) -> bool:
    """Whether a node is a product of columns with rows, which has no sums."""
    left = _value(node.args[0]) if node.target is MATMUL else None
    return left is not None and left.dim() >= 2 and statically_known_true(left.shape[-1] == 1)


def _is_pointwise(node: fx.Node) -> bool:
    """Whether each element of the one result is a function of one element of each input, and nothing else."""
    op, ordered = node.target, node.kwargs.get("memory_format") is not None
    if not isinstance(op, torch._ops.OpOverload) or _value(node) is None or ordered:
        return False
    random = torch.Tag.nondeterministic_seeded in op.tags
    return op in CONVERSIONS or (torch.Tag.pointwise in op.tags and not op._schema.is_mutable and not random)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """What nodes of the graph write to, and what that is a view of."""
    todo = [value for node in graph.nodes if node.op == "call_function" for value in written_by(node, WRITES)]
    found: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            is_view = isinstance(node.target, torch._ops.OpOverload) and node.target.is_view
            todo += node.all_input_nodes[:1] if is_view else []
    return found


def _alike(one: Any, other: Any) -> bool:
    """Whether both have the same shape, dtype and device."""
    a, b = _value(one), _value(other)
    if a is None or b is None or (a.dtype, a.device) != (b.dtype, b.device):
        return False
    return same_sizes(a.shape, b.shape)


def _value(node: Any) -> Tensor | None:
    """What tracing noted for a tensor; None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _rank(node: fx.Node) -> int:
    value = _value(node)
    return 0 if value is None else value.dim()
