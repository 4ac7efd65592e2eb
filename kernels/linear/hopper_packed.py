"""The main loop of the Hopper kernel for arranged weights: words become the left operand in registers.

Each lane reads its own words from the ring, 16 bytes at a time, and expands them into the registers in which ``wgmma``
takes that operand (:mod:`specgraph.kernels.packed.arranged`). A tile is expanded while the one before is multiplied.
The sums of 128 inputs, which have one scale, are multiplied with it and added to those before; numbers of ``mxfp4`` are
multiplied with theirs beforehand. So does :mod:`specgraph.kernels.linear.multiply_packed`, which gives the same bits.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from specgraph.kernels.linear.hopper_ring import refill
from specgraph.kernels.linear.multiply_packed import expand_arranged, factor_pair, per_word

# Functions without layouts have the same source in both languages.
_expand_arranged = gluon.jit(expand_arranged.fn)
_factor_pair = gluon.jit(factor_pair.fn)
_SCALES = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
"""Scales ``[rows, groups]`` in memory accesses: a thread has neighbouring groups of a row."""
REQUESTING_REGISTERS = 24
"""What a thread of the warp has that requests blocks."""
_REQUESTING_REGISTERS = gl.constexpr(REQUESTING_REGISTERS)
_QUADS = [[1, 0], [2, 0], [4, 0]]
_WARPS = [[16, 0], [32, 0]]
_WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], [[0, 4], [0, 8], *_QUADS], _WARPS, [], [64, 16])
)
"""Words ``[64, 16]`` of 128 inputs of four bits: a thread has the four of its place in a quad, of two rows that lie 8
apart."""
_WIDE_WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], [[0, 8], [0, 16], *_QUADS], _WARPS, [], [64, 32])
)
"""The same for words ``[64, 32]`` of 128 inputs of eight bits, of which a thread has eight."""
_GROUPED_WORDS = gl.constexpr(
    gl.DistributedLinearLayout([[0, 4], [0, 8], [8, 0]], [[0, 1], [0, 2], *_QUADS], _WARPS, [], [64, 16])
)
"""The same for words ``[64, 16]`` of which those of 32 inputs are neighbours: a thread has one of each 32."""


@triton.constexpr_function
def _padded(BLOCKS):
    """The power of two that is not below a number."""
    return triton.next_power_of_2(BLOCKS)


@gluon.jit
def load_scales(
    scale_ptr, scale_stride, row, up_offset, begin, in_features, BLOCKS: gl.constexpr, WARP_GROUPS: gl.constexpr,
    TILES: gl.constexpr, SCALE_ROWS: gl.constexpr,
):
    """Load the scales of a program's tiles: for each tile of each group of warps ``[64, blocks]``.

    There are so many blocks that their number is a power of two.
    """
    block = gl.arange(0, _padded(BLOCKS), gl.SliceLayout(0, _SCALES))
    o = row + gl.arange(0, 64, gl.SliceLayout(1, _SCALES))
    loaded = ()
    for group in gl.static_range(WARP_GROUPS):
        for tile in gl.static_range(TILES):
            k = begin + group * BLOCKS + block
            real = (o < up_offset)[:, None] & ((block < BLOCKS) & (k < gl.cdiv(in_features, 128)))[None, :]
            at = ((o + tile * up_offset) // SCALE_ROWS).to(gl.int64)[:, None] * scale_stride + k[None, :]
            # Triton's functions have no starred expressions.
            loaded = loaded + (gl.load(scale_ptr + at, mask=real, other=0.0),)  # type: ignore[assignment]  # noqa: RUF005
    return loaded


@gluon.jit
def _keep_scales(loaded):
    """Store scales ``[ROWS, blocks]`` in shared memory, ``[tiles * blocks, ROWS]``: a block is read at once."""
    TILES: gl.constexpr = len(loaded)
    ROWS: gl.constexpr = loaded[0].shape[0]
    PADDED: gl.constexpr = loaded[0].shape[1]
    kept = gl.allocate_shared_memory(
        loaded[0].dtype, [TILES * PADDED, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for tile in gl.static_range(TILES):
        kept.slice(tile * PADDED, PADDED, 0).permute((1, 0)).store(loaded[tile])
    return kept._reinterpret(kept.dtype, kept.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _expand(words, scales, place, FORMAT: gl.constexpr, HALF: gl.constexpr, layout: gl.constexpr):
    """The operand ``[64, 128]`` from the words of shared memory, and of ``mxfp4`` from their scales."""
    factor = None
    if FORMAT == "mxfp4":
        words = words.load(_GROUPED_WORDS)
        # ---- exponents of four groups [64], and the place of that of each word [16]
        exponents = scales.index(place).load(gl.SliceLayout(1, _GROUPED_WORDS))
        shift = gl.arange(0, 16, gl.SliceLayout(0, _GROUPED_WORDS)) // 4 * 8
        factor = _factor_pair((exponents[:, None] >> shift[None, :]) & 255)
    else:
        words = words.load(_WORDS if per_word(FORMAT) == 8 else _WIDE_WORDS)
    return gl.convert_layout(_expand_arranged(words, factor, FORMAT, HALF), layout, assert_trivial=True)


@gluon.jit
def load_x_scales(
    x_scale_ptr, x_scale_stride, first_n, rows, begin, in_features, BLOCK_N: gl.constexpr, BLOCKS: gl.constexpr
):
    """Load the scales of the program's rows of x, ``[BLOCK_N, blocks]``; None if they have none."""
    scales = None
    if x_scale_ptr is not None:
        block = begin + gl.arange(0, _padded(BLOCKS), gl.SliceLayout(0, _SCALES))
        n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, _SCALES))
        real = (n < rows)[:, None] & (block < gl.cdiv(in_features, 128))[None, :]
        at = x_scale_ptr + n.to(gl.int64)[:, None] * x_scale_stride + block[None, :]
        scales = gl.load(at, mask=real, other=0.0)
    return scales


@gluon.jit
def _add_scaled(total, sums, scales, place, x_scales, block, SCALED: gl.constexpr):
    """``total + sums * scale``, rounded once: ``[64, BLOCK_N]``."""
    layout: gl.constexpr = total.type.layout
    scale = scales.index(place).load(gl.SliceLayout(1, layout)).to(gl.float32)
    factor, _ = gl.broadcast(scale[:, None], total)
    if SCALED:
        factor = factor * x_scales.index(block).load(gl.SliceLayout(0, layout))[None, :]
    return gl.fma(sums, factor, total)


@gluon.jit
def _add_scaled_sums(
    first, second, ring, x_ring, scales, x_scales, stage, turn, OWN: gl.constexpr, FIRST: gl.constexpr,
    SECOND: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, FORMAT: gl.constexpr, HALF: gl.constexpr,
    SCALED: gl.constexpr,
):
    """Add the products of a stage to those of one or two tiles, ``[64, BLOCK_N]``, each block's times its scale."""
    layout: gl.constexpr = first.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    BLOCK_N: gl.constexpr = first.shape[1]
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout)
    last = zeros
    b = zeros
    # ---- the tiles of a stage in turn; one product is under way while the next operand is expanded
    for part in gl.static_range(PARTS):
        block = turn * PARTS + part
        place = stage * PARTS + part
        columns = x_ring.index(place).permute((1, 0))
        a = _expand(ring.index(place * TILES), scales, 0, FORMAT, HALF, operand)
        sums = warpgroup_mma(a, columns, zeros, use_acc=False, is_async=True)
        if part > 0:
            last, b = warpgroup_mma_wait(1, deps=(last, b))
            done = block - 1
            if TILES == 2:
                second = _add_scaled(second, last, scales, SECOND + done, x_scales, OWN + done, SCALED)
            else:
                first = _add_scaled(first, last, scales, FIRST + done, x_scales, OWN + done, SCALED)
        if TILES == 2:
            b = _expand(ring.index(place * TILES + 1), scales, 0, FORMAT, HALF, operand)
            last = warpgroup_mma(b, columns, zeros, use_acc=False, is_async=True)
            sums, a = warpgroup_mma_wait(1, deps=(sums, a))
            first = _add_scaled(first, sums, scales, FIRST + block, x_scales, OWN + block, SCALED)
        else:
            last = sums
            b = a
    last, b = warpgroup_mma_wait(0, deps=(last, b))
    block = turn * PARTS + PARTS - 1
    if TILES == 2:
        second = _add_scaled(second, last, scales, SECOND + block, x_scales, OWN + block, SCALED)
    else:
        first = _add_scaled(first, last, scales, FIRST + block, x_scales, OWN + block, SCALED)
    return first, second


@gluon.jit
def _add_scaled_numbers(
    first, second, ring, x_ring, scales, stage, turn, FIRST: gl.constexpr, SECOND: gl.constexpr, PARTS: gl.constexpr,
    TILES: gl.constexpr, HALF: gl.constexpr,
):
    """The same for ``mxfp4``, whose numbers are multiplied with their scales."""
    layout: gl.constexpr = first.type.layout
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    b = first
    for part in gl.static_range(PARTS):
        block = turn * PARTS + part
        place = stage * PARTS + part
        columns = x_ring.index(place).permute((1, 0))
        a = _expand(ring.index(place * TILES), scales, FIRST + block, "mxfp4", HALF, operand)
        first = warpgroup_mma(a, columns, first, is_async=True)
        # ---- one product is under way while the next operand is expanded
        if TILES == 2:
            if part > 0:
                second, b = warpgroup_mma_wait(1, deps=(second, b))
            b = _expand(ring.index(place * TILES + 1), scales, SECOND + block, "mxfp4", HALF, operand)
            second = warpgroup_mma(b, columns, second, is_async=True)
            first, a = warpgroup_mma_wait(1, deps=(first, a))
        else:
            if part > 0:
                first, b = warpgroup_mma_wait(1, deps=(first, b))
            b = a
    first, second, b = warpgroup_mma_wait(0, deps=(first, second, b))
    return first, second


@gluon.jit
def _multiply_group(given, sizes, GROUP: gl.constexpr):
    """Compute the part of a group of warps in the products of one or two tiles, ``[64, BLOCK_N]`` each.

    It runs over ``OWN_SLICES`` slices of ``BLOCKS`` blocks, whose sums are added in order. A turn of the loop takes the
    ``PARTS`` blocks of a stage. The second group stores its results.
    """
    ring, x_ring, scales, x_scales, barriers, free, results = given
    BLOCK_N: gl.constexpr = x_ring.shape[1]
    BLOCKS: gl.constexpr = sizes[0]
    OWN_SLICES: gl.constexpr = sizes[1]
    PARTS: gl.constexpr = sizes[2]
    STAGES: gl.constexpr = sizes[3]
    TILES: gl.constexpr = sizes[4]
    FORMAT: gl.constexpr = sizes[5]
    SCALED: gl.constexpr = sizes[6]
    OWN: gl.constexpr = GROUP * OWN_SLICES * BLOCKS
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    HALF: gl.constexpr = x_ring.dtype.is_fp16()
    TURNS: gl.constexpr = BLOCKS // PARTS
    FIRST: gl.constexpr = GROUP * TILES * _padded(OWN_SLICES * BLOCKS)
    SECOND: gl.constexpr = FIRST + (_padded(OWN_SLICES * BLOCKS) if TILES == 2 else 0)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout)
    total = zeros
    second_total = zeros
    for k_slice in range(OWN_SLICES):
        first = zeros
        second = zeros
        for turn in range(k_slice * TURNS, (k_slice + 1) * TURNS):
            stage = GROUP * STAGES + turn % STAGES
            mbarrier.wait(barriers.index(stage), (turn // STAGES) & 1)
            if FORMAT == "mxfp4":
                first, second = _add_scaled_numbers(
                    first, second, ring, x_ring, scales, stage, turn, FIRST, SECOND, PARTS, TILES, HALF
                )
            else:
                first, second = _add_scaled_sums(
                    first, second, ring, x_ring, scales, x_scales, stage, turn, OWN, FIRST, SECOND, PARTS, TILES,
                    FORMAT, HALF, SCALED,
                )  # fmt: skip
            mbarrier.arrive(free.index(stage))
        total += first
        second_total += second
    if GROUP > 0:
        results.index(0).store(total)
        if TILES == 2:
            results.index(1).store(second_total)
    return total, second_total


@gluon.jit
def _work(given, sizes, GROUP: gl.constexpr):
    """:func:`_multiply_group` for the second group of warps, which may return nothing."""
    _multiply_group(given, sizes, GROUP)


@gluon.jit
def multiply_packed(
    weight, x, ring, x_ring, scales, x_scales, barriers, free, row, up_offset, first_n, begin,
    BLOCKS: gl.constexpr, OWN_SLICES: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    WARP_GROUPS: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr, FORMAT: gl.constexpr, REGISTERS: gl.constexpr,
):
    """Compute the products of one or two tiles of the weight with the rows of x, ``[64, BLOCK_N]`` each.

    Two groups of four warps take one slice of the summed dimension each, or one group takes all slices of the program.
    Sums are added in the order of the slices. A thread of the second has at most ``REGISTERS``. One more warp requests
    the blocks, so that no other waits for it.
    """
    BLOCK_N: gl.constexpr = x_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    # ---- what the second group computes: [tiles, 64, BLOCK_N]
    results = gl.allocate_shared_memory(
        gl.float32, [TILES, 64, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for stage in gl.static_range(WARP_GROUPS * STAGES):
        mbarrier.init(free.index(stage), count=1)
    scales = _keep_scales(scales)
    SCALED: gl.constexpr = x_scales is not None
    # An argument of a group of warps has to be something, also if nothing reads it.
    x_scales = _keep_scales((x_scales,)) if SCALED else scales
    given = (ring, x_ring, scales, x_scales, barriers, free, results)
    sizes: gl.constexpr = (BLOCKS, OWN_SLICES, PARTS, STAGES, TILES, FORMAT, SCALED)
    request = (weight, x, ring, x_ring, barriers, free, row, up_offset, first_n, begin)
    rings: gl.constexpr = (OWN_SLICES * BLOCKS, PARTS, STAGES, WARP_GROUPS, TILES, BYTES)
    if WARP_GROUPS == 1:
        y, second = gl.warp_specialize(
            [(_multiply_group, (given, sizes, gl.constexpr(0))), (refill, (request, rings))],
            [1], [_REQUESTING_REGISTERS],
        )  # fmt: skip
    else:
        y, second = gl.warp_specialize(
            [
                (_multiply_group, (given, sizes, gl.constexpr(0))),
                (_work, (given, sizes, gl.constexpr(1))),
                (refill, (request, rings)),
            ],
            [4, 1], [REGISTERS, _REQUESTING_REGISTERS],
        )  # fmt: skip
        y += results.index(0).load(layout)
        if TILES == 2:
            second += results.index(1).load(layout)
    return y, second
