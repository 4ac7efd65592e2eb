"""The Gluon kernel of paged attention for many queries on Hopper; :mod:`specgraph.kernels.attention.paged` chooses it.

It computes what :mod:`specgraph.kernels.attention.prefill` computes, and gives the same bits. A program takes 128
(query, head) pairs of one key-value head. Two groups of four warps attend with 64 of them each, and no barrier joins
the groups: while one computes weights, the other one has the tensor cores. Two further warps read the block table and
request keys and values by the tensor memory accelerator, each for a ring of stages in shared memory. They do so page by
page, so a page is a power of two of at least 8 slots.

Registers hold the sums of a KV split and of its split group. The total, which is needed once in a split group, is in
shared memory.

Tiles are those of :mod:`specgraph.kernels.attention.tiles` with pairs as lines: ``q_tile`` ``[64, D]``, a block of keys
or values ``[64, D]``, ``scores`` ``[64, 64]`` and ``acc`` ``[64, D]``. Values are as wide as keys.

Source: FlashAttention-3, Shah et al. 2024, arXiv 2407.08608. Variants that were measured and not kept are in
``docs/experiments.md``.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specgraph.kernels.attention import tiles
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait

STAGES = 3
"""Blocks of keys, and of values, in shared memory."""
_BLOCK = gl.constexpr(64)
"""The keys of a block, and the pairs of a group of warps."""
_REGISTERS = gl.constexpr((240, 24, 24))
"""What a thread has of the second group of warps, and of those that request; the first group has what is left."""
_ROWS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_PAGES = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_TOTAL = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
# Functions without layouts have the same source in both languages.
_finite_or_zero = gluon.jit(tiles.finite_or_zero.fn)
_gdc_launch_dependents = gluon.jit(gdc_launch_dependents.fn)
_gdc_wait = gluon.jit(gdc_wait.fn)
_load_rotated = gluon.jit(tiles.load_rotated.fn)
_locate_among = gluon.jit(tiles.locate_among.fn)
_merge = gluon.jit(tiles.merge.fn)
_result = gluon.jit(tiles.result.fn)
_sum_of_keys = gluon.jit(tiles.sum_of_keys.fn)
_visible_range = gluon.jit(tiles.visible_range.fn)


@gluon.constexpr_function
def _sums(D):
    """The layout of sums of values ``[64, D]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])


@gluon.constexpr_function
def _memory(D):
    """The layout of ``[64, D]`` in accesses to memory: a thread has 8 neighbours."""
    return gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])


@gluon.jit
def _places(slots, positions, pair, row, first_query, num_queries, GROUP: gl.constexpr):
    """Of pairs: the query, whether it is one of the sequence, whether it is no padding, and its position (or -1)."""
    query = first_query + pair // GROUP
    inside = pair // GROUP < num_queries
    real = gl.load(slots + row + query, mask=inside, other=-1) >= 0
    position = gl.where(real, gl.load(positions + row + query, mask=inside, other=-1).to(gl.int32), -1)
    return query, inside, real, position


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and the parity of its barriers there."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _request(cache, ring, full, free, table, column, begin, past, BLOCK_SIZE: gl.constexpr):
    """Request the keys, or the values, of all blocks in ``[begin, past)``: one warp, which does nothing else.

    Pages are read one block ahead. Of an entry of the block table the lower half is read, which has room for any page.
    """
    STAGES: gl.constexpr = ring.shape[0]
    D: gl.constexpr = ring.shape[2]
    ROWS: gl.constexpr = cache.block_type.shape[0]
    BOXES: gl.constexpr = _BLOCK // ROWS
    PANELS: gl.constexpr = D // 64
    boxes = ring._reinterpret(cache.dtype, [STAGES * PANELS * BOXES, ROWS, 64], cache.layout)
    table = table.to(gl.pointer_type(gl.int32))
    last = (past - 1) // BLOCK_SIZE
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    next_pages = ()
    # Triton's functions have no starred expressions.
    for box in gl.static_range(BOXES):
        page = gl.load(table + 2 * gl.minimum((begin + box * ROWS) // BLOCK_SIZE, last))
        next_pages = next_pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
    for start in range(begin, past, _BLOCK):
        pages = next_pages
        next_pages = ()
        for box in gl.static_range(BOXES):
            page = gl.load(table + 2 * gl.minimum((start + _BLOCK + box * ROWS) // BLOCK_SIZE, last))
            next_pages = next_pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(free.index(stage), phase)
        mbarrier.expect(full.index(stage), _BLOCK * D * cache.dtype.primitive_bitwidth // 8)
        for box in gl.static_range(BOXES):
            slot = gl.maximum(pages[box], 0) * BLOCK_SIZE + (start + box * ROWS) % BLOCK_SIZE
            for panel in gl.static_range(PANELS):
                place = boxes.index((stage * PANELS + panel) * BOXES + box)
                tma.async_copy_global_to_shared(cache, [slot, column + panel * 64], full.index(stage), place)
        stage, phase = _next(stage, phase, STAGES)


@gluon.jit
def _score(q_tile, rings, stage, phase, cap, SOFTCAP: gl.constexpr):
    """Scores of a block's keys, ``[64, 64]``, as :func:`~specgraph.kernels.attention.tiles.score` has them."""
    k_ring, _, full_k, _, _ = rings
    mbarrier.wait(full_k.index(stage), phase)
    zeros = gl.zeros([64, _BLOCK], gl.float32, _SCORES)
    scores = warpgroup_mma(q_tile, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    if SOFTCAP:
        scores = 1.0 - 2.0 / (gl.exp2(scores * cap) + 1.0)
    return scores


@gluon.jit
def _hide(scores, position, start, WINDOW: gl.constexpr):
    """``scores``, where those of keys that a query does not see are -inf."""
    distance = position[:, None] - (start + gl.arange(0, _BLOCK, gl.SliceLayout(0, _SCORES)))[None, :]
    seen = distance >= 0
    if WINDOW > 0:
        seen = seen & (distance < WINDOW)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _weights(scores, m_new, scale):
    """``2^(scale (s_ij - m_new))``, and ``m_new`` ``[64]`` or 0, as ``tiles.add_block`` computes them."""
    m_finite = _finite_or_zero(m_new)
    subtracted = gl.convert_layout(-m_finite * scale, gl.SliceLayout(1, _SCORES))
    subtracted, _ = gl.broadcast(subtracted[:, None], scores)
    return gl.exp2(gl.fma(scores, gl.full([64, _BLOCK], scale, gl.float32, _SCORES), subtracted)), m_finite


@gluon.jit
def _add_weights(scores, m_i, l_ij, scale, SUMS: gl.constexpr):
    """Add a block to ``m_i`` and ``l_ij``. Returns them, its weights, and what ``acc`` is scaled by."""
    m_new = gl.maximum(m_i, gl.convert_layout(gl.max(scores, 1), gl.SliceLayout(1, SUMS)))
    p, m_finite = _weights(scores, m_new, scale)
    alpha = gl.exp2((m_i - m_finite) * scale)
    factor, _ = gl.broadcast(gl.convert_layout(alpha, gl.SliceLayout(1, _SCORES))[:, None], scores)
    return m_new, gl.fma(l_ij, factor, p), p, alpha[:, None]


@gluon.jit
def _zero_behind(values, count):
    """Make the rows of a block of values from ``count`` on zero: what was never written may be NaN.

    Both groups of warps do so, and write the same.
    """
    layout: gl.constexpr = _memory(values.shape[1])
    tile = values.load(layout)
    behind = gl.arange(0, _BLOCK, gl.SliceLayout(1, layout)) >= count
    values.store(gl.where(behind[:, None], gl.zeros_like(tile), tile))
    fence_async_shared()


@gluon.jit
def _add_values(p, acc, rings, stage, phase, USE_ACC: gl.constexpr):
    """``acc + p v``, or ``p v`` if not ``USE_ACC``; then the stage is free."""
    _, v_ring, _, full_v, free = rings
    p = gl.convert_layout(p.to(v_ring.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    mbarrier.wait(full_v.index(stage), phase)
    acc = warpgroup_mma(p, v_ring.index(stage), acc, use_acc=USE_ACC, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(free.index(stage))
    return acc


@gluon.jit
def _empty(D: gl.constexpr):
    """``m_i``, ``l_i`` and ``acc`` before any key."""
    row: gl.constexpr = gl.SliceLayout(1, _sums(D))
    m_i = gl.full([64], float("-inf"), gl.float32, row)
    return m_i, gl.zeros([64], gl.float32, row), gl.zeros([64, D], gl.float32, _sums(D))


@gluon.jit
def _end_split(group, m_i, l_ij, acc, scale):
    """Merge a KV split into its split group."""
    m_group, l_group, acc_group = group
    l_i = gl.convert_layout(_sum_of_keys(l_ij, _BLOCK, 64, True), l_group.type.layout)
    return _merge(m_group, l_group, acc_group, m_i, l_i, acc, scale, True)


@gluon.jit
def _end_group(total, m_total, l_total, group, scale):
    """Merge a split group into the total, whose sums of values are in shared memory."""
    m_group, l_group, acc_group = group
    acc = total.load(acc_group.type.layout)
    m_total, l_total, acc = _merge(m_total, l_total, acc, m_group, l_group, acc_group, scale, True)
    total.store(acc)
    return m_total, l_total


@gluon.jit
def _add_splits(
    m_total, l_total, group, first, past, stage, phase, q_tile, rings, total, scale, cap,
    KV_SPLIT: gl.constexpr, SPLIT_GROUP: gl.constexpr, SOFTCAP: gl.constexpr,
):
    """Add the KV splits ``[first, past)``, whose keys all queries see.

    In front of the first block of a split is nothing, so nothing is scaled there. That is the same as scaling zeros.
    """
    STAGES: gl.constexpr = rings[0].shape[0]
    D: gl.constexpr = rings[0].shape[2]
    for start in range(first, past, KV_SPLIT):
        scores = _score(q_tile, rings, stage, phase, cap, SOFTCAP)
        m_i = gl.convert_layout(gl.max(scores, 1), gl.SliceLayout(1, _sums(D)))
        l_ij, _ = _weights(scores, m_i, scale)
        acc = _add_values(l_ij, gl.zeros([64, D], gl.float32, _sums(D)), rings, stage, phase, False)
        stage, phase = _next(stage, phase, STAGES)
        for _ in range(KV_SPLIT // _BLOCK - 1):
            scores = _score(q_tile, rings, stage, phase, cap, SOFTCAP)
            m_i, l_ij, p, alpha = _add_weights(scores, m_i, l_ij, scale, _sums(D))
            acc = _add_values(p, acc * alpha, rings, stage, phase, True)
            stage, phase = _next(stage, phase, STAGES)
        group = _end_split(group, m_i, l_ij, acc, scale)
        if (start + KV_SPLIT) % (SPLIT_GROUP * KV_SPLIT) == 0:
            m_total, l_total = _end_group(total, m_total, l_total, group, scale)
            group = _empty(D)
    return m_total, l_total, group, stage, phase


@gluon.jit
def _add_blocks(
    m_total, l_total, group, first, past, end, stage, phase, q_tile, rings, total, position, scale, cap,
    KV_SPLIT: gl.constexpr, SPLIT_GROUP: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
):
    """Add the blocks ``[first, past)`` behind whole KV splits, with masks. The last KV split is merged, too."""
    STAGES: gl.constexpr = rings[0].shape[0]
    D: gl.constexpr = rings[0].shape[2]
    m_i, _, acc = _empty(D)
    l_ij = gl.zeros([64, _BLOCK], gl.float32, _SCORES)
    for start in range(first, past, _BLOCK):
        if end - start < _BLOCK:
            mbarrier.wait(rings[3].index(stage), phase)
            _zero_behind(rings[1].index(stage), end - start)
        scores = _hide(_score(q_tile, rings, stage, phase, cap, SOFTCAP), position, start, WINDOW)
        if start % KV_SPLIT == 0:
            group = _end_split(group, m_i, l_ij, acc, scale)
            m_i, _, acc = _empty(D)
            l_ij = gl.zeros([64, _BLOCK], gl.float32, _SCORES)
            if start % (SPLIT_GROUP * KV_SPLIT) == 0:
                m_total, l_total = _end_group(total, m_total, l_total, group, scale)
                group = _empty(D)
        m_i, l_ij, p, alpha = _add_weights(scores, m_i, l_ij, scale, _sums(D))
        acc = _add_values(p, acc * alpha, rings, stage, phase, True)
        stage, phase = _next(stage, phase, STAGES)
    group = _end_split(group, m_i, l_ij, acc, scale)
    return m_total, l_total, group, stage, phase


@gluon.jit
def _attend(given, sizes, NUMBER: gl.constexpr):
    """Attention of 64 pairs: one of the two groups of four warps."""
    (q, angles, slots, positions, sinks, out, q_tiles, totals, rings, batch, head, pair, first_query, num_queries, T,
     begin, end, past, scale, cap) = given  # fmt: skip
    HEADS: gl.constexpr = sizes[0]
    GROUP: gl.constexpr = sizes[1]
    KV_SPLIT: gl.constexpr = sizes[2]
    SPLIT_GROUP: gl.constexpr = sizes[3]
    WINDOW: gl.constexpr = sizes[4]
    SOFTCAP: gl.constexpr = sizes[5]
    k_ring, _, full_k, full_v, free = rings
    D: gl.constexpr = k_ring.shape[2]
    MEMORY: gl.constexpr = _memory(D)
    row = batch * T
    pair += NUMBER * 64 + gl.arange(0, 64, gl.SliceLayout(1, MEMORY))
    # ---- load: q [64, D], rotated
    query, inside, real, position = _places(slots, positions, pair, row, first_query, num_queries, GROUP)
    query = query.to(gl.int64)
    q_head = head * GROUP + pair % GROUP
    dim = gl.arange(0, D, gl.SliceLayout(0, MEMORY))[None, :]
    p_q = (q.x + batch * q.batch) + (q_head * q.head + query * q.token)[:, None] + dim
    at = (batch * angles.batch + query * angles.token)[:, None] + dim
    q_tile = q_tiles.index(NUMBER)
    q_tile.store(_load_rotated(p_q, dim, angles, at, real[:, None] & (dim < D), D, sizes[7]))
    fence_async_shared()
    # ---- this half's own range of keys: it may see less than the other half, and its first splits need no mask
    _, own_past = _visible_range(position, real, WINDOW)
    own_past = gl.maximum(gl.minimum(own_past, end), begin + 1)
    whole = begin
    if WINDOW == 0:
        seen_by_all = gl.min(gl.where(inside, position, 2147483646), 0) + 1
        whole = gl.minimum(seen_by_all, own_past) // KV_SPLIT * KV_SPLIT
    position = gl.convert_layout(position, gl.SliceLayout(1, _SCORES))
    # ---- online softmax: blocks into a KV split, KV splits into a split group, and groups into the total
    total = totals.index(NUMBER)
    m_total, l_total, acc = _empty(D)
    total.store(acc)
    group = _empty(D)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    if WINDOW == 0:
        m_total, l_total, group, stage, phase = _add_splits(
            m_total, l_total, group, begin, whole, stage, phase, q_tile, rings, total, scale, cap,
            KV_SPLIT, SPLIT_GROUP, SOFTCAP,
        )  # fmt: skip
    m_total, l_total, group, stage, phase = _add_blocks(
        m_total, l_total, group, whole, own_past, end, stage, phase, q_tile, rings, total, position, scale, cap,
        KV_SPLIT, SPLIT_GROUP, WINDOW, SOFTCAP,
    )  # fmt: skip
    for _ in range(gl.cdiv(own_past, _BLOCK) * _BLOCK, past, _BLOCK):
        # A block that only the other half sees.
        mbarrier.wait(full_k.index(stage), phase)
        mbarrier.wait(full_v.index(stage), phase)
        mbarrier.arrive(free.index(stage))
        stage, phase = _next(stage, phase, k_ring.shape[0])
    m_group, l_group, acc_group = group
    m_i, l_i, acc = _merge(m_total, l_total, total.load(_sums(D)), m_group, l_group, acc_group, scale, True)
    if NUMBER == 0:
        _gdc_launch_dependents(sizes[8])
    # ---- out = acc / l_i: [64, D], through the memory of q
    own_head = gl.convert_layout(q_head, gl.SliceLayout(1, _sums(D)))
    q_tile.store(_result(m_i, l_i, acc, sinks, own_head, scale, sizes[6], True).to(out.dtype.element_ty))
    cells = ((row + query) * (HEADS * GROUP) + q_head)[:, None] * D + dim
    gl.store(out + cells, q_tile.load(MEMORY), mask=inside[:, None])


@gluon.jit(do_not_specialize=["T", "capacity", "sequences"])
def prefill_hopper_kernel(
    q, angles, k_cache, v_cache, k_head, v_head, slots, block_table, positions, cu_seqlens, sinks, out, sequences,
    table_b, T, capacity, scale, cap,
    HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, KV_SPLIT: gl.constexpr,
    SPLIT_GROUP: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, SINKS: gl.constexpr, ROTARY: gl.constexpr,
    LANES: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):
    """Attention of 128 (query, head) pairs of one key-value head to all that they see.

    ``k_cache`` and ``v_cache`` are tensor descriptors (:func:`descriptor`), and ``k_head`` and ``v_head`` are the
    strides of their heads. The other arguments are those of
    :func:`~specgraph.kernels.attention.prefill.prefill_attention_kernel`. The grid is (B * Hkv, tiles): all heads have
    their longest programs first.
    """
    _gdc_wait(PDL)
    q_tiles = gl.allocate_shared_memory(k_cache.dtype, [2, 64, D], _PAGES)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64, D], _TOTAL)
    k_ring = gl.allocate_shared_memory(k_cache.dtype, [STAGES, _BLOCK, D], _PAGES)
    v_ring = gl.allocate_shared_memory(v_cache.dtype, [STAGES, _BLOCK, D], _PAGES)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # Keys and values of a block are free together: each arrival costs two barriers of a group of warps.
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full_k.index(stage), count=1)
        mbarrier.init(full_v.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    batch = (gl.program_id(0) // HEADS).to(gl.int64)
    head = gl.program_id(0) % HEADS
    sequence, first_query, num_queries = batch, 0, T
    if LANES > 0:
        lane = gl.arange(0, LANES, _ROWS)
        sequence, tile, first_query, num_queries = _locate_among(tile, lane, cu_seqlens, sequences, GROUP, 128)
    pair = tile * 128
    lanes = gl.arange(0, 128, _ROWS)
    _, _, real, position = _places(slots, positions, pair + lanes, batch * T, first_query, num_queries, GROUP)
    low, end = _visible_range(position, real, WINDOW)
    end = gl.minimum(end, capacity)  # the block table has no pages beyond its capacity
    begin = low // _BLOCK * _BLOCK
    past = gl.maximum(end, begin + 1)  # both halves take one block at least
    # The padding has no pages, and reads those of the last sequence: its block is hidden from all queries.
    table = block_table + gl.minimum(sequence, sequences - 1) * table_b
    rings = (k_ring, v_ring, full_k, full_v, free)
    given = (
        q, angles, slots, positions, sinks, out, q_tiles, totals, rings, batch, head, pair, first_query, num_queries, T,
        begin, end, past, scale, cap,
    )  # fmt: skip
    sizes: gl.constexpr = (HEADS, GROUP, KV_SPLIT, SPLIT_GROUP, WINDOW, SOFTCAP, SINKS, ROTARY, PDL)
    block_size: gl.constexpr = BLOCK_SIZE
    gl.warp_specialize(
        [
            (_attend, (given, sizes, gl.constexpr(0))),
            (_attend, (given, sizes, gl.constexpr(1))),
            (_request, (k_cache, k_ring, full_k, free, table, head * k_head, begin, past, block_size)),
            (_request, (v_cache, v_ring, full_v, free, table, head * v_head, begin, past, block_size)),
        ],
        [4, 1, 1], _REGISTERS,
    )  # fmt: skip


def descriptor(cache: Tensor) -> TensorDescriptor:
    """A descriptor of a cache ``[num_blocks, block_size, H, D]`` for the tensor memory accelerator: slots by entries.

    It copies 64 entries of the slots of a page, or of a block of keys if a page has more.
    """
    pages, block_size, heads, dim = cache.shape
    shape = [pages * block_size, (heads - 1) * cache.stride(2) + dim]
    return TensorDescriptor(cache, shape, [cache.stride(1), 1], [min(block_size, 64), 64], _PAGES.value)
