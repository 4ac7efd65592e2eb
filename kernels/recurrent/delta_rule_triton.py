"""The Triton form of the gated delta rule: what does not depend on the state first, and then chunk after chunk.

A chunk is a tile of :data:`~specgraph.kernels.recurrent.arguments.CHUNK` rows in which each row has the place that its
position gives it, whether it is cached, new, or not there. So every product has one shape, and the bits of a row are a
function of the state at the boundary and of the rows since, however a call groups them.

1. A program prepares one chunk of one head: its keys, and the new rows of the inverse by which the errors of rows
   become what they add to the state. All chunks of a prompt are prepared side by side.
2. A program carries some columns of one head's state through the chunks, with products alone.

Products are of float32 in three parts of TF32, and no product is contracted with a sum (``enable_fp_fusion``).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, AnchoredDeltaRule
from specgraph.kernels.recurrent.last_rows import by_row, most_in_place, row_span, store_last_rows

_COLUMNS, _WARPS, _PREPARING, _PRECISION = 32, 4, 4, "tf32x3"


@triton.jit
def _unit(tile, NORMALISE: tl.constexpr, EPSILON: tl.constexpr):
    """The rows of a tile, brought to length 1 if asked for."""
    if NORMALISE:
        tile = tile * tl.rsqrt(tl.sum(tile * tile, 1) + EPSILON)[:, None]
    return tile


@triton.jit
def _decay(sums, lane):
    """How much of row ``j`` remains in row ``i``, for ``j <= i``; else 0."""
    seen = lane[None, :] <= lane[:, None]
    return tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=["rows", "outer"])
def _prepare_kernel(
    k, gate, rate, keys, gates, inverse, new_keys, new_gates, new_inverse, span, rows,
    outer, inner: tl.constexpr, between: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, SLOTS: tl.constexpr, NORMALISE: tl.constexpr,
    EPSILON: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is (B, chunks with new rows, H). Unless ``STORE``, the results are by the rows of the call."""
    entry, head = tl.program_id(0).to(tl.int64), tl.program_id(2)
    row, begin, _, count, _ = row_span(span, entry)
    begin, count = begin.to(tl.int32), count.to(tl.int32)
    first = (begin // CHUNK + tl.program_id(1)) * CHUNK
    if first < begin + count:
        lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
        group, inside = head // GROUP, key < KEY
        groups: tl.constexpr = HEADS // GROUP
        position = first + lane
        t, slot = position - begin, position % SLOTS
        known, new = t < 0, (t >= 0) & (t < count)
        base = row * SLOTS
        old = keys + (base * groups + group) * KEY + slot[:, None] * (groups * KEY) + key[None, :]
        tile = tl.load(old, mask=known[:, None] & inside[None, :], other=0)
        own = k + entry * outer + group * between + t[:, None] * inner + key[None, :]
        own = tl.load(own, mask=new[:, None] & inside[None, :], other=0).to(tl.float32)
        tile = tl.where(known[:, None], tile, _unit(own, NORMALISE, EPSILON))
        lines = entry * rows
        log = tl.load(gates + base * HEADS + head + slot * HEADS, mask=known, other=0)
        own_log = tl.load(gate + lines * HEADS + head + t * HEADS, mask=new, other=0).to(tl.float32)
        log = tl.where(known, log, own_log)

        line, place = t, lines
        if STORE:
            line, place = slot, base
        tl.store(new_gates + place * HEADS + head + line * HEADS, log, mask=new)
        tl.store(new_keys + (place * groups + group) * KEY + line[:, None] * (groups * KEY) + key[None, :], tile,
                 mask=(new & (head % GROUP == 0))[:, None] & inside[None, :])  # fmt: skip
        if rate is not None:
            own_rate = tl.load(rate + lines * HEADS + head + t * HEADS, mask=new, other=0).to(tl.float32)
            mixed = _decay(tl.cumsum(log, 0), lane) * tl.dot(tile, tl.trans(tile), input_precision=PRECISION)
            mixed = tl.where(lane[None, :] < lane[:, None], own_rate[:, None] * mixed, 0.0)
            old = inverse + (base * HEADS + head) * CHUNK + slot[:, None] * (HEADS * CHUNK) + lane[None, :]
            solved = tl.load(old, mask=known[:, None] & (lane[None, :] <= lane[:, None]), other=0)
            for i in range(
                loop_bound(tl.maximum(begin - first, 0)), loop_bound(tl.minimum(begin + count - first, CHUNK))
            ):
                factors = tl.sum(tl.where((lane == i)[None, :], tl.trans(mixed), 0.0), 1)
                solution = tl.where(lane == i, 1.0, -tl.sum(factors[:, None] * solved, 0))
                solved = tl.where((lane == i)[:, None], solution[None, :], solved)
            tl.store(new_inverse + (place * HEADS + head) * CHUNK + line[:, None] * (HEADS * CHUNK) + lane[None, :],
                     solved, mask=new[:, None])  # fmt: skip


@triton.jit(do_not_specialize=["rows", "q_outer", "v_outer"])
def _carry_kernel(
    out, q, v, rate, state, keys, errors, gates, inverse, new_keys, new_gates, new_inverse, span, scale, rows,
    q_outer, q_inner: tl.constexpr, q_head: tl.constexpr, v_outer, v_inner: tl.constexpr, v_head: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SLOTS: tl.constexpr,
    NORMALISE: tl.constexpr, EPSILON: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is (B, H, blocks of columns). Unless ``STORE``, what was prepared is by the rows of the call."""
    entry, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, begin, before, count, settled = row_span(span, entry)
    # Only the beginning of a sequence's part of a tensor may be far away; what is added to it per element is int32.
    begin, before, count, settled = begin.to(tl.int32), before.to(tl.int32), count.to(tl.int32), settled.to(tl.int32)
    lane, key, column = tl.arange(0, CHUNK), tl.arange(0, WIDE), block * BLOCK + tl.arange(0, BLOCK)
    own, inside, group = column < VALUE, key < KEY, head // GROUP
    groups: tl.constexpr = HEADS // GROUP
    lines = entry * rows
    out += (lines * HEADS + head) * VALUE
    for padding in range(loop_bound(count), loop_bound(rows)):
        nothing = tl.zeros([BLOCK], out.dtype.element_ty)
        tl.store(out + padding * (HEADS * VALUE) + column, nothing, mask=own)
    if count > 0:
        end = begin + count
        q += entry * q_outer + group * q_head
        v += entry * v_outer + head * v_head
        if rate is not None:
            rate += lines * HEADS + head
        base, place = row * SLOTS, lines
        if STORE:
            place = base
        keys += (base * groups + group) * KEY
        new_keys += (place * groups + group) * KEY
        gates += base * HEADS + head
        new_gates += place * HEADS + head
        inverse += (base * HEADS + head) * CHUNK
        new_inverse += (place * HEADS + head) * CHUNK
        errors += (base * HEADS + head) * VALUE
        tile = state + (row * HEADS + head) * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
        both = inside[:, None] & own[None, :]
        current = tl.load(tile, mask=both, other=0)
        for first in range(loop_bound(before // CHUNK * CHUNK), loop_bound(end), CHUNK):
            position = first + lane
            t = position - begin
            known, new, slot = t < 0, (t >= 0) & (t < count), position % SLOTS
            line = slot if STORE else t
            old_rows, new_rows = known[:, None] & inside[None, :], new[:, None] & inside[None, :]
            tile_k = tl.load(keys + slot[:, None] * (groups * KEY) + key[None, :], mask=old_rows, other=0)
            own_k = tl.load(new_keys + line[:, None] * (groups * KEY) + key[None, :], mask=new_rows, other=0)
            tile_k = tl.where(known[:, None], tile_k, own_k)
            log = tl.load(gates + slot * HEADS, mask=known, other=0)
            sums = tl.cumsum(tl.where(known, log, tl.load(new_gates + line * HEADS, mask=new, other=0)), 0)
            places = errors + slot[:, None] * (HEADS * VALUE) + column[None, :]
            error = tl.load(places, mask=known[:, None] & own[None, :], other=0)
            own_v = tl.load(v + t[:, None] * v_inner + column[None, :], mask=new[:, None] & own[None, :], other=0)
            own_v = own_v.to(tl.float32)
            if rate is not None:
                own_rate = tl.load(rate + t * HEADS, mask=new, other=0).to(tl.float32)
                held = tl.exp(sums)[:, None] * tl.dot(tile_k, current, input_precision=PRECISION)
                own_v = own_rate[:, None] * (own_v - held)
                error = tl.where(known[:, None], error, own_v)
                lower = lane[None, :] <= lane[:, None]
                solved = tl.load(inverse + slot[:, None] * (HEADS * CHUNK) + lane[None, :],
                                 mask=known[:, None] & lower, other=0)  # fmt: skip
                own_solved = tl.load(new_inverse + line[:, None] * (HEADS * CHUNK) + lane[None, :],
                                     mask=new[:, None] & lower, other=0)  # fmt: skip
                solved = tl.where(known[:, None], solved, own_solved)
                update = tl.dot(solved, error, input_precision=PRECISION)
            else:
                error = tl.where(known[:, None], error, own_v)
                update = error

            own_q = tl.load(q + t[:, None] * q_inner + key[None, :], mask=new_rows, other=0).to(tl.float32)
            own_q = _unit(own_q, NORMALISE, EPSILON) * scale
            scores = _decay(sums, lane) * tl.dot(own_q, tl.trans(tile_k), input_precision=PRECISION)
            result = tl.exp(sums)[:, None] * tl.dot(own_q, current, input_precision=PRECISION)
            result += tl.dot(scores, update, input_precision=PRECISION)
            tl.store(out + t[:, None] * (HEADS * VALUE) + column[None, :], result.to(out.dtype.element_ty),
                     mask=new[:, None] & own[None, :])  # fmt: skip

            # Other threads of this program may still read what this replaces.
            tl.debug_barrier()
            tl.store(places, error, mask=(new & (position >= end - SLOTS))[:, None] & own[None, :])
            if first + CHUNK <= end:
                last = tl.sum(tl.where(lane == CHUNK - 1, sums, 0.0), 0)
                weighted = tl.trans(tile_k * tl.exp(last - sums)[:, None])
                current = current * tl.exp(last) + tl.dot(weighted, update, input_precision=PRECISION)
                tl.store(tile, current, mask=both & (first + CHUNK <= begin + settled))


def anchored_delta_rule_triton(given: AnchoredDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.AnchoredDeltaRule` in two kernels, or five for prompts."""
    batch, rows, heads, width = given.v.shape
    (groups, size), slots = given.k.shape[2:], given.keys.shape[1]
    q, k, v = (by_row(part) for part in (given.q, given.k, given.v))
    rate = None if given.rate is None else given.rate.contiguous()
    out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    in_place, caches = rows <= most_in_place(slots, CHUNK - 1), (given.keys, given.gates, given.inverse)
    # New rows are prepared where they are cached, or apart if there they would replace what is still read.
    prepared = caches if in_place else tuple(cache.new_empty(batch, rows, *cache.shape[2:]) for cache in caches)
    options: dict[str, Any] = {
        "HEADS": heads, "GROUP": heads // groups, "KEY": size, "SLOTS": slots, "NORMALISE": given.normalise,
        "EPSILON": EPSILON, "STORE": in_place, "CHUNK": CHUNK, "WIDE": max(16, triton.next_power_of_2(size)),
        "PRECISION": _PRECISION, "enable_fp_fusion": False,
    }  # fmt: skip
    _prepare_kernel[batch, triton.cdiv(rows - 1, CHUNK) + 1, heads](
        k, given.gate.contiguous(), rate, *caches, *prepared, given.span, rows, *k.stride()[:3], **options,
        num_warps=_PREPARING,
    )  # fmt: skip
    block = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    _carry_kernel[batch, heads, triton.cdiv(width, block)](
        out, q, v, rate, given.state, given.keys, given.errors, given.gates, given.inverse, *prepared, given.span,
        given.scale, rows, *q.stride()[:3], *v.stride()[:3], VALUE=width, BLOCK=block, **options, num_warps=_WARPS,
    )  # fmt: skip
    for cache, new in zip(caches, prepared, strict=True) if not in_place else ():
        store_last_rows(cache.flatten(2), new.flatten(2), given.span)
    return out
