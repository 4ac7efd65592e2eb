"""The kernels of paged attention for few queries per sequence, such as those of a decoding step.

``decode_attention_kernel`` computes what :mod:`specgraph.kernels.attention.attention` defines: queries ``q``
``[B, Hq, T, D]`` attend to the cached positions that they see, and the result is ``[B, T, Hq, Dv]``. The new keys
``[B, Hkv, T, D]`` are rotated if asked, and they and the values ``[B, Hkv, T, Dv]`` are written to their cache slots,
either by this kernel or by ``write_cache_kernel`` before it. ``HEADS`` counts key-value heads. The functions also serve
:mod:`specgraph.kernels.attention.block_paged`.

A program takes a tile of (query, head) pairs that share a key-value head, and some of the work units of their context
(:mod:`specgraph.kernels.attention.work_units`). Within a KV split it reads one block of keys and values at a time.
:mod:`specgraph.kernels.attention.paged` says why the bits of a query do not depend on other queries, and names the
sources.

Tiles: ``tile_q`` ``[DP, BLOCK_M]``, ``tile_k`` ``[BLOCK_N, DP]``, ``tile_v`` ``[BLOCK_N, DVP]``, ``scores``
``[BLOCK_N, BLOCK_M]`` and ``acc`` ``[DVP, BLOCK_M]``: pairs are columns. ``DP`` and ``DVP`` are ``D`` and ``DV`` padded
to powers of two, and to 16 at least.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tensors import Cache
from specgraph.kernels.attention.tiles import (
    add_block,
    empty_state,
    empty_sums,
    load_queries,
    load_rotated,
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
def load_new_tokens(
    k, v, angles, batch, head, token, keep,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, ROTARY: tl.constexpr,
):
    """Load keys ``[TOKENS, DP]``, rotated, and values ``[TOKENS, DVP]`` of new tokens; zeros where not ``keep``."""
    token = token.to(tl.int64)
    p_k = (k.x + batch * k.batch + head * k.head) + (token * k.token)[:, None]
    p_v = (v.x + batch * v.batch + head * v.head) + (token * v.token)[:, None]
    at = (batch * angles.batch + token * angles.token)[:, None]
    dim = tl.arange(0, DP)[None, :]
    tile_k = load_rotated(p_k + dim, dim, angles, at + dim, keep[:, None] & (dim < D), D, ROTARY)
    dim = tl.arange(0, DVP)[None, :]
    return tile_k, tl.load(p_v + dim, mask=keep[:, None] & (dim < DV), other=0.0)


@triton.jit
def _store_new_tokens(
    tile_k, tile_v, k_cache, v_cache, slot, head, keep,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
):
    """Write what :func:`load_new_tokens` loaded to the cache at ``slot`` ``[TOKENS]``, where ``keep``."""
    slot = slot[:, None]
    dim = tl.arange(0, DP)[None, :]
    tl.store(k_cache.x + slot * k_cache.slot + head * k_cache.head + dim, tile_k, mask=keep[:, None] & (dim < D))
    dim = tl.arange(0, DVP)[None, :]
    tl.store(v_cache.x + slot * v_cache.slot + head * v_cache.head + dim, tile_v, mask=keep[:, None] & (dim < DV))


@triton.jit(do_not_specialize=["T"])
def write_cache_kernel(
    k, v, angles, k_cache, v_cache, slots, T,
    HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, TOKENS: tl.constexpr,
    ROTARY: tl.constexpr, PDL: tl.constexpr,
):
    """Rotate the keys of ``TOKENS`` tokens of one head of one sequence, and write keys and values to the cache.

    The grid is (blocks of tokens, B * Hkv).
    """
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    # Tokens are lines: [TOKENS]. A slot of -1 is padding, which is not written.
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + batch * T + token, mask=token < T, other=-1)
    # ---- k_cache[slot] = rotate(k), v_cache[slot] = v: [TOKENS, DP] and [TOKENS, DVP]
    tile_k, tile_v = load_new_tokens(k, v, angles, batch, head, token, slot >= 0, D, DV, DP, DVP, ROTARY)
    _store_new_tokens(tile_k, tile_v, k_cache, v_cache, slot, head, slot >= 0, D, DV, DP, DVP)


@triton.jit
def load_pages(table, begin, end, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """Read ``PAGES`` entries of the block table, from the page of position ``begin`` on, up to position ``end``.

    A page that is not there (-1) is taken for page 0, and no key of it is in range.
    """
    index = begin // BLOCK_SIZE + tl.arange(0, PAGES)
    return tl.maximum(tl.load(table + index, mask=index * BLOCK_SIZE < end, other=0), 0).to(tl.int32)


@triton.jit
def _slots_of(pages, begin, key_position, BLOCK_SIZE: tl.constexpr, PAGES: tl.constexpr):
    """The slots of positions whose pages :func:`load_pages` has read, as int32, which multiplies faster than int64."""
    # The modulo keeps the index among the pages that were read, whatever block a pipelined loop looks ahead to.
    index = (key_position // BLOCK_SIZE - begin // BLOCK_SIZE) % PAGES
    return tl.gather(pages, index, 0) * BLOCK_SIZE + key_position % BLOCK_SIZE


@triton.jit
def attend_split(
    tile_q, position, k_cache, v_cache, pages, begin, end, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    STAGES: tl.constexpr, OFFSET: tl.constexpr, BEHIND: tl.constexpr,
):
    """Online softmax of ``tile_q`` ``[DP, BLOCK_M]`` at ``position`` over the keys in ``[begin, end)``.

    ``begin`` is a multiple of ``BLOCK_N``. Where ``end`` cuts a block, all queries are in front of ``end``, so that the
    causal mask hides the rest of the block; with ``BEHIND`` they need not be. Returns ``m_i``, ``l_i`` and ``acc``
    ``[DVP, BLOCK_M]``.

    The caller has read all ``pages`` of the KV split. If the loop read each page itself, the address of a block's keys
    would depend on that read, and the keys could be requested only when the block before them is done.
    """
    m_i, _, acc = empty_state(DVP, BLOCK_M, False)
    l_ij = empty_sums(BLOCK_N, BLOCK_M, False)
    dim = tl.arange(0, DP)[None, :]
    value_dim = tl.arange(0, DVP)[None, :]
    for start in tl.range(loop_bound(begin), loop_bound(end), BLOCK_N, num_stages=STAGES):
        key_position = start + tl.arange(0, BLOCK_N)
        # Unwritten cache rows may hold NaN, and zero times NaN is NaN. So values are masked to zero as keys are.
        in_range = (key_position < end)[:, None]
        # ---- load: k [BLOCK_N, DP] and v [BLOCK_N, DVP] of a block, from the slots of its positions
        slot = _slots_of(pages, begin, key_position, BLOCK_SIZE, PAGES).to(OFFSET)[:, None]
        tile_k = tl.load(k_cache.x + slot * k_cache.slot + dim, mask=in_range & (dim < D), other=0.0)
        tile_v = tl.load(v_cache.x + slot * v_cache.slot + value_dim, mask=in_range & (value_dim < DV), other=0.0)
        if BEHIND:
            key_position = tl.where(key_position < end, key_position, 0x7FFFFFFF)  # behind every query
        # ---- s = k q^T: [BLOCK_N, BLOCK_M], and the online softmax of m_i, l_ij and acc
        scores = score(tile_q, tile_k, position, key_position, cap, WINDOW, SOFTCAP, True, False)
        m_i, l_ij, acc = add_block(scores, tile_v, m_i, l_ij, acc, scale, False)
    return m_i, sum_of_keys(l_ij, BLOCK_N, BLOCK_M, False), acc


@triton.jit
def split_begin(split, low, KV_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The first position of a KV split that is read.

    With a window this is the block that holds the first visible position.
    """
    begin = split * KV_SPLIT
    if WINDOW > 0:
        begin = tl.maximum(begin, low // BLOCK_N * BLOCK_N)
    return begin


@triton.jit
def attend_work_units(
    tile_q, position, real, k_cache, v_cache, table, begin, pages, low, end, first, last, splits_per_unit,
    first_work_unit, work_units, program, programs, partials, task, max_work_units, scale, cap,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGES: tl.constexpr, KV_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr,
    BEHIND: tl.constexpr = False,
):
    """Online softmax of ``tile_q`` ``[DP, BLOCK_M]`` over the work units of a program: ``m_i``, ``l_i`` and ``acc``.

    ``begin`` and ``pages`` are those of its first KV split. If ``SHARED`` and several programs share the context, each
    work unit's own result goes to ``partials``, too.
    """
    # ---- online softmax: blocks into a KV split, KV splits into a work unit, and work units into m_i, l_i, acc
    m_i, l_i, acc = empty_state(DVP, BLOCK_M, False)
    for work_unit in range(loop_bound(program), loop_bound(work_units), loop_bound(tl.maximum(programs, 1))):
        m_unit, l_unit, acc_unit = empty_state(DVP, BLOCK_M, False)
        past = tl.minimum((first_work_unit + work_unit + 1) * splits_per_unit, last)
        for split in range(
            loop_bound(tl.maximum((first_work_unit + work_unit) * splits_per_unit, first)), loop_bound(past)
        ):
            m_split, l_split, acc_split = attend_split(
                tile_q, position, k_cache, v_cache, pages, begin, tl.minimum(end, (split + 1) * KV_SPLIT), scale,
                cap, D, DV, DP, DVP, BLOCK_SIZE, PAGES, BLOCK_N, BLOCK_M, WINDOW, SOFTCAP, STAGES, OFFSET, BEHIND,
            )
            m_unit, l_unit, acc_unit = merge(m_unit, l_unit, acc_unit, m_split, l_split, acc_split, scale, False)
            next_split = tl.where(
                split + 1 < past, split + 1, (first_work_unit + work_unit + programs) * splits_per_unit
            )
            begin = split_begin(next_split, low, KV_SPLIT, BLOCK_N, WINDOW)
            pages = load_pages(table, begin, end, BLOCK_SIZE, PAGES)
        if SHARED and programs > 1:
            index = task * max_work_units + work_unit
            store_work_unit(partials, index, real, m_unit, l_unit, acc_unit, DVP, BLOCK_M)
        m_i, l_i, acc = merge(m_i, l_i, acc, m_unit, l_unit, acc_unit, scale, False)
    return m_i, l_i, acc


@triton.jit(do_not_specialize=["T", "max_splits", "max_work_units", "sequences"])
def decode_attention_kernel(
    q, k, v, angles, k_cache, v_cache, slots, block_table, positions, cu_seqlens, sinks, out, partials, counters,
    sequences, table_b, T, max_splits, max_work_units, scale, cap,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_SPLIT: tl.constexpr, SPLIT_GROUP: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, WRITE: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    ROTARY: tl.constexpr, SHARED: tl.constexpr, STAGES: tl.constexpr, OFFSET: tl.constexpr, PAGES: tl.constexpr,
    LANES: tl.constexpr, PDL: tl.constexpr,
):
    """Attention of ``BLOCK_M`` (query, head) pairs of one key-value head to a share of the work units of their context.

    The grid is (tiles, B * Hkv, programs), and (tiles of all sequences, Hkv, programs) if the call is of variable
    length (``LANES`` > 0). If ``WRITE`` > 0, which calls of variable length do not support, a program first writes the
    new keys and values that its own work units contain, so that no program waits for another. Several tiles then write
    the same bits to the same slots. If ``SHARED`` and a tile has several work units, their partial results go through
    ``partials``, and the program that finishes last merges them.
    """
    # This kernel has few programs. Those of the next launch may start and request its weights meanwhile.
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    # Of one sequence, the last queries see the most keys and take longest, so their programs start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    task = (tl.program_id(1) * tl.num_programs(0) + tile).to(tl.int64)
    batch = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    program = tl.program_id(2)
    sequence, tile, first_query, num_queries = locate_tile(tile, batch, T, cu_seqlens, sequences, GROUP, BLOCK_M, LANES)

    # ---- pairs of the tile, [BLOCK_M] each: query of the call, whether it is no padding, and its position (or -1)
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = pair // GROUP < num_queries
    query = first_query + pair // GROUP
    real = tl.load(slots + batch * T + query, mask=inside, other=-1) >= 0
    position = tl.where(real, tl.load(positions + batch * T + query, mask=inside, other=-1).to(tl.int32), -1)
    if WRITE > 0:
        # New tokens of the sequence: [WRITE].
        new_token = tl.arange(0, WRITE)
        new_slot = tl.load(slots + batch * T + new_token, mask=new_token < T, other=-1)
        new_position = tl.load(positions + batch * T + new_token, mask=new_token < T, other=-1).to(tl.int32)
    # ---- the work units of this program, and the pages of the first one
    low, end, first, last, splits_per_unit, first_work_unit, work_units, programs = divide_context(
        position, real, max_splits, KV_SPLIT, SPLIT_GROUP, WINDOW
    )
    if program >= tl.maximum(programs, 1):
        return

    first_split = tl.maximum((first_work_unit + program) * splits_per_unit, first)
    begin = split_begin(first_split, low, KV_SPLIT, BLOCK_N, WINDOW)
    table = block_table + sequence * table_b
    pages = load_pages(table, begin, tl.where(program < programs, end, 0), BLOCK_SIZE, PAGES)
    k_cache_head = Cache(k_cache.x + head * k_cache.head, k_cache.slot, k_cache.head)
    v_cache_head = Cache(v_cache.x + head * v_cache.head, v_cache.slot, v_cache.head)
    # ---- load: q [DP, BLOCK_M], rotated; new k [WRITE, DP], rotated, and v [WRITE, DVP] of this program's KV splits
    if WRITE > 0:
        new_split = new_position // KV_SPLIT
        new_work_unit = tl.where(splits_per_unit == 1, new_split, new_split // SPLIT_GROUP) - first_work_unit
        owned = (new_slot >= 0) & (new_split >= first) & (new_split < last)
        owned = owned & (new_work_unit % tl.maximum(programs, 1) == program)
        tile_k, tile_v = load_new_tokens(k, v, angles, batch, head, new_token, owned, D, DV, DP, DVP, ROTARY)
    q_head = head * GROUP + pair % GROUP
    tile_q = load_queries(q, angles, batch, q_head, query, real, D, DP, ROTARY, False)
    if WRITE > 0:
        # ---- k_cache[slot] = rotate(k), v_cache[slot] = v
        _store_new_tokens(tile_k, tile_v, k_cache, v_cache, new_slot, head, owned, D, DV, DP, DVP)
        # Any thread of this program may read what the others have just written to the cache.
        tl.debug_barrier()

    m_i, l_i, acc = attend_work_units(
        tile_q, position, real, k_cache_head, v_cache_head, table, begin, pages, low, end, first,
        last, splits_per_unit, first_work_unit, work_units, program, programs, partials, task, max_work_units, scale,
        cap, D, DV, DP, DVP, BLOCK_SIZE, PAGES, KV_SPLIT, BLOCK_N, BLOCK_M, WINDOW, SOFTCAP, SHARED, STAGES, OFFSET,
    )

    # ---- out = acc / l_i: [DVP, BLOCK_M], of the merged work units if several programs share the context
    out_row = (batch * T + query) * (HEADS * GROUP) + q_head
    # Each branch stores its own result. A common store after both would first convert the sums to a common layout.
    if SHARED and programs > 1:
        if is_last(counters + task, programs):
            m_i, l_i, acc = merge_work_units(
                partials, task * max_work_units, work_units, first_work_unit, splits_per_unit, real, scale,
                SPLIT_GROUP, DVP, BLOCK_M,
            )
            store_result(out, out_row, inside, m_i, l_i, acc, sinks, q_head, scale, DV, DVP, SINKS, False)
    else:
        store_result(out, out_row, inside, m_i, l_i, acc, sinks, q_head, scale, DV, DVP, SINKS, False)
