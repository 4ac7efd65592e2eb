"""The Triton form of the selective scan: a program carries the states of some channels of one sequence, row after row.

The sum over a state's numbers is of the same form in every row, so the bits of a row are a function of the state at the
boundary and of the rows since.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import dense_rows
from specgraph.kernels.recurrent.arguments import CHUNK, CachedScan
from specgraph.kernels.recurrent.last_rows import most_in_place, row_span, store_last_rows

_CHANNELS = 32


@triton.jit(do_not_specialize=["rows", "x_outer", "x_inner", "dt_outer", "dt_inner", "b_outer", "b_inner", "c_outer",
                               "c_inner"])
def _cached_scan_kernel(
    out, x, dt, a, places_given, places_read, state, steps, entered, places, span, rows,
    x_outer, x_inner, dt_outer, dt_inner, b_outer, b_inner, c_outer, c_inner,
    CHANNELS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, STORE: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):
    """The grid is (B, blocks of channels)."""
    entry = tl.program_id(0).to(tl.int64)
    row, begin, before, count, settled = row_span(span, entry)
    # Channels are lines: [BLOCK]. The numbers of a channel's state are columns: [WIDE].
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, WIDE)
    own, inside = channel < CHANNELS, number < SIZE
    both = own[:, None] & inside[None, :]
    for padding in range(loop_bound(count), loop_bound(rows)):
        tl.store(out + (entry * rows + padding) * CHANNELS + channel, tl.zeros([BLOCK], tl.float32), mask=own)
    if count > 0:
        end = begin + count
        tile = state + (row * CHANNELS + channel[:, None]) * SIZE + number[None, :]
        rates = tl.load(a + channel[:, None] * SIZE + number[None, :], mask=both, other=0)
        current = tl.load(tile, mask=both, other=0)
        for position in range(loop_bound(before // CHUNK * CHUNK), loop_bound(end)):
            known, t = position < begin, position - begin
            slot = row * SLOTS + position % SLOTS
            # ---- dt, dt x [BLOCK], and b [WIDE]: of a known row from the cache, of a new row from the call; c [WIDE]
            lane = slot * CHANNELS + channel
            step = tl.load(steps + lane, mask=own & known, other=0)
            enters = tl.load(entered + lane, mask=own & known, other=0)
            place = tl.load(places + slot * SIZE + number, mask=inside & known, other=0)
            new_step = tl.load(dt + entry * dt_outer + t * dt_inner + channel, mask=own & (t >= 0), other=0)
            value = tl.load(x + entry * x_outer + t * x_inner + channel, mask=own & (t >= 0), other=0)
            given = tl.load(places_given + entry * b_outer + t * b_inner + number, mask=inside & (t >= 0), other=0)
            read = tl.load(places_read + entry * c_outer + t * c_inner + number, mask=inside & (t >= 0), other=0)
            step, enters = tl.where(known, step, new_step), tl.where(known, enters, value * new_step)
            place = tl.where(known, place, given)
            # ---- S <- e^{a dt} S + (dt x) b^T: [BLOCK, WIDE]
            current = current * tl.exp(rates * step[:, None]) + enters[:, None] * place[None, :]
            kept = (t >= 0) & (position >= end - SLOTS)
            # ---- out = S c: [BLOCK]
            result = tl.sum(current * read[None, :], 1)
            tl.store(out + (entry * rows + t) * CHANNELS + channel, result, mask=own & (t >= 0))
            tl.store(steps + lane, step, mask=own & kept)
            tl.store(entered + lane, enters, mask=own & kept)
            if STORE:
                tl.store(places + slot * SIZE + number, place, mask=inside & kept & (tl.program_id(1) == 0))
            ends = ((position + 1) % CHUNK == 0) & (t < settled)
            tl.store(tile, current, mask=both & ends)


def cached_scan_triton(given: CachedScan) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedScan` in one kernel, or two for prompts."""
    batch, channels, rows = given.x.shape
    size, slots = given.a.shape[1], given.steps.shape[1]
    x, dt, b, c = (dense_rows(part.transpose(1, 2)) for part in (given.x, given.dt, given.b, given.c))
    out = torch.empty(batch, rows, channels, dtype=x.dtype, device=x.device)
    in_place = rows <= most_in_place(slots, CHUNK - 1)
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    strides = [stride for part in (x, dt, b, c) for stride in part.stride()[:2]]
    _cached_scan_kernel[batch, triton.cdiv(channels, block)](
        out, x, dt, given.a.contiguous(), b, c, given.state, given.steps, given.entered, given.places, given.span, rows,
        *strides, CHANNELS=channels, SIZE=size, SLOTS=slots, CHUNK=CHUNK, STORE=in_place, BLOCK=block,
        WIDE=triton.next_power_of_2(size), num_warps=4, enable_fp_fusion=False,
    )
    if not in_place:
        store_last_rows(given.places, b, given.span)
    return out.transpose(1, 2)
