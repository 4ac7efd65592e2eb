"""The ring of the Hopper kernel of ``specgraph::linear``: stages in shared memory that hold blocks of weight and rows.

A stage has ``PARTS`` blocks of one or two tiles of the weight, of 64 rows each, and of a tile of x. A barrier for each
stage counts the bytes that have arrived. The tensor memory accelerator copies them. Each of ``WARP_GROUPS`` has
``STAGES`` stages of its own, and ``BLOCKS`` blocks in turn.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@gluon.jit
def request_weight(
    weight, ring, barriers, stage, row, up_offset, block, needed, BLOCK_W: gl.constexpr, PARTS: gl.constexpr,
    TILES: gl.constexpr, BYTES: gl.constexpr,
):
    """Request the weight tiles of a ``stage``: blocks of ``BLOCK_W`` entries of each row, from ``block`` on.

    The stage's barrier is told how many bytes to expect, those of x included.
    """
    mbarrier.expect(barriers.index(stage), BYTES, needed)
    for part in gl.static_range(PARTS):
        for tile in gl.static_range(TILES):
            coordinates = [row + tile * up_offset, (block + part) * BLOCK_W]
            place = ring.index((stage * PARTS + part) * TILES + tile)
            tma.async_copy_global_to_shared(weight, coordinates, barriers.index(stage), place, needed)


@gluon.jit
def request_x(x, x_ring, barriers, stage, first_n, block, needed, BLOCK_K: gl.constexpr, PARTS: gl.constexpr):
    """Request the tiles of x of a ``stage``: blocks of ``BLOCK_K`` entries, from ``block`` on."""
    for part in gl.static_range(PARTS):
        place = x_ring.index(stage * PARTS + part)
        coordinates = [first_n, (block + part) * BLOCK_K]
        tma.async_copy_global_to_shared(x, coordinates, barriers.index(stage), place, needed)


@gluon.jit
def fill_weight(
    weight, ring, barriers, row, up_offset, begin, weight_is_constant, BLOCKS: gl.constexpr, BLOCK_W: gl.constexpr,
    PARTS: gl.constexpr, STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Allow the next kernel to start, and request the first blocks of the weight."""
    for stage in gl.static_range(WARP_GROUPS * STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    if PDL:
        gdc_launch_dependents()
        if weight_is_constant == 0:
            gdc_wait()
    for stage in gl.static_range(STAGES):
        for group in gl.static_range(WARP_GROUPS if stage * PARTS < BLOCKS else 0):
            request_weight(
                weight, ring, barriers, group * STAGES + stage, row, up_offset, begin + group * BLOCKS + stage * PARTS,
                True, BLOCK_W, PARTS, TILES, BYTES,
            )  # fmt: skip


@gluon.jit
def fill_x(
    x, x_ring, barriers, first_n, begin, BLOCKS: gl.constexpr, BLOCK_K: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, WARP_GROUPS: gl.constexpr, PDL: gl.constexpr,
):
    """Wait for the preceding kernel, which writes x, and request the first blocks of x."""
    if PDL:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        for group in gl.static_range(WARP_GROUPS if stage * PARTS < BLOCKS else 0):
            block = begin + group * BLOCKS + stage * PARTS
            request_x(x, x_ring, barriers, group * STAGES + stage, first_n, block, True, BLOCK_K, PARTS)


@gluon.jit
def refill(given, sizes):
    """Request what no longer is among the first blocks, for all groups of warps: as soon as a stage is ``free``."""
    weight, x, ring, x_ring, barriers, free, row, up_offset, first_n, begin = given
    BLOCKS: gl.constexpr = sizes[0]
    PARTS: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    WARP_GROUPS: gl.constexpr = sizes[3]
    TILES: gl.constexpr = sizes[4]
    BYTES: gl.constexpr = sizes[5]
    BLOCK_W: gl.constexpr = ring.shape[2]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    for turn in range(STAGES, BLOCKS // PARTS):
        for group in gl.static_range(WARP_GROUPS):
            stage = group * STAGES + turn % STAGES
            block = begin + group * BLOCKS + turn * PARTS
            mbarrier.wait(free.index(stage), (turn // STAGES - 1) & 1)
            request_weight(weight, ring, barriers, stage, row, up_offset, block, True, BLOCK_W, PARTS, TILES, BYTES)
            request_x(x, x_ring, barriers, stage, first_n, block, True, BLOCK_K, PARTS)
