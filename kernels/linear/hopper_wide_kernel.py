"""The Gluon kernel of ``specgraph::linear`` for many rows on Hopper, such as those of a prompt;
:mod:`specgraph.kernels.linear.hopper_wide` launches it.

With many rows the time of a product is that of its operations, so the tensor cores should never wait. There is one
program for each multiprocessor, which computes one tile of the result after the other. One warp requests blocks of x
and of the weight into a ring of stages in shared memory, and runs ahead into the next tile while the others finish one.
Two warp groups multiply (``wgmma``), each half of the tile's rows of x, and a product is always under way while the
next stage is waited for. A result goes to memory through shared memory, and nobody waits for it.

A tile has ``BLOCK_N`` rows of x and ``TILE_O`` rows of the weight, or so many gate rows and as many up rows. The last
tile of x ends at the last row and so overlaps the one before it, because a tile that reaches past the last row is slow;
what is computed twice has the same bits. If the summed dimension is cut into slices, each slice is summed by itself,
and the sums are added in order.

The bits are those of :mod:`specgraph.kernels.linear.linear_triton`. There x is the right operand and here it is the
left one, which changes nothing about the order in which the products of an entry are added.

Source: the persistent and the warp-specialised matrix product of Triton's tutorials of Gluon.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from specgraph.kernels.linear import linear_triton

# Functions without layouts have the same source in both languages.
_activate = gluon.jit(linear_triton.activate.fn)
_locate_tile = gluon.jit(linear_triton.locate_tile.fn)


@gluon.jit
def _request(given, sizes):
    """Request the blocks of all tiles of the program, each as soon as its stage is free."""
    x, weight, x_ring, ring, full, free, rows, out_features = given
    BLOCKS: gl.constexpr = sizes[0]
    STAGES: gl.constexpr = sizes[1]
    TILES: gl.constexpr = sizes[2]
    BLOCK_N: gl.constexpr = x_ring.shape[1]
    TILE_O: gl.constexpr = ring.shape[1]
    BLOCK_K: gl.constexpr = ring.shape[2]
    BYTES: gl.constexpr = (BLOCK_N + TILES * TILE_O) * BLOCK_K * x.dtype.primitive_bitwidth // 8
    tiles_n, tiles_o = gl.cdiv(rows, BLOCK_N), gl.cdiv(out_features, TILE_O)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_n * tiles_o, gl.num_programs(0)):
        tile_n, tile_o = _locate_tile(tile, tiles_n, tiles_o)
        first_n = gl.minimum(tile_n * BLOCK_N, rows - BLOCK_N)
        for block in range(BLOCKS):
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), ((turn // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            # ---- load: x [BLOCK_N, BLOCK_K], and one or two tiles of the weight [TILE_O, BLOCK_K]
            tma.async_copy_global_to_shared(x, [first_n, block * BLOCK_K], full.index(stage), x_ring.index(stage))
            for half in gl.static_range(TILES):
                tma.async_copy_global_to_shared(
                    weight, [tile_o * TILE_O + half * out_features, block * BLOCK_K], full.index(stage),
                    ring.index(stage * TILES + half),
                )  # fmt: skip
            turn += 1


@gluon.jit
def _multiply_slice(
    x_ring, ring, full, free, turn, BLOCKS: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr,
    layout: gl.constexpr,
):
    """The sums over ``BLOCKS`` blocks, ``[BLOCK_N, TILE_O]`` each, of one or two tiles of the weight."""
    BLOCK_N: gl.constexpr = x_ring.shape[1]
    TILE_O: gl.constexpr = ring.shape[1]
    first = gl.zeros([BLOCK_N, TILE_O], gl.float32, layout)
    second = first
    for block in range(BLOCKS):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
        a = x_ring.index(stage)
        # ---- x weight^T: [BLOCK_N, TILE_O]
        first = warpgroup_mma(a, ring.index(stage * TILES).permute((1, 0)), first, is_async=True)
        if TILES == 2:
            second = warpgroup_mma(a, ring.index(stage * TILES + 1).permute((1, 0)), second, is_async=True)
            first, second = warpgroup_mma_wait(2, deps=(first, second))
        else:
            first = warpgroup_mma_wait(1, deps=(first,))
        # The products of the block before have ended, so its stage is free.
        mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), pred=block > 0)
        turn += 1
    if TILES == 2:
        first, second = warpgroup_mma_wait(0, deps=(first, second))
    else:
        first = warpgroup_mma_wait(0, deps=(first,))
    mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES))
    return first, second, turn


@gluon.jit
def _halves(y, layout: gl.constexpr):
    """The left and the right half ``[BLOCK_N, TILE_O / 2]`` of a tile, which stay in their registers."""
    BLOCK_N: gl.constexpr = y.shape[0]
    HALF: gl.constexpr = y.shape[1] // 2
    left, right = gl.split(gl.permute(gl.reshape(y, [BLOCK_N, 2, HALF]), (0, 2, 1)))
    return (
        gl.convert_layout(left, layout, assert_trivial=True),
        gl.convert_layout(right, layout, assert_trivial=True),
    )


@gluon.jit
def _scaled(y, scale, bias_ptr, o, weight_rows):
    """Apply the scale of the norm before the product, and the bias, to ``[BLOCK_N, WIDTH]``."""
    if scale is not None:
        y = y * scale[:, None]
    if bias_ptr is not None:
        y = y + gl.load(bias_ptr + o, mask=o < weight_rows, other=0.0).to(gl.float32)[None, :]
    return y


@gluon.jit
def _finish(y, second, out, staging, epilogue, out_features, first_n, first_o, ACTIVATION: gl.constexpr):
    """The epilogue of a tile, or of half of one, ``[BLOCK_N, WIDTH]``, and its only rounding."""
    bias_ptr, residual_ptr, scale_ptr, residual_stride = epilogue
    layout: gl.constexpr = y.type.layout
    BLOCK_N: gl.constexpr = y.shape[0]
    WIDTH: gl.constexpr = y.shape[1]
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    o = first_o + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    scale = None
    if scale_ptr is not None:
        scale = gl.load(scale_ptr + n)
    # ---- activation(y scale + bias) [times up] + residual: [BLOCK_N, WIDTH]
    weight_rows = out_features if second is None else 2 * out_features
    y = _activate(_scaled(y, scale, bias_ptr, o, weight_rows), ACTIVATION)
    if second is not None:
        y = y * _scaled(second, scale, bias_ptr, o + out_features, weight_rows)
    if residual_ptr is not None:
        at = residual_ptr + n.to(gl.int64)[:, None] * residual_stride + o[None, :]
        y = y + gl.load(at, mask=(o < out_features)[None, :], other=0.0).to(gl.float32)
    tma.store_wait(0)
    gl.thread_barrier()  # one thread has waited, for all, until the tile before has left the shared memory
    staging.store(y.to(out.dtype))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(out, [first_n, first_o], staging)


@gluon.jit
def _multiply(given, sizes):
    """Compute all tiles of the program, with their epilogues."""
    out, staging, x_ring, ring, full, free, epilogue, rows, out_features = given
    BLOCKS: gl.constexpr = sizes[0]
    SLICES: gl.constexpr = sizes[1]
    STAGES: gl.constexpr = sizes[2]
    TILES: gl.constexpr = sizes[3]
    ACTIVATION: gl.constexpr = sizes[4]
    BLOCK_N: gl.constexpr = x_ring.shape[1]
    TILE_O: gl.constexpr = ring.shape[1]
    WIDTH: gl.constexpr = staging.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, TILE_O, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    tiles_n, tiles_o = gl.cdiv(rows, BLOCK_N), gl.cdiv(out_features, TILE_O)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), tiles_n * tiles_o, gl.num_programs(0)):
        # ---- the sums of all slices, [BLOCK_N, TILE_O], added in their order
        y = gl.zeros([BLOCK_N, TILE_O], gl.float32, layout)
        second = y
        for _ in range(SLICES):
            first, other, turn = _multiply_slice(x_ring, ring, full, free, turn, BLOCKS, STAGES, TILES, layout)
            y += first
            if TILES == 2:
                second += other
        tile_n, tile_o = _locate_tile(tile, tiles_n, tiles_o)
        first_n, first_o = gl.minimum(tile_n * BLOCK_N, rows - BLOCK_N), tile_o * TILE_O
        if TILE_O > WIDTH:
            left, right = _halves(y, half)
            _finish(left, None, out, staging, epilogue, out_features, first_n, first_o, ACTIVATION)
            _finish(right, None, out, staging, epilogue, out_features, first_n, first_o + WIDTH, ACTIVATION)
        else:
            up = second if TILES == 2 else None
            _finish(y, up, out, staging, epilogue, out_features, first_n, first_o, ACTIVATION)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def linear_wide_kernel(
    x, weight, out, bias_ptr, residual_ptr, scale_ptr, rows, out_features, residual_stride, BLOCKS: gl.constexpr,
    SLICES: gl.constexpr, STAGES: gl.constexpr, ACTIVATION: gl.constexpr, GATED: gl.constexpr,
):
    """Tiles of the result in turn. The grid is (multiprocessors), or (tiles) if they are fewer.

    There are ``BLOCK_N`` rows at least. ``x``, ``weight`` and ``out`` are tensor descriptors, whose blocks are the
    tiles. ``scale_ptr`` has a scale for each row. A slice of the summed dimension has ``BLOCKS`` blocks.
    """
    TILES: gl.constexpr = 2 if GATED else 1
    BLOCK_N: gl.constexpr = x.block_shape[0]
    BLOCK_K: gl.constexpr = x.block_shape[1]
    TILE_O: gl.constexpr = weight.block_shape[0]
    WIDTH: gl.constexpr = out.block_shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, BLOCK_K], x.layout)
    ring = gl.allocate_shared_memory(weight.dtype, [STAGES * TILES, TILE_O, BLOCK_K], weight.layout)
    staging = gl.allocate_shared_memory(out.dtype, [BLOCK_N, WIDTH], out.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    epilogue = (bias_ptr, residual_ptr, scale_ptr, residual_stride)
    given = (out, staging, x_ring, ring, full, free, epilogue, rows, out_features)
    request = (x, weight, x_ring, ring, full, free, rows, out_features)
    sizes: gl.constexpr = (BLOCKS, SLICES, STAGES, TILES, ACTIVATION)
    rings: gl.constexpr = (BLOCKS * SLICES, STAGES, TILES)
    gl.warp_specialize([(_multiply, (given, sizes)), (_request, (request, rings))], [1], [24])
