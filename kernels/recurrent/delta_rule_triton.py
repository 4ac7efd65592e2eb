"""The Triton form of the gated delta rule: what does not depend on the state first, and then chunk after chunk.

A chunk is a tile of :data:`~specgraph.kernels.recurrent.arguments.CHUNK` rows in which each row has the place that its
position gives it, whether it is cached, new, or not there. So every product has one shape, and the bits of a row are a
function of the state at the boundary and of the rows since, however a call groups them.

1. A program prepares one chunk of one head: the new rows of the inverse by which the errors of rows become what they
   add to the state, how much of each error of the chunk a new row reads, and five weights of every row. All chunks of a
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
from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, AnchoredDeltaRule, exact
from specgraph.kernels.recurrent.delta_rule_step import STEP_COLUMNS, step_kernel, step_options
from specgraph.kernels.recurrent.last_rows import by_row, common_stride, most_in_place, near_span
from specgraph.kernels.recurrent.tiles_triton import (
    HELD,
    KEPT,
    LEFT,
    PRECISION,
    RATE,
    READ,
    WEIGHTS,
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
def _length(tile, NORMALISE: tl.constexpr, EPSILON: tl.constexpr):
    """What brings each row of a tile to length 1 if that is asked for, else 1."""
    if NORMALISE:
        tile = tile.to(tl.float32)
        return tl.rsqrt(tl.sum(tile * tile, 1) + EPSILON)
    return tl.full([tile.shape[0]], 1.0, tl.float32)


@triton.jit
def _decay(sums, lane):
    """How much of row ``j`` remains in row ``i``, for ``j <= i``; else 0."""
    seen = lane[None, :] <= lane[:, None]
    return tl.where(seen, tl.exp(tl.where(seen, sums[:, None] - sums[None, :], 0.0)), 0.0)


@triton.jit(do_not_specialize=["rows", "q_outer", "k_outer"])
def _prepare_kernel(
    q, k, gate, rate, keys, gates, inverse, all_keys, all_inverse, scores, weights, span, scale, rows,
    q_outer, q_inner: tl.constexpr, q_head: tl.constexpr, k_outer, k_inner: tl.constexpr, k_head: tl.constexpr,
    UNIT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, SLOTS: tl.constexpr,
    BEHIND: tl.constexpr, NORMALISE: tl.constexpr, EPSILON: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The grid is (B, chunks, H), from the chunk on in which the state stands.

    If ``STORE``, ``all_keys`` and ``all_inverse`` are the caches; else they are by the rows of the call, behind
    ``BEHIND`` lines for rows that are known, as ``scores`` and ``weights`` always are.
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
        old_k = keys + (base * groups + group) * KEY + slot[:, None] * (groups * KEY) + key[None, :]
        own_k = k + entry * k_outer * UNIT + group * k_head + t[:, None] * k_inner + key[None, :]
        tile_k = tl.load(old_k, mask=known[:, None] & inside[None, :], other=0)
        own_k = tl.load(own_k, mask=new[:, None] & inside[None, :], other=0)
        tile_k = tl.where(known[:, None], tile_k, own_k)
        tile_q = q + entry * q_outer * UNIT + group * q_head + t[:, None] * q_inner + key[None, :]
        tile_q = tl.load(tile_q, mask=new[:, None] & inside[None, :], other=0)
        log = tl.load(gates + base * HEADS + head + slot * HEADS, mask=known, other=0)
        own_log = tl.load(gate + (entry * rows * HEADS + head) + t * HEADS, mask=new, other=0).to(tl.float32)
        log = tl.where(known, log, own_log)
        own_rate = tl.full([CHUNK], 1.0, tl.float32)
        if rate is not None:
            own_rate = tl.load(rate + (entry * rows * HEADS + head) + t * HEADS, mask=new, other=0).to(tl.float32)

        sums = tl.cumsum(log, 0)
        length, asked = _length(tile_k, NORMALISE, EPSILON), _length(tile_q, NORMALISE, EPSILON) * scale
        last = tl.sum(tl.where(lane == CHUNK - 1, sums, 0.0), 0)
        left, real = tl.exp(sums), known | new
        weight = weights + lines * (WEIGHTS * HEADS) + head + line * (WEIGHTS * HEADS)
        tl.store(weight + HELD * HEADS, own_rate * length * left, mask=new)
        tl.store(weight + READ * HEADS, asked * left, mask=new)
        tl.store(weight + RATE * HEADS, own_rate, mask=new)
        tl.store(weight + KEPT * HEADS, length * tl.exp(last - sums), mask=real)
        tl.store(weight + LEFT * HEADS, left, mask=real)
        decay = _decay(sums, lane) * length[None, :]
        seen = decay * asked[:, None] * tl.dot(tile_q, tl.trans(tile_k), input_precision=PRECISION)

        if STORE:
            tl.store(gates + base * HEADS + head + slot * HEADS, log, mask=new)
            place, stored, real = base, slot, new
        else:
            place, stored = lines, line
        tl.store(all_keys + (place * groups + group) * KEY + stored[:, None] * (groups * KEY) + key[None, :], tile_k,
                 mask=(real & (head % GROUP == 0))[:, None] & inside[None, :])  # fmt: skip
        if rate is not None:
            mixed = decay * length[:, None] * tl.dot(tile_k, tl.trans(tile_k), input_precision=PRECISION)
            mixed = tl.where(lane[None, :] < lane[:, None], own_rate[:, None] * mixed, 0.0)
            old = inverse + (base * HEADS + head) * CHUNK + slot[:, None] * (HEADS * CHUNK) + lane[None, :]
            solved = tl.load(old, mask=known[:, None] & (lane[None, :] <= lane[:, None]), other=0)
            for i in range(
                loop_bound(tl.maximum(begin - first, 0)), loop_bound(tl.minimum(begin + count - first, CHUNK))
            ):
                factors = tl.sum(tl.where((lane == i)[None, :], tl.trans(mixed), 0.0), 1)
                # As two sums, whose order is the same for one warp and for two.
                halves = tl.sum(tl.reshape(factors[:, None] * solved, [2, CHUNK // 2, CHUNK]), 1)
                solution = tl.where(lane == i, 1.0, -tl.sum(halves, 0))
                solved = tl.where((lane == i)[:, None], solution[None, :], solved)
            row_of = stored[:, None] * (HEADS * CHUNK) + lane[None, :]
            tl.store(all_inverse + (place * HEADS + head) * CHUNK + row_of, solved, mask=real[:, None])
            seen = tl.dot(seen, solved, input_precision=PRECISION)
        row_of = line[:, None] * (HEADS * CHUNK) + lane[None, :]
        tl.store(scores + (lines * HEADS + head) * CHUNK + row_of, seen, mask=new[:, None])


@triton.jit
def _chunk(
    first, current, out, q, v, errors, all_keys, all_inverse, scores, weights, begin, count, column,
    q_inner: tl.constexpr, v_inner: tl.constexpr, HEADS: tl.constexpr, groups: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, SLOTS: tl.constexpr, BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, CORRECTED: tl.constexpr, PAIRED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The state behind a chunk, from the state ``current`` before it. Output and errors of its new rows are stored.

    ``FULL``: all its rows are new, and tiles have no padding, so that nothing is masked.
    """
    lane, key = tl.arange(0, CHUNK), tl.arange(0, WIDE)
    own, inside = column < VALUE, key < KEY
    position = first + lane
    t, slot = position - begin, position % SLOTS
    real, new = t < count, (t >= 0) & (t < count)
    line = t + BEHIND
    stored = slot if STORE else line
    tile_k = all_keys + stored[:, None] * (groups * KEY) + key[None, :]
    tile_k = load_rows(tile_k, real[:, None] & inside[None, :], FULL)
    tile_q = load_rows(q + t[:, None] * q_inner + key[None, :], new[:, None] & inside[None, :], FULL)
    own_error = load_values(v, t, column, new[None, :] & own[:, None], v_inner, FULL, PAIRED)
    lower = lane[None, :] <= lane[:, None]
    seen = load_rows(scores + line[:, None] * (HEADS * CHUNK) + lane[None, :], new[:, None], FULL)
    weight = weights + line * (WEIGHTS * HEADS)
    reading = load_rows(weight + READ * HEADS, new, FULL)
    keeping = load_rows(weight + KEPT * HEADS, real, FULL)
    last = weights + (first + CHUNK - 1 - begin + BEHIND) * (WEIGHTS * HEADS) + LEFT * HEADS
    left = load_rows(last, first + CHUNK <= begin + count, FULL)
    error = tl.zeros([column.shape[0], CHUNK], tl.float32)
    if not FULL and first < begin:  # Few chunks have known rows, and the mask of a load takes longer than a branch.
        error = tl.load(errors + slot[None, :] * (HEADS * VALUE) + column[:, None],
                        mask=(t < 0)[None, :] & own[:, None], other=0)  # fmt: skip
    if CORRECTED:
        own_rate = load_rows(weight + RATE * HEADS, new, FULL)
        holding = load_rows(weight + HELD * HEADS, new, FULL)
        solved = load_rows(all_inverse + stored[:, None] * (HEADS * CHUNK) + lane[None, :], real[:, None], FULL)
    # All is loaded by here: behind a product, a load would not begin before the product is there.
    held, asked = product(current, tl.trans(tile_k)), product(current, tl.trans(tile_q))
    if CORRECTED:
        own_error = own_rate[None, :] * own_error - holding[None, :] * held
    error = own_error if FULL else tl.where((t < 0)[None, :], error, own_error)
    result = reading[None, :] * asked + product(error, tl.trans(tl.where(lower, seen, 0.0)))
    result = result.to(out.dtype.element_ty)
    stored_at = out + t[None, :] * (HEADS * VALUE) + column[:, None]
    if FULL:
        tl.store(stored_at, result)
    else:
        tl.store(stored_at, result, mask=new[None, :] & own[:, None])
    if first + CHUNK > begin + count - SLOTS:
        tl.store(errors + slot[None, :] * (HEADS * VALUE) + column[:, None], error,
                 mask=(new & (position >= begin + count - SLOTS))[None, :] & own[:, None])  # fmt: skip
    update = error
    if CORRECTED:
        update = product(error, tl.trans(tl.where(lower, solved, 0.0)))
    return current * left + product(keeping[None, :] * update, tile_k, CHAINED=True)


@triton.jit
def _chunks(
    start, end, current, tile, both, kept, out, q, v, errors, all_keys, all_inverse, scores, weights, begin, count,
    column, q_inner: tl.constexpr, v_inner: tl.constexpr, HEADS: tl.constexpr, groups: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, SLOTS: tl.constexpr, BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr,
    WIDE: tl.constexpr, CORRECTED: tl.constexpr, PAIRED: tl.constexpr, FULL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The state behind the chunks from ``start`` to ``end``; that at ``kept`` is stored at ``tile``. See `_chunk`."""
    for first in tl.range(loop_bound(start), loop_bound(end), CHUNK, num_stages=STAGES):
        current = _chunk(
            first, current, out, q, v, errors, all_keys, all_inverse, scores, weights, begin, count, column,
            q_inner, v_inner, HEADS, groups, KEY, VALUE, SLOTS, BEHIND, STORE, CHUNK, WIDE, CORRECTED, PAIRED,
            FULL,
        )  # fmt: skip
        if first + CHUNK == kept:
            tl.store(tile, tl.trans(current), mask=both)
    return current


@triton.jit
def _keep_last_rows(
    keys, gates, inverse, gate, all_keys, all_inverse, row, entry, head, begin, count, rows, HEADS: tl.constexpr,
    GROUP: tl.constexpr, KEY: tl.constexpr, SLOTS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    HELD_ROWS: tl.constexpr, CORRECTED: tl.constexpr,
):  # fmt: skip
    """Store what the first kernel made of a sequence's last new rows where it is cached: each at its position modulo
    ``SLOTS``. The first kernel cannot, since its other programs still read what is cached there.
    """
    lane, key, column = tl.arange(0, HELD_ROWS), tl.arange(0, WIDE), tl.arange(0, CHUNK)
    position = begin + count - SLOTS + lane
    t, slot = position - begin, position % SLOTS
    late, inside = (lane < SLOTS) & (t >= 0), key < KEY
    log = tl.load(gate + (entry * rows * HEADS + head) + t * HEADS, mask=late, other=0)
    tl.store(gates + row * (SLOTS * HEADS) + head + slot * HEADS, log.to(gates.dtype.element_ty), mask=late)
    if CORRECTED:
        solved = tl.load(all_inverse + t[:, None] * (HEADS * CHUNK) + column[None, :], mask=late[:, None], other=0)
        inverse += (row * SLOTS * HEADS + head) * CHUNK
        tl.store(inverse + slot[:, None] * (HEADS * CHUNK) + column[None, :], solved, mask=late[:, None])
    if head % GROUP == 0:
        groups: tl.constexpr = HEADS // GROUP
        both = late[:, None] & inside[None, :]
        tile = tl.load(all_keys + t[:, None] * (groups * KEY) + key[None, :], mask=both, other=0)
        keys += (row * SLOTS * groups + head // GROUP) * KEY
        tl.store(keys + slot[:, None] * (groups * KEY) + key[None, :], tile, mask=both)


@triton.jit
def begin_carrying(
    out, state, span, rows, HEADS: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STORE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a program of the grid (B, H, blocks of columns) carries: its sequence and head, the span, and its part of
    the state with its place.

    Rows of the result behind the last one of its sequence become zeros.
    """
    entry, head, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    row, begin, before, count, settled = near_span(span, entry)
    key, column = tl.arange(0, WIDE), block * BLOCK + tl.arange(0, BLOCK)
    own = column < VALUE
    out += (entry * rows * HEADS + head) * VALUE
    # In a step, the first kernel lets this one begin when all kernels before it are done, of which one may have written
    # the state. So the state is loaded while the first kernel still runs.
    tile = state + (row * HEADS + head) * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
    both = (key < KEY)[:, None] & own[None, :]
    current = tl.load(tile, mask=both & (count > 0), other=0, cache_modifier=".cg")
    wait_for_others(STORE, PDL)
    store_padding(out, count, rows, column, own, HEADS, VALUE, BLOCK)
    return entry, head, row, begin, before, count, settled, column, out, tile, both, current


@triton.jit(do_not_specialize=["rows", "q_outer", "v_outer"])
def _carry_kernel(
    out, q, v, gate, state, keys, errors, gates, inverse, all_keys, all_inverse, scores, weights, span, rows,
    q_outer, q_inner: tl.constexpr, q_head: tl.constexpr, v_outer, v_inner: tl.constexpr, v_head: tl.constexpr,
    UNIT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    SLOTS: tl.constexpr, BEHIND: tl.constexpr, STORE: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, HELD_ROWS: tl.constexpr, CORRECTED: tl.constexpr,
    PAIRED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The grid is (B, H, blocks of columns). ``HELD_ROWS`` is a power of two that is not below ``SLOTS``."""
    entry, head, row, begin, before, count, settled, column, out, tile, both, current = begin_carrying(
        out, state, span, rows, HEADS, KEY, VALUE, WIDE, BLOCK, STORE, PDL
    )
    current, group = tl.trans(current), head // GROUP
    groups: tl.constexpr = HEADS // GROUP
    if count > 0:
        q += entry * q_outer * UNIT + group * q_head
        v += entry * v_outer * UNIT + head * v_head
        lines = entry * (rows + BEHIND)
        place = row * SLOTS if STORE else lines
        all_keys += (place * groups + group) * KEY
        all_inverse += (place * HEADS + head) * CHUNK
        scores += (lines * HEADS + head) * CHUNK
        weights += lines * (WEIGHTS * HEADS) + head
        errors += (row * SLOTS * HEADS + head) * VALUE
        start, end, kept = before // CHUNK * CHUNK, begin + count, (begin + settled) // CHUNK * CHUNK
        TILED: tl.constexpr = STAGES > 1 and KEY == WIDE and VALUE % BLOCK == 0
        if TILED:
            # Whole chunks of new rows have a loop of their own, without masks.
            whole = tl.minimum((begin + CHUNK - 1) // CHUNK * CHUNK, end)
            behind = tl.maximum(end // CHUNK * CHUNK, whole)
            current = _chunks(
                start, whole, current, tile, both, kept, out, q, v, errors, all_keys, all_inverse, scores, weights,
                begin, count, column, q_inner, v_inner, HEADS, groups, KEY, VALUE, SLOTS, BEHIND, STORE, CHUNK, WIDE,
                CORRECTED, PAIRED, FULL=False, STAGES=1,
            )  # fmt: skip
            current = _chunks(
                whole, behind, current, tile, both, kept, out, q, v, errors, all_keys, all_inverse, scores, weights,
                begin, count, column, q_inner, v_inner, HEADS, groups, KEY, VALUE, SLOTS, BEHIND, STORE, CHUNK, WIDE,
                CORRECTED, PAIRED, FULL=True, STAGES=STAGES,
            )  # fmt: skip
            start = behind
        _chunks(
            start, end, current, tile, both, kept, out, q, v, errors, all_keys, all_inverse, scores, weights,
            begin, count, column, q_inner, v_inner, HEADS, groups, KEY, VALUE, SLOTS, BEHIND, STORE, CHUNK, WIDE,
            CORRECTED, PAIRED, FULL=False, STAGES=1 if TILED else STAGES,
        )  # fmt: skip
        if not STORE and tl.program_id(2) == 0:
            all_keys += BEHIND * (groups * KEY)
            all_inverse += BEHIND * (HEADS * CHUNK)
            _keep_last_rows(
                keys, gates, inverse, gate, all_keys, all_inverse, row, entry, head, begin, count, rows,
                HEADS, GROUP, KEY, SLOTS, CHUNK, WIDE, HELD_ROWS, CORRECTED,
            )  # fmt: skip


def _prepares_alone(q: Tensor) -> bool:
    """Whether one warp gives the bits of two, and is faster.

    The order of a sum over a query or key is Triton's choice. For these sizes one row is one warp's in both cases.
    """
    return q.dtype == torch.bfloat16 and q.shape[3] % 8 == 0 and 32 <= q.shape[3] <= 256


def anchored_delta_rule_triton(given: AnchoredDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.AnchoredDeltaRule` in two kernels."""
    batch, rows, heads, width = given.v.shape
    (groups, size), slots = given.k.shape[2:], given.keys.shape[1]
    q, k, v = (by_row(part) for part in (given.q, given.k, given.v))
    rate = None if given.rate is None else given.rate.contiguous()
    gate = given.gate.contiguous()
    out, pdl = torch.empty(batch, rows, heads, width, dtype=v.dtype, device=v.device), supports_pdl(v.device)
    unsettled = most_in_place(slots, CHUNK - 1) - 1
    in_place, behind = rows <= unsettled + 1, CHUNK - 1 + unsettled
    # The rows of a call, behind as many as may be known since the boundary.
    lines: tuple[int, int] = (batch, behind + rows)
    precise: dict[str, Any] = {"dtype": exact(v.dtype), "device": v.device}
    scores = torch.empty(*lines, heads, CHUNK, **precise)
    weights = torch.empty(*lines, WEIGHTS.value, heads, **precise)
    # New rows are stored where they are cached, or apart if there they would replace what is still read.
    keys, inverse = (
        cache if in_place else cache.new_empty(*lines, *cache.shape[2:]) for cache in (given.keys, given.inverse)
    )
    unit = common_stride(q, k, v)
    q_strides, k_strides, v_strides = ((part.stride(0) // unit, *part.stride()[1:3]) for part in (q, k, v))
    options: dict[str, Any] = {
        "UNIT": unit, "HEADS": heads, "GROUP": heads // groups, "KEY": size, "SLOTS": slots, "BEHIND": behind,
        "CHUNK": CHUNK, "WIDE": max(16, triton.next_power_of_2(size)), "enable_fp_fusion": False, "PDL": pdl,
        **launch_options(pdl),
    }  # fmt: skip
    alone = not in_place and _prepares_alone(q)
    limit = {"maxnreg": _REGISTERS} if alone and pdl else {}
    _prepare_kernel[batch, triton.cdiv(rows - 1 + unsettled, CHUNK) + 1, heads](
        q, k, gate, rate, given.keys, given.gates, given.inverse, keys, inverse, scores, weights, given.span,
        given.scale, rows, *q_strides, *k_strides, NORMALISE=given.normalise, EPSILON=EPSILON, STORE=in_place,
        num_warps=1 if alone else 2, **limit, **options,
    )  # fmt: skip
    if in_place and unsettled < CHUNK // 2:
        step_kernel[batch, heads, triton.cdiv(width, STEP_COLUMNS)](
            out, q, k, v, rate, given.state, keys, given.errors, inverse, scores, weights, given.span, rows,
            *q_strides, *k_strides, *v_strides, VALUE=width, **options,
            **step_options(q, k, given.state, options["WIDE"]),
        )  # fmt: skip
        return out
    block = max(16, min(_COLUMNS, triton.next_power_of_2(width)))
    paired = v.dtype == torch.bfloat16 and v.data_ptr() % 4 == 0 and not any(step % 2 for step in v.stride()[:3])
    _carry_kernel[batch, heads, triton.cdiv(width, block)](
        out, q, v, gate, given.state, given.keys, given.errors, given.gates, given.inverse, keys, inverse, scores,
        weights, given.span, rows, *q_strides, *v_strides, VALUE=width, BLOCK=block, STORE=in_place,
        STAGES=1 if in_place else _STAGES, HELD_ROWS=triton.next_power_of_2(slots), CORRECTED=rate is not None,
        PAIRED=paired, num_warps=_WARPS, **options,
    )  # fmt: skip
    return out
