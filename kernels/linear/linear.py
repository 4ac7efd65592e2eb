"""``specgraph::linear``: a linear layer fused with the RMS norm before it and the bias, activation and residual after.

It computes ``activation(x @ weight.T * scale + bias) + residual`` for ``x`` ``[..., I]`` and ``weight`` ``[O, I]``, in
float32, rounded once to the dtype of ``x`` (bfloat16, float16 or float32; float64 takes the definition). Gated
activations take a weight ``[2 * O, I]`` of gate rows over up rows and give ``act(gate) * up``.

An RMS norm before the product costs no launch and nothing in the main loop, because it comes in two parts: ``x``, which
is the row times the norm's weight, and ``sum_sq``, the sums of squares of 64 entries each, which give the
``scale`` of the row's result. The linear layer that writes a row produces both parts (``specgraph::linear_norm``),
since its tiles hold whole groups of 64 entries. For rows from elsewhere ``specgraph::norm_parts`` produces them.

A program computes one tile of the result. If that gives too few programs to fill a GPU, the summed dimension is cut
into slices (split-K) with a program for each. These programs store partial sums in scratch memory, and the last one to
arrive adds them in the order of the slices. With many rows one program computes all slices and adds them in the same
order.

The bits of a row's result do not depend on the number of rows, for these reasons:

- The slices of the summed dimension and the order of their sum are a function of the weight's shape and dtype alone.
- The weight is the left operand of ``tl.dot``, so that rows are columns of the product, and their number changes only
  its width.
- Tiles may differ in size, warps and stages. Every tile has at least 64 rows of the weight and a multiple of 4 warps,
  and hence uses the same matrix instruction (``wgmma`` on Hopper), which adds 16 products at a time to a sum whose
  order does not depend on the width.
- Squares within a group, and the sums of all groups, are added as integers, whose sum is the same in any order.
- Contraction is off, so that no compilation fuses a product and a sum that another compilation does not fuse.

On Hopper, few rows go to :mod:`specgraph.kernels.linear.hopper` and many to
:mod:`specgraph.kernels.linear.hopper_wide`, which give the same bits. All other cases go to
:mod:`specgraph.kernels.linear.linear_triton`. Source of split-K: for example Osama et al. 2023, arXiv 2301.03598.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import dense_rows, runs_gluon, supports_pdl
from specgraph.kernels.linear.linear_triton import NORM_GROUP
from specgraph.kernels.linear.product import Product, Tiles, as_rows, is_gated, launch_norm_parts, launch_tiles
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference

_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
_GATED = {f"{name}_mul": _PLAIN[name] for name in ("silu", "gelu", "gelu_tanh")}
ACTIVATIONS = (*_PLAIN, *_GATED)
"""The activations. The last three take a weight of gate rows over up rows and give ``act(gate) * up``."""


@dataclass(slots=True)
class Linear:
    """``activation(x @ weight.T * scale + bias) + residual``, in float32 (float64 for float64), rounded once.

    The result is ``[..., O]`` in the dtype of ``x``.

    Attributes:
        x: ``[..., I]``.
        weight: ``[O, I]``; for the gated activations ``[2 * O, I]``, gate rows first.
        bias: one per row of ``weight``, or None.
        residual: ``[..., O]`` or None.
        sum_sq: ``[..., ceil(I / 64)]`` from :class:`NormParts`, whose other result is ``x``; then
            ``scale = rsqrt(sum(sum_sq) / I + norm_eps)``, otherwise 1.
        activation: one of :data:`ACTIVATIONS`.
        constant_weight: whether nothing in a CUDA graph that holds this call writes ``weight``, so that a GPU may read
            it before the kernels in front have finished. Outside of graphs it makes no difference.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    sum_sq: Tensor | None = None
    _: KW_ONLY
    norm_eps: float = 0.0
    activation: str = "none"
    constant_weight: bool = True


@dataclass(slots=True)
class LinearNorm:
    """:class:`Linear`, then :class:`NormParts` of its result: ``(out, weighted, sum_sq)``."""

    x: Tensor
    weight: Tensor
    norm_weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    sum_sq: Tensor | None = None
    _: KW_ONLY
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    activation: str = "none"
    constant_weight: bool = True


@dataclass(slots=True)
class NormParts:
    """The two parts of ``x / sqrt(mean(x ** 2) + eps) * (norm_weight + norm_offset)`` that need no whole row.

    They are ``x * (norm_weight + norm_offset)`` in the dtype of ``x``, and the sums of squares of 64 entries each,
    ``[..., ceil(I / 64)]`` in float32 (float64 for float64).

    Attributes:
        x: ``[..., I]``.
        norm_weight: ``[I]``.
        norm_offset: 1.0 for gemma's norm, which stores the weight's distance from one.
    """

    x: Tensor
    norm_weight: Tensor
    _: KW_ONLY
    norm_offset: float = 0.0


def linear_reference(given: Linear | LinearNorm) -> Tensor:
    """:class:`Linear` in plain PyTorch."""
    exact = torch.promote_types(given.x.dtype, torch.float32)
    return finished(given, functional.linear(given.x.to(exact), given.weight.to(exact)))


def finished(given: Any, out: Tensor) -> Tensor:
    """What follows the product ``out``, in float32 or float64, of :class:`Linear` or arguments that have its fields."""
    x, bias, sum_sq, residual, exact = given.x, given.bias, given.sum_sq, given.residual, out.dtype
    if sum_sq is not None:
        out = out * torch.rsqrt(sum_sq.to(exact).sum(-1, keepdim=True) / x.shape[-1] + given.norm_eps)
    out = _activated(out if bias is None else out + bias.to(exact), given.activation)
    return (out if residual is None else out + residual.to(exact)).to(x.dtype)


def _activated(y: Tensor, activation: str) -> Tensor:
    """``y`` after one of :data:`ACTIVATIONS`; the gated ones halve its last dimension."""
    if not is_gated(activation):
        return _PLAIN[activation](y)
    gate, up = y.chunk(2, -1)
    return _GATED[activation](gate) * up


def norm_parts_reference(given: NormParts) -> tuple[Tensor, Tensor]:
    """:class:`NormParts` in plain PyTorch."""
    x = given.x
    exact = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(exact)
    padded = functional.pad(rows, (0, -x.shape[-1] % NORM_GROUP))
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // NORM_GROUP, NORM_GROUP)
    sum_sq = groups.square().sum(-1)
    return (rows * (given.norm_weight.to(exact) + given.norm_offset)).to(x.dtype), sum_sq


def linear_norm_reference(given: LinearNorm) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`LinearNorm` in plain PyTorch."""
    return with_norm_parts(given, linear_reference(given))


def with_norm_parts(given: Any, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The result ``out`` of a linear layer, and the parts of the norm that :class:`LinearNorm`, or arguments that have
    its fields, want of it."""
    return (out, *norm_parts_reference(NormParts(out, given.norm_weight, norm_offset=given.norm_offset)))


@functools.cache
def hopper(kernels: str = "hopper") -> ModuleType:
    """Gluon is experimental: other releases of Triton may lack it, so it is imported where it runs."""
    return importlib.import_module(f"specgraph.kernels.linear.{kernels}")


def _hopper_covers(given: Linear | LinearNorm) -> bool:
    """Few rows of 16-bit values: what its kernel was written for, and gives the bits of the tiles."""
    gated, scaled = is_gated(given.activation), given.sum_sq is not None
    return _runs_here(given) and hopper().covers(given.x, given.weight, gated, scaled)


def _wide_covers(given: Linear | LinearNorm) -> bool:
    """Many rows of 16-bit values, in the same way."""
    return _runs_here(given) and hopper("hopper_wide").covers(given.x, given.weight, is_gated(given.activation))


def _runs_here(given: Linear | LinearNorm) -> bool:
    """Whether there are rows, and kernels for Hopper can be imported for their device."""
    return runs_gluon(given.x.device) and given.x.numel() > 0


def filled(
    given: Linear | LinearNorm, fill: Callable[[Product], None], pdl: bool | None, factors: Tensor | None = None
) -> Any:
    """The result of a linear layer, and the parts of the norm behind it if it has one.

    ``factors`` are what is multiplied with the weight, if it is not ``x`` itself.
    """
    x, weight, out = given.x, given.weight, given.x.new_empty(_out_shape(given))
    factors = as_rows(x if factors is None else factors)
    rows = dense_rows(weight)  # a copy is not constant: it is written just before
    residual = None if given.residual is None else as_rows(given.residual)
    next_norm = None
    if isinstance(given, LinearNorm):
        next_norm = (given.norm_weight, given.norm_offset, *_empty_parts(out))
    if out.numel() > 0:
        fill(Product(
            out, factors, rows, given.bias, residual, given.sum_sq, given.norm_eps, given.activation,
            given.constant_weight and rows is weight, next_norm, supports_pdl(x.device) if pdl is None else pdl,
        ))
    return out if next_norm is None else (out, *next_norm[2:])


def linear_triton(given: Linear | LinearNorm, *, tiling: Tiles | None = None, pdl: bool | None = None) -> Any:
    """:class:`Linear` or :class:`LinearNorm` in one kernel; large tiles leave the parts of a norm to a second launch.

    Args:
        tiling: in place of :func:`~specgraph.kernels.linear.product.tiles`; one with another number of slices may give
            other bits.
        pdl: whether to use programmatic dependent launch; None uses it where it exists.
    """
    _check_dtype(given)
    return filled(given, functools.partial(launch_tiles, tiling=tiling), pdl)


def linear_hopper(given: Linear | LinearNorm, *, kernels: str = "hopper", pdl: bool | None = None) -> Any:
    """The same by a kernel for Hopper, which gives the bits of :func:`linear_triton`: that for few rows, or that of
    ``hopper_wide`` for many."""
    _check_dtype(given)
    return filled(given, hopper(kernels).launch, pdl)


linear_hopper_wide = functools.partial(linear_hopper, kernels="hopper_wide")


def norm_parts_triton(given: NormParts, *, pdl: bool | None = None) -> tuple[Tensor, Tensor]:
    """:class:`NormParts` in one kernel, with the bits that :func:`linear_triton` gives."""
    parts = _empty_parts(given.x)
    if given.x.numel() > 0:
        launch_norm_parts(as_rows(given.x), (given.norm_weight, given.norm_offset, *parts), pdl)
    return parts


def _check_dtype(given: Linear | LinearNorm) -> None:
    x, weight = given.x, given.weight
    require(weight.dtype == x.dtype, lambda: f"weight is {weight.dtype}, x is {x.dtype}: they must agree")


def _out_shape(given: Linear | LinearNorm) -> tuple[int, ...]:
    outer = given.weight.shape[0]
    return (*given.x.shape[:-1], outer // 2 if is_gated(given.activation) else outer)


def _empty_parts(out: Tensor) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(out.dtype, torch.float32)
    sum_sq = out.new_empty((*out.shape[:-1], -(-out.shape[-1] // NORM_GROUP)), dtype=exact)
    return out.new_empty(out.shape), sum_sq


def linear_fake(given: Linear | LinearNorm) -> Tensor:
    x, weight, residual, sum_sq = given.x, given.weight, given.residual, given.sum_sq
    activation = given.activation
    require(activation in ACTIVATIONS, lambda: f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation}")
    check_shapes(given, weight="O I", x="... I", bias="O")
    outer, inner = weight.shape
    _check_dtype(given)
    if sum_sq is not None:
        wanted = (*x.shape[:-1], -(-inner // NORM_GROUP))
        require(sum_sq.shape == wanted, lambda: f"sum_sq must be {wanted}, not {tuple(sum_sq.shape)}")
        require(
            sum_sq.is_contiguous(),
            lambda: "sum_sq must be contiguous, as norm_parts and linear_norm give them",
        )
    if is_gated(activation):
        require(outer % 2 == 0, lambda: f"{activation} takes gate rows and as many up rows, not {outer} together")
    shape = _out_shape(given)
    if residual is not None:
        require(residual.shape == shape, lambda: f"residual must be {shape}, not {tuple(residual.shape)}")
    return x.new_empty(shape)


def norm_parts_fake(given: NormParts) -> tuple[Tensor, Tensor]:
    """Empty results of :class:`NormParts`, whose arguments are checked."""
    check_shapes(given, x="... I", norm_weight="I")
    return _empty_parts(given.x)


def linear_norm_fake(given: LinearNorm) -> tuple[Tensor, Tensor, Tensor]:
    out = linear_fake(given)
    return (out, *norm_parts_fake(NormParts(out, given.norm_weight, norm_offset=given.norm_offset)))


HOPPER = (
    Variant("hopper", linear_hopper, batch_invariant=True, covers=_hopper_covers),
    Variant("hopper_wide", linear_hopper_wide, batch_invariant=True, covers=_wide_covers),
)
LINEAR = declare(
    "linear", Linear, linear_fake,
    (*HOPPER, *triton_or_reference(linear_triton, linear_reference, covers=not_float64("x"))),
)
LINEAR_NORM = declare(
    "linear_norm", LinearNorm, linear_norm_fake,
    (*HOPPER, *triton_or_reference(linear_triton, linear_norm_reference, covers=not_float64("x"))),
)
NORM_PARTS = declare(
    "norm_parts", NormParts, norm_parts_fake,
    triton_or_reference(norm_parts_triton, norm_parts_reference, covers=not_float64("x")),
)
