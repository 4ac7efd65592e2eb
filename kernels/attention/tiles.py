"""Functions that both kernels of paged attention share: online softmax for a tile of rows and a block of keys.

For a tile of ``BLOCK_R`` (row, head) pairs, online softmax keeps three float32 values for the keys read so far:
``row_max``, the running maximum of the scores (``[BLOCK_R]``); ``row_sum``, the normaliser, which is the sum of the
weights ``exp2((score - row_max) * scale)`` (``[BLOCK_R]``); and ``acc``, the accumulator, which is the sum of the
values weighted by them (``[BLOCK_R, DVP]`` or its transpose). Within a piece the normaliser is kept as
``partial_sums``, one sum for each place in a block of keys, and the places are added up where the piece ends.

There are two layouts, chosen by ``ROWS_LEFT``. The kernel for few rows computes ``K Q^T`` and ``V^T P``: the context is
the left operand, which a matrix instruction takes in multiples of 64, and rows are columns, of which there may be as
few as 8. The kernel for many rows computes ``Q K^T`` and ``P V``, so that the weights ``P`` stay in registers.

Both layouts give the same bits. An entry of a product is the same sum of the same products in the same order, whichever
operand is on the left. (This holds on Hopper where both layouts use the same instruction, which they do if values have
64 columns or more; ``tests/gpu`` compares the bits.) The sum of a block's weights is the same tree in both layouts. All
other operations act on single entries, so no row influences another.

Sources: Milakov and Gimelshein 2018, arXiv 1805.02867 (online softmax); Dao 2023, arXiv 2307.08691 (FlashAttention-2).
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def loop_bound(x):
    """``x`` as the bound of a loop.

    The interpreter's scalars are arrays of one element, which ``range`` does not take.
    """
    if INTERPRETED:
        return (x + tl.zeros([1], tl.int32)).handle.data.item()
    return x


@triton.jit
def per_row(x, ROWS_LEFT: tl.constexpr):
    """Broadcast one value per row over a tile. Rows are the tile's rows if ``ROWS_LEFT``, and its columns otherwise."""
    return x[:, None] if ROWS_LEFT else x[None, :]


@triton.jit
def across_rows(x, ROWS_LEFT: tl.constexpr):
    """Broadcast one value per key, or per dimension, over a tile: the same values for every row."""
    return x[None, :] if ROWS_LEFT else x[:, None]


@triton.jit
def locate_tile(tile, batch, T, cu_seqlens, sequences, GROUP: tl.constexpr, BLOCK_R: tl.constexpr, LANES: tl.constexpr):
    """Whose rows a tile has: the sequence, the tile's number in it, the row of the call that is the sequence's first
    one, and how many rows it has.

    In a grid these are the arguments. Of packed rows (``LANES`` > 0), tiles are numbered through all sequences, each of
    which begins with a tile of its own, and the padding behind them counts as one more. A number behind the last tile
    has no rows.
    """
    sequence, first_row, rows = batch, 0, T
    if LANES > 0:
        lane = tl.arange(0, LANES)
        begin = tl.load(cu_seqlens + lane, mask=lane <= sequences, other=0)
        counts = tl.load(cu_seqlens + lane + 1, mask=lane <= sequences, other=0) - begin
        tiles = ((counts * GROUP + BLOCK_R - 1) // BLOCK_R).to(tl.int32)
        ends = tl.cumsum(tiles, 0)
        own = lane == tl.sum((ends <= tile).to(tl.int32), 0)
        sequence = tl.sum((ends <= tile).to(tl.int64), 0)
        first_row = tl.sum(tl.where(own, begin, 0), 0)
        rows = tl.sum(tl.where(own, counts, 0), 0).to(tl.int32)
        tile -= tl.sum(tl.where(own, ends - tiles, 0), 0)
    return sequence, tile, first_row, rows


@triton.jit
def visible_range(position, real, WINDOW: tl.constexpr):
    """The first position that any ``real`` row at ``position`` sees, and the position after the last one."""
    end = tl.max(position, 0) + 1
    low = 0
    if WINDOW > 0:
        low = tl.min(tl.where(real, tl.maximum(position - (WINDOW - 1), 0), end), 0)
    return low, end


@triton.jit
def load_rows(x, dim, cos, sin, angles, mask, D: tl.constexpr, ROTARY: tl.constexpr):
    """Load the elements ``dim`` of the heads at ``x``.

    The first ``ROTARY`` of the ``D`` elements of a head are rotated in float32 and rounded to their dtype. The others
    are taken as they are, and so are all of them if ``ROTARY`` is 0.
    """
    values = tl.load(x, mask=mask, other=0.0)
    if ROTARY > 0:
        if ROTARY < D:
            mask = mask & (dim < ROTARY)
        lower = dim < ROTARY // 2
        other = tl.load(x + tl.where(lower, ROTARY // 2, -(ROTARY // 2)), mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
        turned = tl.where(lower, -other, other) * s
        rotated = tl.fma(values.to(tl.float32), c, turned).to(values.dtype)
        values = tl.where(mask, rotated, values) if ROTARY < D else rotated
    return values


@triton.jit
def empty_state(DVP: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """The running maximum, normaliser and weighted values before any key. Merging them with others changes no bit."""
    row_max = tl.full([BLOCK_R], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_R, DVP] if ROWS_LEFT else [DVP, BLOCK_R], tl.float32)
    return row_max, tl.zeros([BLOCK_R], tl.float32), acc


@triton.jit
def empty_sums(BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """The normaliser before any key, with one sum for each place in a block. :func:`sum_of_keys` adds up the places."""
    return tl.zeros([BLOCK_R, BLOCK_K] if ROWS_LEFT else [BLOCK_K, BLOCK_R], tl.float32)


@triton.jit
def score(
    query, keys, position, key_position, cap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, ROWS_LEFT: tl.constexpr,
):
    """Scores of ``query`` (``[BLOCK_R, DP]``, or its transpose) and ``keys`` ``[BLOCK_K, DP]``, before ``scale``.

    A score times the caller's ``scale`` is an exponent of 2. If not ``MASKED``, every row sees every key.
    """
    if ROWS_LEFT:
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(keys, query, input_precision="ieee")
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap) + 1.0)
    if MASKED:
        distance = per_row(position, ROWS_LEFT) - across_rows(key_position, ROWS_LEFT)
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def finite_or_zero(row_max):
    """``row_max``, or 0 where no key has been seen yet, so that differences to it are never NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def add_block(scores, values, row_max, partial_sums, acc, scale, ROWS_LEFT: tl.constexpr):
    """Add a block of keys to the running maximum, the normaliser by place, and the weighted values."""
    new_max = tl.maximum(row_max, tl.max(scores, 1 if ROWS_LEFT else 0))
    base = finite_or_zero(new_max)
    # An explicit fused multiply-add: contraction by the compiler is off, since it could differ between compilations.
    subtracted = tl.broadcast_to(per_row(-base * scale, ROWS_LEFT), scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), subtracted))
    kept = per_row(tl.exp2((row_max - base) * scale), ROWS_LEFT)
    partial_sums = tl.fma(partial_sums, tl.broadcast_to(kept, partial_sums.shape), weights)
    weights = weights.to(values.dtype)
    if ROWS_LEFT:
        acc = tl.dot(weights, values, acc * kept, input_precision="ieee")
    else:
        acc = tl.dot(tl.trans(values), weights, acc * kept, input_precision="ieee")
    return new_max, partial_sums, acc


@triton.jit
def sum_of_keys(partial_sums, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """Add up the places of a block: a binary tree in a fixed order.

    With 64 keys as the left operand, each of four warps holds 16 places, and a thread holds two that are 8 apart. A
    single reduction then compiles to this very tree: first the two places of a thread, then halves of a warp, then
    halves of the warps. Written out step by step, the tree would take 1.2 us longer because of the barriers between
    warps.
    """
    if not ROWS_LEFT and not INTERPRETED:
        return tl.sum(partial_sums, 0)
    partial_sums = tl.trans(partial_sums) if ROWS_LEFT else partial_sums
    SIXTEENS: tl.constexpr = BLOCK_K // 16
    partial_sums = tl.sum(tl.reshape(partial_sums, (SIXTEENS, 2, 8, BLOCK_R)), 1)
    partial_sums = tl.sum(tl.reshape(partial_sums, (SIXTEENS, 2, 4, BLOCK_R)), 1)
    partial_sums = tl.sum(tl.reshape(partial_sums, (SIXTEENS, 2, 2, BLOCK_R)), 1)
    partial_sums = tl.sum(partial_sums, 1)
    if SIXTEENS >= 8:
        partial_sums = tl.sum(tl.reshape(partial_sums, (2, SIXTEENS // 2, BLOCK_R)), 0)
    if SIXTEENS >= 4:
        partial_sums = tl.sum(tl.reshape(partial_sums, (2, 2, BLOCK_R)), 0)
    return tl.sum(partial_sums, 0)


@triton.jit
def merge(row_max, row_sum, acc, next_max, next_sum, next_acc, scale, ROWS_LEFT: tl.constexpr):
    """Merge the state of later keys into that of earlier ones.

    Merging into :func:`empty_state` keeps the later state's bits.
    """
    new_max = tl.maximum(row_max, next_max)
    base = finite_or_zero(new_max)
    old_scale, new_scale = tl.exp2((row_max - base) * scale), tl.exp2((next_max - base) * scale)
    row_sum = tl.fma(next_sum, new_scale, row_sum * old_scale)
    new_scale, old_scale = per_row(new_scale, ROWS_LEFT), per_row(old_scale, ROWS_LEFT)
    acc = tl.fma(next_acc, tl.broadcast_to(new_scale, acc.shape), acc * old_scale)
    return new_max, row_sum, acc


@triton.jit
def _result(row_max, row_sum, acc, sinks, q_head, scale, SINKS: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """The weighted mean of the values, where the sink adds to the normaliser only. A row that sees no key is zero."""
    if SINKS:
        row_max = row_max * scale
        sink = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        base = finite_or_zero(tl.maximum(row_max, sink))
        kept = tl.exp2(row_max - base)
        row_sum = tl.fma(row_sum, kept, tl.exp2(sink - base))
        acc = acc * per_row(kept, ROWS_LEFT)
    return acc / per_row(tl.where(row_sum > 0.0, row_sum, 1.0), ROWS_LEFT)


@triton.jit
def store_result(
    out, out_row, keep, row_max, row_sum, acc, sinks, q_head, scale,
    DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr, ROWS_LEFT: tl.constexpr,
):
    """Write the results of the rows selected by ``keep`` to ``out`` ``[rows, DV]``."""
    value_dim = across_rows(tl.arange(0, DVP), ROWS_LEFT)
    cells = per_row(out_row * DV, ROWS_LEFT) + value_dim
    rows = _result(row_max, row_sum, acc, sinks, q_head, scale, SINKS, ROWS_LEFT)
    tl.store(out + cells, rows.to(out.dtype.element_ty), mask=per_row(keep, ROWS_LEFT) & (value_dim < DV))
