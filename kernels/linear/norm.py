"""``specgraph::rms_norm`` (alone, or two side by side), ``layer_norm`` and ``row_mean``: sums over the last dimension.

Root mean square norm: Zhang and Sennrich 2019 (arXiv 1910.07467); layer norm: Ba et al. 2016 (arXiv 1607.06450). The
mean alone serves every other formula that reduces over the features of a row.

A program takes one row as a whole, so the order of its sum is given by the row's width and dtype alone. The compiler
derives the layout of a reduction from what it may assume of the pointers. Hence it may assume the same for all inputs
of one width: see :class:`Rows`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require

torch.library.define("specgraph::rms_norm", "(Tensor x, Tensor? weight, *, float eps, float offset=0.0) -> Tensor")
torch.library.define("specgraph::layer_norm", "(Tensor x, Tensor? weight, Tensor? bias, *, float eps) -> Tensor")
torch.library.define(
    "specgraph::rms_norm_pair",
    "(Tensor x, Tensor y, Tensor? x_weight, Tensor? y_weight, Tensor? tokens=None, *, float x_eps, float y_eps, "
    "float x_offset=0.0, float y_offset=0.0) -> Tensor",
)
torch.library.define("specgraph::row_mean", "(Tensor x) -> Tensor")

ALIGNED = 16
"""Widths that are multiples of this are read in vectors; it covers 16 bytes of every dtype."""


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def rms_norm_reference(x: Tensor, weight: Tensor | None, *, eps: float, offset: float = 0.0) -> Tensor:
    """``x * rsqrt(mean(x ** 2) + eps) * (weight + offset)`` over the last dimension.

    Computed in float32 (float64 stays) and rounded once, to the dtype of ``x``.

    Args:
        x: ``[..., H]``.
        weight: ``[H]`` or None for 1, without the offset.
        eps: what is added to the mean of squares.
        offset: 1 where a model stores its weight as the difference from 1, as gemma does.

    Returns:
        ``[..., H]``, contiguous.
    """
    exact = x.to(_exact(x.dtype))
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * (weight.to(exact.dtype) + offset)
    return normed.to(x.dtype).contiguous()


def rms_norm_pair_reference(
    x: Tensor, y: Tensor, x_weight: Tensor | None, y_weight: Tensor | None, tokens: Tensor | None = None, *,
    x_eps: float, y_eps: float, x_offset: float = 0.0, y_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """Two RMS norms side by side, ``cat([rms_norm(x), rms_norm(y)], -1)``: what an EAGLE-3 layer reads.

    Args:
        x: ``[..., H]``; where ``tokens`` are given an embedding ``[V, H]``, of which their rows are normed.
        y: ``[..., H]``, of the dtype of ``x``.
        x_weight, y_weight, x_eps, y_eps, x_offset, y_offset: as in :func:`rms_norm_reference`.
        tokens: int64 ``[...]`` in ``[0, V)``, or None.

    Returns:
        ``[..., 2 * H]``, contiguous.
    """
    x = x if tokens is None else torch.nn.functional.embedding(tokens, x)
    left = rms_norm_reference(x, x_weight, eps=x_eps, offset=x_offset)
    return torch.cat([left, rms_norm_reference(y, y_weight, eps=y_eps, offset=y_offset)], dim=-1)


def layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """``(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`` over the last dimension; the variance is the biased one.

    Computed in float32 (float64 stays) and rounded once, to the dtype of ``x``.

    Args:
        x: ``[..., H]``.
        weight, bias: ``[H]`` or None.
        eps: what is added to the variance.

    Returns:
        ``[..., H]``, contiguous.
    """
    exact = x.to(_exact(x.dtype))
    centred = exact - exact.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.to(exact.dtype)
    if bias is not None:
        normed = normed + bias.to(exact.dtype)
    return normed.to(x.dtype).contiguous()


def row_mean_reference(x: Tensor) -> Tensor:
    """The mean over the last dimension: ``[..., H]`` to ``[..., 1]`` in the dtype of ``x``, summed in float32 or 64."""
    return x.to(_exact(x.dtype)).mean(-1, keepdim=True).to(x.dtype).contiguous()


@triton.jit
def _row_start(row, group, outer, inner, UNIT: tl.constexpr):
    """Offset of a row of :class:`Rows`; the product with a constant tells the compiler what divides it."""
    row = row.to(tl.int64)
    return (row // group * outer + row % group * inner) * UNIT


@triton.jit
def _rms_norm_row(x, weight, EPS, OFFSET, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """The normed row that begins at ``x``, not rounded."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + column, mask=inside, other=0.0).to(EXACT)
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + EPS)
    if weight is not None:
        normed = normed * (tl.load(weight + column, mask=inside, other=0.0).to(EXACT) + OFFSET)
    return normed


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _rms_norm_kernel(
    out, x, weight, group, outer, inner, EPS: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x += _row_start(row, group, outer, inner, UNIT)
    normed = _rms_norm_row(x, weight, EPS, OFFSET, WIDTH, BLOCK, EXACT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + row.to(tl.int64) * WIDTH + column, normed.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["group", "outer", "inner", "y_group", "y_outer", "y_inner"])
def _rms_norm_pair_kernel(
    out, x, y, x_weight, y_weight, tokens, group, outer, inner, y_group, y_outer, y_inner, X_EPS: tl.constexpr,
    X_OFFSET: tl.constexpr, Y_EPS: tl.constexpr, Y_OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    out += (2 * row.to(tl.int64) + tl.program_id(1)) * WIDTH + column
    if tl.program_id(1) == 0:
        if tokens is None:
            x += _row_start(row, group, outer, inner, UNIT)
        else:
            x += tl.load(tokens + row) * WIDTH
        normed = _rms_norm_row(x, x_weight, X_EPS, X_OFFSET, WIDTH, BLOCK, EXACT)
        tl.store(out, normed.to(out.dtype.element_ty), mask=column < WIDTH)
    else:
        y += _row_start(row, y_group, y_outer, y_inner, UNIT)
        normed = _rms_norm_row(y, y_weight, Y_EPS, Y_OFFSET, WIDTH, BLOCK, EXACT)
        tl.store(out, normed.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _layer_norm_kernel(
    out, x, weight, bias, group, outer, inner, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + _row_start(row, group, outer, inner, UNIT) + column, mask=inside, other=0.0).to(EXACT)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + EPS)
    if weight is not None:
        normed = normed * tl.load(weight + column, mask=inside, other=0.0).to(EXACT)
    if bias is not None:
        normed = normed + tl.load(bias + column, mask=inside, other=0.0).to(EXACT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + row.to(tl.int64) * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _row_mean_kernel(
    out, x, group, outer, inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    start = _row_start(row, group, outer, inner, UNIT)
    values = tl.load(x + start + column, mask=column < WIDTH, other=0.0).to(EXACT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + row, (tl.sum(values, axis=0) / WIDTH).to(out.dtype.element_ty))


@dataclass(frozen=True)
class Rows:
    """The rows of ``x`` ``[..., W]`` where they lie: row ``r`` at ``(r // group * outer + r % group * inner) * unit``.

    Two strides cover the heads of a merged projection, ``[B, T, heads, D]``; any other view is copied. ``unit`` is
    :data:`ALIGNED` if that divides the width. Rows that do not start at a multiple of it are then copied, too, so that
    kernels may assume it of every ``x``: what they assume is a function of the width alone.
    """

    x: Tensor
    count: int
    group: int
    outer: int
    inner: int
    unit: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of ``x``, or of a contiguous copy."""
        width = x.shape[-1]
        unit = ALIGNED if width % ALIGNED == 0 else 1
        strides = _two_strides(x)
        aligned = x.data_ptr() % 16 == 0 if unit > 1 else True
        if strides is None or not aligned or any(stride % unit for stride in strides[1:]):
            x = x.clone(memory_format=torch.contiguous_format)
            strides = (1, width, 0)
        group, outer, inner = strides
        return cls(x, x.numel() // width, group, outer // unit, inner // unit, unit)

    def arguments(self) -> tuple[int, int, int]:
        """What kernels take after their tensors: ``group``, ``outer``, ``inner``."""
        return self.group, self.outer, self.inner


def _two_strides(x: Tensor) -> tuple[int, int, int] | None:
    """``group``, ``outer`` and ``inner`` of :class:`Rows` in elements; None if two strides do not describe ``x``."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    merged: list[tuple[int, int]] = []  # (size, stride), innermost first
    for size, stride in reversed(list(zip(x.shape[:-1], x.stride()[:-1], strict=True))):
        if size == 1:
            continue
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    if len(merged) > 2:
        return None
    if len(merged) < 2:
        return 1, merged[0][1] if merged else 0, 0
    (group, inner), (_, outer) = merged
    return group, outer, inner


def _launch(kernel: Any, rows: Rows, out: Tensor, *vectors: Tensor | None, **options: float) -> Tensor:
    """One program per row; everything it is compiled for is a function of the width and the dtypes."""
    width = rows.x.shape[-1]
    block = triton.next_power_of_2(width)
    pdl = supports_pdl(out.device)
    kernel[(rows.count,)](
        out, rows.x, *vectors, *rows.arguments(), **options, WIDTH=width, BLOCK=block, UNIT=rows.unit,
        EXACT=tl.float64 if rows.x.dtype == torch.float64 else tl.float32, PDL=pdl,
        num_warps=min(max(block // 512, 1), 32), **launch_options(pdl),
    )  # fmt: skip
    return out


def _aligned(vector: Tensor | None) -> Tensor | None:
    """``vector``, or a copy at a multiple of 16 bytes: a kernel's layout would follow where it begins."""
    if vector is None or (vector.is_contiguous() and vector.data_ptr() % 16 == 0):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, offset: float = 0.0) -> Tensor:
    """:func:`rms_norm_reference` in one kernel."""
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    return _launch(_rms_norm_kernel, Rows.of(x), out, _aligned(weight), EPS=eps, OFFSET=offset)


def rms_norm_pair(
    x: Tensor, y: Tensor, x_weight: Tensor | None, y_weight: Tensor | None, tokens: Tensor | None = None, *,
    x_eps: float, y_eps: float, x_offset: float = 0.0, y_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """:func:`rms_norm_pair_reference` in one kernel, two programs per row."""
    _check_pair(x, y, x_weight, y_weight, tokens)
    width = y.shape[-1]
    out = y.new_empty((*y.shape[:-1], 2 * width))
    if out.numel() == 0:
        return out
    left, right = Rows.of(x if tokens is None else x.contiguous()), Rows.of(y)
    block, pdl = triton.next_power_of_2(width), supports_pdl(out.device)
    _rms_norm_pair_kernel[(right.count, 2)](
        out, left.x, right.x, _aligned(x_weight), _aligned(y_weight), None if tokens is None else tokens.contiguous(),
        *left.arguments(), *right.arguments(), X_EPS=x_eps, X_OFFSET=x_offset, Y_EPS=y_eps, Y_OFFSET=y_offset,
        WIDTH=width, BLOCK=block, UNIT=right.unit, EXACT=tl.float64 if y.dtype == torch.float64 else tl.float32,
        PDL=pdl, num_warps=min(max(block // 512, 1), 32), **launch_options(pdl),
    )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    """:func:`layer_norm_reference` in one kernel."""
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    return _launch(_layer_norm_kernel, Rows.of(x), out, _aligned(weight), _aligned(bias), EPS=eps)


def row_mean(x: Tensor) -> Tensor:
    """:func:`row_mean_reference` in one kernel."""
    out = x.new_empty((*x.shape[:-1], 1))
    return out if out.numel() == 0 else _launch(_row_mean_kernel, Rows.of(x), out)


def _check_input(x: Tensor, **vectors: Tensor | None) -> None:
    require(x.dim() >= 1 and x.dtype.is_floating_point, lambda: f"x must be float [..., H], not {x.dtype} {x.dim()}-d")
    require(x.shape[-1] > 0, lambda: "x must have at least one feature")
    for name, vector in vectors.items():
        if vector is not None:
            _check_vector(name, vector, x)


def _check_vector(name: str, vector: Tensor, x: Tensor) -> None:
    require(
        vector.dim() == 1 and vector.shape[0] == x.shape[-1],
        lambda: f"{name} must be [{x.shape[-1]}], one value per feature of x, not {list(vector.shape)}",
    )


def _rms_norm_fake(x: Tensor, weight: Tensor | None, *, eps: float, offset: float = 0.0) -> Tensor:
    _check_input(x, weight=weight)
    return x.new_empty(x.shape)


def _check_pair(x: Tensor, y: Tensor, x_weight: Tensor | None, y_weight: Tensor | None, tokens: Tensor | None) -> None:
    _check_input(x, x_weight=x_weight)
    _check_input(y, y_weight=y_weight)
    rows = x.shape[:-1] if tokens is None else tokens.shape
    require(
        x.dtype == y.dtype and x.shape[-1] == y.shape[-1] and rows == y.shape[:-1],
        lambda: f"x and y must be pairs of rows, not {x.dtype} {[*rows, x.shape[-1]]} and {y.dtype} {list(y.shape)}",
    )
    require(tokens is None or x.dim() == 2, lambda: f"an embedding must be [V, H], not {x.dim()}-d")


def _rms_norm_pair_fake(
    x: Tensor, y: Tensor, x_weight: Tensor | None, y_weight: Tensor | None, tokens: Tensor | None = None, *,
    x_eps: float, y_eps: float, x_offset: float = 0.0, y_offset: float = 0.0,
) -> Tensor:  # fmt: skip
    _check_pair(x, y, x_weight, y_weight, tokens)
    return y.new_empty((*y.shape[:-1], 2 * y.shape[-1]))


def _layer_norm_fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float) -> Tensor:
    _check_input(x, weight=weight, bias=bias)
    return x.new_empty(x.shape)


def _row_mean_fake(x: Tensor) -> Tensor:
    _check_input(x)
    return x.new_empty((*x.shape[:-1], 1))


register("rms_norm", cpu=rms_norm_reference, cuda=rms_norm, fake=_rms_norm_fake)
register("rms_norm_pair", cpu=rms_norm_pair_reference, cuda=rms_norm_pair, fake=_rms_norm_pair_fake)
register("layer_norm", cpu=layer_norm_reference, cuda=layer_norm, fake=_layer_norm_fake)
register("row_mean", cpu=row_mean_reference, cuda=row_mean, fake=_row_mean_fake)
