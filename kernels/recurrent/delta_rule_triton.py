"""The Triton form of the gated delta rule: a program carries some columns of one head's state, chunk after chunk.

A chunk is a tile of :data:`~specgraph.kernels.recurrent.arguments.CHUNK` rows in which each row has the place that its
position gives it, whether it is cached, new, or not there. So every product has one shape, and the bits of a row are a
function of the state at the boundary and of the rows since, however a call groups them. Products are of float32 in
three parts of TF32, and no product is contracted with a sum (``enable_fp_fusion``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, AnchoredDeltaRule
from specgraph.kernels.recurrent.last_rows import by_row, most_in_place, row_span, store_last_rows

_COLUMNS, _WARPS, _PRECISION = 32, 4, "tf32x3"


@triton.jit
def _row(tile, lane, i):
    """Row ``i`` of a tile."""
    return tl.sum(tl.where((lane == i)[:, None], tile, 0.0), 0)


@triton.jit
def _element(values, lane, i):
    """Element ``i`` of a vector."""
    return tl.sum(tl.where(lane == i, values, 0.0), 0)


@triton.jit
def _unit(tile, NORMALISE: tl.constexpr, EPSILON: tl.constexpr):
    """The rows of a tile, brought to length 1 if asked for."""
    if NORMALISE:
        tile = tile * tl.rsqrt(tl.sum(tile * tile, 1) + EPSILON)[:, None]
    return tile


@triton.jit
def _corrected(updates, state, keys, values, rates, sums, lane, first, last, PRECISION: tl.constexpr):
    """What rows ``first`` up to ``last`` add to the state: each depends on those before it."""
    found = tl.dot(keys, state, input_precision=PRECISION)
    alike = tl.dot(keys, tl.trans(keys), input_precision=PRECISION)
    for i in range(loop_bound(first), loop_bound(last)):
        total = _element(sums, lane, i)
        weights = tl.where(lane < i, tl.exp(tl.where(lane < i, total - sums, 0.0)) * _row(alike, lane, i), 0.0)
        known = tl.exp(total) * _row(found, lane, i) + tl.sum(weights[:, None] * updates, 0)
        update = _element(rates, lane, i) * (_row(values, lane, i) - known)
        updates = tl.where((lane == i)[:, None], update[None, :], updates)
    return updates


@triton.jit(do_not_specialize=["rows", "q_outer", "k_outer", "v_outer"])
def _anchored_delta_rule_kernel(
    out, q, k, v, gate, rate, state, keys, updates, gates, new_keys, new_gates, span, scale, rows,
    q_outer, q_inner: tl.constexpr, q_head: tl.constexpr, k_outer, k_inner: tl.constexpr, k_head: tl.constexpr,
    v_outer, v_inner: tl.constexpr, v_head: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, SLOTS: tl.constexpr,
    NORMALISE: tl.constexpr, EPSILON: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The grid is (B, H, blocks of columns). Unless ``STORE``, ``new_keys`` and ``new_gates`` hold the call's rows."""
    entry, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, begin, before, count, settled = row_span(span, entry)
    # Only the beginning of a sequence's part of a tensor may be far away; what is added to it per element is int32.
    begin, before, count, settled = begin.to(tl.int32), before.to(tl.int32), count.to(tl.int32), settled.to(tl.int32)
    lane, key, column = tl.arange(0, CHUNK), tl.arange(0, WIDE), block * BLOCK + tl.arange(0, BLOCK)
    own, inside, group = column < VALUE, key < KEY, head // GROUP
    groups: tl.constexpr = HEADS // GROUP
    lines = (entry * rows).to(tl.int64)
    out += (lines * HEADS + head) * VALUE
    for padding in range(loop_bound(count), loop_bound(rows)):
        nothing = tl.zeros([BLOCK], out.dtype.element_ty)
        tl.store(out + padding * (HEADS * VALUE) + column, nothing, mask=own)
    if count > 0:
        end = begin + count
        q += entry * q_outer + group * q_head
        k += entry * k_outer + group * k_head
        v += entry * v_outer + head * v_head
        gate += lines * HEADS + head
        if rate is not None:
            rate += lines * HEADS + head
        keys += (row * (SLOTS * groups) + group) * KEY
        updates += (row * (SLOTS * HEADS) + head) * VALUE
        gates += row * (SLOTS * HEADS) + head
        first_line = row * SLOTS if STORE else lines
        new_keys += (first_line * groups + group) * KEY
        new_gates += first_line * HEADS + head
        tile = state + (row * HEADS + head) * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
        both = inside[:, None] & own[None, :]
        current = tl.load(tile, mask=both, other=0)
        for first in range(loop_bound(before // CHUNK * CHUNK), loop_bound(end), CHUNK):
            position = first + lane
            t = position - begin
            known, new, slot = t < 0, (t >= 0) & (t < count), position % SLOTS
            places = slot[:, None] * (HEADS * VALUE) + column[None, :]
            tile_k = tl.load(keys + slot[:, None] * (groups * KEY) + key[None, :],
                             mask=known[:, None] & inside[None, :], other=0)  # fmt: skip
            tile_u = tl.load(updates + places, mask=known[:, None] & own[None, :], other=0)
            sums = tl.load(gates + slot * HEADS, mask=known, other=0)
            new_rows = new[:, None] & inside[None, :]
            own_k = tl.load(k + t[:, None] * k_inner + key[None, :], mask=new_rows, other=0).to(tl.float32)
            own_q = tl.load(q + t[:, None] * q_inner + key[None, :], mask=new_rows, other=0).to(tl.float32)
            new_values = new[:, None] & own[None, :]
            own_v = tl.load(v + t[:, None] * v_inner + column[None, :], mask=new_values, other=0).to(tl.float32)
            own_gate = tl.load(gate + t * HEADS, mask=new, other=0).to(tl.float32)
            tile_k = tl.where(known[:, None], tile_k, _unit(own_k, NORMALISE, EPSILON))
            own_q = _unit(own_q, NORMALISE, EPSILON) * scale

            start, stop = tl.maximum(begin - first, 0), tl.minimum(end - first, CHUNK)
            total = _element(sums, lane, start - 1)
            for i in range(loop_bound(start), loop_bound(stop)):
                total += _element(own_gate, lane, i)
                sums = tl.where(lane == i, total, sums)
            if rate is not None:
                own_rate = tl.load(rate + t * HEADS, mask=new, other=0).to(tl.float32)
                tile_u = _corrected(tile_u, current, tile_k, own_v, own_rate, sums, lane, start, stop, PRECISION)
            else:
                tile_u = tl.where(new[:, None], own_v, tile_u)

            seen = (lane[None, :] <= lane[:, None]) & new[:, None]
            decay = tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)
            scores = decay * tl.dot(own_q, tl.trans(tile_k), input_precision=PRECISION)
            result = tl.exp(sums)[:, None] * tl.dot(own_q, current, input_precision=PRECISION)
            result += tl.dot(scores, tile_u, input_precision=PRECISION)
            tl.store(out + t[:, None] * (HEADS * VALUE) + column[None, :], result.to(out.dtype.element_ty),
                     mask=new_values)  # fmt: skip

            # Other threads of this program may still read what this replaces.
            tl.debug_barrier()
            kept = new & (position >= end - SLOTS)
            tl.store(updates + places, tile_u, mask=kept[:, None] & own[None, :])
            line = slot if STORE else t
            kept = (kept if STORE else new) & (block == 0)
            tl.store(new_gates + line * HEADS, sums, mask=kept)
            tl.store(new_keys + line[:, None] * (groups * KEY) + key[None, :], tile_k,
                     mask=(kept & (head % GROUP == 0))[:, None] & inside[None, :])  # fmt: skip
            if first + CHUNK <= end:
                last = _element(sums, lane, CHUNK - 1)
                weighted = tl.trans(tile_k * tl.exp(last - sums)[:, None])
                current = current * tl.exp(last) + tl.dot(weighted, tile_u, input_precision=PRECISION)
                tl.store(tile, current, mask=both & (first + CHUNK <= begin + settled))


def anchored_delta_rule_triton(given: AnchoredDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.AnchoredDeltaRule` in one kernel, or three for prompts."""
    batch, rows, heads, width = given.v.shape
    (groups, size), slots = given.k.shape[2:], given.keys.shape[1]
    q, k, v = (by_row(part) for part in (given.q, given.k, given.v))
    rate = None if given.rate is None else given.rate.contiguous()
    out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device)
    in_place, keys, gates = rows <= most_in_place(slots, CHUNK - 1), given.keys, given.gates
    if not in_place:
        keys, gates = keys.new_empty(batch, rows, groups, size), gates.new_empty(batch, rows, heads)
    block = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    _anchored_delta_rule_kernel[batch, heads, triton.cdiv(width, block)](
        out, q, k, v, given.gate.contiguous(), rate, given.state, given.keys, given.updates, given.gates, keys, gates,
        given.span, given.scale, rows, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], HEADS=heads,
        GROUP=heads // groups, KEY=size, VALUE=width, SLOTS=slots, NORMALISE=given.normalise, EPSILON=EPSILON,
        STORE=in_place, CHUNK=CHUNK, WIDE=max(16, triton.next_power_of_2(size)), BLOCK=block, PRECISION=_PRECISION,
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    if not in_place:
        store_last_rows(given.keys.flatten(2), keys.flatten(2), given.span)
        store_last_rows(given.gates, gates, given.span)
    return out
