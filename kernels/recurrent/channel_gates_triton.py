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
from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, AnchoredDeltaRule, exact
from specgraph.kernels.recurrent.delta_rule_triton import begin_carrying
from specgraph.kernels.recurrent.last_rows import by_row, most_in_place, near_span, store_last_rows
from specgraph.kernels.recurrent.tiles_triton import PRECISION, wait_for_others

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
    q, k, gate, rate, keys, gates, inverse, all_inverse, scores, read, held, kept, left, span, scale, rows, chunks,
    q_outer, q_inner: tl.constexpr, q_head: tl.constexpr, k_outer, k_inner: tl.constexpr, k_head: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, SLOTS: tl.constexpr, BEHIND: tl.constexpr,
    NORMALISE: tl.constexpr, EPSILON: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The grid is (B, chunks, H), from the chunk on in which the state stands.

    ``scores``, ``read``, ``held`` and ``kept`` are by the rows of the call, behind ``BEHIND`` lines for rows that are
    known, and ``left`` is by the chunks. If ``STORE``, ``all_inverse`` is the cache; else it is by the rows, too.
    """
    wait_for_others(STORE, PDL)
    entry, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row, begin, before, count, _ = near_span(span, entry)
    first = (before // CHUNK + tl.program_id(1)) * CHUNK
    if (count > 0) & (first < begin + count):
        lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
        group, inside = head // GROUP, key < KEY
        groups: tl.constexpr = HEADS // GROUP
        position = first + lane
        t, slot = position - begin, position % SLOTS
        known, new = t < 0, (t >= 0) & (t < count)
        base, lines, line = row * SLOTS, entry * (rows + BEHIND), t + BEHIND
        known_tile, new_tile = known[:, None] & inside[None, :], new[:, None] & inside[None, :]
        old_k = keys + (base * groups + group) * KEY + slot[:, None] * (groups * KEY) + key[None, :]
        own_k = k + entry * k_outer + group * k_head + t[:, None] * k_inner + key[None, :]
        tile_k = tl.load(own_k, mask=new_tile, other=0)
        tile_k = tl.where(known[:, None], tl.load(old_k, mask=known_tile, other=0), tile_k)
        tile_q = q + entry * q_outer + group * q_head + t[:, None] * q_inner + key[None, :]
        tile_q = tl.load(tile_q, mask=new_tile, other=0)
        old_log = gates + (base * HEADS + head) * KEY + slot[:, None] * (HEADS * KEY) + key[None, :]
        own_log = gate + (entry * rows * HEADS + head) * KEY + t[:, None] * (HEADS * KEY) + key[None, :]
        log = tl.load(own_log, mask=new_tile, other=0).to(tl.float32)
        log = tl.where(known[:, None], tl.load(old_log, mask=known_tile, other=0), log)
        own_rate = tl.full([CHUNK], 1.0, tl.float32)
        solved = tl.zeros([CHUNK, CHUNK], tl.float32)
        if rate is not None:
            own_rate = tl.load(rate + (entry * rows * HEADS + head) + t * HEADS, mask=new, other=0).to(tl.float32)
            old = inverse + (base * HEADS + head) * CHUNK + slot[:, None] * (HEADS * CHUNK) + lane[None, :]
            solved = tl.load(old, mask=known[:, None] & (lane[None, :] <= lane[:, None]), other=0)
        if STORE:
            tl.store(old_k, tile_k, mask=new_tile & (head % GROUP == 0))
            tl.store(old_log, log, mask=new_tile)

        unit_k, unit_q = _unit(tile_k, NORMALISE, EPSILON), _unit(tile_q, NORMALISE, EPSILON) * scale
        seen = tl.zeros([CHUNK, CHUNK], tl.float32)
        # Sums of gates: of all rows so far, and of those behind each row.
        total, behind = tl.zeros([WIDE], tl.float32), tl.zeros([CHUNK, WIDE], tl.float32)
        place = (lines * HEADS + head) * KEY
        for i in range(0, loop_bound(tl.minimum(begin + count - first, CHUNK))):
            own = (lane == i)[:, None]
            log_i = _row(log, own)
            total += log_i
            behind = tl.where((lane < i)[:, None], behind + log_i[None, :], 0.0)
            if first + i >= begin:
                query, own_key = _row(unit_q, own), _row(unit_k, own)
                rate_i = tl.sum(tl.where(lane == i, own_rate, 0.0), 0)
                reaching = tl.where((lane <= i)[:, None], tl.exp(behind) * unit_k, 0.0)
                seen = tl.where(own, tl.sum(reaching * query[None, :], 1)[None, :], seen)
                line_i = place + (first + i - begin + BEHIND) * (HEADS * KEY) + key
                tl.store(read + line_i, query * tl.exp(total), mask=inside)
                if rate is not None:
                    tl.store(held + line_i, rate_i * (own_key * tl.exp(total)), mask=inside)
                    mixed = tl.where(lane < i, rate_i * tl.sum(reaching * own_key[None, :], 1), 0.0)
                    solution = tl.where(lane == i, 1.0, -tl.sum(mixed[:, None] * solved, 0))
                    solved = tl.where(own, solution[None, :], solved)

        if first + CHUNK <= begin + count:
            tl.store(kept + place + line[:, None] * (HEADS * KEY) + key[None, :], unit_k * tl.exp(behind),
                     mask=(lane < CHUNK)[:, None] & inside[None, :])  # fmt: skip
            left += ((entry * chunks + tl.program_id(1)) * HEADS + head) * KEY
            tl.store(left + key, tl.exp(total), mask=inside)
        if rate is not None:
            stored, real = line, known | new
            if STORE:
                stored, real = slot, new
            begun = (base if STORE else lines) * HEADS + head
            row_of = stored[:, None] * (HEADS * CHUNK) + lane[None, :]
            tl.store(all_inverse + begun * CHUNK + row_of, solved, mask=real[:, None])
            seen = tl.dot(seen, solved, input_precision=PRECISION)
        row_of = line[:, None] * (HEADS * CHUNK) + lane[None, :]
        tl.store(scores + (lines * HEADS + head) * CHUNK + row_of, seen, mask=new[:, None])


@triton.jit
def _chunk(
    first, current, out, v, rate, errors, all_errors, all_inverse, scores, read, held, kept, left, begin, count, column,
    v_inner: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SLOTS: tl.constexpr,
    BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Output and errors of the new rows of a chunk behind the state ``current``.

    Returns what is left of the state behind it, and keys and updates whose product its rows add to the state.
    """
    lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    own, inside, full = column < VALUE, key < KEY, first + CHUNK <= begin + count
    position = first + lane
    t, slot = position - begin, position % SLOTS
    real, new = t < count, (t >= 0) & (t < count)
    line = t + BEHIND
    stored = slot if STORE else line
    tile = line[:, None] * (HEADS * KEY) + key[None, :]
    tile_read = tl.load(read + tile, mask=new[:, None] & inside[None, :], other=0)
    tile_kept = tl.load(kept + tile, mask=real[:, None] & inside[None, :] & full, other=0)
    remains = tl.load(left + key, mask=inside & full, other=0)
    tile_v = tl.load(v + t[:, None] * v_inner + column[None, :], mask=new[:, None] & own[None, :], other=0)
    lower = lane[None, :] <= lane[:, None]
    seen = tl.load(scores + line[:, None] * (HEADS * CHUNK) + lane[None, :], mask=new[:, None] & lower, other=0)
    error = tl.load(errors + slot[:, None] * (HEADS * VALUE) + column[None, :],
                    mask=(t < 0)[:, None] & own[None, :], other=0)  # fmt: skip
    if rate is not None:
        own_rate = tl.load(rate + t * HEADS, mask=new, other=0).to(tl.float32)
        tile_held = tl.load(held + tile, mask=new[:, None] & inside[None, :], other=0)
        solved = tl.load(all_inverse + stored[:, None] * (HEADS * CHUNK) + lane[None, :],
                         mask=real[:, None] & lower, other=0)  # fmt: skip
    # All is loaded by here: behind a product, a load would not begin before the product is there.
    own_error = tile_v.to(tl.float32)
    if rate is not None:
        own_error = own_rate[:, None] * own_error - tl.dot(tile_held, current, input_precision=PRECISION)
    error = tl.where((t < 0)[:, None], error, own_error)
    result = tl.dot(tile_read, current, input_precision=PRECISION) + tl.dot(seen, error, input_precision=PRECISION)
    tl.store(out + t[:, None] * (HEADS * VALUE) + column[None, :], result.to(out.dtype.element_ty),
             mask=new[:, None] & own[None, :])  # fmt: skip
    tl.store(all_errors + stored[:, None] * (HEADS * VALUE) + column[None, :], error,
             mask=(new & (position >= begin + count - SLOTS))[:, None] & own[None, :])  # fmt: skip
    update = error
    if rate is not None:
        update = tl.dot(solved, error, input_precision=PRECISION)
    return remains, tile_kept, update


@triton.jit(do_not_specialize=["rows", "chunks", "v_outer"])
def _carry_kernel(
    out, v, rate, state, errors, all_errors, all_inverse, scores, read, held, kept, left, span, rows, chunks,
    v_outer, v_inner: tl.constexpr, v_head: tl.constexpr, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    SLOTS: tl.constexpr, BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The grid is (B, H, blocks of columns)."""
    entry, head, row, begin, before, count, settled, column, out, tile, both, current = begin_carrying(
        out, state, span, rows, HEADS, KEY, VALUE, WIDE, BLOCK, STORE, PDL
    )
    if count > 0:
        v += entry * v_outer + head * v_head
        if rate is not None:
            rate += entry * rows * HEADS + head
        lines = entry * (rows + BEHIND)
        place = row * SLOTS if STORE else lines
        all_inverse += (place * HEADS + head) * CHUNK
        scores += (lines * HEADS + head) * CHUNK
        read += (lines * HEADS + head) * KEY
        held += (lines * HEADS + head) * KEY
        kept += (lines * HEADS + head) * KEY
        left += (entry * chunks * HEADS + head) * KEY
        errors += (row * SLOTS * HEADS + head) * VALUE
        all_errors += (place * HEADS + head) * VALUE
        start, full = before // CHUNK * CHUNK, (begin + count) // CHUNK * CHUNK
        stored = (begin + settled) // CHUNK * CHUNK
        for first in tl.range(loop_bound(start), loop_bound(full), CHUNK, num_stages=STAGES):
            remains, tile_kept, update = _chunk(
                first, current, out, v, rate, errors, all_errors, all_inverse, scores, read, held, kept,
                left + (first - start) // CHUNK * (HEADS * KEY), begin, count, column,
                v_inner, HEADS, KEY, VALUE, SLOTS, BEHIND, STORE, CHUNK, WIDE,
            )  # fmt: skip
            added = tl.dot(tl.trans(tile_kept), update, input_precision=PRECISION)
            current = current * remains[:, None] + added
            tl.store(tile, current, mask=both & (first + CHUNK == stored))
        if full < begin + count:
            _chunk(
                full, current, out, v, rate, errors, all_errors, all_inverse, scores, read, held, kept, left,
                begin, count, column, v_inner, HEADS, KEY, VALUE, SLOTS, BEHIND, STORE, CHUNK, WIDE,
            )  # fmt: skip


def channel_gates_triton(given: AnchoredDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.AnchoredDeltaRule` whose gates are per channel, in two kernels.

    For prompts there are four more, which store the last rows.
    """
    batch, rows, heads, width = given.v.shape
    (groups, size), slots = given.k.shape[2:], given.keys.shape[1]
    q, k, v = (by_row(part) for part in (given.q, given.k, given.v))
    rate, gate = None if given.rate is None else given.rate.contiguous(), given.gate.contiguous()
    out, pdl = torch.empty(batch, rows, heads, width, dtype=v.dtype, device=v.device), supports_pdl(v.device)
    unsettled = most_in_place(slots, CHUNK - 1) - 1
    in_place, behind = rows <= unsettled + 1, CHUNK - 1 + unsettled
    # The rows of a call, behind as many as may be known since the boundary.
    lines, chunks = (batch, behind + rows, heads), triton.cdiv(rows - 1 + unsettled, CHUNK) + 1
    precise: dict[str, Any] = {"dtype": exact(v.dtype), "device": v.device}
    scores = torch.empty(*lines, CHUNK, **precise)
    read, held, kept = (torch.empty(*lines, size, **precise) for _ in range(3))
    left = torch.empty(batch, chunks, heads, size, **precise)
    # New rows are stored where they are cached, or apart if there they would replace what is still read.
    caches = given.errors, given.inverse
    stored = caches if in_place else tuple(cache.new_empty(*lines[:2], *cache.shape[2:]) for cache in caches)
    errors, inverse = stored
    options: dict[str, Any] = {
        "HEADS": heads, "KEY": size, "SLOTS": slots, "BEHIND": behind, "STORE": in_place, "CHUNK": CHUNK,
        "WIDE": max(16, triton.next_power_of_2(size)), "enable_fp_fusion": False, "PDL": pdl, **launch_options(pdl),
        "num_warps": _WARPS,
    }  # fmt: skip
    _prepare_kernel[batch, chunks, heads](
        q, k, gate, rate, given.keys, given.gates, given.inverse, inverse, scores, read, held, kept, left, given.span,
        given.scale, rows, chunks, *q.stride()[:3], *k.stride()[:3], GROUP=heads // groups, NORMALISE=given.normalise,
        EPSILON=EPSILON, **options,
    )  # fmt: skip
    block = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    _carry_kernel[batch, heads, triton.cdiv(width, block)](
        out, v, rate, given.state, given.errors, errors, inverse, scores, read, held, kept, left, given.span, rows,
        chunks, *v.stride()[:3], VALUE=width, BLOCK=block, STAGES=1 if in_place else _STAGES, **options,
    )  # fmt: skip
    if not in_place:
        last = (k, gate.to(given.gates.dtype), *(part[:, behind:] for part in stored))
        for cache, part in zip((given.keys, given.gates, *caches), last, strict=True):
            store_last_rows(cache.flatten(2), part.flatten(2), given.span)
    return out
