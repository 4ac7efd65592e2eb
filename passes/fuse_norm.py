"""The ATen nodes of ``x * rsqrt(mean(x^2) + eps) * weight`` become one ``specgraph::rms_norm``.

The pass looks for ``rsqrt`` and reads the nodes around it. Models multiply by a weight, by a weight plus one (gemma) or
by nothing, and they convert to their own dtype before or after that. The pass writes the same op for all of them, which
rounds once, at the end.

Where several devices share the features of a row, each adds what it has to the mean of squares
(:mod:`specgraph.passes.shard`). Then all such means that are summed together become one ``specgraph::mean_squares``,
and each norm a ``specgraph::rms_norm_part``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import arguments, calls
from specgraph.ir.program import Program
from specgraph.passes.base import LoweringPass, PassResult
from specgraph.passes.common.patterns import (
    CASTS,
    RMS_NORM,
    Mismatch,
    aten,
    before_cast,
    dtype_of,
    insert_weight,
    only_user,
    producer,
    replace_by,
    rewrite,
    value_of,
    weight_name,
)

ALL_REDUCE_RANK = torch.ops.specgraph.all_reduce_rank.default
MEAN_SQUARES = torch.ops.specgraph.mean_squares.default
RMS_NORM_PART = torch.ops.specgraph.rms_norm_part.default


class FuseNorm(LoweringPass, requires={"traced"}):
    """Options: ``enabled``."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite every norm of every module."""
        dtype = program.target.dtype
        result = rewrite(program, aten.rsqrt.default, lambda node: _fuse(node, dtype))
        for _, module in program.modules.where(lambda graph: any(calls(graph, ALL_REDUCE_RANK))):
            for node in list(calls(module.graph, ALL_REDUCE_RANK)):
                _join_means(node)
            module.recompile()
        return result


def _fuse(rsqrt: fx.Node, dtype: torch.dtype) -> None:
    """Join the norm around ``rsqrt``. ``dtype`` is assumed for an input of which tracing noted nothing."""
    shifted = producer(rsqrt.args[0], aten.add.Tensor)
    if shifted is None or not isinstance(shifted.args[1], float):
        raise Mismatch(f"{rsqrt.name} has no epsilon under the root")
    total, place, mean = _mean(shifted.args[0])
    if mean is None or mean.args[1] not in _last(mean) or not arguments(mean)["keepdim"]:
        raise Mismatch(f"{shifted.name} is not the mean over the last dimension plus epsilon")
    wide = _squared(mean.args[0])
    normed = only_user(rsqrt)
    if normed is None or normed.target is not aten.mul.Tensor or set(normed.args) != {wide, rsqrt}:
        raise Mismatch(f"{rsqrt.name} does not scale what was squared")
    x = before_cast(wide)
    dtype = dtype_of(x) or dtype
    end, weight, offset = _weighted(normed, dtype)
    if dtype_of(end) != dtype:
        raise Mismatch(f"{end.name} is {dtype_of(end)}, but {x.name} is {dtype}")
    own, options = None if weight is None else insert_weight(end, weight), {"eps": shifted.args[1], "offset": offset}
    if total is None:
        replace_by(end, RMS_NORM, (x, own), options, "rms_norm")
    else:
        replace_by(end, RMS_NORM_PART, (x, own, total), {**options, "place": place}, "rms_norm_part")


def _mean(value: Any) -> tuple[fx.Node | None, int, fx.Node | None]:
    """The mean that ``value`` is, or that this device adds to it: then in front of it the sum, and its place there."""
    part = producer(value, aten.slice.Tensor)
    total = producer(value if part is None else part.args[0], ALL_REDUCE_RANK)
    if total is None:
        return None, 0, producer(value, aten.mean.dim)
    means = _means(total)
    for place, mean in enumerate(means):
        if len(means) == 1 if part is None else part.args[1:] == (-1, place, place + 1):
            return total, place, mean
    return None, 0, None


def _means(total: fx.Node) -> list[fx.Node | None]:
    """For each number of a row that is summed over devices, the mean of which this device adds its share, or None."""
    joined = producer(total.args[0], aten.cat.default)
    parts: Any = [total.args[0]] if joined is None or joined.args[1:] != (-1,) else joined.args[0]
    if any((value := value_of(part)) is None or value.shape[-1] != 1 for part in parts):
        return []
    divided = (producer(part, aten.div.Tensor) for part in parts)
    shares = [share if share and share.args[1] == total.kwargs["world_size"] else None for share in divided]
    return [producer(share.args[0], aten.mean.dim) if share else None for share in shares]


def _join_means(total: fx.Node) -> None:
    """Let one op compute the means of squares that this device adds to a sum, if it consists of such."""
    means = _means(total)
    try:
        inputs = [before_cast(_squared(mean.args[0])) for mean in means if mean is not None and _of_rows(mean)]
    except Mismatch:
        return
    wide = {torch.promote_types(x.meta["val"].dtype, torch.float32) for x in inputs}
    if len(inputs) == len(means) and wide == {dtype_of(total)}:
        own: Any = total.args[0]
        replace_by(own, MEAN_SQUARES, (inputs,), {"count": total.kwargs["world_size"]}, "mean_squares")


def _of_rows(mean: fx.Node) -> bool:
    """Whether a mean is over the last dimension of ``[B, T, H]``, and stays one."""
    value = mean.meta.get("val")
    return value is not None and value.dim() == 3 and mean.args[1] in _last(mean) and arguments(mean)["keepdim"]


def _last(mean: fx.Node) -> tuple[Any, ...]:
    value = mean.meta.get("val")
    return ([-1],) if value is None else ([-1], [value.dim() - 1])


def _squared(value: Any) -> fx.Node:
    power, product = producer(value, aten.pow.Tensor_Scalar), producer(value, aten.mul.Tensor)
    if power is not None and power.args[1] == 2 and isinstance(power.args[0], fx.Node):
        return power.args[0]
    if product is not None and product.args[0] is product.args[1] and isinstance(product.args[0], fx.Node):
        return product.args[0]
    raise Mismatch(f"{value} is not a square")


def _weighted(normed: fx.Node, dtype: torch.dtype) -> tuple[fx.Node, fx.Node | None, float]:
    """Follow casts and one multiplication with a weight, as long as nothing else reads the values in between."""
    end, weight, offset = normed, None, 0.0
    size = normed.meta["val"].shape[-1]
    while (user := only_user(end)) is not None:
        if user.target in CASTS and user.args[0] is end:
            end = user
        elif weight is None and (found := _weight(user, end, size)) is not None:
            end, (weight, offset) = user, found
        else:
            break
    # A last cast to another dtype belongs to whatever reads the norm, and not to the norm.
    while dtype_of(end) != dtype and end.target in CASTS:
        end = end.all_input_nodes[0]
    return end, weight, offset


def _weight(user: fx.Node, normed: fx.Node, size: int) -> tuple[fx.Node, float] | None:
    """The weight ``[size]`` by which ``user`` multiplies ``normed``, and the number that is added to the weight."""
    if user.target is not aten.mul.Tensor or normed not in user.args:
        return None
    other = user.args[1] if user.args[0] is normed else user.args[0]
    offset = 0.0
    plus = producer(other, aten.add.Tensor)
    if plus is not None and isinstance(plus.args[1], int | float):
        other, offset = plus.args[0], float(plus.args[1])
    elif plus is not None and isinstance(plus.args[0], int | float):
        other, offset = plus.args[1], float(plus.args[0])
    other = before_cast(other)
    known = isinstance(other, fx.Node) and weight_name(other) is not None and tuple(other.meta["val"].shape) == (size,)
    return (other, offset) if known else None
