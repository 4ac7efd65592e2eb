"""The Triton kernels of :mod:`specgraph.kernels.linear.linear`: products with an epilogue, and a norm's parts."""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

NORM_GROUP = 64
"""Entries of a row whose squares are summed together: what every tile of a product holds whole."""

_NORM_GROUP = tl.constexpr(NORM_GROUP)
_TILE_GROUP = tl.constexpr(8)
"""Tiles along the rows of x that run side by side, so that a tile of the weight is read once for all of them."""


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
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
def sum_in_any_order(values, AXIS: tl.constexpr):
    """Sums of non-negative values, the same for every order of summation, hence for every layout.

    Integers add up exactly: each sum is scaled by a power of two so that its largest value just cannot overflow, which
    leaves that one 24 bits if there are 64.
    """
    COUNT: tl.constexpr = values.shape[AXIS]
    BITS: tl.constexpr = 30 - _log2(COUNT)
    top = tl.max(values, axis=AXIS)
    exponent = tl.maximum(top.to(tl.int32, bitcast=True) >> 23, BITS)
    scale = ((253 + BITS - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - (BITS - 1)) << 23).to(tl.float32, bitcast=True)
    total = tl.sum((values * tl.expand_dims(scale, AXIS) + 0.5).to(tl.int32), axis=AXIS)
    return tl.where(top < float("inf"), total.to(tl.float32) * inverse, top)


@triton.jit
def _norm_scale(squares, features, norm_eps):
    return tl.math.rsqrt(sum_in_any_order(squares, 0) / features + norm_eps)


@triton.jit
def _load_squares(squares_ptr, n, real, features, GROUPS: tl.constexpr):
    """The sums of squares ``[GROUPS, N]`` of the rows ``n``."""
    groups = tl.cdiv(features, _NORM_GROUP)
    group = tl.arange(0, GROUPS)
    places = squares_ptr + n.to(tl.int64)[None, :] * groups + group[:, None]
    return tl.load(places, mask=(group < groups)[:, None] & real[None, :], other=0.0)


@triton.jit
def _norm_parts(y, gain, gained_ptr, squares_ptr, tile_o, n, real, features):
    """Of ``y`` ``[O, N]``, rounded already: times the norm's weight, and the sums of squares of whole groups."""
    GROUPS: tl.constexpr = y.shape[0] // _NORM_GROUP
    o = tile_o * y.shape[0] + tl.arange(0, y.shape[0])
    mask = (o < features)[:, None] & real[None, :]
    exact = tl.where(mask, y.to(tl.float32), 0.0)
    places = gained_ptr + n.to(tl.int64)[None, :] * features + o[:, None]
    tl.store(places, (exact * gain[:, None]).to(gained_ptr.dtype.element_ty), mask=mask)
    sums = sum_in_any_order(tl.reshape(exact * exact, (GROUPS, _NORM_GROUP, y.shape[1])), 1)
    groups = tl.cdiv(features, _NORM_GROUP)
    group = tile_o * GROUPS + tl.arange(0, GROUPS)
    places = squares_ptr + n.to(tl.int64)[None, :] * groups + group[:, None]
    tl.store(places, sums, mask=(group < groups)[:, None] & real[None, :])


@triton.jit
def _load_gain(gain_ptr, o, features, norm_offset):
    return tl.load(gain_ptr + o, mask=o < features, other=0.0).to(tl.float32) + norm_offset


@triton.jit
def _neighbours(
    squares_ptr,
    scale_ptr,
    residual_ptr,
    gain_ptr,
    o,
    n,
    real,
    out_features,
    in_features,
    residual_stride,
    norm_offset,
    GROUPS: tl.constexpr,
):
    """What a tile is finished with: sums of squares ``[GROUPS, N]`` or the scale ``[1, N]`` made of them, residual
    ``[O, N]``, weight of the following norm ``[O]``. What does not exist is zeros, which nothing reads.
    """
    squares = tl.zeros((1, n.shape[0]), tl.float32)
    added = tl.zeros((o.shape[0], n.shape[0]), tl.float32)
    gain = tl.zeros((o.shape[0],), tl.float32)
    if squares_ptr is not None:
        squares = _load_squares(squares_ptr, n, real, in_features, GROUPS)
    elif scale_ptr is not None:
        squares = tl.load(scale_ptr + n, mask=real, other=0.0)[None, :]
    if residual_ptr is not None:
        places = residual_ptr + n.to(tl.int64)[None, :] * residual_stride + o[:, None]
        added = tl.load(places, mask=(o < out_features)[:, None] & real[None, :], other=0.0).to(tl.float32)
    if gain_ptr is not None:
        gain = _load_gain(gain_ptr, o, out_features, norm_offset)
    return squares, added, gain


@triton.jit
def _multiply(
    weight_rows,
    x_rows,
    real,
    piece,
    in_features,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One piece of the product: ``[BLOCK_O, BLOCK_N]``."""
    acc = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    for block in range(BLOCKS):
        k = (piece * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
        if EVEN_K:
            w = tl.load(weight_rows[:, None] + k[None, :])
            x = tl.load(x_rows[None, :] + k[:, None], mask=real[None, :], other=0.0)
        else:
            inside = k < in_features
            w = tl.load(weight_rows[:, None] + k[None, :], mask=inside[None, :], other=0.0)
            x = tl.load(x_rows[None, :] + k[:, None], mask=inside[:, None] & real[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _add_partials(
    partial_ptr, partial_stride, real, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr
):
    """The sum over the pieces, in their order. Other multiprocessors wrote them: read past this one's own cache."""
    total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    # Unrolled, the loads go out together; the registers of large tiles do not hold that.
    for piece in tl.range(PIECES, loop_unroll_factor=PIECES if BLOCK_O * BLOCK_N <= 4096 else 1):
        total += tl.load(partial_ptr + piece * partial_stride, mask=real[None, :], other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    y,
    squares,
    added,
    gain,
    out_ptr,
    bias_ptr,
    gained_ptr,
    out_squares_ptr,
    tile_o,
    weight_row,
    o,
    n,
    real,
    out_features,
    in_features,
    norm_eps,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """Everything after the product: scale of the norm before, bias, activation, residual, the one rounding, and the
    parts of the norm that follows."""
    if SCALE == "squares":
        y = y * _norm_scale(squares, in_features, norm_eps)[None, :]
    elif SCALE == "ready":
        y = y * squares
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_O // 2
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_N)), (1, 2, 0)))
        y = activate(gate, ACTIVATION) * up
    else:
        y = activate(y, ACTIVATION)
    if RESIDUAL:
        y = y + added
    y = y.to(out_ptr.dtype.element_ty)
    mask = (o < out_features)[:, None] & real[None, :]
    tl.store(out_ptr + n.to(tl.int64)[None, :] * out_features + o[:, None], y, mask=mask)
    if gained_ptr is not None:
        _norm_parts(y, gain, gained_ptr, out_squares_ptr, tile_o, n, real, out_features)


@triton.jit
def _bring_nearer(rows, size: tl.constexpr):
    """Ask for ``size`` bytes of every row to come to the second-level cache; nothing waits for them."""
    address = rows.to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [address, tl.full(address.shape, size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    squares_ptr,
    scale_ptr,
    gain_ptr,
    gained_ptr,
    out_squares_ptr,
    partial_ptr,
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
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid ``(tiles, PIECES)`` if ``SPLIT``, or ``(tiles, 1)``; tiles of x in groups, tiles of the weight within.

    ``EARLY`` reads what a tile is finished with before the product, during which it arrives; large tiles have no room
    for it. ``AHEAD`` asks for the first block of the weight before the wait: weights are constant.
    """
    OUT_ROWS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    SCALE: tl.constexpr = "squares" if squares_ptr is not None else "none" if scale_ptr is None else "ready"
    tile = tl.program_id(0)
    tiles_o = tl.cdiv(out_features, OUT_ROWS)
    group = tile // (_TILE_GROUP * tiles_o)
    group_size = tl.minimum(tl.cdiv(rows, BLOCK_N) - group * _TILE_GROUP, _TILE_GROUP)
    tile_n = group * _TILE_GROUP + tile % (_TILE_GROUP * tiles_o) % group_size
    tile_o = tile % (_TILE_GROUP * tiles_o) // group_size

    # Rows past the end of the weight repeat its last one: a load without a mask, and nothing of them is stored.
    row = tl.arange(0, BLOCK_O)
    if GATED:
        weight_row = tl.minimum(tile_o * OUT_ROWS + row % OUT_ROWS, out_features - 1) + row // OUT_ROWS * out_features
    else:
        weight_row = tl.minimum(tile_o * OUT_ROWS + row, out_features - 1)
    weight_rows = weight_ptr + weight_row.to(tl.int64) * weight_stride
    o = tile_o * OUT_ROWS + tl.arange(0, OUT_ROWS)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    x_rows = x_ptr + n.to(tl.int64) * x_stride

    if AHEAD:
        begin = tl.program_id(1) * BLOCKS * BLOCK_K
        _bring_nearer(weight_rows + begin, BLOCK_K * weight_ptr.dtype.element_ty.primitive_bitwidth // 8)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if EARLY:
        squares, added, gain = _neighbours(
            squares_ptr, scale_ptr, residual_ptr, gain_ptr, o, n, real, out_features, in_features, residual_stride,
            norm_offset, GROUPS,
        )  # fmt: skip
    if SPLIT:
        piece = tl.program_id(1)
        total = _multiply(weight_rows, x_rows, real, piece, in_features, BLOCK_O, BLOCK_N, BLOCK_K, BLOCKS, EVEN_K)
    else:
        total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        # As one loop, the loads do not run dry between pieces; larger tiles are slower that way.
        for piece in tl.range(PIECES, flatten=BLOCK_O == 64):
            total += _multiply(weight_rows, x_rows, real, piece, in_features, BLOCK_O, BLOCK_N, BLOCK_K, BLOCKS, EVEN_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    finish = True
    if SPLIT:
        # Scratch: products [PIECES, rows, tiles_o * BLOCK_O].
        partial_stride = tl.cast(rows, tl.int64) * tiles_o * BLOCK_O
        partial_ptrs = partial_ptr + n.to(tl.int64)[None, :] * (tiles_o * BLOCK_O) + (tile_o * BLOCK_O + row)[:, None]
        tl.store(partial_ptrs + piece * partial_stride, total, mask=real[None, :])
        tl.debug_barrier()  # one thread counts for all, so all must have stored
        finish = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PIECES - 1
        if finish:
            tl.store(counter_ptr + tile, 0)
            total = _add_partials(partial_ptrs, partial_stride, real, BLOCK_O, BLOCK_N, PIECES)
    if finish:
        if not EARLY:
            squares, added, gain = _neighbours(
                squares_ptr, scale_ptr, residual_ptr, gain_ptr, o, n, real, out_features, in_features, residual_stride,
                norm_offset, GROUPS,
            )  # fmt: skip
        _finish(
            total, squares, added, gain, out_ptr, bias_ptr, gained_ptr, out_squares_ptr, tile_o, weight_row, o, n, real,
            out_features, in_features, norm_eps, BLOCK_O, BLOCK_N, SCALE, residual_ptr is not None, ACTIVATION, GATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def norm_scale_kernel(
    scale_ptr,
    squares_ptr,
    rows,
    features,
    norm_eps,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """The scale of every row, once for all tiles of a wide product. Grid (blocks of rows)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    if PDL:
        tl.extra.cuda.gdc_wait()
    squares = _load_squares(squares_ptr, n, real, features, GROUPS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(scale_ptr + n, _norm_scale(squares, features, norm_eps), mask=real)


@triton.jit(do_not_specialize=["rows"])
def norm_parts_kernel(
    gained_ptr,
    squares_ptr,
    x_ptr,
    gain_ptr,
    rows,
    features,
    x_stride,
    norm_offset,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """The parts of a norm of rows that no product of ours has made. Grid (blocks of a row, blocks of rows)."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    if PDL:
        tl.extra.cuda.gdc_wait()
    gain = _load_gain(gain_ptr, o, features, norm_offset)
    mask = (o < features)[:, None] & real[None, :]
    y = tl.load(x_ptr + n.to(tl.int64)[None, :] * x_stride + o[:, None], mask=mask, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    _norm_parts(y, gain, gained_ptr, squares_ptr, tl.program_id(0), n, real, features)
