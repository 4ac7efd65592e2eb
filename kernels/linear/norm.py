"""Norms and means over the last dimension: ``specgraph::rms_norm``, ``rms_norm_pair``, ``layer_norm`` and ``row_mean``.

For rows ``x`` ``[..., H]`` of any float dtype they compute, in float32 (float64 stays), rounded once::

    rms_norm    x * rsqrt(mean(x ** 2) + eps) * (weight + offset)
    layer_norm  (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias
    row_mean    mean(x), [..., 1]

``rms_norm_pair`` puts two RMS norms side by side. The mean serves every other formula that reduces over the features of
a row.

A program takes a whole row, because all of it is needed for the sum and a row fits into registers. (A linear layer that
follows a norm does not need the whole row first; see :mod:`specgraph.kernels.linear.linear`.)

The order of a row's sum is therefore a function of the row's width and dtype alone, and does not depend on other rows.
The compiler derives the layout of a reduction from what it may assume about the pointers, so it must be able to assume
the same for all inputs of one width; :class:`Rows` takes care of that.

Sources: RMS norm, Zhang and Sennrich 2019, arXiv 1910.07467; layer norm, Ba et al. 2016, arXiv 1607.06450.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.strides import Rows, aligned, row_options
from specgraph.kernels.ops import declare, triton_or_reference


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of a dtype are computed: float32, or float64 if they have that."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True)
class RmsNorm:
    """``x * rsqrt(mean(x ** 2) + eps) * (weight + offset)`` over the last dimension.

    Computed in float32 (float64 stays) and rounded once, to the dtype of ``x``. The result is ``[..., H]``, contiguous.

    Attributes:
        x: ``[..., H]``.
        weight: ``[H]`` or None for 1, without the offset.
        eps: what is added to the mean of squares.
        offset: 1 where a model stores its weight as the difference from 1, as gemma does.
    """

    x: Tensor
    weight: Tensor | None
    _: KW_ONLY
    eps: float
    offset: float = 0.0


@dataclass(slots=True)
class RmsNormPair:
    """Two RMS norms side by side, ``cat([rms_norm(x), rms_norm(y)], -1)``: what an EAGLE-3 layer reads.

    The result is ``[..., 2 * H]``, contiguous.

    Attributes:
        x: ``[..., H]``; where ``tokens`` are given an embedding ``[V, H]``, of which their rows are normed.
        y: ``[..., H]``, of the dtype of ``x``.
        x_weight, y_weight, x_eps, y_eps, x_offset, y_offset: as in :class:`RmsNorm`.
        tokens: int64 ``[...]`` in ``[0, V)``, or None.
    """

    x: Tensor
    y: Tensor
    x_weight: Tensor | None
    y_weight: Tensor | None
    tokens: Tensor | None = None
    _: KW_ONLY
    x_eps: float
    y_eps: float
    x_offset: float = 0.0
    y_offset: float = 0.0


@dataclass(slots=True)
class LayerNorm:
    """``(x - mean(x)) * rsqrt(var(x) + eps) * weight + bias`` over the last dimension; the variance is the biased one.

    Computed in float32 (float64 stays) and rounded once, to the dtype of ``x``. The result is ``[..., H]``, contiguous.

    Attributes:
        x: ``[..., H]``.
        weight, bias: ``[H]`` or None.
        eps: what is added to the variance.
    """

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    _: KW_ONLY
    eps: float


@dataclass(slots=True)
class RowMean:
    """The mean over the last dimension, ``[..., H]`` to ``[..., 1]`` in the dtype of ``x``.

    Summed in float32 (float64 stays) and rounded once.
    """

    x: Tensor


def rms_norm_reference(given: RmsNorm) -> Tensor:
    """:class:`RmsNorm` in plain PyTorch."""
    x, weight = given.x, given.weight
    exact = x.to(exact_dtype(x.dtype))
    normed = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + given.eps)
    if weight is not None:
        normed = normed * (weight.to(exact.dtype) + given.offset)
    return normed.to(x.dtype).contiguous()


def rms_norm_pair_reference(given: RmsNormPair) -> Tensor:
    """:class:`RmsNormPair` in plain PyTorch."""
    x = given.x if given.tokens is None else torch.nn.functional.embedding(given.tokens, given.x)
    left = RmsNorm(x, given.x_weight, eps=given.x_eps, offset=given.x_offset)
    right = RmsNorm(given.y, given.y_weight, eps=given.y_eps, offset=given.y_offset)
    return torch.cat([rms_norm_reference(left), rms_norm_reference(right)], dim=-1)


def layer_norm_reference(given: LayerNorm) -> Tensor:
    """:class:`LayerNorm` in plain PyTorch."""
    x = given.x
    exact = x.to(exact_dtype(x.dtype))
    centred = exact - exact.mean(-1, keepdim=True)
    normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + given.eps)
    if given.weight is not None:
        normed = normed * given.weight.to(exact.dtype)
    if given.bias is not None:
        normed = normed + given.bias.to(exact.dtype)
    return normed.to(x.dtype).contiguous()


def row_mean_reference(given: RowMean) -> Tensor:
    """:class:`RowMean` in plain PyTorch."""
    x = given.x
    return x.to(exact_dtype(x.dtype)).mean(-1, keepdim=True).to(x.dtype).contiguous()


@triton.jit
def _row_start(row, group, outer, inner, ALIGNMENT: tl.constexpr):
    """The offset of a row of :class:`Rows`.

    The product with the constant ``ALIGNMENT`` tells the compiler what divides it.
    """
    row = row.to(tl.int64)
    return (row // group * outer + row % group * inner) * ALIGNMENT


@triton.jit
def rms_norm_row(x, weight, EPS, OFFSET, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr):
    """The norm of the row that begins at ``x``, not rounded: ``[BLOCK]``."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + column, mask=inside, other=0.0).to(EXACT)
    # ---- x * rsqrt(sum(x^2) / WIDTH + eps) * (weight + offset): [BLOCK]
    normed = values * tl.rsqrt(tl.sum(values * values, axis=0) / WIDTH + EPS)
    if weight is not None:
        normed = normed * (tl.load(weight + column, mask=inside, other=0.0).to(EXACT) + OFFSET)
    return normed


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _rms_norm_kernel(
    out, x, weight, group, outer, inner, EPS: tl.constexpr, OFFSET: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):
    """One row per program."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x += _row_start(row, group, outer, inner, ALIGNMENT)
    normed = rms_norm_row(x, weight, EPS, OFFSET, WIDTH, BLOCK, EXACT)
    tl.store(out + row.to(tl.int64) * WIDTH + column, normed.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["group", "outer", "inner", "y_group", "y_outer", "y_inner"])
def _rms_norm_pair_kernel(
    out, x, y, x_weight, y_weight, tokens, group, outer, inner, y_group, y_outer, y_inner, X_EPS: tl.constexpr,
    X_OFFSET: tl.constexpr, Y_EPS: tl.constexpr, Y_OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):
    """The norm of one row of ``x`` or of ``y``. The grid is (rows, 2)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    out += (2 * row.to(tl.int64) + tl.program_id(1)) * WIDTH + column
    if tl.program_id(1) == 0:
        if tokens is None:
            x += _row_start(row, group, outer, inner, ALIGNMENT)
        else:
            x += tl.load(tokens + row) * WIDTH
        normed = rms_norm_row(x, x_weight, X_EPS, X_OFFSET, WIDTH, BLOCK, EXACT)
        tl.store(out, normed.to(out.dtype.element_ty), mask=column < WIDTH)
    else:
        y += _row_start(row, y_group, y_outer, y_inner, ALIGNMENT)
        normed = rms_norm_row(y, y_weight, Y_EPS, Y_OFFSET, WIDTH, BLOCK, EXACT)
        tl.store(out, normed.to(out.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _layer_norm_kernel(
    out, x, weight, bias, group, outer, inner, EPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNMENT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):
    """One row per program."""
    gdc_wait(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + _row_start(row, group, outer, inner, ALIGNMENT) + column, mask=inside, other=0.0).to(EXACT)
    # ---- c = x - mean(x), and c * rsqrt(mean(c^2) + eps) * weight + bias: [BLOCK]
    centred = tl.where(inside, values - tl.sum(values, axis=0) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / WIDTH + EPS)
    if weight is not None:
        normed = normed * tl.load(weight + column, mask=inside, other=0.0).to(EXACT)
    if bias is not None:
        normed = normed + tl.load(bias + column, mask=inside, other=0.0).to(EXACT)
    gdc_launch_dependents(PDL)
    tl.store(out + row.to(tl.int64) * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _row_mean_kernel(
    out, x, group, outer, inner, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row per program."""
    gdc_wait(PDL)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    start = _row_start(row, group, outer, inner, ALIGNMENT)
    values = tl.load(x + start + column, mask=column < WIDTH, other=0.0).to(EXACT)
    gdc_launch_dependents(PDL)
    tl.store(out + row, (tl.sum(values, axis=0) / WIDTH).to(out.dtype.element_ty))


def _launch(kernel: Any, rows: Rows, out: Tensor, *vectors: Tensor | None, **options: float) -> Tensor:
    """Launch one program per row. Everything that it is compiled for is a function of the width and the dtypes."""
    own = row_options(rows.x.shape[-1], rows.x.dtype)
    launch(kernel, (rows.count,), out, rows.x, *vectors, *rows.arguments(), **options, **own)
    return out


def rms_norm_triton(given: RmsNorm) -> Tensor:
    """:class:`RmsNorm` in one kernel."""
    out = given.x.new_empty(given.x.shape)
    return _launch(_rms_norm_kernel, Rows.of(given.x), out, aligned(given.weight), EPS=given.eps, OFFSET=given.offset)


def rms_norm_pair_triton(given: RmsNormPair) -> Tensor:
    """:class:`RmsNormPair` in one kernel, two programs per row."""
    out, y, tokens = _rms_norm_pair_fake(given), given.y, given.tokens
    left, right = Rows.of(given.x if tokens is None else given.x.contiguous()), Rows.of(y)
    launch(
        _rms_norm_pair_kernel, (right.count, 2), out, left.x, right.x, aligned(given.x_weight), aligned(given.y_weight),
        None if tokens is None else tokens.contiguous(), *left.arguments(), *right.arguments(), X_EPS=given.x_eps,
        X_OFFSET=given.x_offset, Y_EPS=given.y_eps, Y_OFFSET=given.y_offset, **row_options(y.shape[-1], y.dtype),
    )
    return out


def layer_norm_triton(given: LayerNorm) -> Tensor:
    """:class:`LayerNorm` in one kernel."""
    out = given.x.new_empty(given.x.shape)
    return _launch(_layer_norm_kernel, Rows.of(given.x), out, aligned(given.weight), aligned(given.bias), EPS=given.eps)


def row_mean_triton(given: RowMean) -> Tensor:
    """:class:`RowMean` in one kernel."""
    return _launch(_row_mean_kernel, Rows.of(given.x), given.x.new_empty((*given.x.shape[:-1], 1)))


def _check_input(x: Tensor) -> None:
    require(x.dim() >= 1 and x.dtype.is_floating_point, lambda: f"x must be float [..., H], not {x.dtype} {x.dim()}-d")
    require(x.shape[-1] > 0, lambda: "x must have at least one feature")


def _rms_norm_fake(given: RmsNorm) -> Tensor:
    _check_input(given.x)
    check_shapes(given, x="... H", weight="H")
    return given.x.new_empty(given.x.shape)


def _rms_norm_pair_fake(given: RmsNormPair) -> Tensor:
    x, y, tokens = given.x, given.y, given.tokens
    _check_input(x)
    _check_input(y)
    check_shapes(given, y="... H", x_weight="H", y_weight="H")
    rows = x.shape[:-1] if tokens is None else tokens.shape
    require(
        x.dtype == y.dtype and x.shape[-1] == y.shape[-1] and rows == y.shape[:-1],
        lambda: f"x and y must be pairs of rows, not {x.dtype} {[*rows, x.shape[-1]]} and {y.dtype} {list(y.shape)}",
    )
    require(tokens is None or x.dim() == 2, lambda: f"an embedding must be [V, H], not {x.dim()}-d")
    return y.new_empty((*y.shape[:-1], 2 * y.shape[-1]))


def _layer_norm_fake(given: LayerNorm) -> Tensor:
    _check_input(given.x)
    check_shapes(given, x="... H", weight="H", bias="H")
    return given.x.new_empty(given.x.shape)


def _row_mean_fake(given: RowMean) -> Tensor:
    _check_input(given.x)
    return given.x.new_empty((*given.x.shape[:-1], 1))


RMS_NORM = declare("rms_norm", RmsNorm, _rms_norm_fake, triton_or_reference(rms_norm_triton, rms_norm_reference))
RMS_NORM_PAIR = declare(
    "rms_norm_pair", RmsNormPair, _rms_norm_pair_fake,
    triton_or_reference(rms_norm_pair_triton, rms_norm_pair_reference),
)
LAYER_NORM = declare(
    "layer_norm", LayerNorm, _layer_norm_fake, triton_or_reference(layer_norm_triton, layer_norm_reference),
)
ROW_MEAN = declare("row_mean", RowMean, _row_mean_fake, triton_or_reference(row_mean_triton, row_mean_reference))
