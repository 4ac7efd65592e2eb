"""The Gluon kernel of ``specgraph::linear`` on Hopper for few rows, and for arranged words;
:mod:`specgraph.kernels.linear.hopper` launches it.

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
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from specgraph.kernels.linear import linear_triton
from specgraph.kernels.linear.hopper_packed import load_scales, load_x_scales, multiply_packed
from specgraph.kernels.linear.hopper_ring import fill_weight, fill_x, request_weight, request_x
from specgraph.kernels.linear.multiply_packed import per_word

TILE_O = 64
"""The rows of the weight in a tile: as many as one matrix instruction of a warp group takes."""

_TILE_O = gl.constexpr(TILE_O)
_NORM_GROUP = gl.constexpr(linear_triton.NORM_GROUP)
# Functions without layouts have the same source in both languages.
_activate = gluon.jit(linear_triton.activate.fn)
_sum_in_any_order = gluon.jit(linear_triton.sum_in_any_order.fn)
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""The layout of tiles ``[64, BLOCK_N]`` in memory accesses: a thread has 8 neighbouring entries of a result row."""


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
            block_k = begin + next_block
            request_weight(weight, ring, barriers, stage, row, up_offset, block_k, needed, BLOCK_K, 1, TILES, BYTES)
            request_x(x, x_ring, barriers, stage, first_n, block_k, needed, BLOCK_K, 1)
        first, second = warpgroup_mma_wait(0, deps=(first, second))
        total += first
        second_total += second
    return total, second_total


@gluon.jit
def _norm_scale(sum_sq_ptr, first_n, rows, in_features, norm_eps, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr):
    """The scale ``[BLOCK_N]`` of the norm before the product; ones if there is no norm."""
    scale = gl.full([BLOCK_N], 1.0, gl.float32, gl.SliceLayout(0, OUT))
    if sum_sq_ptr is not None:
        layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        group = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
        groups = gl.cdiv(in_features, _NORM_GROUP)
        mask = (group < groups)[:, None] & (n < rows)[None, :]
        sum_sq = gl.load(sum_sq_ptr + n[None, :] * groups + group[:, None], mask=mask, other=0.0)
        mean = _sum_in_any_order(sum_sq, 0) / in_features
        scale = gl.convert_layout(gl.rsqrt(mean + norm_eps), gl.SliceLayout(0, OUT))
    return scale


@gluon.jit
def _load_residual(residual_ptr, o, n, mask, residual_stride):
    """Load the residual of a tile of the result; zeros if there is none."""
    residual = gl.zeros([o.shape[0], n.shape[0]], gl.float32, OUT)
    if residual_ptr is not None:
        addresses = residual_ptr + n.to(gl.int64)[None, :] * residual_stride + o[:, None]
        residual = gl.load(addresses, mask=mask, other=0.0).to(gl.float32)
    return residual


@gluon.jit
def _load_norm_weight(norm_weight_ptr, o, out_features, norm_offset):
    """Load the weight of the norm that follows; zeros if there is none."""
    norm_weight = gl.zeros([o.shape[0]], gl.float32, gl.SliceLayout(1, OUT))
    if norm_weight_ptr is not None:
        norm_weight = gl.load(norm_weight_ptr + o, mask=o < out_features, other=0.0).to(gl.float32) + norm_offset
    return norm_weight


@gluon.jit
def _merge(y, second, partial_ptr, counter_ptr, tile, tiles_o, n, rows, TILES: gl.constexpr, SLICES: gl.constexpr):
    """Store this slice in scratch memory. The last program of a tile to arrive adds all slices in their order.

    The scratch memory holds products ``[SLICES, rows, tiles * 64]``. Returns the sums, and whether this program is
    last.
    """
    o = gl.arange(0, _TILE_O, gl.SliceLayout(1, OUT))
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
        y = gl.zeros([_TILE_O, y.shape[1]], gl.float32, OUT)
        second = gl.zeros([_TILE_O, y.shape[1]], gl.float32, OUT)
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
    weight_scale_ptr=None,
    weight_scale_stride=None,
    x_scale_ptr=None,
    x_scale_stride=None,
    FORMAT: gl.constexpr = None,
    SCALE_ROWS: gl.constexpr = 1,
    PARTS: gl.constexpr = 1,
    WARP_GROUPS: gl.constexpr = 1,
    REGISTERS: gl.constexpr = 0,
):
    """One tile of the result, from a tile of the weight or, if ``GATED``, from a tile of gate rows and one of up rows.

    The grid is (tiles of the result, ``SLICES`` if ``SPLIT``, else 1). Tiles of x are neighbours in it, so that a tile
    of the weight is read from memory once for all of them. ``weight`` and ``x`` are tensor descriptors. If not
    ``weight_is_constant``, the wait for the preceding kernel comes before any request.

    A weight in a ``FORMAT`` is read as arranged words, and has scales (:mod:`specgraph.kernels.linear.hopper_packed`).
    """
    TILES: gl.constexpr = 2 if GATED else 1
    BLOCK_W: gl.constexpr = BLOCK_K if FORMAT is None else BLOCK_K // per_word(FORMAT)
    WEIGHT_BITS: gl.constexpr = TILES * _TILE_O * BLOCK_W * weight.dtype.primitive_bitwidth
    BYTES: gl.constexpr = PARTS * (WEIGHT_BITS + BLOCK_N * BLOCK_K * x.dtype.primitive_bitwidth) // 8
    OWN_SLICES: gl.constexpr = 1 if SPLIT else SLICES // WARP_GROUPS
    PLACES: gl.constexpr = WARP_GROUPS * STAGES * PARTS
    ring = gl.allocate_shared_memory(weight.dtype, [PLACES * TILES, _TILE_O, BLOCK_W], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [PLACES, BLOCK_N, BLOCK_K], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [WARP_GROUPS * STAGES, 1], mbarrier.MBarrierLayout())
    tiles_n = gl.cdiv(rows, BLOCK_N)
    tile = gl.program_id(0) // tiles_n
    row = tile * _TILE_O
    # The last of several tiles ends at the last row. It computes some rows a second time, with the same bits, because a
    # tile that reaches past the last row is slow.
    first_n = gl.maximum(gl.minimum(gl.program_id(0) % tiles_n * BLOCK_N, rows - BLOCK_N), 0)
    begin = gl.program_id(1) * BLOCKS
    fill_weight(
        weight, ring, barriers, row, out_features, begin, weight_is_constant, OWN_SLICES * BLOCKS, BLOCK_W, PARTS,
        STAGES, WARP_GROUPS, TILES, BYTES, PDL,
    )
    if FORMAT is not None:
        scales = load_scales(
            weight_scale_ptr, weight_scale_stride, row, out_features, begin, in_features, OWN_SLICES * BLOCKS,
            WARP_GROUPS, TILES, SCALE_ROWS,
        )  # fmt: skip
    fill_x(x, x_ring, barriers, first_n, begin, OWN_SLICES * BLOCKS, BLOCK_K, PARTS, STAGES, WARP_GROUPS, PDL)
    o = row + gl.arange(0, _TILE_O, gl.SliceLayout(1, OUT))
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))
    mask = (o < out_features)[:, None] & (n < rows)[None, :]
    # The operands of the epilogue arrive during the product.
    scale = _norm_scale(sum_sq_ptr, first_n, rows, in_features, norm_eps, BLOCK_N, GROUPS)
    residual = _load_residual(residual_ptr, o, n, mask, residual_stride)
    norm_weight = _load_norm_weight(norm_weight_ptr, o, out_features, norm_offset)
    if FORMAT is None:
        y, second = _multiply(
            weight, x, ring, x_ring, barriers, row, out_features, first_n, begin,
            BLOCK_N, BLOCK_K, BLOCKS, OWN_SLICES, STAGES, TILES, BYTES,
        )
    else:
        x_scales = load_x_scales(
            x_scale_ptr, x_scale_stride, first_n, rows, begin, in_features, BLOCK_N, WARP_GROUPS * OWN_SLICES * BLOCKS
        )
        free = gl.allocate_shared_memory(gl.int64, [WARP_GROUPS * STAGES, 1], mbarrier.MBarrierLayout())
        y, second = multiply_packed(
            weight, x, ring, x_ring, scales, x_scales, barriers, free, row, out_features, first_n, begin,
            BLOCKS, OWN_SLICES, PARTS, STAGES, WARP_GROUPS, TILES, BYTES, FORMAT, REGISTERS,
        )
    y, second = gl.convert_layout(y, OUT), gl.convert_layout(second, OUT)
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
