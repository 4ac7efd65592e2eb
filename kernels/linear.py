"""``specgraph::linear``: a linear layer with its neighbours: RMS norm before, bias, activation and residual after it.

A row's result is the same, bit for bit, whatever the number of rows: what lies along the summed dimension (the block,
the pieces, the order of their sum) is a function of the weight's shape and dtype alone, and the weight is the left
operand of ``tl.dot``, so that rows are columns of the product and only its width follows their number. Tiles differ in
width, warps and stages; every one of them has at least 64 rows of the weight and a multiple of 4 warps, hence the same
matrix instruction (``wgmma`` on Hopper), whose order along the summed dimension does not depend on its width. Floating
point contraction is off, so that no compilation fuses what another does not.

With few tiles for the number of multiprocessors the summed dimension is cut into pieces ("split-K", e.g. Osama et al.
2023, arXiv 2301.03598). Programs of the same tile leave their partial sums in scratch memory and the last to arrive
adds them in the order of the pieces. With many rows one program goes through all pieces and adds them in that order.

The norm is applied without a launch of its own: every program reads the whole row anyway. The norm's weight multiplies
the tile of ``x``, the mean square is gathered beside the product and scales the result. With many rows, where that
would slow the main loop, a first kernel does both; it gives the same bits.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.launch import MAX_COUNTERS, arrival_counters, launch_options, supports_pdl
from specgraph.kernels.sample import require

torch.library.define(
    "specgraph::linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? norm_weight=None, *, "
    "float norm_eps=0.0, float norm_offset=0.0, str activation='none') -> Tensor",
)

_GELU_TANH = functools.partial(functional.gelu, approximate="tanh")
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _GELU_TANH,
    "relu": functional.relu,
}
_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": functional.silu,
    "gelu_mul": functional.gelu,
    "gelu_tanh_mul": _GELU_TANH,
}
ACTIVATIONS = (*_PLAIN, *_GATED)
"""What may follow the product; the last three take a weight of gate rows over up rows and give ``act(gate) * up``."""


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    activation: str = "none",
) -> Tensor:
    """``activation(norm(x) @ weight.T + bias) + residual``, in float32 (float64 for float64), rounded once.

    Args:
        x: ``[..., I]``.
        weight: ``[O, I]``; for the gated activations ``[2 * O, I]``, gate rows first.
        bias: one per row of ``weight``, or None.
        residual: ``[..., O]`` or None.
        norm_weight: ``[I]``: ``norm(x) = x / sqrt(mean(x ** 2) + norm_eps) * (norm_weight + norm_offset)``; or None.
        norm_offset: 1.0 for gemma's norm, which stores the weight's distance from one.
        activation: one of :data:`ACTIVATIONS`.

    Returns:
        ``[..., O]`` in the dtype of ``x``.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(exact)
    if norm_weight is not None:
        scale = torch.rsqrt(rows.square().mean(-1, keepdim=True) + norm_eps)
        rows = rows * scale * (norm_weight.to(exact) + norm_offset)
    out = functional.linear(rows, weight.to(exact), None if bias is None else bias.to(exact))
    if activation in _GATED:
        gate, up = out.chunk(2, -1)
        out = _GATED[activation](gate) * up
    else:
        out = _PLAIN[activation](out)
    return (out if residual is None else out + residual.to(exact)).to(x.dtype)


class Tiles(NamedTuple):
    """How a product is cut. ``block_k`` and ``pieces`` decide the bits and never follow the number of rows."""

    block_o: int  # rows of the weight in a tile, gate and up rows together
    block_n: int  # rows of x in a tile
    block_k: int
    pieces: int
    serial: bool  # one program goes through all pieces
    warps: int
    stages: int
    norm_inside: bool = True  # whether the product computes the norm, or a kernel before it


def summation(out_features: int, in_features: int, itemsize: int = 2) -> tuple[int, int]:
    """``(block_k, pieces)`` for a weight ``[out_features, in_features]``: everything that decides the bits.

    Pieces fill the multiprocessors where tiles of 64 weight rows are too few to: 132 of them hold two programs each.
    """
    block_k = 128 if itemsize == 2 else 32
    pieces = 1
    while triton.cdiv(out_features, 64) * pieces < 192 and pieces < 8 and in_features >= 2 * pieces * 8 * block_k:
        pieces *= 2
    return block_k, pieces


def tiles(rows: int, out_features: int, in_features: int, itemsize: int = 2) -> Tiles:
    """The tiling of ``rows`` rows and a weight ``[out_features, in_features]``: a plain table, measured on an H200 (see
    docs/performance.md); nothing is timed at run time."""
    block_k, pieces = summation(out_features, in_features, itemsize)
    if itemsize == 4:  # no matrix instruction for exact float32: small tiles fit the registers
        return Tiles(64, 16 if rows <= 16 else 32, block_k, pieces, rows > 256, 4, 3)
    if rows <= 16 and pieces == 1:
        return Tiles(128, 16, block_k, pieces, False, 4, 3)
    if rows <= 16:
        return Tiles(64, 16, block_k, pieces, False, 4, 3 if out_features >= 6144 else 4)
    if rows <= 32:
        return Tiles(64, 32, block_k, pieces, False, 4, 4)
    if rows <= 64:
        return Tiles(128, 64, block_k, pieces, False, 8, 4 if pieces == 1 else 3)
    return Tiles(128, 128, block_k, pieces, rows > 256, 8, 3, norm_inside=False)


_NORM_ROWS = 1
_GROUP = tl.constexpr(8)
"""Tiles along the rows of x that run side by side, so that a tile of the weight is read once for all of them."""


@triton.jit
def _activate(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.math.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u), which keeps the digits of the left tail.
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # not a maximum, which would swallow NaN
    return y


@triton.jit
def _sum_in_any_order(values):
    """The column sums of non-negative ``[K, N]``, the same for every order of summation, hence for every layout.

    Integers add up exactly: each column is scaled by a power of two so that its largest value has 41 bits.
    """
    top = tl.max(values, axis=0)
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, 41)
    scale = ((294 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 40) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((values * scale[None, :]).to(tl.int64), axis=0)
    return tl.where(top < float("inf"), total.to(tl.float32) * inverse, top)


@triton.jit
def _norm_scale(squares, in_features, norm_eps):
    return tl.math.rsqrt(squares / in_features + norm_eps)


@triton.jit
def _multiply(
    weight_rows,
    x_rows,
    norm_ptr,
    norm_offset,
    real,
    piece,
    in_features,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    NORM: tl.constexpr,
):
    """One piece: the product ``[BLOCK_O, BLOCK_N]`` and, under ``NORM``, the sums of squares ``[BLOCK_N]``."""
    acc = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
    if NORM:
        k = piece * BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
        gain = tl.load(norm_ptr + k, mask=k < in_features, other=0.0)
    for block in range(BLOCKS):
        k = (piece * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight_rows[:, None] + k[None, :])
            x = tl.load(x_rows[None, :] + k[:, None], mask=real[None, :], other=0.0)
        else:
            inside = k < in_features
            w = tl.load(weight_rows[:, None] + k[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(x_rows[None, :] + k[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        if NORM:
            exact = x.to(tl.float32)
            squares = tl.fma(exact, exact, squares)
            x = (exact * (gain.to(tl.float32) + norm_offset)[:, None]).to(w.dtype)
            gain = tl.load(norm_ptr + k + BLOCK_K, mask=k + BLOCK_K < in_features, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc, _sum_in_any_order(squares) if NORM else tl.zeros((BLOCK_N,), tl.float32)


@triton.jit
def _add_partials(
    partial_ptr,
    square_ptr,
    partial_stride,
    square_stride,
    real,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECES: tl.constexpr,
    NORM: tl.constexpr,
):
    """The sums over the pieces, in their order. Other multiprocessors wrote them: read past this one's own cache."""
    total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    # Unrolled, the loads go out together; the registers of large tiles do not hold that.
    for piece in tl.range(PIECES, loop_unroll_factor=PIECES if BLOCK_O * BLOCK_N <= 4096 else 1):
        total += tl.load(partial_ptr + piece * partial_stride, mask=real[None, :], other=0.0, cache_modifier=".cg")
        if NORM:
            squares += tl.load(square_ptr + piece * square_stride, mask=real, other=0.0, cache_modifier=".cg")
    return total, squares


@triton.jit
def _finish(
    y,
    squares,
    out_ptr,
    bias_ptr,
    residual_ptr,
    scale_ptr,
    tile_o,
    weight_row,
    n,
    real,
    out_features,
    in_features,
    residual_stride,
    norm_eps,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """Everything after the product: scale of the norm, bias, activation, residual, the one rounding."""
    if NORM:
        y = y * _norm_scale(squares, in_features, norm_eps)[None, :]
    elif scale_ptr is not None:
        y = y * tl.load(scale_ptr + n, mask=real, other=0.0)[None, :]
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_O // 2
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_N)), (1, 2, 0)))
        o = tile_o * HALF + tl.arange(0, HALF)
        y = _activate(gate, ACTIVATION) * up
    else:
        o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
        y = _activate(y, ACTIVATION)
    mask = (o < out_features)[:, None] & real[None, :]
    if residual_ptr is not None:
        places = residual_ptr + n.to(tl.int64)[None, :] * residual_stride + o[:, None]
        y = y + tl.load(places, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + n.to(tl.int64)[None, :] * out_features + o[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    norm_ptr,
    scale_ptr,
    partial_ptr,
    square_ptr,
    counter_ptr,
    rows,
    out_features,
    in_features,
    x_stride,
    weight_stride,
    residual_stride,
    norm_eps,
    norm_offset,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    SERIAL: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid ``(tiles, PIECES)``, or ``(tiles, 1)`` if ``SERIAL``; tiles of x in groups, tiles of the weight within."""
    NORM: tl.constexpr = norm_ptr is not None
    OUT_ROWS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    tile = tl.program_id(0)
    tiles_o = tl.cdiv(out_features, OUT_ROWS)
    group = tile // (_GROUP * tiles_o)
    group_size = tl.minimum(tl.cdiv(rows, BLOCK_N) - group * _GROUP, _GROUP)
    tile_n = group * _GROUP + tile % (_GROUP * tiles_o) % group_size
    tile_o = tile % (_GROUP * tiles_o) // group_size

    # Rows past the end of the weight repeat its last one: a load without a mask, and nothing of them is stored.
    row = tl.arange(0, BLOCK_O)
    if GATED:
        weight_row = tl.minimum(tile_o * OUT_ROWS + row % OUT_ROWS, out_features - 1) + row // OUT_ROWS * out_features
    else:
        weight_row = tl.minimum(tile_o * OUT_ROWS + row, out_features - 1)
    weight_rows = weight_ptr + weight_row.to(tl.int64) * weight_stride
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    x_rows = x_ptr + n.to(tl.int64) * x_stride

    if PDL:
        tl.extra.cuda.gdc_wait()
    if PIECES == 1 or SERIAL:
        total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        squares = tl.zeros((BLOCK_N,), tl.float32)
        for piece in range(PIECES):
            acc, square_sum = _multiply(
                weight_rows, x_rows, norm_ptr, norm_offset, real, piece, in_features,
                BLOCK_O, BLOCK_N, BLOCK_K, BLOCKS, EVEN_K, NORM,
            )  # fmt: skip
            total += acc
            squares += square_sum
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        _finish(
            total, squares, out_ptr, bias_ptr, residual_ptr, scale_ptr, tile_o, weight_row, n, real, out_features,
            in_features, residual_stride, norm_eps, BLOCK_O, BLOCK_N, NORM, ACTIVATION, GATED,
        )  # fmt: skip
    else:
        piece = tl.program_id(1)
        acc, square_sum = _multiply(
            weight_rows, x_rows, norm_ptr, norm_offset, real, piece, in_features,
            BLOCK_O, BLOCK_N, BLOCK_K, BLOCKS, EVEN_K, NORM,
        )  # fmt: skip
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
        # Scratch: products [PIECES, rows, tiles_o * BLOCK_O], squares [PIECES, tiles_o, rows].
        partial_stride = tl.cast(rows, tl.int64) * tiles_o * BLOCK_O
        square_stride = tiles_o * rows
        partial_ptrs = partial_ptr + n.to(tl.int64)[None, :] * (tiles_o * BLOCK_O) + (tile_o * BLOCK_O + row)[:, None]
        square_ptrs = square_ptr
        tl.store(partial_ptrs + piece * partial_stride, acc, mask=real[None, :])
        if NORM:
            square_ptrs = square_ptr + tile_o * rows + n
            tl.store(square_ptrs + piece * square_stride, square_sum, mask=real)
        tl.debug_barrier()  # one thread counts for all, so all must have stored
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PIECES - 1:
            tl.store(counter_ptr + tile, 0)
            total, squares = _add_partials(
                partial_ptrs, square_ptrs, partial_stride, square_stride, real, BLOCK_O, BLOCK_N, PIECES, NORM
            )
            _finish(
                total, squares, out_ptr, bias_ptr, residual_ptr, scale_ptr, tile_o, weight_row, n, real, out_features,
                in_features, residual_stride, norm_eps, BLOCK_O, BLOCK_N, NORM, ACTIVATION, GATED,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _norm_kernel(
    out_ptr,
    scale_ptr,
    x_ptr,
    norm_ptr,
    rows,
    in_features,
    x_stride,
    norm_eps,
    norm_offset,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    PIECES: tl.constexpr,
    EVEN_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """``x * (norm_weight + norm_offset)`` and the scale of each row, apart, in the order of ``_linear_kernel``."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    x_rows = x_ptr + n.to(tl.int64) * x_stride
    out_rows = out_ptr + n.to(tl.int64) * in_features
    if PDL:
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N,), tl.float32)
    for piece in range(PIECES):
        squares = tl.zeros((BLOCK_K, BLOCK_N), tl.float32)
        for block in tl.range(BLOCKS, num_stages=8):  # its few bytes in flight are all that hides the latency
            k = (piece * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
            if EVEN_K:
                mask = real[None, :]
                gain = tl.load(norm_ptr + k)
            else:
                mask = (k < in_features)[:, None] & real[None, :]
                gain = tl.load(norm_ptr + k, mask=k < in_features, other=0.0)
            x = tl.load(x_rows[None, :] + k[:, None], mask=mask, other=0.0).to(tl.float32)
            squares = tl.fma(x, x, squares)
            y = x * (gain.to(tl.float32) + norm_offset)[:, None]
            tl.store(out_rows[None, :] + k[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)
        total += _sum_in_any_order(squares)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(scale_ptr + n, _norm_scale(total, in_features, norm_eps), mask=real)


def _as_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    *,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    activation: str = "none",
    tiling: Tiles | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """:func:`linear_reference` in one Triton kernel; float64 takes the reference itself.

    Args:
        tiling: in place of :func:`tiles`; one with another ``block_k`` or ``pieces`` may give other bits.
        pdl: whether to use programmatic dependent launch; None uses it where it exists.
    """
    if x.dtype == torch.float64:
        return linear_reference(
            x, weight, bias, residual, norm_weight, norm_eps=norm_eps, norm_offset=norm_offset, activation=activation
        )
    gated = activation in _GATED
    out_features = weight.shape[0] // 2 if gated else weight.shape[0]
    in_features = weight.shape[1]
    out = x.new_empty(*x.shape[:-1], out_features)
    if out.numel() == 0:
        return out
    matrix = _as_rows(x)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    added = None if residual is None else _as_rows(residual)
    rows = matrix.shape[0]
    cut = tiling or tiles(rows, weight.shape[0], in_features, x.element_size())
    pdl = supports_pdl(x.device) if pdl is None else pdl
    num_blocks = triton.cdiv(in_features, cut.block_k)
    pieces = min(cut.pieces, num_blocks)
    summed = {
        "BLOCKS": triton.cdiv(num_blocks, pieces),
        "BLOCK_K": cut.block_k,
        "PIECES": pieces,
        "EVEN_K": in_features % (cut.block_k * pieces) == 0,
        "PDL": pdl,
        "enable_fp_fusion": False,
        **launch_options(pdl),
    }
    scale = None
    if norm_weight is not None and not cut.norm_inside:
        normed, scale = x.new_empty(rows, in_features), x.new_empty(rows, dtype=torch.float32)
        _norm_kernel[(triton.cdiv(rows, _NORM_ROWS),)](
            normed, scale, matrix, norm_weight, rows, in_features, matrix.stride(0), norm_eps, norm_offset,
            BLOCK_N=_NORM_ROWS, num_warps=1, **summed,
        )  # fmt: skip
        matrix, norm_weight = normed, None
    tiles_o = triton.cdiv(weight.shape[0], cut.block_o)
    num_tiles = tiles_o * triton.cdiv(rows, cut.block_n)
    serial = cut.serial or num_tiles > MAX_COUNTERS
    partial = squares = counters = None
    if pieces > 1 and not serial:
        partial = x.new_empty(pieces, rows, tiles_o * cut.block_o, dtype=torch.float32)
        squares = None if norm_weight is None else x.new_empty(pieces, tiles_o, rows, dtype=torch.float32)
        counters = arrival_counters(x.device)
    _linear_kernel[(num_tiles, 1 if serial else pieces)](
        out, matrix, weight, bias, added, norm_weight, scale, partial, squares, counters,
        rows, out_features, in_features, matrix.stride(0), weight.stride(0), 0 if added is None else added.stride(0),
        norm_eps, norm_offset,
        BLOCK_O=cut.block_o, BLOCK_N=cut.block_n, SERIAL=serial, ACTIVATION=activation.removesuffix("_mul"),
        GATED=gated, num_warps=cut.warps, num_stages=cut.stages, **summed,
    )  # fmt: skip
    return out


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    norm_weight: Tensor | None = None, *, norm_eps: float = 0.0, norm_offset: float = 0.0, activation: str = "none",
) -> Tensor:  # fmt: skip
    require(activation in ACTIVATIONS, lambda: f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation}")
    require(weight.dim() == 2, lambda: f"weight must be [O, I], not {tuple(weight.shape)}")
    outer, inner = weight.shape
    require(x.shape[-1] == inner, lambda: f"x has {x.shape[-1]} features, the weight takes {inner}")
    require(weight.dtype == x.dtype, lambda: f"weight is {weight.dtype}, x is {x.dtype}: they must agree")
    if bias is not None:
        require(bias.shape == (outer,), lambda: f"bias must be [{outer}], not {tuple(bias.shape)}")
    if norm_weight is not None:
        require(norm_weight.shape == (inner,), lambda: f"norm_weight must be [{inner}], not {tuple(norm_weight.shape)}")
    if activation in _GATED:
        require(outer % 2 == 0, lambda: f"{activation} takes gate rows and as many up rows, not {outer} together")
        outer = outer // 2
    shape = (*x.shape[:-1], outer)
    if residual is not None:
        require(residual.shape == shape, lambda: f"residual must be {shape}, not {tuple(residual.shape)}")
    return x.new_empty(shape)


torch.library.impl("specgraph::linear", "cpu")(linear_reference)
torch.library.impl("specgraph::linear", "cuda")(linear)
torch.library.register_fake("specgraph::linear")(_linear_fake)
