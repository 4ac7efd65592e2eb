"""What the two kernels of paged attention share: one tile of rows against one block of keys, and sums of such.

The kernel for few rows multiplies ``K Q^T`` and ``V^T P``, context on the left and rows as columns, of which there may
be as few as 8; the one for many rows multiplies ``Q K^T`` and ``P V``, in which what is multiplied with the values
stays in registers. Both give the same bits: an entry of a product is the same sum of the same products in the same
order whichever operand is on the left (so it is on Hopper where the instruction is the same, which takes values of 64
columns or more; ``tests/gpu`` compares), the sum of a block's weights is one tree in both, and all else is done entry
by entry.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def bound(x):
    """``x`` as the bound of a loop: the interpreter's scalars are arrays of one element, which are no integers."""
    if INTERPRETED:
        return (x + tl.zeros([1], tl.int32)).handle.data.item()
    return x


@triton.jit
def per_row(x, ROWS_LEFT: tl.constexpr):
    """A value for each row beside a tile: rows on the left of a product are its rows, else its columns."""
    return x[:, None] if ROWS_LEFT else x[None, :]


@triton.jit
def across_rows(x, ROWS_LEFT: tl.constexpr):
    """The same values for every row of a tile."""
    return x[None, :] if ROWS_LEFT else x[:, None]


@triton.jit
def seen_range(place, real, WINDOW: tl.constexpr):
    """The first position that any of the ``real`` rows at ``place`` sees, and the one after the last."""
    end = tl.max(place, 0) + 1
    low = 0
    if WINDOW > 0:
        low = tl.min(tl.where(real, tl.maximum(place - (WINDOW - 1), 0), end), 0)
    return low, end


@triton.jit
def load_rows(x, dim, cos, sin, angles, mask, D: tl.constexpr, ROTARY: tl.constexpr):
    """Elements ``dim`` of the heads at ``x``, rotated by halves in float32 and rounded to their dtype."""
    values = tl.load(x, mask=mask, other=0.0)
    if ROTARY:
        lower = dim < D // 2
        other = tl.load(x + tl.where(lower, D // 2, -(D // 2)), mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos + angles, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(sin + angles, mask=mask, other=0.0).to(tl.float32)
        turned = tl.where(lower, -other, other) * s
        values = tl.fma(values.to(tl.float32), c, turned).to(values.dtype)
    return values


@triton.jit
def nothing(DVP: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """Largest score, sum of weights and weighted values of no keys: what merges with anything without a trace."""
    top = tl.full([BLOCK_R], float("-inf"), tl.float32)
    summed = tl.zeros([BLOCK_R, DVP] if ROWS_LEFT else [DVP, BLOCK_R], tl.float32)
    return top, tl.zeros([BLOCK_R], tl.float32), summed


@triton.jit
def no_weights(BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """The weights of no keys, a sum for each place in a block: only :func:`sum_of_keys` adds up places."""
    return tl.zeros([BLOCK_R, BLOCK_K] if ROWS_LEFT else [BLOCK_K, BLOCK_R], tl.float32)


@triton.jit
def score(
    query, keys, place, key_place, cap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, ROWS_LEFT: tl.constexpr,
):  # fmt: skip
    """Scores of ``query``, ``[BLOCK_R, DP]`` or turned, and ``keys`` ``[BLOCK_K, DP]``.

    They are in units that times ``scale`` are those of log 2. Without ``MASKED`` every row sees every key.
    """
    if ROWS_LEFT:
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(keys, query, input_precision="ieee")
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap) + 1.0)
    if MASKED:
        distance = per_row(place, ROWS_LEFT) - across_rows(key_place, ROWS_LEFT)
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def above(top):
    """``top``, or 0 where nothing has been seen yet, so that differences to it are never NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def add_block(scores, values, top, totals, summed, scale, ROWS_LEFT: tl.constexpr):
    """Online softmax: the largest score, weights by place and weighted values with those of a block more."""
    new_top = tl.maximum(top, tl.max(scores, 1 if ROWS_LEFT else 0))
    base = above(new_top)
    # Product and difference in one instruction; the compiler is not to choose where it does that.
    subtracted = tl.broadcast_to(per_row(-base * scale, ROWS_LEFT), scores.shape)
    weights = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), subtracted))
    kept = per_row(tl.exp2((top - base) * scale), ROWS_LEFT)
    totals = tl.fma(totals, tl.broadcast_to(kept, totals.shape), weights)
    weights = weights.to(values.dtype)
    if ROWS_LEFT:
        summed = tl.dot(weights, values, summed * kept, input_precision="ieee")
    else:
        summed = tl.dot(tl.trans(values), weights, summed * kept, input_precision="ieee")
    return new_top, totals, summed


@triton.jit
def sum_of_keys(totals, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """The sum over a block's places: a tree of pairs.

    With 64 keys on the left, four warps have 16 places each and a thread two that are 8 apart, and one reduction
    compiles to this very tree: a thread's own, halves of a warp's, halves of the warps. (Step by step it would take
    1.2 us longer, for the barriers between warps.)
    """
    if not ROWS_LEFT and not INTERPRETED:
        return tl.sum(totals, 0)
    totals = tl.trans(totals) if ROWS_LEFT else totals
    SIXTEENS: tl.constexpr = BLOCK_K // 16
    totals = tl.sum(tl.reshape(totals, (SIXTEENS, 2, 8, BLOCK_R)), 1)
    totals = tl.sum(tl.reshape(totals, (SIXTEENS, 2, 4, BLOCK_R)), 1)
    totals = tl.sum(tl.reshape(totals, (SIXTEENS, 2, 2, BLOCK_R)), 1)
    totals = tl.sum(totals, 1)
    if SIXTEENS >= 8:
        totals = tl.sum(tl.reshape(totals, (2, SIXTEENS // 2, BLOCK_R)), 0)
    if SIXTEENS >= 4:
        totals = tl.sum(tl.reshape(totals, (2, 2, BLOCK_R)), 0)
    return tl.sum(totals, 0)


@triton.jit
def merge(top, total, summed, next_top, next_total, next_summed, scale, ROWS_LEFT: tl.constexpr):
    """Add keys to those before them; the first ones merge with nothing and keep their bits."""
    new_top = tl.maximum(top, next_top)
    base = above(new_top)
    old, new = tl.exp2((top - base) * scale), tl.exp2((next_top - base) * scale)
    total = tl.fma(next_total, new, total * old)
    new, old = per_row(new, ROWS_LEFT), per_row(old, ROWS_LEFT)
    summed = tl.fma(next_summed, tl.broadcast_to(new, summed.shape), summed * old)
    return new_top, total, summed


@triton.jit
def _result(top, total, summed, sinks, q_head, scale, SINKS: tl.constexpr, ROWS_LEFT: tl.constexpr):
    """The weighted mean of the values, the sink's weight among the weights; a row that sees nothing has zeros."""
    if SINKS:
        top = top * scale
        sink = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        base = above(tl.maximum(top, sink))
        kept = tl.exp2(top - base)
        total = tl.fma(total, kept, tl.exp2(sink - base))
        summed = summed * per_row(kept, ROWS_LEFT)
    return summed / per_row(tl.where(total > 0.0, total, 1.0), ROWS_LEFT)


@triton.jit
def store_result(
    out, out_row, keep, top, total, summed, sinks, q_head, scale,
    DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr, ROWS_LEFT: tl.constexpr,
):  # fmt: skip
    """Write the results of the rows to ``keep``; ``out`` is ``[rows, DV]``."""
    value_dim = across_rows(tl.arange(0, DVP), ROWS_LEFT)
    cells = per_row(out_row * DV, ROWS_LEFT) + value_dim
    rows = _result(top, total, summed, sinks, q_head, scale, SINKS, ROWS_LEFT)
    tl.store(out + cells, rows.to(out.dtype.element_ty), mask=per_row(keep, ROWS_LEFT) & (value_dim < DV))
