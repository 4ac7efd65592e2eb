"""The Triton forms of ``specgraph::write_context`` and ``specgraph::paged_block_attention``.

They compute what :mod:`specgraph.kernels.attention.block` defines, for float16, bfloat16 and float32: queries of a
block, ``q`` ``[B, Hq, T, D]``, attend to the cached positions in front of the block and to the keys and values of the
block itself, ``[B, Hkv, T, D]``. The result is ``[B, T, Hq, Dv]``. Scores and sums are float32.

The context is divided over programs as in the kernel of paged attention for few queries
(:mod:`specgraph.kernels.attention.decode`), with the same KV splits at absolute positions, because reading the context
takes most of the time. The block is at most a few dozen keys. The program that holds the sum over the whole context
adds the block as one last KV split. So the bits of a query depend on itself and on the keys and values that it sees
alone: the KV splits and the order of their sums follow from absolute positions, and the keys of the block come last
whichever program adds them. They do not depend on the batch, on the width of the block table, or on how many programs
share a context.

Tiles are those of :mod:`specgraph.kernels.attention.decode`. The keys and values of the block are ``own_k``
``[NEW, DP]`` and ``own_v`` ``[NEW, DVP]``, with ``NEW`` a power of two that is at least ``T``.

Sources: DFlash (z-lab, 2026) for the attention; :mod:`specgraph.kernels.attention.paged` names those of the division.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention import paged
from specgraph.kernels.attention.block_arguments import PagedBlockAttention, WriteContext
from specgraph.kernels.attention.decode import (
    attend_work_units,
    load_new_tokens,
    load_pages,
    split_begin,
    write_cache_kernel,
)
from specgraph.kernels.attention.paged import WRITTEN_TOKENS, Tiling
from specgraph.kernels.attention.tensors import Cache, Heads, new_and_cached
from specgraph.kernels.attention.tiles import (
    add_block,
    empty_state,
    empty_sums,
    load_queries,
    merge,
    score,
    store_result,
    sum_of_keys,
)
from specgraph.kernels.attention.work_units import divide_context, is_last, merge_work_units
from specgraph.kernels.launch import arrival_counters, contiguous, gdc_launch_dependents, gdc_wait, launch


@triton.jit
def _attend_block(
    tile_q, query, T, tile_k, tile_v, scale, DVP: tl.constexpr, NEW: tl.constexpr, BLOCK_M: tl.constexpr,
    WINDOW: tl.constexpr, CAUSAL: tl.constexpr,
):
    """Online softmax of ``tile_q`` ``[DP, BLOCK_M]`` over the ``T`` <= ``NEW`` keys of their block.

    ``query`` ``[BLOCK_M]`` is the number of each query in its block. Returns ``m_i``, ``l_i`` and ``acc``.
    """
    m_i, _, acc = empty_state(DVP, BLOCK_M, False)
    key = tl.arange(0, NEW)
    # ---- s = k q^T: [NEW, BLOCK_M], -inf where a query does not see a key
    scores = score(tile_q, tile_k, query, key, 0.0, 0, False, False, False)
    distance = query[None, :] - key[:, None]
    seen = (key < T)[:, None] & (query >= 0)[None, :]
    if CAUSAL:
        seen = seen & (distance >= 0)
    if WINDOW > 0:
        seen = seen & (tl.abs(distance) < WINDOW)
    scores = tl.where(seen, scores, float("-inf"))
    l_ij = empty_sums(NEW, BLOCK_M, False)
    m_i, l_ij, acc = add_block(scores, tile_v, m_i, l_ij, acc, scale, False)
    return m_i, sum_of_keys(l_ij, NEW, BLOCK_M, False), acc


@triton.jit(do_not_specialize=["T", "max_splits", "max_work_units"])
def block_attention_kernel(
    q, k, v, angles, k_cache, v_cache, block_table, positions, sinks, out, partials, counters, table_b, T, max_splits,
    max_work_units, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_SPLIT: tl.constexpr, SPLIT_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, NEW: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, ANCHORED: tl.constexpr,
    SINKS: tl.constexpr, ROTARY: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr,
    PAGES: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of ``BLOCK_M`` (query, head) pairs of one key-value head to a share of their context, and to the block.

    The grid is (tiles, B * Hkv, programs). If ``SHARED`` and a tile has several work units, their partial results go
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

    # ---- pairs of the tile, [BLOCK_M] each: query of the block, whether the block has it, and what context it sees
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query = pair // GROUP
    real = query < T
    start = tl.load(positions + batch * T).to(tl.int32)
    # A query sees the context as a causal query at this position would. Where the window is counted from the first
    # query of the block (ANCHORED), and where there is none, that is the last position of the context.
    position = tl.where(real, start - 1, -1)
    if WINDOW > 0 and not ANCHORED:
        position = tl.where(real, start + query, -1)
    # ---- the work units of this program, and the pages of the first one
    low, end, first, last, splits_per_unit, first_work_unit, work_units, programs = divide_context(
        position, real, max_splits, KV_SPLIT, SPLIT_GROUP, WINDOW
    )
    end = tl.minimum(end, tl.maximum(start, 0))
    if program >= tl.maximum(programs, 1):
        return

    first_split = tl.maximum((first_work_unit + program) * splits_per_unit, first)
    begin = split_begin(first_split, low, KV_SPLIT, BLOCK_N, WINDOW)
    table = block_table + batch * table_b
    pages = load_pages(table, begin, tl.where(program < programs, end, 0), BLOCK_SIZE, PAGES)
    k_cache_head = Cache(k_cache.x + head * k_cache.head, k_cache.slot, k_cache.head)
    v_cache_head = Cache(v_cache.x + head * v_cache.head, v_cache.slot, v_cache.head)
    # ---- load: q [DP, BLOCK_M], rotated; k [NEW, DP], rotated, and v [NEW, DVP] of the block
    q_head = head * GROUP + pair % GROUP
    tile_q = load_queries(q, angles, batch, q_head, query, real, D, DP, ROTARY, False)
    # The block comes last, but its keys and values are requested with the queries: another wait would take as long.
    key = tl.arange(0, NEW)
    own_k, own_v = load_new_tokens(k, v, angles, batch, head, key, key < T, D, DV, DP, DVP, ROTARY)

    task = (tl.program_id(1) * tl.num_programs(0) + tile).to(tl.int64)
    m_i, l_i, acc = attend_work_units(
        tile_q, position, real, k_cache_head, v_cache_head, table, begin, pages, low, end, first,
        last, splits_per_unit, first_work_unit, work_units, program, programs, partials, task, max_work_units, scale,
        0.0, D, DV, DP, DVP, BLOCK_SIZE, PAGES, KV_SPLIT, BLOCK_N, BLOCK_M, WINDOW, False, SHARED, STAGES, OFFSET,
        BEHIND=True,
    )

    # ---- merge the block's own keys and values, and out = acc / l_i: [DVP, BLOCK_M]
    # Each branch ends on its own. A common end after both would first convert the sums to a common layout.
    out_row = (batch * T + query) * (HEADS * GROUP) + q_head
    if SHARED and programs > 1:
        if is_last(counters + task, programs):
            m_i, l_i, acc = merge_work_units(
                partials, task * max_work_units, work_units, first_work_unit, splits_per_unit, real, scale,
                SPLIT_GROUP, DVP, BLOCK_M,
            )
            m_own, l_own, acc_own = _attend_block(
                tile_q, query, T, own_k, own_v, scale, DVP, NEW, BLOCK_M, 0 if ANCHORED else WINDOW, CAUSAL
            )
            m_i, l_i, acc = merge(m_i, l_i, acc, m_own, l_own, acc_own, scale, False)
            store_result(out, out_row, real, m_i, l_i, acc, sinks, q_head, scale, DV, DVP, SINKS, False)
    else:
        m_own, l_own, acc_own = _attend_block(
            tile_q, query, T, own_k, own_v, scale, DVP, NEW, BLOCK_M, 0 if ANCHORED else WINDOW, CAUSAL
        )
        m_i, l_i, acc = merge(m_i, l_i, acc, m_own, l_own, acc_own, scale, False)
        store_result(out, out_row, real, m_i, l_i, acc, sinks, q_head, scale, DV, DVP, SINKS, False)


def write_context_triton(given: WriteContext) -> None:
    """:class:`WriteContext` for float16, bfloat16 and float32."""
    batch, groups, length, _ = given.k.shape
    launch(
        write_cache_kernel, (triton.cdiv(length, WRITTEN_TOKENS), batch * groups), *new_and_cached(given),
        given.slots.contiguous(), length, TOKENS=WRITTEN_TOKENS, **paged.write_constants(given),
    )


def paged_block_attention_triton(given: PagedBlockAttention, *, tiling: Tiling | None = None) -> Tensor:
    """:class:`PagedBlockAttention` for float16, bfloat16 and float32 and head dims up to 256.

    Of ``tiling``, ``write_first`` and ``prefill`` mean nothing here.
    """
    tiling = tiling or Tiling()
    batch, heads, length, dim = given.q.shape
    groups, value_dim, block_size = given.k.shape[1], given.v.shape[3], given.k_cache.shape[1]
    if max(dim, value_dim) > 256:
        raise ValueError(f"block attention has kernels for head dims up to 256, not {dim} and {value_dim}.")
    out = given.q.new_empty(batch, length, heads, value_dim)
    if batch * length == 0:
        return out
    constants = {**paged.write_constants(given), **paged.read_constants(given, tiling)}
    pairs, sequences, pages = length * heads // groups, batch * groups, given.block_table.shape[1]
    block_m = tiling.block_queries or paged.block_queries(pairs, sequences, out.dtype)
    tiles = triton.cdiv(pairs, block_m)
    splits, programs, work_units = paged.shares(tiles * sequences, pages * block_size, tiling)
    partials = paged.partial_results(out, programs, tiles * sequences * work_units * block_m, constants["DVP"])
    launch(
        block_attention_kernel, (tiles, sequences, programs), Heads.of(given.q), *new_and_cached(given),
        *contiguous(given, "block_table", "positions", "sinks"), out, partials, arrival_counters(out.device), pages,
        length, splits, work_units, paged.score_factors(given.scale, None)[0],
        BLOCK_M=block_m, NEW=max(16, triton.next_power_of_2(length)), CAUSAL=given.causal, ANCHORED=given.anchored,
        SHARED=programs > 1, PAGES=paged.pages_of(tiling.kv_split, block_size), **constants,
    )
    return out
