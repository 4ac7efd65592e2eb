"""The kernel of paged attention for few rows per sequence, such as those of a decoding step.

It computes what :mod:`specgraph.kernels.attention.attention` defines: rows of ``q`` ``[B, Hq, T, D]`` attend to the
cached positions that they see, and the result is ``[B, T, Hq, Dv]``. The new keys and values ``[B, Hkv, T, D]`` are
rotated if asked and written to their cache slots, either by this kernel or by ``write_cache_kernel`` before it.

A program takes a tile of (row, head) pairs that share a key-value head, and some of the work units of their context
(:mod:`specgraph.kernels.attention.work_units`). Within a piece it reads one block of keys and values at a time.
:mod:`specgraph.kernels.attention.paged` says why the bits of a row do not depend on other rows, and names the sources.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import (
    add_block,
    empty_state,
    empty_sums,
    load_rows,
    locate_tile,
    loop_bound,
    merge,
    score,
    store_result,
    sum_of_keys,
)
from specgraph.kernels.attention.work_units import divide_context, is_last, merge_work_units, store_work_unit
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _load_new_rows(
    keys, values, cos, sin, angles, keep,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, ROTARY: tl.constexpr,
):
    """Load new rows of one key-value head in the form in which they are cached; zeros where not ``keep``."""
    dim = tl.arange(0, DP)[None, :]
    rows = load_rows(keys + dim, dim, cos, sin, angles + dim, keep[:, None] & (dim < D), D, ROTARY)
    dim = tl.arange(0, DVP)[None, :]
    return rows, tl.load(values + dim, mask=keep[:, None] & (dim < DV), other=0.0)


@triton.jit
def _store_new_rows(
    keys, values, k_cache, v_cache, slot, head, keep, k_slot, k_head, v_slot, v_head,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
):
    """Write the rows that :func:`_load_new_rows` loaded to the cache at ``slot``, where ``keep``."""
    slot = slot[:, None]
    dim = tl.arange(0, DP)[None, :]
    tl.store(k_cache + slot * k_slot + head * k_head + dim, keys, mask=keep[:, None] & (dim < D))
    dim = tl.arange(0, DVP)[None, :]
    tl.store(v_cache + slot * v_slot + head * v_head + dim, values, mask=keep[:, None] & (dim < DV))


@triton.jit(do_not_specialize=["T"])
def write_cache_kernel(
    k, v, cos, sin, k_cache, v_cache, slots,
    k_b, k_h, k_t, v_b, v_h, v_t, angle_b, angle_t, k_slot, k_head, v_slot, v_head, T,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr,
    ROTARY: tl.constexpr, PDL: tl.constexpr,
):
    """Rotate ``ROWS`` rows of one head of one sequence and write them to the cache.

    The grid is (row tiles, B * Hkv).
    """
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + batch * T + row, mask=row < T, other=-1)
    row = row.to(tl.int64)[:, None]
    keys, values = _load_new_rows(
        k + batch * k_b + head * k_h + row * k_t, v + batch * v_b + head * v_h + row * v_t,
        cos, sin, batch * angle_b + row * angle_t, slot >= 0, D, DV, DP, DVP, ROTARY,
    )
    _store_new_rows(
        keys, values, k_cache, v_cache, slot, head, slot >= 0, k_slot, k_head, v_slot, v_head, D, DV, DP, DVP
    )


@triton.jit
def load_pages(table, begin, end, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """Read ``PAGES`` entries of the block table, from the page of position ``begin`` on, up to position ``end``."""
    index = begin // BLOCK_SIZE + tl.arange(0, PAGES)
    return tl.maximum(tl.load(table + index, mask=index * BLOCK_SIZE < end, other=0), 0).to(tl.int32)


@triton.jit
def _slots_of(pages, begin, key_position, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """The slots of positions whose pages :func:`load_pages` has read, as int32, which multiplies faster than int64."""
    # The last block may reach past the end of a piece, hence the modulo.
    index = (key_position // BLOCK_SIZE - begin // BLOCK_SIZE) % PAGES
    return tl.gather(pages, index, 0) * BLOCK_SIZE + key_position % BLOCK_SIZE


@triton.jit
def attend_piece(
    query, position, k_cache, v_cache, pages, begin, end, k_slot, v_slot, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, BEHIND: tl.constexpr = False,
):
    """Online softmax of the rows ``query`` ``[DP, BLOCK_R]`` at ``position`` over the keys in ``[begin, end)``.

    ``begin`` is a multiple of ``BLOCK_K``. Rows are in front of ``end``, unless ``BEHIND``. Returns the running
    maximum, the normaliser and the weighted values ``[DVP, BLOCK_R]``.

    The caller has read all ``pages`` of the piece. If the loop read each page itself, the address of a block's keys
    would depend on that read, and the keys could be requested only when the block before them is done.
    """
    row_max, _, acc = empty_state(DVP, BLOCK_R, False)
    partial_sums = empty_sums(BLOCK_K, BLOCK_R, False)
    dim = tl.arange(0, DP)[None, :]
    value_dim = tl.arange(0, DVP)[None, :]
    for start in tl.range(loop_bound(begin), loop_bound(end), BLOCK_K, num_stages=STAGES):
        key_position = start + tl.arange(0, BLOCK_K)
        # Unwritten cache rows may hold NaN, and zero times NaN is NaN. So values are masked to zero as keys are.
        in_range = (key_position < end)[:, None]
        slot = _slots_of(pages, begin, key_position, BLOCK_SIZE, PAGES).to(OFFSET)[:, None]
        keys = tl.load(k_cache + slot * k_slot + dim, mask=in_range & (dim < D), other=0.0)
        values = tl.load(v_cache + slot * v_slot + value_dim, mask=in_range & (value_dim < DV), other=0.0)
        if BEHIND:
            key_position = tl.where(key_position < end, key_position, 0x7FFFFFFF)  # behind every row
        scores = score(query, keys, position, key_position, cap, WINDOW, SOFTCAP, True, False)
        row_max, partial_sums, acc = add_block(scores, values, row_max, partial_sums, acc, scale, False)
    return row_max, sum_of_keys(partial_sums, BLOCK_K, BLOCK_R, False), acc


@triton.jit
def piece_begin(piece, low, PIECE: tl.constexpr, BLOCK_K: tl.constexpr, WINDOW: tl.constexpr):
    """The first position of a piece that is read.

    With a window this is the block that holds the first visible position.
    """
    begin = piece * PIECE
    if WINDOW > 0:
        begin = tl.maximum(begin, low // BLOCK_K * BLOCK_K)
    return begin


@triton.jit(do_not_specialize=["T", "max_pieces", "max_work_units", "sequences"])
def decode_attention_kernel(
    q, k, v, cos, sin, k_cache, v_cache, slots, block_table, positions, cu_seqlens, sinks, out, partials, counters,
    sequences, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, angle_b, angle_t, k_slot, k_head, v_slot, v_head, table_b,
    T, max_pieces, max_work_units, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr, WRITE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ROTARY: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr, PAGES: tl.constexpr,
    LANES: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of ``BLOCK_R`` (row, head) pairs of one key-value head to a share of the work units of their context.

    The grid is (row tiles, B * Hkv, split), and (row tiles of all sequences, Hkv, split) if rows are packed (``LANES``
    > 0). If ``WRITE`` > 0, which packed rows do not support, a program first writes the new rows that its own work
    units contain, so that no program waits for another. Several row tiles then write the same bits to the same slots.
    If ``SPLIT`` and a tile has several work units, their partial results go through ``partials``, and the program that
    finishes last merges them.
    """
    # This kernel has few programs. Those of the next launch may start and request its weights meanwhile.
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    # The last rows see the most keys and take longest, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    task = (tl.program_id(1) * tl.num_programs(0) + tile).to(tl.int64)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    program = tl.program_id(2)
    sequence, tile, first_row, rows = locate_tile(tile, batch, T, cu_seqlens, sequences, GROUP, BLOCK_R, LANES)

    pair = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = pair // GROUP < rows
    row = first_row + pair // GROUP
    real = tl.load(slots + batch * T + row, mask=inside, other=-1) >= 0
    position = tl.where(real, tl.load(positions + batch * T + row, mask=inside, other=-1).to(tl.int32), -1)
    if WRITE > 0:
        new_row = tl.arange(0, WRITE)
        new_slot = tl.load(slots + batch * T + new_row, mask=new_row < T, other=-1)
        new_position = tl.load(positions + batch * T + new_row, mask=new_row < T, other=-1).to(tl.int32)
    low, end, first, last, pieces_per_unit, first_work_unit, work_units, programs = divide_context(
        position, real, max_pieces, PIECE, RUN, WINDOW
    )
    if program >= tl.maximum(programs, 1):
        return

    first_piece = tl.maximum((first_work_unit + program) * pieces_per_unit, first)
    begin = piece_begin(first_piece, low, PIECE, BLOCK_K, WINDOW)
    table = block_table + sequence * table_b
    pages = load_pages(table, begin, tl.where(program < programs, end, 0), BLOCK_SIZE, PAGES)
    k_cache_head = k_cache + head * k_head
    v_cache_head = v_cache + head * v_head
    if WRITE > 0:
        new_piece = new_position // PIECE
        new_work_unit = tl.where(pieces_per_unit == 1, new_piece, new_piece // RUN) - first_work_unit
        owned = (new_slot >= 0) & (new_piece >= first) & (new_piece < last)
        owned = owned & (new_work_unit % tl.maximum(programs, 1) == program)
        new_keys = (k + batch * k_b + head * k_h) + (new_row.to(tl.int64) * k_t)[:, None]
        new_values = (v + batch * v_b + head * v_h) + (new_row.to(tl.int64) * v_t)[:, None]
        new_angles = (batch * angle_b + new_row.to(tl.int64) * angle_t)[:, None]
    q_head = head * GROUP + pair % GROUP
    dim = tl.arange(0, DP)[:, None]
    queries = (q + batch * q_b) + (q_head * q_h + row.to(tl.int64) * q_t)[None, :] + dim
    angles = (batch * angle_b + row.to(tl.int64) * angle_t)[None, :] + dim
    if WRITE > 0:
        keys, values = _load_new_rows(new_keys, new_values, cos, sin, new_angles, owned, D, DV, DP, DVP, ROTARY)
    query = load_rows(queries, dim, cos, sin, angles, real[None, :] & (dim < D), D, ROTARY)
    if WRITE > 0:
        _store_new_rows(
            keys, values, k_cache, v_cache, new_slot, head, owned, k_slot, k_head, v_slot, v_head, D, DV, DP, DVP
        )
        # Any thread of this program may read what the others have just written to the cache.
        tl.debug_barrier()

    row_max, row_sum, acc = empty_state(DVP, BLOCK_R, False)
    for work_unit in range(loop_bound(program), loop_bound(work_units), loop_bound(tl.maximum(programs, 1))):
        unit_max, unit_sum, unit_acc = empty_state(DVP, BLOCK_R, False)
        past = tl.minimum((first_work_unit + work_unit + 1) * pieces_per_unit, last)
        for piece in range(
            loop_bound(tl.maximum((first_work_unit + work_unit) * pieces_per_unit, first)), loop_bound(past)
        ):
            piece_max, piece_sum, piece_acc = attend_piece(
                query, position, k_cache_head, v_cache_head, pages,
                begin, tl.minimum(end, (piece + 1) * PIECE), k_slot, v_slot, scale, cap,
                D, DV, DP, DVP, BLOCK_SIZE, PAGES, BLOCK_K, BLOCK_R, WINDOW, SOFTCAP, STAGES, OFFSET,
            )
            unit_max, unit_sum, unit_acc = merge(
                unit_max, unit_sum, unit_acc, piece_max, piece_sum, piece_acc, scale, False
            )
            next_piece = tl.where(
                piece + 1 < past, piece + 1, (first_work_unit + work_unit + programs) * pieces_per_unit
            )
            begin = piece_begin(next_piece, low, PIECE, BLOCK_K, WINDOW)
            pages = load_pages(table, begin, end, BLOCK_SIZE, PAGES)
        if SPLIT and programs > 1:
            index = task * max_work_units + work_unit
            store_work_unit(partials, index, real, unit_max, unit_sum, unit_acc, DVP, BLOCK_R)
        row_max, row_sum, acc = merge(row_max, row_sum, acc, unit_max, unit_sum, unit_acc, scale, False)

    out_row = (batch * T + row) * (HEADS * GROUP) + q_head
    # Each branch stores its own result. A common store after both would first convert the sums to a common layout.
    if SPLIT and programs > 1:
        if is_last(counters + task, programs):
            row_max, row_sum, acc = merge_work_units(
                partials,
                task * max_work_units,
                work_units,
                first_work_unit,
                pieces_per_unit,
                real,
                scale,
                RUN,
                DVP,
                BLOCK_R,
            )
            store_result(out, out_row, inside, row_max, row_sum, acc, sinks, q_head, scale, DV, DVP, SINKS, False)
    else:
        store_result(out, out_row, inside, row_max, row_sum, acc, sinks, q_head, scale, DV, DVP, SINKS, False)
