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
    bound,
    load_rows,
    merge,
    no_weights,
    nothing,
    score,
    seen_range,
    store_result,
    sum_of_keys,
)


@triton.jit
def _read_slots(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The slots, int32, of the ``BLOCK_K`` positions from ``start`` on. Past ``end`` the last page is repeated."""
    tl.static_assert(table.dtype.element_ty == tl.int64, "pages are int64")
    place = (start + tl.arange(0, BLOCK_K)).to(tl.uint32)
    entry = table + tl.minimum(place, tl.maximum(end - 1, 0).to(tl.uint32)) // BLOCK_SIZE
    if INTERPRETED:
        page = tl.load(entry)
    else:
        # The compiler would pipeline a load that it recognises through shared memory, and wait for it in every
        # iteration.
        page = tl.inline_asm_elementwise(
            "ld.global.b64 $0, [$1];", "=l,l", [entry.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
    return tl.maximum(page, 0).to(tl.int32) * BLOCK_SIZE + (place % BLOCK_SIZE).to(tl.int32)


@triton.jit
def _add_blocks(
    run_top, run_total, run_summed, top, totals, summed, first, past,
    query, place, end, k_cache, v_cache, table, k_slot, v_slot, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PIECE: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys ``[first, past)`` of a run.

    The state is that of the run's finished pieces (``run_top``, ``run_total``, ``run_summed``) and that of the current
    piece (``top``, ``totals``, ``summed``), and is returned in this order.
    """
    dim = tl.arange(0, DP)[None, :]
    value_dim = tl.arange(0, DVP)[None, :]
    next_slot = _read_slots(table, first, end, BLOCK_SIZE, BLOCK_K)
    for start in tl.range(bound(first), bound(past), BLOCK_K, num_stages=STAGES):
        slot = next_slot.to(OFFSET)[:, None]
        next_slot = _read_slots(table, start + BLOCK_K, end, BLOCK_SIZE, BLOCK_K)
        key_place = start + tl.arange(0, BLOCK_K)
        # Unwritten cache rows may hold NaN, and zero times NaN is NaN. So values are masked to zero as keys are.
        live = (key_place < end if MASKED else key_place >= 0)[:, None]
        keys = tl.load(k_cache + dim + slot * k_slot, mask=live & (dim < D), other=0.0)
        values = tl.load(v_cache + value_dim + slot * v_slot, mask=live & (value_dim < DV), other=0.0)
        scores = score(query, keys, place, key_place, cap, WINDOW, SOFTCAP, MASKED, True)
        if start % PIECE == 0:
            # The merge comes after the scores above, so that the products of the previous block finish during them.
            total = sum_of_keys(totals, BLOCK_K, BLOCK_R, True)
            run_top, run_total, run_summed = merge(run_top, run_total, run_summed, top, total, summed, scale, True)
            top, total, summed = nothing(DVP, BLOCK_R, True)
            totals = no_weights(BLOCK_K, BLOCK_R, True)
        top, totals, summed = add_block(scores, values, top, totals, summed, scale, True)
    return run_top, run_total, run_summed, top, totals, summed


@triton.jit(do_not_specialize=["T", "capacity"])
def prefill_attention_kernel(
    q, cos, sin, k_cache, v_cache, slots, block_table, positions, sinks, out,
    q_b, q_h, q_t, angle_b, angle_t, k_slot, k_head, v_slot, v_head, table_b, T, capacity, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROTARY: tl.constexpr, STAGES: tl.constexpr,
    OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attention of ``BLOCK_R`` (row, head) pairs of one key-value head to all that they see.

    Grid: (row tiles, B * Hkv).
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
    # The last rows see the most keys and take longest, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    pair = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    row = pair // GROUP
    real = tl.load(slots + batch * T + row, mask=row < T, other=-1) >= 0
    place = tl.where(real, tl.load(positions + batch * T + row, mask=row < T, other=-1).to(tl.int32), -1)
    low, end = seen_range(place, real, WINDOW)
    end = tl.minimum(end, capacity)  # the block table has no pages beyond its capacity
    # Every row sees the positions below this one, so they need no mask. With a window every block has a mask.
    seen_by_all = 0 if WINDOW > 0 else tl.min(tl.where(row < T, place, 2147483646), 0) + 1

    q_head = head * GROUP + pair % GROUP
    dim = tl.arange(0, DP)[None, :]
    queries = (q + batch * q_b) + (q_head * q_h + row.to(tl.int64) * q_t)[:, None] + dim
    angles = (batch * angle_b + row.to(tl.int64) * angle_t)[:, None] + dim
    query = load_rows(queries, dim, cos, sin, angles, real[:, None] & (dim < D), D, ROTARY)

    k_cache += head * k_head
    v_cache += head * v_head
    table = block_table + batch * table_b
    KEYS: tl.constexpr = RUN * PIECE
    top, total, summed = nothing(DVP, BLOCK_R, True)
    for run in range(bound(low // KEYS), bound((end + KEYS - 1) // KEYS)):
        begin = tl.maximum(run * KEYS, low // BLOCK_K * BLOCK_K)
        past = tl.minimum((run + 1) * KEYS, end)
        whole = tl.maximum(tl.minimum(seen_by_all // BLOCK_K * BLOCK_K, past), begin)
        run_top, run_total, run_summed = nothing(DVP, BLOCK_R, True)
        piece_top, piece_total, piece_summed = nothing(DVP, BLOCK_R, True)
        totals = no_weights(BLOCK_K, BLOCK_R, True)
        run_top, run_total, run_summed, piece_top, totals, piece_summed = _add_blocks(
            run_top, run_total, run_summed, piece_top, totals, piece_summed, begin, whole,
            query, place, end, k_cache, v_cache, table, k_slot, v_slot, scale, cap,
            D, DV, DP, DVP, BLOCK_SIZE, PIECE, BLOCK_K, BLOCK_R, WINDOW, SOFTCAP, STAGES, OFFSET, False,
        )  # fmt: skip
        run_top, run_total, run_summed, piece_top, totals, piece_summed = _add_blocks(
            run_top, run_total, run_summed, piece_top, totals, piece_summed, whole, past,
            query, place, end, k_cache, v_cache, table, k_slot, v_slot, scale, cap,
            D, DV, DP, DVP, BLOCK_SIZE, PIECE, BLOCK_K, BLOCK_R, WINDOW, SOFTCAP, STAGES, OFFSET, True,
        )  # fmt: skip
        piece_total = sum_of_keys(totals, BLOCK_K, BLOCK_R, True)
        run_top, run_total, run_summed = merge(
            run_top, run_total, run_summed, piece_top, piece_total, piece_summed, scale, True
        )
        top, total, summed = merge(top, total, summed, run_top, run_total, run_summed, scale, True)

    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    out_row = (batch * T + row) * (HEADS * GROUP) + q_head
    store_result(out, out_row, row < T, top, total, summed, sinks, q_head, scale, DV, DVP, SINKS, True)
