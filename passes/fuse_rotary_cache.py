"""Rotary embeddings in front of an op that writes a cache or reads one become part of that op.

The op, such as ``paged_attention``, gets queries and keys before the rotation, and ``cos`` and ``sin``. The pass
recognises the rotation by halves, of a whole head or of its first values, in both of transformers' spellings: llama's
``x * cos + rotate_half(x) * sin``, and ``cat((a * cos - b * sin, b * cos + a * sin))`` of the halves ``a`` and ``b``
of ``x``, as gpt_oss has it, whose angles are repeated for the op. Other rotations (interleaved ones, and those of the
last values) stay as they are and are reported as near misses.

The computation of the angles, ``cos`` and ``sin`` of positions times inverse frequencies, becomes one
``rotary_angles``, even if the rotation that reads them was not recognised.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from specgraph.ir.graphs import arguments
from specgraph.ir.program import Program
from specgraph.passes.base import LoweringPass, PassResult
from specgraph.passes.common.patterns import (
    CASTS,
    CONVERSIONS,
    Mismatch,
    aten,
    dtype_of,
    erase_unused,
    half_of,
    insert,
    items,
    only_user,
    operands,
    producer,
    replace,
    rewrite,
    value_of,
)

ROTATING = {
    torch.ops.specgraph.paged_attention.default: 2,
    torch.ops.specgraph.paged_block_attention.default: 2,
    torch.ops.specgraph.write_context.default: 1,
}
"""The ops that take angles, and how many of their first arguments they rotate."""
ANGLES = torch.ops.specgraph.rotary_angles.default
BROADCASTS = (aten.unsqueeze.default, aten.expand.default, *CONVERSIONS)
"""Ops that may stand between the positions or the frequencies and their product. None of them moves an element."""


class FuseRotaryCache(LoweringPass, requires={"kv_cache", "traced"}):
    """Options: ``enabled``."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite every attention whose queries and keys are both rotated, and all angles of positions."""
        parts = {f"rotation in {op._opname}": rewrite(program, op, _give_angles) for op in ROTATING}
        parts["rotary_angles"] = rewrite(program, aten.cos.default, _fuse_angles)
        notes = tuple(f"{part.matches} x {name}" for name, part in parts.items() if part.matches)
        misses = tuple(miss for part in parts.values() for miss in part.near_misses)
        return PassResult(sum(part.matches for part in parts.values()), near_misses=misses, notes=notes)


def _give_angles(node: fx.Node) -> None:
    """Let an op rotate what was rotated before it."""
    count = ROTATING[node.target]  # type: ignore[index]
    rotated, cos, sin = _unrotated(node.args[:count])
    inputs = node.all_input_nodes
    node.args = (*rotated, *node.args[count:])
    node.kwargs = {**node.kwargs, "cos": cos, "sin": sin}
    for value in inputs:
        erase_unused(value)


class _Rotation(NamedTuple):
    """What a rotation of the first ``n`` values of every head of ``x`` reads.

    ``cos`` and ``sin`` are ``[B, T, n]``; or ``[B, T, n / 2]``, each angle ``once`` for both halves.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    once: bool


def _unrotated(values: Sequence[Any]) -> tuple[list[fx.Node], fx.Node, fx.Node]:
    """The nodes that were rotated into ``values`` by the same angles, and the cosines and sines ``[B, T, n]``."""
    rotated = [_unrotated_heads(value) for value in values]
    if len({rotation[1:] for rotation in rotated}) > 1:
        raise Mismatch("queries and keys are rotated by different angles")
    _, cos, sin, once = rotated[0]
    return [rotation.x for rotation in rotated], *((_twice(cos), _twice(sin)) if once else (cos, sin))


def _twice(angles: fx.Node) -> fx.Node:
    """``cat((angles, angles), -1)`` behind ``angles``: one node for all layers."""
    given = ([angles, angles], -1)
    for user in angles.users:
        if producer(user, aten.cat.default) and user.args == given:
            return user
    node = insert(angles.next, aten.cat.default, given)
    node.meta["val"] = torch.cat([angles.meta["val"]] * 2, -1)
    return node


def _unrotated_heads(value: Any) -> _Rotation:
    """The rotation of the first ``n`` values of every head.

    Where a head has more values, the rotated ones and the others are joined again.
    """
    joined = producer(value, aten.cat.default)
    if joined is None:
        return _rotation(value)
    parts: Any = joined.args[0]
    if _joins_two(joined) and producer(parts[0], aten.sub.Tensor) is not None:
        return _rotation_of_halves(joined)
    if not _joins_two(joined) or producer(parts[0], aten.add.Tensor, aten.cat.default) is None:
        raise Mismatch(f"{joined.name} does not begin with rotated values")
    first = _unrotated_heads(parts[0])
    rotated, others = _columns(first.x), _columns(parts[1])
    if rotated is None or others is None or rotated[0] is not others[0]:
        raise Mismatch(f"{joined.name} does not join rotated values and others of the same heads")
    x, begin, width = rotated
    if begin != 0 or others[1:] != (width, x.meta["val"].shape[-1]):
        raise Mismatch(f"{joined.name} does not put the values of a head back in their places")
    return first._replace(x=x)


def _rotation(value: Any) -> _Rotation:
    """The rotation ``x * cos + rotate_half(x) * sin``."""
    total = producer(value, aten.add.Tensor)
    if total is None:
        raise Mismatch(f"{value} is not rotated")
    for turned, straight in operands(total, aten.mul.Tensor):
        straight = producer(straight, aten.mul.Tensor)
        for half, sin in operands(turned, aten.cat.default):
            x = _halves(half)
            if straight is not None and x is not None and x in straight.args:
                cos = straight.args[1] if straight.args[0] is x else straight.args[0]
                return _Rotation(x, _per_row(cos, x), _per_row(sin, x), once=False)
    raise Mismatch(f"{total.name} is not a rotation by halves")


def _rotation_of_halves(cat: fx.Node) -> _Rotation:
    """The rotation ``cat((a * cos - b * sin, b * cos + a * sin), -1)`` of the halves ``a`` and ``b`` of ``x``."""
    parts: Any = cat.args[0]
    sums = producer(parts[0], aten.sub.Tensor), producer(parts[1], aten.add.Tensor)
    products = [producer(term, aten.mul.Tensor) for node in sums if node is not None for term in node.args[:2]]
    factors: list[Any] = [product.args for product in products if product is not None]
    if len(factors) == 4:
        for (a, cos), (b, sin) in itertools.product(*map(itertools.permutations, factors[:2])):
            x = _joined(a, b)
            if x is not None and {*map(frozenset, factors[2:])} == {frozenset((b, cos)), frozenset((a, sin))}:
                return _Rotation(x, _per_row(cos, a), _per_row(sin, a), once=True)
    raise Mismatch(f"{cat.name} is not a rotation by halves")


def _halves(cat: fx.Node) -> fx.Node | None:
    """``x`` if the node is ``cat([-x[..., n/2:], x[..., :n/2]], -1)``, which is ``rotate_half(x)``; else None."""
    if not _joins_two(cat):
        return None
    parts: Any = cat.args[0]
    negated = producer(parts[0], aten.neg.default)
    return None if negated is None else _joined(parts[1], negated.args[0])


def _joined(lower: Any, upper: Any) -> fx.Node | None:
    """``x`` if the values are ``x[..., :n/2]`` and ``x[..., n/2:]``; else None."""
    first, second = _columns(lower), _columns(upper)
    if first is None or second is None or first[0] is not second[0]:
        return None
    x = first[0]
    size = x.meta["val"].shape[-1]
    whole = first[1:] == (0, size // 2) and second[1:] == (size // 2, size)
    return x if whole and size % 2 == 0 else None


def _joins_two(cat: fx.Node) -> bool:
    """Whether the node joins two tensors along the last of four dimensions."""
    parts = cat.args[0]
    return isinstance(parts, list | tuple) and len(parts) == 2 and cat.args[1:] in ((-1,), (3,))


def _columns(value: Any) -> tuple[fx.Node, int, int] | None:
    """``x``, ``begin`` and ``end`` of ``x[..., begin:end]``, where ``x`` has four dimensions; else None."""
    half = half_of(value)
    if half is not None and half[0].meta["val"].dim() == 4:
        size = half[0].meta["val"].shape[-1]
        middle = (size + 1) // 2
        return (half[0], middle, size) if half[1] else (half[0], 0, middle)
    node = producer(value, aten.slice.Tensor, aten.alias.default)
    if node is None:
        return None
    # Tracing writes a slice that takes every element as an alias.
    given = {"dim": -1, "start": 0, "end": sys.maxsize, "step": 1, **arguments(node)}
    x, begin, end = given["self"], given["start"], given["end"]
    constant = isinstance(begin, int) and isinstance(end, int) and given["step"] == 1
    if not constant or given["dim"] not in (-1, 3) or "val" not in x.meta:
        return None
    return x, *slice(begin, end).indices(x.meta["val"].shape[-1])[:2]


def _per_row(angles: Any, x: fx.Node) -> fx.Node:
    """The node of shape ``[B, T, n]`` from which ``angles`` ``[B, 1, T, n]`` was made, for ``x`` ``[B, H, T, n]``."""
    node = producer(angles, aten.unsqueeze.default)
    if node is None or node.args[1] != 1 or not isinstance(node.args[0], fx.Node):
        raise Mismatch(f"{angles} does not give every head the same angles")
    value: Any = node.args[0].meta.get("val")
    if value is None or value.dim() != 3 or value.shape[-1] != x.meta["val"].shape[-1]:
        raise Mismatch(f"{angles} does not have an angle for each value that is rotated")
    return node.args[0]


@dataclass(frozen=True)
class _Angles:
    """How the argument of a cosine is computed: positions times frequencies, and the layout of the result."""

    positions: fx.Node
    max_position: int | None
    frequencies: fx.Node
    dtype: torch.dtype
    layout: str


def _fuse_angles(cos: fx.Node) -> None:
    (source,) = cos.all_input_nodes
    sines = [user for user in source.users if user.target is aten.sin.default]
    if len(sines) != 1:
        raise Mismatch(f"{cos.name} has no sine of the same angles")
    angles = _angles(source)
    (end, *form), (sine_end, *sine_form) = (_scaled(node, angles.layout) for node in (cos, sines[0]))
    dtype = dtype_of(end)
    if form != sine_form or dtype is None or dtype != dtype_of(sine_end):
        raise Mismatch(f"{end.name} and {sine_end.name} are scaled, repeated or rounded differently")
    options: dict[str, Any] = {"dtype": dtype, **dict(zip(("scaling", "layout"), form, strict=True))}
    if angles.max_position is not None:
        options["max_position"] = angles.max_position
    place, frequencies = source.next, angles.frequencies
    if torch.promote_types(dtype_of(frequencies) or torch.float32, torch.float32) != angles.dtype:
        frequencies = insert(place, aten.to.dtype, (frequencies, angles.dtype))
    both = insert(place, ANGLES, (angles.positions, frequencies), options, "angles")
    for old, new in zip((end, sine_end), items(place, both, 2), strict=True):
        replace(old, new)


def _angles(source: fx.Node) -> _Angles:
    """Read ``source``, the argument of a cosine, from its end upward."""
    product, layout = _layout(source)
    if layout is None:
        raise Mismatch(f"{source.name} does not repeat the angles in halves or in pairs")
    turned = producer(product, aten.transpose.int)
    factors = producer(turned.args[0] if turned is not None else product, aten.mul.Tensor, aten.matmul.default)
    if factors is None:
        raise Mismatch(f"{source.name}, the argument of the cosine, is not a product of positions and frequencies")
    roots = [_root(factor, dtype_of(product)) for factor in factors.args[:2]]
    positions, frequencies = sorted(roots, key=lambda node: node.op == "get_attr")
    positions, limit = _unclamped(positions)
    value, rows, table = map(value_of, (product, positions, frequencies))
    unlike = Mismatch(f"{factors.name} is not the product of positions [B, T] and frequencies [F]")
    if value is None or rows is None or table is None or frequencies.op != "get_attr":
        raise unlike
    if value.dtype not in (torch.float32, torch.float64):
        raise Mismatch(f"{factors.name} rounds the angles to {value.dtype}, and the positions with them")
    # Only broadcasting separates the factors from the product, so its shape tells which factor is which.
    shape = (*rows.shape, *table.shape)
    if rows.dim() != 2 or table.dim() != 1 or rows.is_floating_point() or value.shape != shape:
        raise unlike
    if table.device != value.device:
        raise Mismatch(f"{frequencies.name} is on another device")
    return _Angles(positions, limit, frequencies, value.dtype, layout)


def _layout(node: fx.Node) -> tuple[Any, str | None]:
    """The value that the node repeats along the last of three dimensions, and the layout; None for another one."""
    joined, repeated = producer(node, aten.cat.default), producer(node, aten.repeat_interleave.self_int)
    if joined is not None:
        parts: Any = joined.args[0]
        twice: Any = len(parts) == 2 and parts[0] is parts[1] and joined.args[1:] in ((-1,), (2,))
        return parts[0], "halves" if twice else None
    if repeated is not None:
        twice = repeated.args[1] == 2 and arguments(repeated)["dim"] in (-1, 2)
        return repeated.args[0], "pairs" if twice else None
    return node, "once"


def _root(value: Any, dtype: torch.dtype | None) -> fx.Node:
    """The node that ``value`` was made from by adding or expanding dimensions and by converting to ``dtype``.

    ``dtype`` is that of the product. A conversion of positions to float32 is accepted in its place, because integers of
    their size are exact in both types.
    """
    while (node := producer(value, *BROADCASTS) or _whole(value)) is not None:
        value, converted = node.args[0], dtype_of(node)
        exact = converted == dtype or (converted == torch.float32 and dtype_of(value) == torch.int64)
        if node.target in CONVERSIONS and not exact:
            raise Mismatch(f"{node.name} rounds what the angles are computed from")
    if not isinstance(value, fx.Node):
        raise Mismatch(f"{value} is a number")
    return value


def _whole(value: Any) -> fx.Node | None:
    """``value`` if it is a slice that takes every element, else None."""
    node = producer(value, aten.slice.Tensor)
    if node is None:
        return None
    given = arguments(node)
    return node if (given["start"], given["end"], given["step"]) == (0, sys.maxsize, 1) else None


def _unclamped(positions: fx.Node) -> tuple[fx.Node, int | None]:
    """The positions behind the clamp that ``insert_kv_cache`` puts in front of tables, and its upper limit."""
    given = arguments(positions) if positions.target is aten.clamp.default else {}
    known = given.get("min") == 0 and isinstance(given.get("max"), int)
    return (given["self"], given["max"]) if known else (positions, None)


def _scaled(node: fx.Node, layout: str) -> tuple[fx.Node, float, str]:
    """Follow a multiplication with a number, a cast and a repetition before or behind it, where nothing else reads the
    values in between.

    ``layout`` is that of the argument of the cosine, and the one that is returned is that of the result. Repeating
    cosines gives the cosines of repeated angles.
    """
    end, scaling = node, 1.0
    user = producer(only_user(end), aten.mul.Tensor)
    if user is not None and isinstance(user.args[1], int | float):
        end, scaling = user, float(user.args[1])
    end, layout = _repeated(end, layout)
    cast = producer(only_user(end), *CASTS)
    moves = cast is not None and cast.target is aten._to_copy.default and set(cast.kwargs) != {"dtype"}
    if cast is not None and cast.args[0] is end and not moves:
        end = cast
    end, layout = _repeated(end, layout)
    return end, scaling, layout


def _repeated(end: fx.Node, layout: str) -> tuple[fx.Node, str]:
    """Follow a repetition of what is not repeated yet."""
    user = only_user(end)
    if user is not None and layout == "once" and (repeated := _layout(user)[1]) not in (None, "once"):
        return user, str(repeated)
    return end, layout
