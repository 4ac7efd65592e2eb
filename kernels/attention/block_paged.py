"""The Triton forms of ``specgraph::write_context`` and ``specgraph::paged_block_attention``.

They compute what :mod:`specgraph.kernels.attention.block` defines, for float16, bfloat16 and float32: rows of a block,
``q`` ``[B, Hq, T, D]``, attend to the cached positions in front of the block and to the keys and values of the block
itself, ``[B, Hkv, T, D]``. The result is ``[B, T, Hq, Dv]``. Scores and sums are float32.

The context is divided over programs as in the kernel of paged attention for few rows
(:mod:`specgraph.kernels.attention.decode`), with the same pieces at absolute positions, because reading the context
takes most of the time. The block is at most a few dozen keys. The program that holds the sum over the whole context
adds the block as one last piece. So the bits of a row depend on its own query and on the keys and values that it sees
alone: the pieces and the order of their sums follow from absolute positions, and the keys of the block come last
whichever program adds them. They do not depend on the batch, on the width of the block table, or on how many programs
share a context.

Sources: DFlash (z-lab, 2026) for the attention; :mod:`specgraph.kernels.attention.paged` names those of the division.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention import paged
from specgraph.kernels.attention.block_arguments import PagedBlockAttention, WriteContext
from specgraph.kernels.attention.decode import attend_piece, load_pages, piece_begin, write_cache_kernel
from specgraph.kernels.attention.paged import NUM_WARPS, WRITTEN_ROWS, Tiling
from specgraph.kernels.attention.tiles import (
    add_block,
    empty_state,
    empty_sums,
    load_rows,
    loop_bound,
    merge,
    score,
    store_result,
    sum_of_keys,
)
from specgraph.kernels.attention.work_units import divide_context, is_last, merge_work_units, store_work_unit
from specgraph.kernels.launch import arrival_counters, gdc_launch_dependents, gdc_wait, launch_options, supports_pdl


@triton.jit
def _load_block(
    k, v, cos, sin, angles, T, k_t, v_t, angle_t,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, ROTARY: tl.constexpr, NEW: tl.constexpr,
):
    """Keys ``[NEW, DP]``, rotated, and values ``[NEW, DVP]`` of the ``T`` <= ``NEW`` rows of a block."""
    key_row = tl.arange(0, NEW)
    place, inside = key_row.to(tl.int64)[:, None], (key_row < T)[:, None]
    dim, value_dim = tl.arange(0, DP)[None, :], tl.arange(0, DVP)[None, :]
    own_angles = angles + place * angle_t + dim
    keys = load_rows(k + place * k_t + dim, dim, cos, sin, own_angles, inside & (dim < D), D, ROTARY)
    return keys, tl.load(v + place * v_t + value_dim, mask=inside & (value_dim < DV), other=0.0)


@triton.jit
def _attend_block(
    query, row, T, keys, values, scale, DVP: tl.constexpr, NEW: tl.constexpr, BLOCK_R: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Online softmax of the rows ``query`` ``[DP, BLOCK_R]`` over the ``T`` <= ``NEW`` keys of their block.

    ``row`` is the number of each row in its block. Returns the running maximum, the normaliser and the weighted values.
    """
    row_max, _, acc = empty_state(DVP, BLOCK_R, False)
    key_row = tl.arange(0, NEW)
    scores = score(query, keys, row, key_row, 0.0, 0, False, False, False)
    distance = row[None, :] - key_row[:, None]
    seen = (key_row < T)[:, None] & (row >= 0)[None, :]
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW > 0:
        seen = seen & (tl.abs(distance) < WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    partial_sums = empty_sums(NEW, BLOCK_R, False)
    row_max, partial_sums, acc = add_block(scores, values, row_max, partial_sums, acc, scale, False)
    return row_max, sum_of_keys(partial_sums, NEW, BLOCK_R, False), acc


@triton.jit(do_not_specialize=["T", "max_pieces", "max_work_units"])
def block_attention_kernel(
    q, k, v, cos, sin, k_cache, v_cache, block_table, positions, sinks, out, partials, counters,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, angle_b, angle_t, k_slot, k_head, v_slot, v_head, table_b,
    T, max_pieces, max_work_units, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PIECE: tl.constexpr, RUN: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr,
    NEW: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, ANCHORED: tl.constexpr, SINKS: tl.constexpr,
    ROTARY: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr, PAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of ``BLOCK_R`` (row, head) pairs of one key-value head to a share of their context, and to the block.

    The grid is (row tiles, B * Hkv, split). If ``SPLIT`` and a tile has several work units, their partial results go
    through ``partials``, and the program that finishes last merges them. Whichever program has the sum over the whole
    context adds the block.
    """
    # The projection behind requests its weights from here on. Before the wait, these requests would be in the way
    # of the norms of queries and keys, and they are answered well before the attention has ended.
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    tile = tl.program_id(0)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    program = tl.program_id(2)

    pair = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    row = pair // GROUP
    real = row < T
    start = tl.load(positions + batch * T).to(tl.int32)
    # A row sees the context as a causal row at this position would. Where the window is counted from the first row of
    # the block, and where there is none, that is the last position of the context.
    position = tl.where(real, start - 1, -1)
    if WINDOW > 0 and not ANCHORED:
        position = tl.where(real, start + row, -1)
    low, end, first, last, pieces_per_unit, first_work_unit, work_units, programs = divide_context(
        position, real, max_pieces, PIECE, RUN, WINDOW
    )
    end = tl.minimum(end, tl.maximum(start, 0))
    if program >= tl.maximum(programs, 1):
        return

    begin = piece_begin(tl.maximum((first_work_unit + program) * pieces_per_unit, first), low, PIECE, BLOCK_K, WINDOW)
    table = block_table + batch * table_b
    pages = load_pages(table, begin, tl.where(program < programs, end, 0), BLOCK_SIZE, PAGES)
    k_cache_head = k_cache + head * k_head
    v_cache_head = v_cache + head * v_head
    q_head = head * GROUP + pair % GROUP
    dim = tl.arange(0, DP)[:, None]
    queries = (q + batch * q_b) + (q_head * q_h + row.to(tl.int64) * q_t)[None, :] + dim
    angles = (batch * angle_b + row.to(tl.int64) * angle_t)[None, :] + dim
    query = load_rows(queries, dim, cos, sin, angles, real[None, :] & (dim < D), D, ROTARY)
    # The block comes last, but its rows are requested with the query, since waiting for them would take as long again.
    own_keys, own_values = _load_block(
        k + batch * k_b + head * k_h, v + batch * v_b + head * v_h, cos, sin, batch * angle_b, T, k_t, v_t, angle_t,
        D, DV, DP, DVP, ROTARY, NEW,
    )

    row_max, row_sum, acc = empty_state(DVP, BLOCK_R, False)
    task = (tl.program_id(1) * tl.num_programs(0) + tile).to(tl.int64)
    for work_unit in range(loop_bound(program), loop_bound(work_units), loop_bound(tl.maximum(programs, 1))):
        unit_max, unit_sum, unit_acc = empty_state(DVP, BLOCK_R, False)
        past = tl.minimum((first_work_unit + work_unit + 1) * pieces_per_unit, last)
        for piece in range(
            loop_bound(tl.maximum((first_work_unit + work_unit) * pieces_per_unit, first)), loop_bound(past)
        ):
            piece_max, piece_sum, piece_acc = attend_piece(
                query, position, k_cache_head, v_cache_head, pages,
                begin, tl.minimum(end, (piece + 1) * PIECE), k_slot, v_slot, scale, 0.0,
                D, DV, DP, DVP, BLOCK_SIZE, PAGES, BLOCK_K, BLOCK_R, WINDOW, False, STAGES, OFFSET, True,
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

    # Each branch ends on its own. A common end after both would first convert the sums to a common layout.
    out_row = (batch * T + row) * (HEADS * GROUP) + q_head
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
            own_max, own_sum, own_acc = _attend_block(
                query, row, T, own_keys, own_values, scale, DVP, NEW, BLOCK_R, 0 if ANCHORED else WINDOW, CAUSAL
            )
            row_max, row_sum, acc = merge(row_max, row_sum, acc, own_max, own_sum, own_acc, scale, False)
            store_result(out, out_row, real, row_max, row_sum, acc, sinks, q_head, scale, DV, DVP, SINKS, False)
    else:
        own_max, own_sum, own_acc = _attend_block(
            query, row, T, own_keys, own_values, scale, DVP, NEW, BLOCK_R, 0 if ANCHORED else WINDOW, CAUSAL
        )
        row_max, row_sum, acc = merge(row_max, row_sum, acc, own_max, own_sum, own_acc, scale, False)
        store_result(out, out_row, real, row_max, row_sum, acc, sinks, q_head, scale, DV, DVP, SINKS, False)


def write_context_triton(given: WriteContext) -> None:
    """:class:`WriteContext` for float16, bfloat16 and float32."""
    k, v = (_rows_contiguous(x) for x in (given.k, given.v))
    batch, groups, rows, _ = k.shape
    if batch * rows == 0:
        return
    caches, pdl = (given.k_cache, given.v_cache), supports_pdl(k.device)
    cos, sin, *angle_strides = paged.angles_of(_angles(given))
    write_cache_kernel[(triton.cdiv(rows, WRITTEN_ROWS), batch * groups)](
        k, v, cos, sin, *caches, given.slots.contiguous(), *k.stride()[:3], *v.stride()[:3], *angle_strides,
        *_cache_strides(given), rows, HEADS=groups, **paged.widths(k, v), ROWS=WRITTEN_ROWS,
        ROTARY=paged.rotated_width(cos), PDL=pdl, **_launch(pdl),
    )


def paged_block_attention_triton(given: PagedBlockAttention, *, tiling: Tiling | None = None) -> Tensor:
    """:class:`PagedBlockAttention` for float16, bfloat16 and float32 and head dims up to 256.

    Of ``tiling``, ``write_first`` and ``prefill`` mean nothing here.
    """
    tiling = tiling or Tiling()
    q, k, v = (_rows_contiguous(x) for x in (given.q, given.k, given.v))
    batch, heads, rows, _ = q.shape
    groups, block_table, caches = k.shape[1], given.block_table.contiguous(), (given.k_cache, given.v_cache)
    sizes = paged.widths(k, v)
    if max(sizes["D"], sizes["DV"]) > 256:
        raise ValueError(f"block attention has kernels for head dims up to 256, not {sizes['D']} and {sizes['DV']}.")
    out = q.new_empty(batch, rows, heads, sizes["DV"])
    if batch * rows == 0:
        return out
    pdl, counters = supports_pdl(q.device), arrival_counters(q.device)
    cos, sin, *angle_strides = paged.angles_of(_angles(given))
    pairs, sequences, block_size = rows * heads // groups, batch * groups, caches[0].shape[1]
    tile_rows = tiling.block_rows or paged.block_rows(pairs, sequences, q.dtype)
    tiles = triton.cdiv(pairs, tile_rows)
    pieces, split, work_units = paged.shares(tiles * sequences, block_table.shape[1] * block_size, tiling)
    partials = None
    if split > 1:
        size = tiles * sequences * work_units * (sizes["DVP"] + 2) * tile_rows
        partials = torch.empty(size, dtype=torch.float32, device=q.device)
    block_attention_kernel[(tiles, sequences, split)](
        q, k, v, cos, sin, *caches, block_table, given.positions.contiguous(), given.sinks, out, partials, counters,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *angle_strides, *_cache_strides(given),
        block_table.stride(0), rows, pieces, work_units, paged.score_factors(given.scale, None)[0],
        HEADS=groups, GROUP=heads // groups, **sizes, BLOCK_SIZE=block_size, PIECE=tiling.piece, RUN=tiling.run,
        BLOCK_K=tiling.block_keys, BLOCK_R=tile_rows, NEW=max(16, triton.next_power_of_2(rows)),
        WINDOW=given.window or 0, CAUSAL=given.causal, ANCHORED=given.anchored, SINKS=given.sinks is not None,
        ROTARY=paged.rotated_width(cos), SPLIT=split > 1, OFFSET=paged.offset_type(*caches),
        STAGES=tiling.num_stages or paged.num_stages(tiling.block_keys, sizes, q.dtype),
        PAGES=paged.pages_of(tiling.piece, block_size), PDL=pdl, **_launch(pdl),
    )
    return out


def _rows_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _angles(given: WriteContext | PagedBlockAttention) -> tuple[Tensor, Tensor] | None:
    return None if given.cos is None or given.sin is None else (given.cos, given.sin)


def _cache_strides(given: WriteContext | PagedBlockAttention) -> list[int]:
    return [stride for cache in (given.k_cache, given.v_cache) for stride in (cache.stride(1), cache.stride(2))]


def _launch(pdl: bool) -> dict[str, Any]:
    return {"num_warps": NUM_WARPS, "enable_fp_fusion": False, **launch_options(pdl)}
