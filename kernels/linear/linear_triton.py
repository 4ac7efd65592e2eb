"""The Triton kernels of :mod:`specgraph.kernels.linear.linear`: products with an epilogue, and the parts of a norm.

``linear_kernel`` computes ``activation(x @ weight.T * scale + bias) + residual`` for rows ``x`` ``[N, I]``, and on
request the parts of the norm that follows. ``norm_parts_kernel`` computes these parts for rows from elsewhere, and
``norm_scale_kernel`` computes the scale of every row once where many tiles would compute it again. Inputs are bfloat16,
float16 or float32; sums are float32.

A program of ``linear_kernel`` computes a tile of ``BLOCK_O`` rows of the weight times ``BLOCK_N`` rows of ``x``, over
one slice of the summed dimension or over all slices. Programs are ordered such that neighbouring ones share a tile of
the weight, which is then read from memory once.

In this file rows of ``x`` are columns: tiles are ``[O, N]``. A column's sum runs over the same blocks in the same order
whatever stands beside it, and all other operations act on single columns.
:mod:`specgraph.kernels.linear.linear` says why the bits are the same for all tilings, and names the sources.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait
from specgraph.kernels.linear.multiply_packed import multiply_packed, packed_rows, per_word

NORM_GROUP = 64
"""The entries of a norm group, whose squares are summed together. Every tile of a product holds whole groups."""

_NORM_GROUP = tl.constexpr(NORM_GROUP)
_TILE_GROUP = tl.constexpr(8)
"""The number of tiles of x that run side by side, so that a tile of the weight is read once for all of them."""


@triton.jit
def locate_tile(tile, tiles_n, tiles_o):
    """Which tile of x and which of the weight a tile of the result has.

    Tiles of x are taken in groups of ``_TILE_GROUP``; for each tile of the weight, those of a group are neighbours.
    """
    group = tile // (_TILE_GROUP * tiles_o)
    group_size = tl.minimum(tiles_n - group * _TILE_GROUP, _TILE_GROUP)
    place = tile % (_TILE_GROUP * tiles_o)
    return group * _TILE_GROUP + place % group_size, place // group_size


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
        # (1 + tanh(u)) / 2 = sigmoid(2 u). The right side keeps its precision where u is far below 0.
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "relu":
        y = tl.where(y < 0.0, 0.0, y)  # a maximum would turn NaN into 0
    return y


@triton.jit
def sum_in_any_order(values, AXIS: tl.constexpr):
    """Sums of non-negative values along ``AXIS`` whose bits do not depend on the order, and hence not on the layout.

    Values are converted to integers, which add up exactly. Each sum has its own power-of-two scale, the largest with
    which the sum cannot overflow. If 64 values are added, the largest one keeps 24 bits.
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
def _norm_scale(sum_sq, features, norm_eps):
    return tl.math.rsqrt(sum_in_any_order(sum_sq, 0) / features + norm_eps)


@triton.jit
def _load_sum_sq(sum_sq_ptr, n, real, features, GROUPS: tl.constexpr):
    """Load the sums of squares ``[GROUPS, N]`` of the rows ``n``."""
    groups = tl.cdiv(features, _NORM_GROUP)
    group = tl.arange(0, GROUPS)
    addresses = sum_sq_ptr + n.to(tl.int64)[None, :] * groups + group[:, None]
    return tl.load(addresses, mask=(group < groups)[:, None] & real[None, :], other=0.0)


@triton.jit
def _norm_parts(y, norm_weight, weighted_ptr, sum_sq_ptr, tile_o, n, real, features):
    """Store the norm's parts of the rounded ``y`` ``[O, N]``: ``y`` times the norm's weight, and sums of squares."""
    GROUPS: tl.constexpr = y.shape[0] // _NORM_GROUP
    o = tile_o * y.shape[0] + tl.arange(0, y.shape[0])
    mask = (o < features)[:, None] & real[None, :]
    exact = tl.where(mask, y.to(tl.float32), 0.0)
    addresses = weighted_ptr + n.to(tl.int64)[None, :] * features + o[:, None]
    tl.store(addresses, (exact * norm_weight[:, None]).to(weighted_ptr.dtype.element_ty), mask=mask)
    sums = sum_in_any_order(tl.reshape(exact * exact, (GROUPS, _NORM_GROUP, y.shape[1])), 1)
    groups = tl.cdiv(features, _NORM_GROUP)
    group = tile_o * GROUPS + tl.arange(0, GROUPS)
    addresses = sum_sq_ptr + n.to(tl.int64)[None, :] * groups + group[:, None]
    tl.store(addresses, sums, mask=(group < groups)[:, None] & real[None, :])


@triton.jit
def _load_norm_weight(norm_weight_ptr, o, features, norm_offset):
    return tl.load(norm_weight_ptr + o, mask=o < features, other=0.0).to(tl.float32) + norm_offset


@triton.jit
def _load_epilogue_operands(
    sum_sq_ptr,
    scale_ptr,
    residual_ptr,
    norm_weight_ptr,
    o,
    n,
    real,
    out_features,
    in_features,
    residual_stride,
    norm_offset,
    GROUPS: tl.constexpr,
):
    """Load the operands of the epilogue.

    They are the sums of squares ``[GROUPS, N]`` or the scale ``[1, N]`` made of them, the residual ``[O, N]``, and the
    weight of the norm that follows ``[O]``. An operand that does not exist is zeros, which nothing reads.
    """
    sum_sq = tl.zeros((1, n.shape[0]), tl.float32)
    residual = tl.zeros((o.shape[0], n.shape[0]), tl.float32)
    norm_weight = tl.zeros((o.shape[0],), tl.float32)
    if sum_sq_ptr is not None:
        sum_sq = _load_sum_sq(sum_sq_ptr, n, real, in_features, GROUPS)
    elif scale_ptr is not None:
        sum_sq = tl.load(scale_ptr + n, mask=real, other=0.0)[None, :]
    if residual_ptr is not None:
        addresses = residual_ptr + n.to(tl.int64)[None, :] * residual_stride + o[:, None]
        residual = tl.load(addresses, mask=(o < out_features)[:, None] & real[None, :], other=0.0).to(tl.float32)
    if norm_weight_ptr is not None:
        norm_weight = _load_norm_weight(norm_weight_ptr, o, out_features, norm_offset)
    return sum_sq, residual, norm_weight


@triton.jit
def _multiply(
    weight_rows,
    scale_rows,
    x_rows,
    x_scale_rows,
    real,
    k_slice,
    in_features,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    DOT_K: tl.constexpr,
    ALIGNED_WORDS: tl.constexpr,
    ARRANGED: tl.constexpr,
):
    """Compute one slice of the product: ``[BLOCK_O, BLOCK_N]``."""
    if FORMAT is not None:
        return multiply_packed(
            weight_rows, scale_rows, x_rows, x_scale_rows, real, k_slice, in_features, BLOCK_O, BLOCK_N, BLOCK_K,
            BLOCKS, EVEN_K, FORMAT, GROUP, DOT_K, ALIGNED_WORDS, ARRANGED,
        )
    else:
        acc = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        for block in range(BLOCKS):
            k = (k_slice * BLOCKS + block) * BLOCK_K + tl.arange(0, BLOCK_K)
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
    partial_ptr, partial_stride, real, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr
):
    """Add the partial sums in the order of the slices. Reads bypass the L1 cache: other multiprocessors wrote them."""
    total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
    # In an unrolled loop all loads are issued together. Large tiles do not have enough registers for that.
    for k_slice in tl.range(SLICES, loop_unroll_factor=SLICES if BLOCK_O * BLOCK_N <= 4096 else 1):
        total += tl.load(partial_ptr + k_slice * partial_stride, mask=real[None, :], other=0.0, cache_modifier=".cg")
    return total


@triton.jit
def _finish(
    y,
    sum_sq,
    residual,
    norm_weight,
    out_ptr,
    bias_ptr,
    weighted_ptr,
    out_sum_sq_ptr,
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
    """Apply the epilogue and store the result.

    The epilogue is the scale of the norm before the product, the bias, the activation, the residual and the only
    rounding. On request it also stores the parts of the norm that follows.
    """
    if SCALE == "sum_sq":
        y = y * _norm_scale(sum_sq, in_features, norm_eps)[None, :]
    elif SCALE == "ready":
        y = y * sum_sq
    if bias_ptr is not None:
        y = y + tl.load(bias_ptr + weight_row).to(tl.float32)[:, None]
    if GATED:
        HALF: tl.constexpr = BLOCK_O // 2
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, HALF, BLOCK_N)), (1, 2, 0)))
        y = activate(gate, ACTIVATION) * up
    else:
        y = activate(y, ACTIVATION)
    if RESIDUAL:
        y = y + residual
    y = y.to(out_ptr.dtype.element_ty)
    mask = (o < out_features)[:, None] & real[None, :]
    tl.store(out_ptr + n.to(tl.int64)[None, :] * out_features + o[:, None], y, mask=mask)
    if weighted_ptr is not None:
        _norm_parts(y, norm_weight, weighted_ptr, out_sum_sq_ptr, tile_o, n, real, out_features)


@triton.jit
def _prefetch_rows(rows, size: tl.constexpr):
    """Prefetch ``size`` bytes of every row into the L2 cache. Nothing waits for them."""
    address = rows.to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;", "=r,l,r",
        [address, tl.full(address.shape, size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    sum_sq_ptr,
    scale_ptr,
    norm_weight_ptr,
    weighted_ptr,
    out_sum_sq_ptr,
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
    SLICES: tl.constexpr,
    GROUPS: tl.constexpr,
    SPLIT: tl.constexpr,
    EVEN_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    weight_scale_ptr=None,
    weight_scale_stride=None,
    x_scale_ptr=None,
    x_scale_stride=None,
    FORMAT: tl.constexpr = None,
    GROUP: tl.constexpr = 0,
    DOT_K: tl.constexpr = 0,
    SCALE_ROWS: tl.constexpr = 1,
    ALIGNED_WORDS: tl.constexpr = False,
    ARRANGED: tl.constexpr = False,
):
    """One tile of a product with its epilogue.

    The grid is ``(tiles, SLICES)`` if ``SPLIT``, and ``(tiles, 1)`` otherwise.

    ``EARLY`` requests the operands of the epilogue before the product, so that they arrive meanwhile; large tiles do
    not have enough registers for that. ``PREFETCH`` prefetches the first block of the weight before the wait for the
    preceding kernel. This needs no wait because weights are constant.

    A weight in a ``FORMAT`` is read as words, and has scales ``weight_scale_ptr``; so may rows of ``x`` have
    (:func:`~specgraph.kernels.linear.multiply_packed.multiply_packed`).
    """
    OUT_ROWS: tl.constexpr = BLOCK_O // 2 if GATED else BLOCK_O
    SCALE: tl.constexpr = "sum_sq" if sum_sq_ptr is not None else "none" if scale_ptr is None else "ready"
    tile = tl.program_id(0)
    tiles_o = tl.cdiv(out_features, OUT_ROWS)
    tile_n, tile_o = locate_tile(tile, tl.cdiv(rows, BLOCK_N), tiles_o)

    # Rows past the end of the weight repeat its last row, so that loads need no mask. Their results are not stored.
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
    scale_rows = None
    x_scale_rows = None
    if FORMAT is not None:
        weight_rows, scale_rows = packed_rows(
            weight_ptr, weight_scale_ptr, weight_row, weight_stride, weight_scale_stride, 0, 0, SCALE_ROWS,
            ALIGNED_WORDS,
        )
    if x_scale_ptr is not None:
        x_scale_rows = x_scale_ptr + n.to(tl.int64) * x_scale_stride

    if PREFETCH:
        PER_ELEMENT: tl.constexpr = 1 if FORMAT is None else per_word(FORMAT)
        # Rows of words are short, and so are the products with them: the first blocks are as many as a pipeline holds.
        FIRST: tl.constexpr = 1 if FORMAT is None else min(BLOCKS, 4)
        begin = tl.program_id(1) * BLOCKS * (BLOCK_K // PER_ELEMENT)
        size: tl.constexpr = BLOCK_K // PER_ELEMENT * FIRST * weight_ptr.dtype.element_ty.primitive_bitwidth // 8
        _prefetch_rows(weight_rows + begin, size)
    gdc_wait(PDL)
    if EARLY:
        sum_sq, residual, norm_weight = _load_epilogue_operands(
            sum_sq_ptr, scale_ptr, residual_ptr, norm_weight_ptr, o, n, real, out_features, in_features,
            residual_stride, norm_offset, GROUPS,
        )
    if SPLIT:
        k_slice = tl.program_id(1)
        total = _multiply(
            weight_rows, scale_rows, x_rows, x_scale_rows, real, k_slice, in_features, BLOCK_O, BLOCK_N, BLOCK_K,
            BLOCKS, EVEN_K, FORMAT, GROUP, DOT_K, ALIGNED_WORDS, ARRANGED,
        )
    else:
        total = tl.zeros((BLOCK_O, BLOCK_N), tl.float32)
        # As one flat loop, the pipeline of loads does not run empty between slices. Larger tiles are slower that way.
        for k_slice in tl.range(SLICES, flatten=BLOCK_O == 64):
            total += _multiply(
                weight_rows, scale_rows, x_rows, x_scale_rows, real, k_slice, in_features, BLOCK_O, BLOCK_N, BLOCK_K,
                BLOCKS, EVEN_K, FORMAT, GROUP, DOT_K, ALIGNED_WORDS, ARRANGED,
            )
    gdc_launch_dependents(PDL)
    finish = True
    if SPLIT:
        # The scratch memory holds products [SLICES, rows, tiles_o * BLOCK_O].
        partial_stride = tl.cast(rows, tl.int64) * tiles_o * BLOCK_O
        partial_ptrs = partial_ptr + n.to(tl.int64)[None, :] * (tiles_o * BLOCK_O) + (tile_o * BLOCK_O + row)[:, None]
        tl.store(partial_ptrs + k_slice * partial_stride, total, mask=real[None, :])
        tl.debug_barrier()  # one thread counts for all threads, so all of them must have stored
        finish = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SLICES - 1
        if finish:
            tl.store(counter_ptr + tile, 0)
            total = _add_partials(partial_ptrs, partial_stride, real, BLOCK_O, BLOCK_N, SLICES)
    if finish:
        if not EARLY:
            sum_sq, residual, norm_weight = _load_epilogue_operands(
                sum_sq_ptr, scale_ptr, residual_ptr, norm_weight_ptr, o, n, real, out_features, in_features,
                residual_stride, norm_offset, GROUPS,
            )
        _finish(
            total, sum_sq, residual, norm_weight, out_ptr, bias_ptr, weighted_ptr, out_sum_sq_ptr, tile_o,
            weight_row, o, n, real, out_features, in_features, norm_eps, BLOCK_O, BLOCK_N, SCALE,
            residual_ptr is not None, ACTIVATION, GATED,
        )


@triton.jit(do_not_specialize=["rows"])
def norm_scale_kernel(
    scale_ptr,
    sum_sq_ptr,
    rows,
    features,
    norm_eps,
    GROUPS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the scale of every row once for all tiles of a wide product. The grid is (blocks of rows)."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    gdc_wait(PDL)
    sum_sq = _load_sum_sq(sum_sq_ptr, n, real, features, GROUPS)
    gdc_launch_dependents(PDL)
    tl.store(scale_ptr + n, _norm_scale(sum_sq, features, norm_eps), mask=real)


@triton.jit(do_not_specialize=["rows"])
def norm_parts_kernel(
    weighted_ptr,
    sum_sq_ptr,
    x_ptr,
    norm_weight_ptr,
    rows,
    features,
    x_stride,
    norm_offset,
    BLOCK_O: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the parts of a norm for rows from elsewhere. The grid is (blocks of a row, blocks of rows)."""
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    real = n < rows
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    norm_weight = _load_norm_weight(norm_weight_ptr, o, features, norm_offset)
    mask = (o < features)[:, None] & real[None, :]
    y = tl.load(x_ptr + n.to(tl.int64)[None, :] * x_stride + o[:, None], mask=mask, other=0.0)
    _norm_parts(y, norm_weight, weighted_ptr, sum_sq_ptr, tl.program_id(0), n, real, features)
