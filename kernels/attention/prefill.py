"""The kernel of paged attention for many rows per sequence, such as a prompt's chunk.

It computes the same as :mod:`specgraph.kernels.attention.paged`: rows of ``q`` ``[B, Hq, T, D]`` attend to the cached
positions that they see, and the result is ``[B, T, Hq, Dv]``. A launch before it must have written the new keys and
values to the cache.

With many rows there are enough tiles of (row, head) pairs to fill a GPU, so one program reads the whole context of its
tile, block by block. No partial results go through memory. The slots of a block are read one block ahead. If the same
iteration read them, the keys could be requested only when the block before them is done.

The program ends a piece or a run of the context where the kernel for few rows does, at the same absolute positions, and
merges in the same order. So it gives the same bits, and like there the bits of a row do not depend on the other rows.
:mod:`specgraph.kernels.attention.tiles` says why products in the other layout have the same bits.

Source: FlashAttention-2, Dao 2023, arXiv 2307.08691. Variants that were measured and not kept are in
``docs/experiments.md``.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import (
    INTERPRETED,
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
    visible_range,
)
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait


@triton.jit
def _read_slots(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The slots, int32, of the ``BLOCK_K`` positions from ``start`` on. Past ``end`` the last page is repeated."""
    tl.static_assert(table.dtype.element_ty == tl.int64, "pages are int64")
    position = (start + tl.arange(0, BLOCK_K)).to(tl.uint32)
    entry = table + tl.minimum(position, tl.maximum(end - 1, 0).to(tl.uint32)) // BLOCK_SIZE
    if INTERPRETED:
        page = tl.load(entry)
    else:
        # The compiler would pipeline a load that it recognises through shared memory, and wait for it in every
        # iteration.
        page = tl.inline_asm_elementwise(
            "ld.global.b64 $0, [$1];", "=l,l", [entry.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
    return tl.maximum(page, 0).to(tl.int32) * BLOCK_SIZE + (position % BLOCK_SIZE).to(tl.int32)


@triton.jit
def _add_blocks(
    run_max, run_sum, run_acc, row_max, partial_sums, acc, first, past,
    query, position, end, k_cache, v_cache, table, k_slot, v_slot, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr,
):
    """Add the keys ``[first, past)`` of a run.

    The state is that of the run's finished pieces (``run_max``, ``run_sum``, ``run_acc``) and that of the current
    piece (``row_max``, ``partial_sums``, ``acc``), and is returned in this order.
    """
    dim = tl.arange(0, DP)[None, :]
    value_dim = tl.arange(0, DVP)[None, :]
    next_slot = _read_slots(table, first, end, BLOCK_SIZE, BLOCK_K)
    for start in tl.range(loop_bound(first), loop_bound(past), BLOCK_K, num_stages=STAGES):
        slot = next_slot.to(OFFSET)[:, None]
        next_slot = _read_slots(table, start + BLOCK_K, end, BLOCK_SIZE, BLOCK_K)
        key_position = start + tl.arange(0, BLOCK_K)
        # Unwritten cache rows may hold NaN, and zero times NaN is NaN. So values are masked to zero as keys are.
        in_range = (key_position < end if MASKED else key_position >= 0)[:, None]
        keys = tl.load(k_cache + dim + slot * k_slot, mask=in_range & (dim < D), other=0.0)
        values = tl.load(v_cache + value_dim + slot * v_slot, mask=in_range & (value_dim < DV), other=0.0)
        scores = score(query, keys, position, key_position, cap, WINDOW, SOFTCAP, MASKED, True)
        if start % PIECE == 0:
            # The merge comes after the scores above, so that the products of the previous block finish during them.
            row_sum = sum_of_keys(partial_sums, BLOCK_K, BLOCK_R, True)
            run_max, run_sum, run_acc = merge(run_max, run_sum, run_acc, row_max, row_sum, acc, scale, True)
            row_max, row_sum, acc = empty_state(DVP, BLOCK_R, True)
            partial_sums = empty_sums(BLOCK_K, BLOCK_R, True)
        row_max, partial_sums, acc = add_block(scores, values, row_max, partial_sums, acc, scale, True)
    return run_max, run_sum, run_acc, row_max, partial_sums, acc


@triton.jit(do_not_specialize=["T", "capacity", "sequences"])
def prefill_attention_kernel(
    q, cos, sin, k_cache, v_cache, slots, block_table, positions, cu_seqlens, sinks, out, sequences,
    q_b, q_h, q_t, angle_b, angle_t, k_slot, k_head, v_slot, v_head, table_b, T, capacity, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROTARY: tl.constexpr, STAGES: tl.constexpr,
    OFFSET: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of ``BLOCK_R`` (row, head) pairs of one key-value head to all that they see.

    The grid is (row tiles, B * Hkv), and (row tiles of all sequences, Hkv) if rows are packed (``LANES`` > 0).
    """
    gdc_wait(PDL)
    # The last rows see the most keys and take longest, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    sequence, tile, first_row, rows = locate_tile(tile, batch, T, cu_seqlens, sequences, GROUP, BLOCK_R, LANES)
    pair = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = pair // GROUP < rows
    row = first_row + pair // GROUP
    real = tl.load(slots + batch * T + row, mask=inside, other=-1) >= 0
    position = tl.where(real, tl.load(positions + batch * T + row, mask=inside, other=-1).to(tl.int32), -1)
    low, end = visible_range(position, real, WINDOW)
    end = tl.minimum(end, capacity)  # the block table has no pages beyond its capacity
    # Every row sees the positions below this one, so they need no mask. With a window every block has a mask.
    seen_by_all = 0 if WINDOW > 0 else tl.min(tl.where(inside, position, 2147483646), 0) + 1

    q_head = head * GROUP + pair % GROUP
    dim = tl.arange(0, DP)[None, :]
    queries = (q + batch * q_b) + (q_head * q_h + row.to(tl.int64) * q_t)[:, None] + dim
    angles = (batch * angle_b + row.to(tl.int64) * angle_t)[:, None] + dim
    query = load_rows(queries, dim, cos, sin, angles, real[:, None] & (dim < D), D, ROTARY)

    k_cache += head * k_head
    v_cache += head * v_head
    table = block_table + sequence * table_b
    KEYS: tl.constexpr = RUN * PIECE
    row_max, row_sum, acc = empty_state(DVP, BLOCK_R, True)
    for run in range(loop_bound(low // KEYS), loop_bound((end + KEYS - 1) // KEYS)):
        begin = tl.maximum(run * KEYS, low // BLOCK_K * BLOCK_K)
        past = tl.minimum((run + 1) * KEYS, end)
        whole = tl.maximum(tl.minimum(seen_by_all // BLOCK_K * BLOCK_K, past), begin)
        run_max, run_sum, run_acc = empty_state(DVP, BLOCK_R, True)
        piece_max, piece_sum, piece_acc = empty_state(DVP, BLOCK_R, True)
        partial_sums = empty_sums(BLOCK_K, BLOCK_R, True)
        run_max, run_sum, run_acc, piece_max, partial_sums, piece_acc = _add_blocks(
            run_max, run_sum, run_acc, piece_max, partial_sums, piece_acc, begin, whole,
            query, position, end, k_cache, v_cache, table, k_slot, v_slot, scale, cap,
            D, DV, DP, DVP, BLOCK_SIZE, PIECE, BLOCK_K, BLOCK_R, WINDOW, SOFTCAP, STAGES, OFFSET, False,
        )
        run_max, run_sum, run_acc, piece_max, partial_sums, piece_acc = _add_blocks(
            run_max, run_sum, run_acc, piece_max, partial_sums, piece_acc, whole, past,
            query, position, end, k_cache, v_cache, table, k_slot, v_slot, scale, cap,
            D, DV, DP, DVP, BLOCK_SIZE, PIECE, BLOCK_K, BLOCK_R, WINDOW, SOFTCAP, STAGES, OFFSET, True,
        )
        piece_sum = sum_of_keys(partial_sums, BLOCK_K, BLOCK_R, True)
        run_max, run_sum, run_acc = merge(run_max, run_sum, run_acc, piece_max, piece_sum, piece_acc, scale, True)
        row_max, row_sum, acc = merge(row_max, row_sum, acc, run_max, run_sum, run_acc, scale, True)

    gdc_launch_dependents(PDL)
    out_row = (batch * T + row) * (HEADS * GROUP) + q_head
    store_result(out, out_row, inside, row_max, row_sum, acc, sinks, q_head, scale, DV, DVP, SINKS, True)
