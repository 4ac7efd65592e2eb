"""The gated delta rule with a gate per channel: what does not depend on the state first, and then chunk after chunk.

The two kernels do what those of :mod:`specgraph.kernels.recurrent.delta_rule_triton` do: the tile of a chunk, the
places of its rows and what is cached are the same. But a decay belongs to a channel and not to a row, so it is not a
factor of a product of rows:

- The products of two rows, ``sum over d of e^{G_i - G_j} k_i k_j``, are no product of matrices. ``e^{G_i}`` and
  ``e^{-G_j}`` would make them one, but the second overflows where gates are strong. So the first kernel goes through
  the rows of the chunk, and keeps for every row ``j`` the sum of the gates behind it up to the present row ``i``. It is
  never above zero, and no digits are lost in it behind a strong gate, as they are in a difference of two sums. Only new
  rows ``i`` cost exponentials and products: a step that decodes has few of them.
- Queries and keys reach the second kernel with their decays, in float32: what reads the state, what is held against a
  value, and what a row adds to the state at the end of the chunk. All its products are of float32 (``tf32x3``).

Row ``i`` is computed from a tile in which each row of the chunk has its own place, and in an order that its position
alone gives. Both kernels have a fixed number of warps. So no bit depends on how a call groups rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import contiguous, dense_rows, launch
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, CachedDeltaRule, exact
from specgraph.kernels.recurrent.delta_rule_triton import begin_carrying
from specgraph.kernels.recurrent.last_rows import most_in_place, near_span, store_last_rows
from specgraph.kernels.recurrent.tiles_triton import PRECISION, Strides, wait_for_others

_COLUMNS, _WARPS, _STAGES = 32, 4, 2


@triton.jit
def _unit(tile, NORMALISE: tl.constexpr, EPSILON: tl.constexpr):
    """The rows of a tile in float32, brought to length 1 if that is asked for."""
    tile = tile.to(tl.float32)
    if NORMALISE:
        tile = tile * tl.rsqrt(tl.sum(tile * tile, 1) + EPSILON)[:, None]
    return tile


@triton.jit
def _row(tile, own):
    """The row of a tile that ``own`` ``[CHUNK, 1]`` marks; the other terms of the sum are zeros."""
    return tl.sum(tl.where(own, tile, 0.0), 0)


@triton.jit(do_not_specialize=["rows", "chunks", "q_outer", "k_outer"])
def _prepare_kernel(
    q, k, g, beta, chunk_k, chunk_g, chunk_a, a_lines, scores, w_q, w_k, w_update, decay, span, scale, rows, chunks,
    q_outer, q_strides: tl.constexpr, k_outer, k_strides: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    KEY: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr, NORMALISE: tl.constexpr, EPSILON: tl.constexpr,
    STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):
    """The grid is (B, chunks, H), from the chunk on in which the state stands.

    ``scores``, ``w_q``, ``w_k`` and ``w_update`` are by the rows of the call, behind ``BEHIND`` lines for rows that are
    known, and ``decay`` is by the chunks. If ``STORE``, ``a_lines`` is the cache; else it is by the rows, too.
    """
    wait_for_others(STORE, PDL)
    entry, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    slot, begin, before, count, _ = near_span(span, entry)
    first = (before // CHUNK + tl.program_id(1)) * CHUNK
    if (count > 0) & (first < begin + count):
        lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
        group, inside = head // GROUP, key < KEY
        groups: tl.constexpr = HEADS // GROUP
        position = first + lane
        t, ring = position - begin, position % RING
        known, new = t < 0, (t >= 0) & (t < count)
        base, lines, line = slot * RING, entry * (rows + BEHIND), t + BEHIND
        # ---- load: q, k, g [CHUNK, WIDE]; beta [CHUNK]; A [CHUNK, CHUNK], of which rows of new positions are made here
        known_tile, new_tile = known[:, None] & inside[None, :], new[:, None] & inside[None, :]
        old_k = chunk_k + (base * groups + group) * KEY + ring[:, None] * (groups * KEY) + key[None, :]
        new_k = k + entry * k_outer + group * k_strides.head + t[:, None] * k_strides.row + key[None, :]
        tile_k = tl.load(new_k, mask=new_tile, other=0)
        tile_k = tl.where(known[:, None], tl.load(old_k, mask=known_tile, other=0), tile_k)
        tile_q = q + entry * q_outer + group * q_strides.head + t[:, None] * q_strides.row + key[None, :]
        tile_q = tl.load(tile_q, mask=new_tile, other=0)
        old_g = chunk_g + (base * HEADS + head) * KEY + ring[:, None] * (HEADS * KEY) + key[None, :]
        new_g = g + (entry * rows * HEADS + head) * KEY + t[:, None] * (HEADS * KEY) + key[None, :]
        tile_g = tl.load(new_g, mask=new_tile, other=0).to(tl.float32)
        tile_g = tl.where(known[:, None], tl.load(old_g, mask=known_tile, other=0), tile_g)
        tile_beta = tl.full([CHUNK], 1.0, tl.float32)
        tile_a = tl.zeros([CHUNK, CHUNK], tl.float32)
        if beta is not None:
            tile_beta = tl.load(beta + (entry * rows * HEADS + head) + t * HEADS, mask=new, other=0).to(tl.float32)
            old = chunk_a + (base * HEADS + head) * CHUNK + ring[:, None] * (HEADS * CHUNK) + lane[None, :]
            tile_a = tl.load(old, mask=known[:, None] & (lane[None, :] <= lane[:, None]), other=0)
        if STORE:
            tl.store(old_k, tile_k, mask=new_tile & (head % GROUP == 0))
            tl.store(old_g, tile_g, mask=new_tile)

        # ---- for each new row i: scores_ij = sum over channels of e^{G_i - G_j} q_i k_j, and M_ij alike, for j <= i;
        #   A_i = 1_i - sum over j < i of M_ij A_j;  w_q = e^G q,  w_k = beta e^G k,  w_update = e^{G_last - G} k
        unit_k, unit_q = _unit(tile_k, NORMALISE, EPSILON), _unit(tile_q, NORMALISE, EPSILON) * scale
        tile_scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        # Sums of gates: of all rows so far, and of those behind each row.
        total, behind = tl.zeros([WIDE], tl.float32), tl.zeros([CHUNK, WIDE], tl.float32)
        place = (lines * HEADS + head) * KEY
        for i in range(0, loop_bound(tl.minimum(begin + count - first, CHUNK))):
            own = (lane == i)[:, None]
            g_i = _row(tile_g, own)
            total += g_i
            behind = tl.where((lane < i)[:, None], behind + g_i[None, :], 0.0)
            if first + i >= begin:
                query, own_key = _row(unit_q, own), _row(unit_k, own)
                beta_i = tl.sum(tl.where(lane == i, tile_beta, 0.0), 0)
                reaching = tl.where((lane <= i)[:, None], tl.exp(behind) * unit_k, 0.0)
                tile_scores = tl.where(own, tl.sum(reaching * query[None, :], 1)[None, :], tile_scores)
                line_i = place + (first + i - begin + BEHIND) * (HEADS * KEY) + key
                tl.store(w_q + line_i, query * tl.exp(total), mask=inside)
                if beta is not None:
                    tl.store(w_k + line_i, beta_i * (own_key * tl.exp(total)), mask=inside)
                    tile_m = tl.where(lane < i, beta_i * tl.sum(reaching * own_key[None, :], 1), 0.0)
                    a_row = tl.where(lane == i, 1.0, -tl.sum(tile_m[:, None] * tile_a, 0))
                    tile_a = tl.where(own, a_row[None, :], tile_a)

        if first + CHUNK <= begin + count:
            tl.store(w_update + place + line[:, None] * (HEADS * KEY) + key[None, :], unit_k * tl.exp(behind),
                     mask=(lane < CHUNK)[:, None] & inside[None, :])
            decay += ((entry * chunks + tl.program_id(1)) * HEADS + head) * KEY
            tl.store(decay + key, tl.exp(total), mask=inside)
        if beta is not None:
            stored, real = line, known | new
            if STORE:
                stored, real = ring, new
            begun = (base if STORE else lines) * HEADS + head
            row_of = stored[:, None] * (HEADS * CHUNK) + lane[None, :]
            tl.store(a_lines + begun * CHUNK + row_of, tile_a, mask=real[:, None])
            tile_scores = tl.dot(tile_scores, tile_a, input_precision=PRECISION)
        row_of = line[:, None] * (HEADS * CHUNK) + lane[None, :]
        tl.store(scores + (lines * HEADS + head) * CHUNK + row_of, tile_scores, mask=new[:, None])


@triton.jit
def _chunk(
    first, tile_s, out, v, beta, chunk_delta, delta_lines, a_lines, scores, w_q, w_k, w_update, decay, begin, count,
    column, v_row: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, RING: tl.constexpr,
    BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):
    """Output and errors of the new rows of a chunk behind the state ``tile_s``.

    Returns what is left of the state behind it, and keys and updates whose product its rows add to the state.
    """
    lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    own, inside, full = column < VALUE, key < KEY, first + CHUNK <= begin + count
    position = first + lane
    t, ring = position - begin, position % RING
    real, new = t < count, (t >= 0) & (t < count)
    line = t + BEHIND
    stored = ring if STORE else line
    tile = line[:, None] * (HEADS * KEY) + key[None, :]
    tile_w_q = tl.load(w_q + tile, mask=new[:, None] & inside[None, :], other=0)
    tile_w_update = tl.load(w_update + tile, mask=real[:, None] & inside[None, :] & full, other=0)
    tile_decay = tl.load(decay + key, mask=inside & full, other=0)
    tile_v = tl.load(v + t[:, None] * v_row + column[None, :], mask=new[:, None] & own[None, :], other=0)
    lower = lane[None, :] <= lane[:, None]
    tile_scores = tl.load(scores + line[:, None] * (HEADS * CHUNK) + lane[None, :], mask=new[:, None] & lower, other=0)
    delta = tl.load(chunk_delta + ring[:, None] * (HEADS * VALUE) + column[None, :],
                    mask=(t < 0)[:, None] & own[None, :], other=0)
    if beta is not None:
        tile_beta = tl.load(beta + t * HEADS, mask=new, other=0).to(tl.float32)
        tile_w_k = tl.load(w_k + tile, mask=new[:, None] & inside[None, :], other=0)
        tile_a = tl.load(a_lines + stored[:, None] * (HEADS * CHUNK) + lane[None, :],
                         mask=real[:, None] & lower, other=0)
    # ---- delta = beta v - w_k S: [CHUNK, BLOCK];  out = w_q S + scores A delta;  v_new = A delta
    # All is loaded by here: behind a product, a load would not begin before the product is there.
    new_delta = tile_v.to(tl.float32)
    if beta is not None:
        new_delta = tile_beta[:, None] * new_delta - tl.dot(tile_w_k, tile_s, input_precision=PRECISION)
    delta = tl.where((t < 0)[:, None], delta, new_delta)
    result = tl.dot(tile_w_q, tile_s, input_precision=PRECISION) + tl.dot(tile_scores, delta, input_precision=PRECISION)
    tl.store(out + t[:, None] * (HEADS * VALUE) + column[None, :], result.to(out.dtype.element_ty),
             mask=new[:, None] & own[None, :])
    tl.store(delta_lines + stored[:, None] * (HEADS * VALUE) + column[None, :], delta,
             mask=(new & (position >= begin + count - RING))[:, None] & own[None, :])
    v_new = delta
    if beta is not None:
        v_new = tl.dot(tile_a, delta, input_precision=PRECISION)
    return tile_decay, tile_w_update, v_new


@triton.jit(do_not_specialize=["rows", "chunks", "v_outer"])
def _carry_kernel(
    out, v, beta, state, chunk_delta, delta_lines, a_lines, scores, w_q, w_k, w_update, decay, span, rows, chunks,
    v_outer, v_strides: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, RING: tl.constexpr,
    BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """The grid is (B, H, blocks of columns)."""
    entry, head, slot, begin, before, count, settled, column, out, p_state, state_mask, tile_s = begin_carrying(
        out, state, span, rows, HEADS, KEY, VALUE, WIDE, BLOCK, STORE, PDL
    )
    if count > 0:
        v += entry * v_outer + head * v_strides.head
        if beta is not None:
            beta += entry * rows * HEADS + head
        lines = entry * (rows + BEHIND)
        place = slot * RING if STORE else lines
        a_lines += (place * HEADS + head) * CHUNK
        scores += (lines * HEADS + head) * CHUNK
        w_q += (lines * HEADS + head) * KEY
        w_k += (lines * HEADS + head) * KEY
        w_update += (lines * HEADS + head) * KEY
        decay += (entry * chunks * HEADS + head) * KEY
        chunk_delta += (slot * RING * HEADS + head) * VALUE
        delta_lines += (place * HEADS + head) * VALUE
        start, full = before // CHUNK * CHUNK, (begin + count) // CHUNK * CHUNK
        stored = (begin + settled) // CHUNK * CHUNK
        for first in tl.range(loop_bound(start), loop_bound(full), CHUNK, num_stages=STAGES):
            tile_decay, tile_w_update, v_new = _chunk(
                first, tile_s, out, v, beta, chunk_delta, delta_lines, a_lines, scores, w_q, w_k, w_update,
                decay + (first - start) // CHUNK * (HEADS * KEY), begin, count, column,
                v_strides.row, HEADS, KEY, VALUE, RING, BEHIND, STORE, CHUNK, WIDE,
            )
            # ---- S <- e^{G_last} S + w_update^T v_new: [WIDE, BLOCK]
            added = tl.dot(tl.trans(tile_w_update), v_new, input_precision=PRECISION)
            tile_s = tile_s * tile_decay[:, None] + added
            tl.store(p_state, tile_s, mask=state_mask & (first + CHUNK == stored))
        if full < begin + count:
            _chunk(
                full, tile_s, out, v, beta, chunk_delta, delta_lines, a_lines, scores, w_q, w_k, w_update, decay,
                begin, count, column, v_strides.row, HEADS, KEY, VALUE, RING, BEHIND, STORE, CHUNK, WIDE,
            )


def channel_gates_triton(given: CachedDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedDeltaRule` whose gates are per channel, in two kernels.

    For prompts there are four more, which store the last rows.
    """
    batch, rows, heads, width = given.v.shape
    (groups, size), ring_size = given.k.shape[2:], given.chunk_k.shape[1]
    q, k, v = (dense_rows(part) for part in (given.q, given.k, given.v))
    q_strides, k_strides, v_strides = ((part.stride(0), Strides(*part.stride()[1:3])) for part in (q, k, v))
    g, beta = contiguous(given, "g", "beta")
    out = torch.empty(batch, rows, heads, width, dtype=v.dtype, device=v.device)
    unsettled = most_in_place(ring_size, CHUNK - 1) - 1
    in_place, behind = rows <= unsettled + 1, CHUNK - 1 + unsettled
    # The rows of a call, behind as many as may be known since the boundary.
    lines, chunks = (batch, behind + rows, heads), triton.cdiv(rows - 1 + unsettled, CHUNK) + 1
    precise: dict[str, Any] = {"dtype": exact(v.dtype), "device": v.device}
    scores = torch.empty(*lines, CHUNK, **precise)
    w_q, w_k, w_update = (torch.empty(*lines, size, **precise) for _ in range(3))
    decay = torch.empty(batch, chunks, heads, size, **precise)
    # New rows are stored where they are cached, or apart if there they would replace what is still read.
    caches = given.chunk_delta, given.chunk_a
    stored = caches if in_place else tuple(cache.new_empty(*lines[:2], *cache.shape[2:]) for cache in caches)
    chunk_delta, chunk_a = stored
    options: dict[str, Any] = {
        "HEADS": heads, "KEY": size, "RING": ring_size, "BEHIND": behind, "STORE": in_place, "CHUNK": CHUNK,
        "WIDE": max(16, triton.next_power_of_2(size)), "enable_fp_fusion": False, "num_warps": _WARPS,
    }
    launch(
        _prepare_kernel, (batch, chunks, heads), q, k, g, beta, given.chunk_k, given.chunk_g, given.chunk_a, chunk_a,
        scores, w_q, w_k, w_update, decay, given.span, given.scale, rows, chunks, *q_strides, *k_strides,
        GROUP=heads // groups, NORMALISE=given.normalise, EPSILON=EPSILON, **options,
    )
    block = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    launch(
        _carry_kernel, (batch, heads, triton.cdiv(width, block)), out, v, beta, given.state, given.chunk_delta,
        chunk_delta, chunk_a, scores, w_q, w_k, w_update, decay, given.span, rows, chunks, *v_strides, VALUE=width,
        BLOCK=block, STAGES=1 if in_place else _STAGES, **options,
    )
    if not in_place:
        last = (k, g.to(given.chunk_g.dtype), *(part[:, behind:] for part in stored))
        for cache, part in zip((given.chunk_k, given.chunk_g, *caches), last, strict=True):
            store_last_rows(cache.flatten(2), part.flatten(2), given.span)
    return out
