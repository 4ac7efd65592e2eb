"""Functions that all kernels of paged attention share: online softmax of a tile of queries over blocks of keys.

The queries of one sequence and key-value head, times the ``GROUP`` query heads that share it, are numbered through as
(query, head) pairs. A tile has ``BLOCK_M`` pairs, and a block has ``BLOCK_N`` keys. For the keys ``j`` read so far,
online softmax keeps three float32 values for each pair ``i``. Scores ``s_ij = q_i . k_j`` become exponents of 2 by the
factor ``scale``::

    m_i   [BLOCK_M]         max over j of s_ij                         the running maximum
    l_i   [BLOCK_M]         sum over j of 2^(scale (s_ij - m_i))       the normaliser
    acc   [BLOCK_M, DVP]    sum over j of 2^(scale (s_ij - m_i)) v_j   the weighted values, or the transpose

Within a KV split the normaliser is kept as ``l_ij`` ``[BLOCK_M, BLOCK_N]``, one sum for each place in a block of keys,
and the places are added up where the KV split ends.

There are two layouts, chosen by ``Q_LEFT``. The kernel for few queries computes ``K Q^T`` and ``V^T P^T``: the context
is the left operand, which a matrix instruction takes in multiples of 64, and pairs are columns, of which there may be
as few as 8. The kernel for many queries computes ``Q K^T`` and ``P V``, so that the weights ``P`` stay in registers.

Both layouts give the same bits. An entry of a product is the same sum of the same products in the same order, whichever
operand is on the left. (This holds on Hopper where both layouts use the same instruction, which they do if values have
64 columns or more; ``tests/gpu`` compares the bits.) The sum of a block's weights is the same tree in both layouts. All
other operations act on single entries, so no query influences another.

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
def per_query(x, Q_LEFT: tl.constexpr):
    """``[BLOCK_M]`` as ``[BLOCK_M, 1]``, or as ``[1, BLOCK_M]`` if the queries of a tile are its columns."""
    return x[:, None] if Q_LEFT else x[None, :]


@triton.jit
def across_queries(x, Q_LEFT: tl.constexpr):
    """One value per key, or per dimension of a value, for every query: ``[1, N]``, or ``[N, 1]`` without ``Q_LEFT``."""
    return x[None, :] if Q_LEFT else x[:, None]


@triton.jit
def locate_tile(tile, batch, T, cu_seqlens, sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr):
    """Whose queries a tile has: the sequence, the tile's number in it, the query of the call that is the sequence's
    first one, and how many queries it has.

    Where the call is padded, ``[B, T]``, these are the arguments. Where it is of variable length (``LANES`` > 0), tiles
    are numbered through all sequences, each of which begins with a tile of its own, and the padding behind them counts
    as one more. A number behind the last tile has no queries. ``LANES`` is a power of two above the number of
    sequences.
    """
    sequence, first_query, num_queries = batch, 0, T
    if LANES > 0:
        lane = tl.arange(0, LANES)
        sequence, tile, first_query, num_queries = locate_among(tile, lane, cu_seqlens, sequences, GROUP, BLOCK_M)
    return sequence, tile, first_query, num_queries


@triton.jit
def locate_among(tile, lane, cu_seqlens, sequences, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """:func:`locate_tile` in a call of variable length. Lanes are sequences, the padding included: [LANES]."""
    begin = tl.load(cu_seqlens + lane, mask=lane <= sequences, other=0)
    counts = tl.load(cu_seqlens + lane + 1, mask=lane <= sequences, other=0) - begin
    tiles = ((counts * GROUP + BLOCK_M - 1) // BLOCK_M).to(tl.int32)
    ends = tl.cumsum(tiles, 0)
    own = lane == tl.sum((ends <= tile).to(tl.int32), 0)
    sequence = tl.sum((ends <= tile).to(tl.int64), 0)
    first_query = tl.sum(tl.where(own, begin, 0), 0)
    num_queries = tl.sum(tl.where(own, counts, 0), 0).to(tl.int32)
    return sequence, tile - tl.sum(tl.where(own, ends - tiles, 0), 0), first_query, num_queries


@triton.jit
def visible_range(position, real, WINDOW: tl.constexpr):
    """The first position that any ``real`` query at ``position`` sees, and the position after the last one."""
    end = tl.max(position, 0) + 1
    low = 0
    if WINDOW > 0:
        low = tl.min(tl.where(real, tl.maximum(position - (WINDOW - 1), 0), end), 0)
    return low, end


@triton.jit
def load_rotated(x, dim, angles, at, mask, D: tl.constexpr, ROTARY: tl.constexpr):
    """Load the elements ``dim`` of the heads at ``x``, and rotate the first ``ROTARY`` of the ``D`` of each head.

    ``at`` are the offsets of their angles. They are rotated in float32 and rounded to their dtype. The others are taken
    as they are, and so are all of them if ``ROTARY`` is 0.
    """
    tile = tl.load(x, mask=mask, other=0.0)
    if ROTARY > 0:
        # ---- with n = ROTARY: x_d cos_d - x_{d + n/2} sin_d for d < n/2, and x_d cos_d + x_{d - n/2} sin_d behind
        if ROTARY < D:
            mask = mask & (dim < ROTARY)
        lower = dim < ROTARY // 2
        other = tl.load(x + tl.where(lower, ROTARY // 2, -(ROTARY // 2)), mask=mask, other=0.0).to(tl.float32)
        c = tl.load(angles.cos + at, mask=mask, other=0.0).to(tl.float32)
        s = tl.load(angles.sin + at, mask=mask, other=0.0).to(tl.float32)
        turned = tl.where(lower, -other, other) * s
        rotated = tl.fma(tile.to(tl.float32), c, turned).to(tile.dtype)
        tile = tl.where(mask, rotated, tile) if ROTARY < D else rotated
    return tile


@triton.jit
def load_queries(
    q, angles, batch, q_head, query, real, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr, Q_LEFT: tl.constexpr
):
    """Load ``tile_q``, rotated: heads ``q_head`` ``[BLOCK_M]`` of the queries ``query``; zeros where not ``real``."""
    dim, query = across_queries(tl.arange(0, DP), Q_LEFT), query.to(tl.int64)
    p_q = (q.x + batch * q.batch) + per_query(q_head * q.head + query * q.token, Q_LEFT) + dim
    at = per_query(batch * angles.batch + query * angles.token, Q_LEFT) + dim
    return load_rotated(p_q, dim, angles, at, per_query(real, Q_LEFT) & (dim < D), D, ROTARY)


@triton.jit
def empty_state(DVP: tl.constexpr, BLOCK_M: tl.constexpr, Q_LEFT: tl.constexpr):
    """``m_i``, ``l_i`` and ``acc`` before any key. Merging them with others changes no bit."""
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_M, DVP] if Q_LEFT else [DVP, BLOCK_M], tl.float32)
    return m_i, tl.zeros([BLOCK_M], tl.float32), acc


@triton.jit
def empty_sums(BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, Q_LEFT: tl.constexpr):
    """``l_ij`` before any key: one sum for each place in a block. :func:`sum_of_keys` adds up the places."""
    return tl.zeros([BLOCK_M, BLOCK_N] if Q_LEFT else [BLOCK_N, BLOCK_M], tl.float32)


@triton.jit
def score(
    tile_q, tile_k, position, key_position, cap,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, Q_LEFT: tl.constexpr,
):
    """Scores of ``tile_q`` ``[BLOCK_M, DP]`` and ``tile_k`` ``[BLOCK_N, DP]``: ``[BLOCK_M, BLOCK_N]``.

    Without ``Q_LEFT``, ``tile_q`` and the scores are transposed. A score times the caller's ``scale`` is an exponent of
    2. If not ``MASKED``, every query sees every key.
    """
    # ---- s_ij = q_i . k_j, and with a soft cap c: s_ij = tanh(q_i . k_j * softmax_scale / c), from a power of 2
    if Q_LEFT:
        scores = tl.dot(tile_q, tl.trans(tile_k), input_precision="ieee")
    else:
        scores = tl.dot(tile_k, tile_q, input_precision="ieee")
    if SOFTCAP:
        scores = 1.0 - 2.0 / (tl.exp2(scores * cap) + 1.0)
    if MASKED:
        # ---- s_ij = -inf where key j is behind query i, or outside of its window
        distance = per_query(position, Q_LEFT) - across_queries(key_position, Q_LEFT)
        seen = distance >= 0
        if WINDOW > 0:
            seen = seen & (distance < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def finite_or_zero(m_i):
    """``m_i``, or 0 where no key has been seen yet, so that differences to it are never NaN."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def add_block(scores, tile_v, m_i, l_ij, acc, scale, Q_LEFT: tl.constexpr):
    """Add a block of keys with their values ``tile_v`` ``[BLOCK_N, DVP]`` to ``m_i``, ``l_ij`` and ``acc``."""
    # ---- m_new = max(m_i, max over j of s_ij): [BLOCK_M]
    m_new = tl.maximum(m_i, tl.max(scores, 1 if Q_LEFT else 0))
    m_finite = finite_or_zero(m_new)
    # ---- p_ij = 2^(scale (s_ij - m_new)): [BLOCK_M, BLOCK_N]
    # An explicit fused multiply-add: contraction by the compiler is off, since it could differ between compilations.
    subtracted = tl.broadcast_to(per_query(-m_finite * scale, Q_LEFT), scores.shape)
    p = tl.exp2(tl.fma(scores, tl.full(scores.shape, scale, tl.float32), subtracted))
    # ---- alpha = 2^(scale (m_i - m_new)), l_ij <- alpha l_ij + p_ij, acc <- alpha acc + p v
    alpha = per_query(tl.exp2((m_i - m_finite) * scale), Q_LEFT)
    l_ij = tl.fma(l_ij, tl.broadcast_to(alpha, l_ij.shape), p)
    p = p.to(tile_v.dtype)
    if Q_LEFT:
        acc = tl.dot(p, tile_v, acc * alpha, input_precision="ieee")
    else:
        acc = tl.dot(tl.trans(tile_v), p, acc * alpha, input_precision="ieee")
    return m_new, l_ij, acc


@triton.jit
def sum_of_keys(l_ij, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, Q_LEFT: tl.constexpr):
    """``l_i`` = the sum over the places ``j`` of a block of ``l_ij``: a binary tree in a fixed order.

    With 64 keys as the left operand, each of four warps holds 16 places, and a thread holds two that are 8 apart. A
    single reduction then compiles to this very tree: first the two places of a thread, then halves of a warp, then
    halves of the warps. Written out step by step, the tree would take 1.2 us longer because of the barriers between
    warps.
    """
    if not Q_LEFT and not INTERPRETED:
        return tl.sum(l_ij, 0)
    l_ij = tl.trans(l_ij) if Q_LEFT else l_ij
    SIXTEENS: tl.constexpr = BLOCK_N // 16
    l_ij = tl.sum(tl.reshape(l_ij, (SIXTEENS, 2, 8, BLOCK_M)), 1)
    l_ij = tl.sum(tl.reshape(l_ij, (SIXTEENS, 2, 4, BLOCK_M)), 1)
    l_ij = tl.sum(tl.reshape(l_ij, (SIXTEENS, 2, 2, BLOCK_M)), 1)
    l_ij = tl.sum(l_ij, 1)
    if SIXTEENS >= 8:
        l_ij = tl.sum(tl.reshape(l_ij, (2, SIXTEENS // 2, BLOCK_M)), 0)
    if SIXTEENS >= 4:
        l_ij = tl.sum(tl.reshape(l_ij, (2, 2, BLOCK_M)), 0)
    return tl.sum(l_ij, 0)


@triton.jit
def merge(m_i, l_i, acc, m_j, l_j, acc_j, scale, Q_LEFT: tl.constexpr):
    """Merge the state ``m_j``, ``l_j``, ``acc_j`` of later keys into that of earlier ones (log-sum-exp).

    Merging into :func:`empty_state` keeps the later state's bits.
    """
    # ---- m_new = max(m_i, m_j), and what each side is scaled by: alpha = 2^(scale (m - m_new)), [BLOCK_M]
    m_new = tl.maximum(m_i, m_j)
    m_finite = finite_or_zero(m_new)
    alpha_i, alpha_j = tl.exp2((m_i - m_finite) * scale), tl.exp2((m_j - m_finite) * scale)
    # ---- l_i <- alpha_i l_i + alpha_j l_j, acc <- alpha_i acc + alpha_j acc_j
    l_i = tl.fma(l_j, alpha_j, l_i * alpha_i)
    alpha_j, alpha_i = per_query(alpha_j, Q_LEFT), per_query(alpha_i, Q_LEFT)
    acc = tl.fma(acc_j, tl.broadcast_to(alpha_j, acc.shape), acc * alpha_i)
    return m_new, l_i, acc


@triton.jit
def result(m_i, l_i, acc, sinks, q_head, scale, SINKS: tl.constexpr, Q_LEFT: tl.constexpr):
    """``acc / l_i``, where the sink adds to the normaliser only. A query that sees no key has zeros."""
    if SINKS:
        # ---- m = max(scale m_i, sink), l_i <- 2^(scale m_i - m) l_i + 2^(sink - m), acc <- 2^(scale m_i - m) acc
        m_i = m_i * scale
        sink = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634
        m_finite = finite_or_zero(tl.maximum(m_i, sink))
        alpha = tl.exp2(m_i - m_finite)
        l_i = tl.fma(l_i, alpha, tl.exp2(sink - m_finite))
        acc = acc * per_query(alpha, Q_LEFT)
    return acc / per_query(tl.where(l_i > 0.0, l_i, 1.0), Q_LEFT)


@triton.jit
def store_result(
    out, out_row, keep, m_i, l_i, acc, sinks, q_head, scale,
    DV: tl.constexpr, DVP: tl.constexpr, SINKS: tl.constexpr, Q_LEFT: tl.constexpr,
):
    """Write the results of the pairs selected by ``keep`` to ``out_row`` of ``out`` ``[B * T * Hq, DV]``."""
    value_dim = across_queries(tl.arange(0, DVP), Q_LEFT)
    cells = per_query(out_row * DV, Q_LEFT) + value_dim
    value = result(m_i, l_i, acc, sinks, q_head, scale, SINKS, Q_LEFT)
    tl.store(out + cells, value.to(out.dtype.element_ty), mask=per_query(keep, Q_LEFT) & (value_dim < DV))
