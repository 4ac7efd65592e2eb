"""The ATen nodes of ``x * rsqrt(mean(x^2) + eps) * weight`` become one ``specgraph::rms_norm``.

The pass looks for ``rsqrt`` and reads the nodes around it. Models multiply by a weight, by a weight plus one (gemma) or
by nothing, and they convert to their own dtype before or after that. The pass writes the same op for all of them, which
rounds once, at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import arguments
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
    weight_name,
)


class FuseNorm(LoweringPass, requires={"traced"}):
    """Options: ``enabled``."""

    def apply(self, program: Program) -> PassResult:
        """Rewrite every norm of every module."""
        dtype = program.target.dtype
        return rewrite(program, aten.rsqrt.default, lambda node: _fuse(node, dtype))


def _fuse(rsqrt: fx.Node, dtype: torch.dtype) -> None:
    """Join the norm around ``rsqrt``. ``dtype`` is assumed for an input of which tracing noted nothing."""
    shifted = producer(rsqrt.args[0], aten.add.Tensor)
    if shifted is None or not isinstance(shifted.args[1], float):
        raise Mismatch(f"{rsqrt.name} has no epsilon under the root")
    mean = producer(shifted.args[0], aten.mean.dim)
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
    own = None if weight is None else insert_weight(end, weight)
    replace_by(end, RMS_NORM, (x, own), {"eps": shifted.args[1], "offset": offset}, "rms_norm")


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
