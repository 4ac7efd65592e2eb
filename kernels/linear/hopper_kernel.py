"""The Gluon kernel of ``specgraph::linear`` for few rows on Hopper; :mod:`specgraph.kernels.linear.hopper` launches it.

With few rows the time of a product is the time that its weights take to arrive. Between two launches no weights arrive:
the last programs of one launch merge, store and exit, and the first programs of the next launch wait for them before
they request anything. This kernel closes that gap. A program first requests weights into a ring of stages in shared
memory, which is safe because no kernel writes them, and only then waits for the preceding kernel, which writes x. It
also allows the next launch to start at once. As programs exit, programs of the next launch take their place and keep
the memory busy.

A program computes one tile of 64 rows of the weight (or 64 gate and 64 up rows) times ``BLOCK_N`` rows of x, over one
slice of the summed dimension or over all slices. The tensor memory accelerator fills the ring with a tile of the weight
and a tile of x at a time, and one warp group multiplies them (``wgmma``).

The formula, the dtypes, and the reason why a row's bits do not depend on the number of rows stand in
:mod:`specgraph.kernels.linear.hopper`.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgraph.kernels.linear import linear_triton

TILE_O = 64
"""The rows of the weight in a tile: as many as one matrix instruction of a warp group takes."""

_TILE_O = gl.constexpr(TILE_O)
_NORM_GROUP = gl.constexpr(linear_triton.NORM_GROUP)
# Functions without layouts have the same source in both languages.
_activate = gluon.jit(linear_triton.activate.fn)
_sum_in_any_order = gluon.jit(linear_triton.sum_in_any_order.fn)
_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""The layout of tiles ``[64, BLOCK_N]`` in memory accesses: a thread has 8 neighbouring entries of a result row."""


@gluon.jit
def _request_weight(weight, ring, barriers, stage, row, up_offset, k, needed, TILES: gl.constexpr, BYTES: gl.constexpr):
    """Request the block of the program's weight tiles at column ``k`` into a ``stage`` of the ring.

    The stage's barrier is told how many bytes to expect, those of the tile of x included.
    """
    mbarrier.expect(barriers.index(stage), BYTES, needed)
    for tile in gl.static_range(TILES):
        coordinates = [row + tile * up_offset, k]
        tma.async_copy_global_to_shared(
            weight, coordinates, barriers.index(stage), ring.index(stage * TILES + tile), needed
        )


@gluon.jit
def _fill(
    weight, x, ring, x_ring, barriers, row, up_offset, first_n, begin, weight_is_constant,
    BLOCK_K: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Request the first blocks: those of the weight before the wait for the preceding kernel, those of x after it."""
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    if PDL:
        gdc_launch_dependents()
        if weight_is_constant == 0:
            gdc_wait()
    for stage in gl.static_range(STAGES):
        if stage < BLOCKS:
            _request_weight(
                weight, ring, barriers, stage, row, up_offset, (begin + stage) * BLOCK_K, True, TILES, BYTES
            )
    if PDL:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        if stage < BLOCKS:
            coordinates = [first_n, (begin + stage) * BLOCK_K]
            tma.async_copy_global_to_shared(x, coordinates, barriers.index(stage), x_ring.index(stage))


@gluon.jit
def _multiply(
    weight, x, ring, x_ring, barriers, row, up_offset, first_n, begin,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCKS: gl.constexpr, OWN_SLICES: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr,
):
    """Compute the products of one or two tiles of the weight with the rows of x, ``[64, BLOCK_N]`` each.

    They run over ``OWN_SLICES`` slices of ``BLOCKS`` blocks. Each slice is summed by itself, and the sums are added in
    order. The caller has filled the ring.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    total = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
    second_total = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
    for k_slice in range(OWN_SLICES):
        first = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
        second = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
        for block in range(k_slice * BLOCKS, (k_slice + 1) * BLOCKS):
            stage = block % STAGES
            mbarrier.wait(barriers.index(stage), (block // STAGES) & 1)
            columns = x_ring.index(stage).permute((1, 0))
            first = warpgroup_mma(ring.index(stage * TILES), columns, first, is_async=True)
            if TILES == 2:
                second = warpgroup_mma(ring.index(stage * TILES + 1), columns, second, is_async=True)
            first, second = warpgroup_mma_wait(TILES, deps=(first, second))
            # The previous block has been multiplied, so its stage is free for the next request.
            next_block = block - 1 + STAGES
            needed = (block > 0) & (next_block < OWN_SLICES * BLOCKS)
            stage = next_block % STAGES
            k = (begin + next_block) * BLOCK_K
            _request_weight(weight, ring, barriers, stage, row, up_offset, k, needed, TILES, BYTES)
            tma.async_copy_global_to_shared(x, [first_n, k], barriers.index(stage), x_ring.index(stage), needed)
        first, second = warpgroup_mma_wait(0, deps=(first, second))
        total += first
        second_total += second
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(stage))
    return gl.convert_layout(total, _OUT), gl.convert_layout(second_total, _OUT)


@gluon.jit
def _norm_scale(sum_sq_ptr, first_n, rows, in_features, norm_eps, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr):
    """The scale ``[BLOCK_N]`` of the norm before the product; ones if there is no norm."""
    scale = gl.full([BLOCK_N], 1.0, gl.float32, gl.SliceLayout(0, _OUT))
    if sum_sq_ptr is not None:
        layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        group = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
        groups = gl.cdiv(in_features, _NORM_GROUP)
        mask = (group < groups)[:, None] & (n < rows)[None, :]
        sum_sq = gl.load(sum_sq_ptr + n[None, :] * groups + group[:, None], mask=mask, other=0.0)
        mean = _sum_in_any_order(sum_sq, 0) / in_features
        scale = gl.convert_layout(gl.rsqrt(mean + norm_eps), gl.SliceLayout(0, _OUT))
    return scale


@gluon.jit
def _load_residual(residual_ptr, o, n, mask, residual_stride):
    """Load the residual of a tile of the result; zeros if there is none."""
    residual = gl.zeros([o.shape[0], n.shape[0]], gl.float32, _OUT)
    if residual_ptr is not None:
        addresses = residual_ptr + n.to(gl.int64)[None, :] * residual_stride + o[:, None]
        residual = gl.load(addresses, mask=mask, other=0.0).to(gl.float32)
    return residual


@gluon.jit
def _load_norm_weight(norm_weight_ptr, o, out_features, norm_offset):
    """Load the weight of the norm that follows; zeros if there is none."""
    norm_weight = gl.zeros([o.shape[0]], gl.float32, gl.SliceLayout(1, _OUT))
    if norm_weight_ptr is not None:
        norm_weight = gl.load(norm_weight_ptr + o, mask=o < out_features, other=0.0).to(gl.float32) + norm_offset
    return norm_weight


@gluon.jit
def _merge(y, second, partial_ptr, counter_ptr, tile, tiles_o, n, rows, TILES: gl.constexpr, SLICES: gl.constexpr):
    """Store this slice in scratch memory. The last program of a tile to arrive adds all slices in their order.

    The scratch memory holds products ``[SLICES, rows, tiles * 64]``. Returns the sums, and whether this program is
    last.
    """
    o = gl.arange(0, _TILE_O, gl.SliceLayout(1, _OUT))
    real = (n < rows)[None, :]
    width = tiles_o * TILES * _TILE_O
    stride = gl.cast(rows, gl.int64) * width
    at = partial_ptr + n[None, :] * width + (tile * TILES * _TILE_O + o)[:, None]
    gl.store(at + gl.program_id(1) * stride, y, mask=real)
    if TILES == 2:
        gl.store(at + _TILE_O + gl.program_id(1) * stride, second, mask=real)
    gl.thread_barrier()  # one thread counts for all threads, so all of them must have stored
    last = gl.atomic_add(counter_ptr + gl.program_id(0), 1, sem="acq_rel") == SLICES - 1
    if last:
        gl.store(counter_ptr + gl.program_id(0), 0)
        y = gl.zeros([_TILE_O, y.shape[1]], gl.float32, _OUT)
        second = gl.zeros([_TILE_O, y.shape[1]], gl.float32, _OUT)
        for k_slice in gl.static_range(SLICES):
            y += gl.load(at + k_slice * stride, mask=real, other=0.0, cache_modifier=".cg")
            if TILES == 2:
                second += gl.load(at + _TILE_O + k_slice * stride, mask=real, other=0.0, cache_modifier=".cg")
    return y, second, last


@gluon.jit
def _scaled(y, scale, bias_ptr, weight_row, weight_rows):
    """Apply the scale of the norm before the product, and the bias, to a tile."""
    y = y * scale[None, :]
    if bias_ptr is not None:
        bias = gl.load(bias_ptr + weight_row, mask=weight_row < weight_rows, other=0.0)
        y = y + bias.to(gl.float32)[:, None]
    return y


@gluon.jit
def _store(
    y,
    residual,
    norm_weight,
    out_ptr,
    weighted_ptr,
    out_sum_sq_ptr,
    tile,
    o,
    n,
    mask,
    rows,
    out_features,
    RESIDUAL: gl.constexpr,
):
    """Add the residual, round once, and store the result.

    On request, also store the parts of the norm that follows. A tile is one norm group.
    """
    at = n[None, :] * out_features + o[:, None]
    if RESIDUAL:
        y = y + residual
    y = y.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + at, y, mask=mask)
    if weighted_ptr is not None:
        exact = gl.where(mask, y.to(gl.float32), 0.0)
        gl.store(weighted_ptr + at, (exact * norm_weight[:, None]).to(weighted_ptr.dtype.element_ty), mask=mask)
        addresses = out_sum_sq_ptr + n * gl.cdiv(out_features, _NORM_GROUP) + tile
        gl.store(addresses, _sum_in_any_order(exact * exact, 0), mask=n < rows)


@gluon.jit(do_not_specialize=["rows", "weight_is_constant"])
def linear_hopper_kernel(
    weight,
    x,
    out_ptr,
    bias_ptr,
    residual_ptr,
    sum_sq_ptr,
    norm_weight_ptr,
    weighted_ptr,
    out_sum_sq_ptr,
    partial_ptr,
    counter_ptr,
    weight_is_constant,
    rows,
    out_features,
    in_features,
    residual_stride,
    norm_eps,
    norm_offset,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    BLOCKS: gl.constexpr,
    SLICES: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One tile of the result, from a tile of the weight or, if ``GATED``, from a tile of gate rows and one of up rows.

    The grid is (tiles of the result, ``SLICES`` if ``SPLIT``, else 1). Tiles of x are neighbours in it, so that a tile
    of the weight is read from memory once for all of them. ``weight`` and ``x`` are tensor descriptors. If not
    ``weight_is_constant``, the wait for the preceding kernel comes before any request.
    """
    TILES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (TILES * _TILE_O + BLOCK_N) * BLOCK_K * weight.dtype.primitive_bitwidth // 8
    ring = gl.allocate_shared_memory(weight.dtype, [STAGES * TILES, _TILE_O, BLOCK_K], weight.layout)
    x_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tiles_n = gl.cdiv(rows, BLOCK_N)
    tile = gl.program_id(0) // tiles_n
    row = tile * _TILE_O
    # The last of several tiles ends at the last row. It computes some rows a second time, with the same bits, because a
    # tile that reaches past the last row is slow.
    first_n = gl.maximum(gl.minimum(gl.program_id(0) % tiles_n * BLOCK_N, rows - BLOCK_N), 0)
    begin = gl.program_id(1) * BLOCKS
    OWN_SLICES: gl.constexpr = 1 if SPLIT else SLICES
    _fill(
        weight, x, ring, x_ring, barriers, row, out_features, first_n, begin, weight_is_constant,
        BLOCK_K, OWN_SLICES * BLOCKS, STAGES, TILES, BYTES, PDL,
    )
    o = row + gl.arange(0, _TILE_O, gl.SliceLayout(1, _OUT))
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, _OUT))
    mask = (o < out_features)[:, None] & (n < rows)[None, :]
    # The operands of the epilogue arrive during the product.
    scale = _norm_scale(sum_sq_ptr, first_n, rows, in_features, norm_eps, BLOCK_N, GROUPS)
    residual = _load_residual(residual_ptr, o, n, mask, residual_stride)
    norm_weight = _load_norm_weight(norm_weight_ptr, o, out_features, norm_offset)
    y, second = _multiply(
        weight, x, ring, x_ring, barriers, row, out_features, first_n, begin,
        BLOCK_N, BLOCK_K, BLOCKS, OWN_SLICES, STAGES, TILES, BYTES,
    )
    finish = True
    if SPLIT:
        y, second, finish = _merge(
            y, second, partial_ptr, counter_ptr, tile, gl.cdiv(out_features, _TILE_O), n, rows, TILES, SLICES
        )
    if finish:
        RESIDUAL: gl.constexpr = residual_ptr is not None
        weight_rows = 2 * out_features if GATED else out_features
        y = _activate(_scaled(y, scale, bias_ptr, o, weight_rows), ACTIVATION)
        if GATED:
            y = y * _scaled(second, scale, bias_ptr, o + out_features, weight_rows)
        _store(
            y,
            residual,
            norm_weight,
            out_ptr,
            weighted_ptr,
            out_sum_sq_ptr,
            tile,
            o,
            n,
            mask,
            rows,
            out_features,
            RESIDUAL,
        )
