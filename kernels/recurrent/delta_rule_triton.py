"""The Triton form of the gated delta rule: what does not depend on the state first, and then chunk after chunk.

A chunk is a tile of :data:`~specgraph.kernels.recurrent.arguments.CHUNK` rows in which each row has the place that its
position gives it, whether it is cached, new, or not there. So every product has one shape, and the bits of a row are a
function of the state at the boundary and of the rows since, however a call groups them.

1. A program prepares one chunk of one head: the new rows of ``A``, by which ``delta`` becomes ``v_new``; how much of
   each ``delta`` of the chunk a new row reads; and five weights of every row. All chunks of a
   prompt are prepared side by side.
2. A program carries some columns of one head's state through the chunks, with products alone. It holds the state with
   columns as rows: as the left operand of its products, and as what the last of them is added to, the state then lies
   in nearly the same registers. Chunks of a prompt that have new rows alone have a loop without masks. A step that
   decodes at most half a chunk of rows has a kernel of its own, :mod:`specgraph.kernels.recurrent.delta_rule_step`,
   which holds the state as it is stored.

Queries and keys stay as they are given, in the model's dtype, and what brings them to length 1 is part of the weights.
So a product of them is exact in every term, and
:func:`~specgraph.kernels.recurrent.tiles_triton.product` needs to divide only its other operand into parts.
Sums are of float32, and no product is contracted with a sum (``enable_fp_fusion``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import contiguous, dense_rows, launch, supports_pdl
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, CachedDeltaRule, exact
from specgraph.kernels.recurrent.delta_rule_step import STEP_COLUMNS, step_kernel, step_options
from specgraph.kernels.recurrent.last_rows import common_stride, most_in_place, near_span
from specgraph.kernels.recurrent.tiles_triton import (
    BETA,
    DECAY,
    PRECISION,
    W_K,
    W_Q,
    W_UPDATE,
    WEIGHTS,
    Strides,
    load_rows,
    load_values,
    product,
    store_padding,
    wait_for_others,
)

_REGISTERS = 128
"""Registers of a thread of the first kernel where it has one warp, so that more programs share a multiprocessor."""
_COLUMNS, _WARPS, _STAGES = 16, 2, 3
"""Columns, warps and stages of a program of the second kernel. Each number of a product is summed by one warp: no bit
depends on how many there are."""


@triton.jit
def _scale(tile, NORMALISE: tl.constexpr, EPSILON: tl.constexpr):
    """What brings each row of a tile to length 1 if that is asked for, else 1."""
    if NORMALISE:
        tile = tile.to(tl.float32)
        return tl.rsqrt(tl.sum(tile * tile, 1) + EPSILON)
    return tl.full([tile.shape[0]], 1.0, tl.float32)


@triton.jit
def _decay_mask(g_sum, lane):
    """How much of row ``j`` remains in row ``i``, for ``j <= i``; else 0."""
    tile_scores = lane[None, :] <= lane[:, None]
    return tl.where(tile_scores, tl.exp(tl.where(tile_scores, g_sum[:, None] - g_sum[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=["rows", "q_outer", "k_outer"])
def _prepare_kernel(
    q, k, g, beta, chunk_k, chunk_g, chunk_a, k_lines, a_lines, scores, weights, span, scale, rows,
    q_outer, q_strides: tl.constexpr, k_outer, k_strides: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr, NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):
    """The grid is (B, chunks, H), from the chunk on in which the state stands.

    If ``STORE``, ``k_lines`` and ``a_lines`` are the caches; else they are by the rows of the call, behind
    ``BEHIND`` lines for rows that are known, as ``scores`` and ``weights`` always are.
    """
    wait_for_others(STORE, PDL)
    entry, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot, begin, before, count, _ = near_span(span, entry)
    first = (before // CHUNK + tl.program_id(1)) * CHUNK
    if (count > 0) & (first < begin + count):
        # Rows are lanes of the chunk by their absolute position: [CHUNK]. Channels of keys: [WIDE].
        lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
        group, inside = head // GROUP, key < KEY
        groups: tl.constexpr = HEADS // GROUP
        position = first + lane
        t, ring = position - begin, position % RING
        known, new = t < 0, (t >= 0) & (t < count)
        # ---- load: q, k [CHUNK, WIDE]; g, beta [CHUNK]. Known rows come from the cache, new ones from the call.
        base, lines, line = slot * RING, entry * (rows + BEHIND), t + BEHIND
        old_k = chunk_k + (base * groups + group) * KEY + ring[:, None] * (groups * KEY) + key[None, :]
        new_k = k + entry * k_outer * UNIT + group * k_strides.head + t[:, None] * k_strides.row + key[None, :]
        tile_k = tl.load(old_k, mask=known[:, None] & inside[None, :], other=0)
        new_k = tl.load(new_k, mask=new[:, None] & inside[None, :], other=0)
        tile_k = tl.where(known[:, None], tile_k, new_k)
        tile_q = q + entry * q_outer * UNIT + group * q_strides.head + t[:, None] * q_strides.row + key[None, :]
        tile_q = tl.load(tile_q, mask=new[:, None] & inside[None, :], other=0)
        tile_g = tl.load(chunk_g + base * HEADS + head + ring * HEADS, mask=known, other=0)
        new_g = tl.load(g + (entry * rows * HEADS + head) + t * HEADS, mask=new, other=0).to(tl.float32)
        tile_g = tl.where(known, tile_g, new_g)
        tile_beta = tl.full([CHUNK], 1.0, tl.float32)
        if beta is not None:
            tile_beta = tl.load(beta + (entry * rows * HEADS + head) + t * HEADS, mask=new, other=0).to(tl.float32)

        # ---- columns of the carrying kernel, [CHUNK] each, with G = cumsum(g):
        #   W_K = beta |k|^-1 e^G    W_Q = scale |q|^-1 e^G    W_UPDATE = |k|^-1 e^{G_last - G}    DECAY = e^G    BETA
        g_sum = tl.cumsum(tile_g, 0)
        k_scale, q_scale = _scale(tile_k, NORMALISE, EPSILON), _scale(tile_q, NORMALISE, EPSILON) * scale
        last = tl.sum(tl.where(lane == CHUNK - 1, g_sum, 0.0), 0)
        decay, real = tl.exp(g_sum), known | new
        weight = weights + lines * (WEIGHTS * HEADS) + head + line * (WEIGHTS * HEADS)
        tl.store(weight + W_K * HEADS, tile_beta * k_scale * decay, mask=new)
        tl.store(weight + W_Q * HEADS, q_scale * decay, mask=new)
        tl.store(weight + BETA * HEADS, tile_beta, mask=new)
        tl.store(weight + W_UPDATE * HEADS, k_scale * tl.exp(last - g_sum), mask=real)
        tl.store(weight + DECAY * HEADS, decay, mask=real)
        # ---- scores_ij = e^{G_i - G_j} (q_i . k_j) for j <= i: [CHUNK, CHUNK]
        decay_mask = _decay_mask(g_sum, lane) * k_scale[None, :]
        tile_scores = decay_mask * q_scale[:, None] * tl.dot(tile_q, tl.trans(tile_k), input_precision=PRECISION)

        if STORE:
            tl.store(chunk_g + base * HEADS + head + ring * HEADS, tile_g, mask=new)
            place, stored, real = base, ring, new
        else:
            place, stored = lines, line
        tl.store(k_lines + (place * groups + group) * KEY + stored[:, None] * (groups * KEY) + key[None, :], tile_k,
                 mask=(real & (head % GROUP == 0))[:, None] & inside[None, :])
        if beta is not None:
            # ---- M_ij = beta_i e^{G_i - G_j} (k_i . k_j) for j < i, and A = (1 + M)^-1 by forward substitution:
            #   A_i = 1_i - sum over j < i of M_ij A_j, for new rows; those of known rows are cached. [CHUNK, CHUNK]
            tile_m = decay_mask * k_scale[:, None] * tl.dot(tile_k, tl.trans(tile_k), input_precision=PRECISION)
            tile_m = tl.where(lane[None, :] < lane[:, None], tile_beta[:, None] * tile_m, 0.0)
            old = chunk_a + (base * HEADS + head) * CHUNK + ring[:, None] * (HEADS * CHUNK) + lane[None, :]
            tile_a = tl.load(old, mask=known[:, None] & (lane[None, :] <= lane[:, None]), other=0)
            for i in range(
                loop_bound(tl.maximum(begin - first, 0)), loop_bound(tl.minimum(begin + count - first, CHUNK))
            ):
                m_row = tl.sum(tl.where((lane == i)[None, :], tl.trans(tile_m), 0.0), 1)
                # As two sums, whose order is the same for one warp and for two.
                halves = tl.sum(tl.reshape(m_row[:, None] * tile_a, [2, CHUNK // 2, CHUNK]), 1)
                a_row = tl.where(lane == i, 1.0, -tl.sum(halves, 0))
                tile_a = tl.where((lane == i)[:, None], a_row[None, :], tile_a)
            row_of = stored[:, None] * (HEADS * CHUNK) + lane[None, :]
            tl.store(a_lines + (place * HEADS + head) * CHUNK + row_of, tile_a, mask=real[:, None])
            # ---- scores A: what a new row reads of each delta of the chunk, instead of each v_new.
            tile_scores = tl.dot(tile_scores, tile_a, input_precision=PRECISION)
        row_of = line[:, None] * (HEADS * CHUNK) + lane[None, :]
        tl.store(scores + (lines * HEADS + head) * CHUNK + row_of, tile_scores, mask=new[:, None])


@triton.jit
def _chunk(
    first, tile_s, out, q, v, chunk_delta, k_lines, a_lines, scores, weights, begin, count, column,
    q_row: tl.constexpr, v_row: tl.constexpr, HEADS: tl.constexpr, groups: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, CORRECTED: tl.constexpr, PAIRED: tl.constexpr, FULL: tl.constexpr,
):
    """The state behind a chunk, from the state ``tile_s`` before it. Output and errors of its new rows are stored.

    ``FULL``: all its rows are new, and tiles have no padding, so that nothing is masked.
    """
    # Rows of the chunk: [CHUNK]. Columns of the state, which are those of values: [BLOCK]. Channels of keys: [WIDE].
    lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    own, inside = column < VALUE, key < KEY
    position = first + lane
    t, ring = position - begin, position % RING
    real, new = t < count, (t >= 0) & (t < count)
    line = t + BEHIND
    stored = ring if STORE else line
    # ---- load: k, q [CHUNK, WIDE]; v^T, delta^T [BLOCK, CHUNK]; scores, A [CHUNK, CHUNK]; weights [CHUNK]
    tile_k = k_lines + stored[:, None] * (groups * KEY) + key[None, :]
    tile_k = load_rows(tile_k, real[:, None] & inside[None, :], FULL)
    tile_q = load_rows(q + t[:, None] * q_row + key[None, :], new[:, None] & inside[None, :], FULL)
    new_delta = load_values(v, t, column, new[None, :] & own[:, None], v_row, FULL, PAIRED)
    lower = lane[None, :] <= lane[:, None]
    tile_scores = load_rows(scores + line[:, None] * (HEADS * CHUNK) + lane[None, :], new[:, None], FULL)
    weight = weights + line * (WEIGHTS * HEADS)
    w_q = load_rows(weight + W_Q * HEADS, new, FULL)
    w_update = load_rows(weight + W_UPDATE * HEADS, real, FULL)
    last = weights + (first + CHUNK - 1 - begin + BEHIND) * (WEIGHTS * HEADS) + DECAY * HEADS
    decay = load_rows(last, first + CHUNK <= begin + count, FULL)
    delta = tl.zeros([column.shape[0], CHUNK], tl.float32)
    if not FULL and first < begin:  # Few chunks have known rows, and the mask of a load takes longer than a branch.
        delta = tl.load(chunk_delta + ring[None, :] * (HEADS * VALUE) + column[:, None],
                        mask=(t < 0)[None, :] & own[:, None], other=0)
    if CORRECTED:
        tile_beta = load_rows(weight + BETA * HEADS, new, FULL)
        w_k = load_rows(weight + W_K * HEADS, new, FULL)
        tile_a = load_rows(a_lines + stored[:, None] * (HEADS * CHUNK) + lane[None, :], real[:, None], FULL)
    # All is loaded by here: behind a product, a load would not begin before the product is there.
    # ---- S^T k and S^T q, transposed as the state is: [BLOCK, WIDE] x [WIDE, CHUNK] -> [BLOCK, CHUNK]
    state_k, state_q = product(tile_s, tl.trans(tile_k)), product(tile_s, tl.trans(tile_q))
    # ---- delta = beta (v - e^G S^T k): [BLOCK, CHUNK]
    if CORRECTED:
        new_delta = tile_beta[None, :] * new_delta - w_k[None, :] * state_k
    delta = new_delta if FULL else tl.where((t < 0)[None, :], delta, new_delta)
    # ---- out = e^G S^T q + scores A delta: [BLOCK, CHUNK]
    result = w_q[None, :] * state_q + product(delta, tl.trans(tl.where(lower, tile_scores, 0.0)))
    result = result.to(out.dtype.element_ty)
    stored_at = out + t[None, :] * (HEADS * VALUE) + column[:, None]
    if FULL:
        tl.store(stored_at, result)
    else:
        tl.store(stored_at, result, mask=new[None, :] & own[:, None])
    if first + CHUNK > begin + count - RING:
        tl.store(chunk_delta + ring[None, :] * (HEADS * VALUE) + column[:, None], delta,
                 mask=(new & (position >= begin + count - RING))[None, :] & own[:, None])
    # ---- v_new = A delta: [BLOCK, CHUNK]
    # ---- S <- e^{G_last} S + sum over j of e^{G_last - G_j} k_j v_new_j^T, transposed: [BLOCK, WIDE]
    v_new = delta
    if CORRECTED:
        v_new = product(delta, tl.trans(tl.where(lower, tile_a, 0.0)))
    return tile_s * decay + product(w_update[None, :] * v_new, tile_k, CHAINED=True)


@triton.jit
def _chunks(
    start, end, tile_s, p_state, state_mask, fold_end, out, q, v, chunk_delta, k_lines, a_lines, scores, weights, begin,
    count, column, q_row: tl.constexpr, v_row: tl.constexpr, HEADS: tl.constexpr, groups: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr, STORE: tl.constexpr,
    CHUNK: tl.constexpr, WIDE: tl.constexpr, CORRECTED: tl.constexpr, PAIRED: tl.constexpr, FULL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The state behind the chunks from ``start`` to ``end``. That at ``fold_end`` is stored at ``p_state``."""
    for first in tl.range(loop_bound(start), loop_bound(end), CHUNK, num_stages=STAGES):
        tile_s = _chunk(
            first, tile_s, out, q, v, chunk_delta, k_lines, a_lines, scores, weights, begin, count, column, q_row,
            v_row, HEADS, groups, KEY, VALUE, RING, BEHIND, STORE, CHUNK, WIDE, CORRECTED, PAIRED, FULL,
        )
        if first + CHUNK == fold_end:
            tl.store(p_state, tl.trans(tile_s), mask=state_mask)
    return tile_s


@triton.jit
def _keep_last_rows(
    chunk_k, chunk_g, chunk_a, g, k_lines, a_lines, slot, entry, head, begin, count, rows, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, RING: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    RING_WIDE: tl.constexpr, CORRECTED: tl.constexpr,
):
    """Store what the first kernel made of a sequence's last new rows where it is cached: each at its position modulo
    ``RING``. The first kernel cannot, since its other programs still read what is cached there.
    """
    lane, key, column = tl.arange(0, RING_WIDE), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    position = begin + count - RING + lane
    t, ring = position - begin, position % RING
    late, inside = (lane < RING) & (t >= 0), key < KEY
    tile_g = tl.load(g + (entry * rows * HEADS + head) + t * HEADS, mask=late, other=0)
    tl.store(chunk_g + slot * (RING * HEADS) + head + ring * HEADS, tile_g.to(chunk_g.dtype.element_ty), mask=late)
    if CORRECTED:
        tile_a = tl.load(a_lines + t[:, None] * (HEADS * CHUNK) + column[None, :], mask=late[:, None], other=0)
        chunk_a += (slot * RING * HEADS + head) * CHUNK
        tl.store(chunk_a + ring[:, None] * (HEADS * CHUNK) + column[None, :], tile_a, mask=late[:, None])
    if head % GROUP == 0:
        groups: tl.constexpr = HEADS // GROUP
        mask_k = late[:, None] & inside[None, :]
        tile_k = tl.load(k_lines + t[:, None] * (groups * KEY) + key[None, :], mask=mask_k, other=0)
        chunk_k += (slot * RING * groups + head // GROUP) * KEY
        tl.store(chunk_k + ring[:, None] * (groups * KEY) + key[None, :], tile_k, mask=mask_k)


@triton.jit
def begin_carrying(
    out, state, span, rows, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STORE: tl.constexpr, PDL: tl.constexpr,
):
    """What a program of the grid (B, H, blocks of columns) carries: its sequence and head, the span, and its part of
    the state with its place.

    Rows of the result behind the last one of its sequence become zeros.
    """
    entry, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slot, begin, before, count, settled = near_span(span, entry)
    key, column = tl.arange(0, WIDE), block * BLOCK + tl.arange(0, BLOCK)
    own = column < VALUE
    out += (entry * rows * HEADS + head) * VALUE
    # In a step, the first kernel lets this one begin when all kernels before it are done, of which one may have written
    # the state. So the state is loaded while the first kernel still runs.
    p_state = state + (slot * HEADS + head) * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
    state_mask = (key < KEY)[:, None] & own[None, :]
    tile_s = tl.load(p_state, mask=state_mask & (count > 0), other=0, cache_modifier=".cg")
    wait_for_others(STORE, PDL)
    store_padding(out, count, rows, column, own, HEADS, VALUE, BLOCK)
    return entry, head, slot, begin, before, count, settled, column, out, p_state, state_mask, tile_s


@triton.jit(do_not_specialize=["rows", "q_outer", "v_outer"])
def _carry_kernel(
    out, q, v, g, state, chunk_k, chunk_delta, chunk_g, chunk_a, k_lines, a_lines, scores, weights, span, rows,
    q_outer, q_strides: tl.constexpr, v_outer, v_strides: tl.constexpr, UNIT: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr,
    STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    RING_WIDE: tl.constexpr, CORRECTED: tl.constexpr, PAIRED: tl.constexpr, PDL: tl.constexpr,
):
    """The grid is (B, H, blocks of columns). ``HELD_ROWS`` is a power of two that is not below ``SLOTS``."""
    entry, head, slot, begin, before, count, settled, column, out, p_state, state_mask, tile_s = begin_carrying(
        out, state, span, rows, HEADS, KEY, VALUE, WIDE, BLOCK, STORE, PDL
    )
    tile_s, group = tl.trans(tile_s), head // GROUP
    groups: tl.constexpr = HEADS // GROUP
    if count > 0:
        q += entry * q_outer * UNIT + group * q_strides.head
        v += entry * v_outer * UNIT + head * v_strides.head
        lines = entry * (rows + BEHIND)
        place = slot * RING if STORE else lines
        k_lines += (place * groups + group) * KEY
        a_lines += (place * HEADS + head) * CHUNK
        scores += (lines * HEADS + head) * CHUNK
        weights += lines * (WEIGHTS * HEADS) + head
        chunk_delta += (slot * RING * HEADS + head) * VALUE
        start, end, fold_end = before // CHUNK * CHUNK, begin + count, (begin + settled) // CHUNK * CHUNK
        TILED: tl.constexpr = STAGES > 1 and KEY == WIDE and VALUE % BLOCK == 0
        if TILED:
            # Whole chunks of new rows have a loop of their own, without masks.
            whole = tl.minimum((begin + CHUNK - 1) // CHUNK * CHUNK, end)
            behind = tl.maximum(end // CHUNK * CHUNK, whole)
            tile_s = _chunks(
                start, whole, tile_s, p_state, state_mask, fold_end, out, q, v, chunk_delta, k_lines, a_lines, scores,
                weights, begin, count, column, q_strides.row, v_strides.row, HEADS, groups, KEY, VALUE, RING, BEHIND,
                STORE, CHUNK, WIDE, CORRECTED, PAIRED, FULL=False, STAGES=1,
            )
            tile_s = _chunks(
                whole, behind, tile_s, p_state, state_mask, fold_end, out, q, v, chunk_delta, k_lines, a_lines, scores,
                weights, begin, count, column, q_strides.row, v_strides.row, HEADS, groups, KEY, VALUE, RING, BEHIND,
                STORE, CHUNK, WIDE, CORRECTED, PAIRED, FULL=True, STAGES=STAGES,
            )
            start = behind
        _chunks(
            start, end, tile_s, p_state, state_mask, fold_end, out, q, v, chunk_delta, k_lines, a_lines, scores,
            weights, begin, count, column, q_strides.row, v_strides.row, HEADS, groups, KEY, VALUE, RING, BEHIND,
            STORE, CHUNK, WIDE, CORRECTED, PAIRED, FULL=False, STAGES=1 if TILED else STAGES,
        )
        if not STORE and tl.program_id(2) == 0:
            k_lines += BEHIND * (groups * KEY)
            a_lines += BEHIND * (HEADS * CHUNK)
            _keep_last_rows(
                chunk_k, chunk_g, chunk_a, g, k_lines, a_lines, slot, entry, head, begin, count, rows,
                HEADS, GROUP, KEY, RING, CHUNK, WIDE, RING_WIDE, CORRECTED,
            )


def _prepares_alone(q: Tensor) -> bool:
    """Whether one warp gives the bits of two, and is faster.

    The order of a sum over a query or key is Triton's choice. For these sizes one row is one warp's in both cases.
    """
    return q.dtype == torch.bfloat16 and q.shape[3] % 8 == 0 and 32 <= q.shape[3] <= 256


def cached_delta_rule_triton(given: CachedDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedDeltaRule` in two kernels."""
    batch, rows, heads, width = given.v.shape
    (groups, size), ring_size = given.k.shape[2:], given.chunk_k.shape[1]
    q, k, v = (dense_rows(part) for part in (given.q, given.k, given.v))
    g, beta = contiguous(given, "g", "beta")
    out = torch.empty(batch, rows, heads, width, dtype=v.dtype, device=v.device)
    unsettled = most_in_place(ring_size, CHUNK - 1) - 1
    in_place, behind = rows <= unsettled + 1, CHUNK - 1 + unsettled
    # The rows of a call, behind as many as may be known since the boundary.
    lines: tuple[int, int] = (batch, behind + rows)
    precise: dict[str, Any] = {"dtype": exact(v.dtype), "device": v.device}
    scores = torch.empty(*lines, heads, CHUNK, **precise)
    weights = torch.empty(*lines, WEIGHTS.value, heads, **precise)
    # New rows are stored where they are cached, or apart if there they would replace what is still read.
    chunk_k, chunk_a = (
        cache if in_place else cache.new_empty(*lines, *cache.shape[2:]) for cache in (given.chunk_k, given.chunk_a)
    )
    unit = common_stride(q, k, v)
    q_strides, k_strides, v_strides = ((part.stride(0) // unit, Strides(*part.stride()[1:3])) for part in (q, k, v))
    options: dict[str, Any] = {
        "UNIT": unit, "HEADS": heads, "GROUP": heads // groups, "KEY": size, "RING": ring_size, "BEHIND": behind,
        "CHUNK": CHUNK, "WIDE": max(16, triton.next_power_of_2(size)), "enable_fp_fusion": False,
    }
    alone = not in_place and _prepares_alone(q)
    limit = {"maxnreg": _REGISTERS} if alone and supports_pdl(v.device) else {}
    launch(
        _prepare_kernel, (batch, triton.cdiv(rows - 1 + unsettled, CHUNK) + 1, heads), q, k, g, beta, given.chunk_k,
        given.chunk_g, given.chunk_a, chunk_k, chunk_a, scores, weights, given.span, given.scale, rows, *q_strides,
        *k_strides, NORMALISE=given.normalise, EPSILON=EPSILON, STORE=in_place, num_warps=1 if alone else 2, **limit,
        **options,
    )
    if in_place and unsettled < CHUNK // 2:
        launch(
            step_kernel, (batch, heads, triton.cdiv(width, STEP_COLUMNS)), out, q, k, v, beta, given.state, chunk_k,
            given.chunk_delta, chunk_a, scores, weights, given.span, rows, *q_strides, *k_strides, *v_strides,
            VALUE=width, **options, **step_options(q, k, given.state, options["WIDE"]),
        )
        return out
    block = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    paired = v.dtype == torch.bfloat16 and v.data_ptr() % 4 == 0 and not any(step % 2 for step in v.stride()[:3])
    launch(
        _carry_kernel, (batch, heads, triton.cdiv(width, block)), out, q, v, g, given.state, given.chunk_k,
        given.chunk_delta, given.chunk_g, given.chunk_a, chunk_k, chunk_a, scores, weights, given.span, rows,
        *q_strides, *v_strides, VALUE=width, BLOCK=block, STORE=in_place, STAGES=1 if in_place else _STAGES,
        RING_WIDE=triton.next_power_of_2(ring_size), CORRECTED=beta is not None, PAIRED=paired, num_warps=_WARPS,
        **options,
    )
    return out
