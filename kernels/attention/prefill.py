"""The kernel of paged attention for many queries per sequence, such as a prompt's chunk.

It computes the same as :mod:`specgraph.kernels.attention.paged`: queries ``q`` ``[B, Hq, T, D]`` attend to the cached
positions that they see, and the result is ``[B, T, Hq, Dv]``. A launch before it must have written the new keys and
values to the cache.

With many queries there are enough tiles of (query, head) pairs to fill a GPU, so one program reads the whole context of
its tile, block by block. No partial results go through memory. The slots of a block are read one block ahead. If the
same iteration read them, the keys could be requested only when the block before them is done.

The program ends a KV split or a split group of the context where the kernel for few queries does, at the same absolute
positions, and merges in the same order. So it gives the same bits, and like there the bits of a query do not depend on
the other queries. :mod:`specgraph.kernels.attention.tiles` says why products in the other layout have the same bits.

Tiles: ``tile_q`` ``[BLOCK_M, DP]``, ``tile_k`` ``[BLOCK_N, DP]``, ``tile_v`` ``[BLOCK_N, DVP]``, ``scores``
``[BLOCK_M, BLOCK_N]`` and ``acc`` ``[BLOCK_M, DVP]``: pairs are lines. ``DP`` and ``DVP`` are ``D`` and ``DV`` padded
to powers of two.

Source: FlashAttention-2, Dao 2023, arXiv 2307.08691. Variants that were measured and not kept are in
``docs/experiments.md``.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tensors import Cache
from specgraph.kernels.attention.tiles import (
    INTERPRETED,
    add_block,
    empty_state,
    empty_sums,
    load_queries,
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
def _read_slots(table, start, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The slots, int32, of the ``BLOCK_N`` positions from ``start`` on. Past ``end`` the last page is repeated."""
    tl.static_assert(table.dtype.element_ty == tl.int64, "pages are int64")
    position = (start + tl.arange(0, BLOCK_N)).to(tl.uint32)
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
    m_group, l_group, acc_group, m_i, l_ij, acc, first, past,
    tile_q, position, end, k_cache, v_cache, table, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KV_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, MASKED: tl.constexpr,
):
    """Add the keys ``[first, past)`` of a split group.

    The state is that of the group's finished KV splits (``m_group``, ``l_group``, ``acc_group``) and that of the
    current KV split (``m_i``, ``l_ij``, ``acc``), and is returned in this order.
    """
    dim = tl.arange(0, DP)[None, :]
    value_dim = tl.arange(0, DVP)[None, :]
    next_slot = _read_slots(table, first, end, BLOCK_SIZE, BLOCK_N)
    for start in tl.range(loop_bound(first), loop_bound(past), BLOCK_N, num_stages=STAGES):
        slot = next_slot.to(OFFSET)[:, None]
        next_slot = _read_slots(table, start + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        key_position = start + tl.arange(0, BLOCK_N)
        # ---- load: k [BLOCK_N, DP] and v [BLOCK_N, DVP] of a block, from the slots of its positions
        # Unwritten cache rows may hold NaN, and zero times NaN is NaN. So values are masked to zero as keys are.
        in_range = (key_position < end if MASKED else key_position >= 0)[:, None]
        tile_k = tl.load(k_cache.x + dim + slot * k_cache.slot, mask=in_range & (dim < D), other=0.0)
        tile_v = tl.load(v_cache.x + value_dim + slot * v_cache.slot, mask=in_range & (value_dim < DV), other=0.0)
        # ---- s = q k^T: [BLOCK_M, BLOCK_N]
        scores = score(tile_q, tile_k, position, key_position, cap, WINDOW, SOFTCAP, MASKED, True)
        if start % KV_SPLIT == 0:
            # ---- a KV split ends: merge it into its split group
            # The merge comes after the scores above, so that the products of the previous block finish during them.
            l_i = sum_of_keys(l_ij, BLOCK_N, BLOCK_M, True)
            m_group, l_group, acc_group = merge(m_group, l_group, acc_group, m_i, l_i, acc, scale, True)
            m_i, l_i, acc = empty_state(DVP, BLOCK_M, True)
            l_ij = empty_sums(BLOCK_N, BLOCK_M, True)
        # ---- the online softmax of m_i, l_ij and acc
        m_i, l_ij, acc = add_block(scores, tile_v, m_i, l_ij, acc, scale, True)
    return m_group, l_group, acc_group, m_i, l_ij, acc


@triton.jit(do_not_specialize=["T", "capacity", "sequences"])
def prefill_attention_kernel(
    q, angles, k_cache, v_cache, slots, block_table, positions, cu_seqlens, sinks, out, sequences, table_b, T,
    capacity, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_SPLIT: tl.constexpr, SPLIT_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, ROTARY: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of ``BLOCK_M`` (query, head) pairs of one key-value head to all that they see.

    The grid is (tiles, B * Hkv), and (tiles of all sequences, Hkv) if the call is of variable length (``LANES`` > 0).
    """
    gdc_wait(PDL)
    # The last queries see the most keys and take longest, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    sequence, tile, first_query, num_queries = locate_tile(tile, batch, T, cu_seqlens, sequences, GROUP, BLOCK_M, LANES)
    # ---- pairs of the tile, [BLOCK_M] each: query of the call, whether it is no padding, and its position (or -1)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pair // GROUP < num_queries
    query = first_query + pair // GROUP
    real = tl.load(slots + batch * T + query, mask=inside, other=-1) >= 0
    position = tl.where(real, tl.load(positions + batch * T + query, mask=inside, other=-1).to(tl.int32), -1)
    low, end = visible_range(position, real, WINDOW)
    end = tl.minimum(end, capacity)  # the block table has no pages beyond its capacity
    # Every query sees the positions below this one, so they need no mask. With a window every block has a mask.
    seen_by_all = 0 if WINDOW > 0 else tl.min(tl.where(inside, position, 2147483646), 0) + 1

    # ---- load: q [BLOCK_M, DP], rotated
    q_head = head * GROUP + pair % GROUP
    tile_q = load_queries(q, angles, batch, q_head, query, real, D, DP, ROTARY, True)

    k_cache_head = Cache(k_cache.x + head * k_cache.head, k_cache.slot, k_cache.head)
    v_cache_head = Cache(v_cache.x + head * v_cache.head, v_cache.slot, v_cache.head)
    table = block_table + sequence * table_b
    # ---- online softmax: blocks into a KV split, KV splits into a split group, and groups into m_i, l_i, acc
    GROUP_KEYS: tl.constexpr = SPLIT_GROUP * KV_SPLIT
    m_i, l_i, acc = empty_state(DVP, BLOCK_M, True)
    for group in range(loop_bound(low // GROUP_KEYS), loop_bound((end + GROUP_KEYS - 1) // GROUP_KEYS)):
        begin = tl.maximum(group * GROUP_KEYS, low // BLOCK_N * BLOCK_N)
        past = tl.minimum((group + 1) * GROUP_KEYS, end)
        whole = tl.maximum(tl.minimum(seen_by_all // BLOCK_N * BLOCK_N, past), begin)
        m_group, l_group, acc_group = empty_state(DVP, BLOCK_M, True)
        m_split, l_split, acc_split = empty_state(DVP, BLOCK_M, True)
        l_ij = empty_sums(BLOCK_N, BLOCK_M, True)
        m_group, l_group, acc_group, m_split, l_ij, acc_split = _add_blocks(
            m_group, l_group, acc_group, m_split, l_ij, acc_split, begin, whole,
            tile_q, position, end, k_cache_head, v_cache_head, table, scale, cap,
            D, DV, DP, DVP, BLOCK_SIZE, KV_SPLIT, BLOCK_N, BLOCK_M, WINDOW, SOFTCAP, STAGES, OFFSET, False,
        )
        m_group, l_group, acc_group, m_split, l_ij, acc_split = _add_blocks(
            m_group, l_group, acc_group, m_split, l_ij, acc_split, whole, past,
            tile_q, position, end, k_cache_head, v_cache_head, table, scale, cap,
            D, DV, DP, DVP, BLOCK_SIZE, KV_SPLIT, BLOCK_N, BLOCK_M, WINDOW, SOFTCAP, STAGES, OFFSET, True,
        )
        l_split = sum_of_keys(l_ij, BLOCK_N, BLOCK_M, True)
        m_group, l_group, acc_group = merge(m_group, l_group, acc_group, m_split, l_split, acc_split, scale, True)
        m_i, l_i, acc = merge(m_i, l_i, acc, m_group, l_group, acc_group, scale, True)

    gdc_launch_dependents(PDL)
    # ---- out = acc / l_i: [BLOCK_M, DVP]
    out_row = (batch * T + query) * (HEADS * GROUP) + q_head
    store_result(out, out_row, inside, m_i, l_i, acc, sinks, q_head, scale, DV, DVP, SINKS, True)
