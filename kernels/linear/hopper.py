"""``specgraph::linear`` for few rows on Hopper, written in Gluon, the language below Triton.

It computes ``activation(x @ weight.T * scale + bias) + residual``, and on request the parts of the norm that follows,
as :mod:`specgraph.kernels.linear.linear` defines them, for rows ``x`` ``[N, I]`` and a weight ``[O, I]`` or
``[2 * O, I]`` of bfloat16 or float16, with float32 sums.

With few rows the time of a product is the time that its weights take to arrive. Between two launches no weights arrive:
the last programs of one launch merge, store and exit, and the first programs of the next launch wait for them before
they request anything. This kernel closes that gap. A program first requests weights into a ring of stages in shared
memory, which is safe because no kernel writes them, and only then waits for the preceding kernel, which writes x. It
also allows the next launch to start at once. As programs exit, programs of the next launch take their place and keep
the memory busy.

A program computes one tile of 64 rows of the weight (or 64 gate and 64 up rows) times ``BLOCK_N`` rows of x, over one
piece of the summed dimension or over all pieces. The tensor memory accelerator fills the ring with a tile of the weight
and a tile of x at a time, and one warp group multiplies them (``wgmma``).

The bits are those of :mod:`specgraph.kernels.linear.triton_form`, and so do not depend on the number of rows. Both
kernels multiply 64 rows of the weight with the same instruction, add 16 products at a time in the same order, and add
the pieces in the same order. What was measured is in ``docs/experiments.md``.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgraph.kernels.launch import arrival_counters, launch_options
from specgraph.kernels.linear import triton_form as linear_triton
from specgraph.kernels.linear.product import Product, norm_groups, num_pieces, pieces_of

TILE_O = 64
"""The rows of the weight in a tile: as many as one matrix instruction of a warp group takes."""
BLOCK_K = 128

_TILE_O = gl.constexpr(TILE_O)
_NORM_GROUP = gl.constexpr(linear_triton.NORM_GROUP)
# Functions without layouts have the same source in both languages.
_activate = gluon.jit(linear_triton.activate.fn)
_sum_in_any_order = gluon.jit(linear_triton.sum_in_any_order.fn)
_OUT = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
"""The layout of tiles ``[64, BLOCK_N]`` in memory accesses: a thread has 8 neighbouring entries of a result row."""


@gluon.jit
def _ask_weight(weight, ring, arrived, slot, row, apart, k, wanted, TILES: gl.constexpr, BYTES: gl.constexpr):
    """Request the block of the program's weight tiles at column ``k`` into stage ``slot`` of the ring.

    The stage's barrier is told how many bytes to expect, those of the tile of x included.
    """
    mbarrier.expect(arrived.index(slot), BYTES, wanted)
    for tile in gl.static_range(TILES):
        place = [row + tile * apart, k]
        tma.async_copy_global_to_shared(weight, place, arrived.index(slot), ring.index(slot * TILES + tile), wanted)


@gluon.jit
def _fill(
    weight, x, ring, x_ring, arrived, row, apart, first_n, begin, weight_is_constant,
    BLOCK_K: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Request the first blocks: those of the weight before the wait for the preceding kernel, those of x after it."""
    for slot in gl.static_range(STAGES):
        mbarrier.init(arrived.index(slot), count=1)
    if PDL:
        gdc_launch_dependents()
        if weight_is_constant == 0:
            gdc_wait()
    for slot in gl.static_range(STAGES):
        if slot < BLOCKS:
            _ask_weight(weight, ring, arrived, slot, row, apart, (begin + slot) * BLOCK_K, True, TILES, BYTES)
    if PDL:
        gdc_wait()
    for slot in gl.static_range(STAGES):
        if slot < BLOCKS:
            place = [first_n, (begin + slot) * BLOCK_K]
            tma.async_copy_global_to_shared(x, place, arrived.index(slot), x_ring.index(slot))


@gluon.jit
def _multiply(
    weight, x, ring, x_ring, arrived, row, apart, first_n, begin,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCKS: gl.constexpr, OWN_PIECES: gl.constexpr,
    STAGES: gl.constexpr, TILES: gl.constexpr, BYTES: gl.constexpr,
):  # fmt: skip
    """Compute the products of one or two tiles of the weight with the rows of x, ``[64, BLOCK_N]`` each.

    They run over ``OWN_PIECES`` pieces of ``BLOCKS`` blocks. Each piece is summed by itself, and the sums are added in
    order. The caller has filled the ring.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    total = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
    second_total = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
    for piece in range(OWN_PIECES):
        first = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
        second = gl.zeros([_TILE_O, BLOCK_N], gl.float32, layout)
        for block in range(piece * BLOCKS, (piece + 1) * BLOCKS):
            slot = block % STAGES
            mbarrier.wait(arrived.index(slot), (block // STAGES) & 1)
            columns = x_ring.index(slot).permute((1, 0))
            first = warpgroup_mma(ring.index(slot * TILES), columns, first, is_async=True)
            if TILES == 2:
                second = warpgroup_mma(ring.index(slot * TILES + 1), columns, second, is_async=True)
            first, second = warpgroup_mma_wait(TILES, deps=(first, second))
            # The previous block has been multiplied, so its stage is free for the next request.
            following = block - 1 + STAGES
            wanted = (block > 0) & (following < OWN_PIECES * BLOCKS)
            slot = following % STAGES
            k = (begin + following) * BLOCK_K
            _ask_weight(weight, ring, arrived, slot, row, apart, k, wanted, TILES, BYTES)
            tma.async_copy_global_to_shared(x, [first_n, k], arrived.index(slot), x_ring.index(slot), wanted)
        first, second = warpgroup_mma_wait(0, deps=(first, second))
        total += first
        second_total += second
    for slot in gl.static_range(STAGES):
        mbarrier.invalidate(arrived.index(slot))
    return gl.convert_layout(total, _OUT), gl.convert_layout(second_total, _OUT)


@gluon.jit
def _norm_scale(squares_ptr, first_n, rows, in_features, norm_eps, BLOCK_N: gl.constexpr, GROUPS: gl.constexpr):
    """The scale ``[BLOCK_N]`` of the norm before the product; ones if there is no norm."""
    scale = gl.full([BLOCK_N], 1.0, gl.float32, gl.SliceLayout(0, _OUT))
    if squares_ptr is not None:
        layout: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, 4], [0, 1])
        n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        group = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
        groups = gl.cdiv(in_features, _NORM_GROUP)
        mask = (group < groups)[:, None] & (n < rows)[None, :]
        squares = gl.load(squares_ptr + n[None, :] * groups + group[:, None], mask=mask, other=0.0)
        mean = _sum_in_any_order(squares, 0) / in_features
        scale = gl.convert_layout(gl.rsqrt(mean + norm_eps), gl.SliceLayout(0, _OUT))
    return scale


@gluon.jit
def _load_added(residual_ptr, o, n, mask, residual_stride):
    """Load the residual of a tile of the result; zeros if there is none."""
    added = gl.zeros([o.shape[0], n.shape[0]], gl.float32, _OUT)
    if residual_ptr is not None:
        places = residual_ptr + n.to(gl.int64)[None, :] * residual_stride + o[:, None]
        added = gl.load(places, mask=mask, other=0.0).to(gl.float32)
    return added


@gluon.jit
def _load_gain(gain_ptr, o, out_features, norm_offset):
    """Load the weight of the norm that follows; zeros if there is none."""
    gain = gl.zeros([o.shape[0]], gl.float32, gl.SliceLayout(1, _OUT))
    if gain_ptr is not None:
        gain = gl.load(gain_ptr + o, mask=o < out_features, other=0.0).to(gl.float32) + norm_offset
    return gain


@gluon.jit
def _merge(y, second, partial_ptr, counter_ptr, tile, tiles_o, n, rows, TILES: gl.constexpr, PIECES: gl.constexpr):
    """Store this piece in scratch memory. The last program of a tile to arrive adds all pieces in their order.

    The scratch memory holds products ``[PIECES, rows, tiles * 64]``. Returns the sums, and whether this program is
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
    last = gl.atomic_add(counter_ptr + gl.program_id(0), 1, sem="acq_rel") == PIECES - 1
    if last:
        gl.store(counter_ptr + gl.program_id(0), 0)
        y = gl.zeros([_TILE_O, y.shape[1]], gl.float32, _OUT)
        second = gl.zeros([_TILE_O, y.shape[1]], gl.float32, _OUT)
        for piece in gl.static_range(PIECES):
            y += gl.load(at + piece * stride, mask=real, other=0.0, cache_modifier=".cg")
            if TILES == 2:
                second += gl.load(at + _TILE_O + piece * stride, mask=real, other=0.0, cache_modifier=".cg")
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
    y, added, gain, out_ptr, gained_ptr, out_squares_ptr, tile, o, n, mask, rows, out_features, RESIDUAL: gl.constexpr
):
    """Add the residual, round once, and store the result.

    On request, also store the parts of the norm that follows. A tile is one norm group.
    """
    at = n[None, :] * out_features + o[:, None]
    if RESIDUAL:
        y = y + added
    y = y.to(out_ptr.dtype.element_ty)
    gl.store(out_ptr + at, y, mask=mask)
    if gained_ptr is not None:
        exact = gl.where(mask, y.to(gl.float32), 0.0)
        gl.store(gained_ptr + at, (exact * gain[:, None]).to(gained_ptr.dtype.element_ty), mask=mask)
        places = out_squares_ptr + n * gl.cdiv(out_features, _NORM_GROUP) + tile
        gl.store(places, _sum_in_any_order(exact * exact, 0), mask=n < rows)


@gluon.jit(do_not_specialize=["rows", "weight_is_constant"])
def linear_hopper_kernel(
    weight,
    x,
    out_ptr,
    bias_ptr,
    residual_ptr,
    squares_ptr,
    gain_ptr,
    gained_ptr,
    out_squares_ptr,
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
    PIECES: gl.constexpr,
    SPLIT: gl.constexpr,
    GROUPS: gl.constexpr,
    STAGES: gl.constexpr,
    ACTIVATION: gl.constexpr,
    GATED: gl.constexpr,
    PDL: gl.constexpr,
):
    """One tile of the result, from a tile of the weight or, if ``GATED``, from a tile of gate rows and one of up rows.

    The grid is (tiles of the result, ``PIECES`` if ``SPLIT``, else 1). Tiles of x are neighbours in it, so that a tile
    of the weight is read from memory once for all of them. ``weight`` and ``x`` are tensor descriptors. If not
    ``weight_is_constant``, the wait for the preceding kernel comes before any request.
    """
    TILES: gl.constexpr = 2 if GATED else 1
    BYTES: gl.constexpr = (TILES * _TILE_O + BLOCK_N) * BLOCK_K * weight.dtype.primitive_bitwidth // 8
    ring = gl.allocate_shared_memory(weight.dtype, [STAGES * TILES, _TILE_O, BLOCK_K], weight.layout)
    x_ring = gl.allocate_shared_memory(weight.dtype, [STAGES, BLOCK_N, BLOCK_K], x.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tiles_n = gl.cdiv(rows, BLOCK_N)
    tile = gl.program_id(0) // tiles_n
    row = tile * _TILE_O
    # The last of several tiles ends at the last row. It computes some rows a second time, with the same bits, because a
    # tile that reaches past the last row is slow.
    first_n = gl.maximum(gl.minimum(gl.program_id(0) % tiles_n * BLOCK_N, rows - BLOCK_N), 0)
    begin = gl.program_id(1) * BLOCKS
    OWN_PIECES: gl.constexpr = 1 if SPLIT else PIECES
    _fill(
        weight, x, ring, x_ring, arrived, row, out_features, first_n, begin, weight_is_constant,
        BLOCK_K, OWN_PIECES * BLOCKS, STAGES, TILES, BYTES, PDL,
    )  # fmt: skip
    o = row + gl.arange(0, _TILE_O, gl.SliceLayout(1, _OUT))
    n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, _OUT))
    mask = (o < out_features)[:, None] & (n < rows)[None, :]
    # The operands of the epilogue arrive during the product.
    scale = _norm_scale(squares_ptr, first_n, rows, in_features, norm_eps, BLOCK_N, GROUPS)
    added = _load_added(residual_ptr, o, n, mask, residual_stride)
    gain = _load_gain(gain_ptr, o, out_features, norm_offset)
    y, second = _multiply(
        weight, x, ring, x_ring, arrived, row, out_features, first_n, begin,
        BLOCK_N, BLOCK_K, BLOCKS, OWN_PIECES, STAGES, TILES, BYTES,
    )  # fmt: skip
    finish = True
    if SPLIT:
        y, second, finish = _merge(
            y, second, partial_ptr, counter_ptr, tile, gl.cdiv(out_features, _TILE_O), n, rows, TILES, PIECES
        )
    if finish:
        RESIDUAL: gl.constexpr = residual_ptr is not None
        weight_rows = 2 * out_features if GATED else out_features
        y = _activate(_scaled(y, scale, bias_ptr, o, weight_rows), ACTIVATION)
        if GATED:
            y = y * _scaled(second, scale, bias_ptr, o + out_features, weight_rows)
        _store(y, added, gain, out_ptr, gained_ptr, out_squares_ptr, tile, o, n, mask, rows, out_features, RESIDUAL)


class Ring(NamedTuple):
    """How a product is tiled and how many stages its ring has. None of this decides bits."""

    block_n: int  # rows of x
    split: bool  # whether every piece of the summed dimension has a program of its own
    stages: int


_SHARED_BYTES = 224 * 1024
"""The shared memory of a multiprocessor, less what the barriers of its programs take."""
_MULTIPROCESSORS = 132
MOST_ROWS = 256
"""Of more rows than that, larger tiles are always better."""


def ring(rows: int, out_features: int, pieces: int, gated: bool) -> Ring | None:
    """The ring for ``rows`` rows, as measured on an H200 (see docs/experiments.md).

    If there are enough programs, two share a multiprocessor and its shared memory; otherwise a program has it to
    itself. A gated product also has one program per multiprocessor, and four stages are enough for it.

    Returns None where the larger tiles of the Triton kernel are better. This is so above 256 rows. Above 64 rows it is
    so for gated products, and for other products unless the weight has so few tiles of 64 rows that half of the
    multiprocessors would have no work.
    """
    tiles_o = triton.cdiv(out_features, TILE_O)
    if rows > MOST_ROWS or (rows > 64 and (gated or 2 * tiles_o > _MULTIPROCESSORS)):
        return None
    split = rows <= 64 and pieces > 1
    block_n = max(8, triton.next_power_of_2(rows) // (1 if rows <= 64 else 2))
    if gated:
        return Ring(block_n, split, 4)
    programs = tiles_o * triton.cdiv(rows, block_n) * (pieces if split else 1)
    room = _SHARED_BYTES if programs <= _MULTIPROCESSORS else _SHARED_BYTES // 2
    return Ring(block_n, split, min(10, room // ((TILE_O + block_n) * BLOCK_K * 2)))


@functools.cache
def _layout(rows: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, BLOCK_K], getattr(gl, str(dtype).removeprefix("torch.")))


def _tiled(matrix: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of ``matrix`` for the tensor memory accelerator, in blocks of ``rows`` rows.

    Reads beyond the edges give 0.
    """
    count, width = matrix.shape
    strides = [matrix.stride(0) if count > 1 else width, 1]
    return TensorDescriptor(matrix, [count, width], strides, [rows, BLOCK_K], _layout(rows, matrix.dtype))


class Plan(NamedTuple):
    """How a product is launched; ``pieces`` and ``blocks`` decide its bits."""

    cut: Ring
    pieces: int
    blocks: int
    groups: int


@functools.cache
def _plan(rows: int, weight_rows: int, in_features: int, gated: bool) -> Plan | None:
    """The plan for a shape, which is asked for several times in each call; None if larger tiles are better."""
    pieces, blocks = pieces_of(in_features, num_pieces(weight_rows, in_features), BLOCK_K)
    cut = ring(rows, weight_rows // 2 if gated else weight_rows, pieces, gated)
    return None if cut is None else Plan(cut, pieces, blocks, norm_groups(in_features))


def covers(x: Tensor, weight: Tensor, gated: bool, scaled: bool) -> bool:
    """Whether :func:`launch` can compute a product, and larger tiles are not better; ``scaled``: by sums of squares.

    The matrix instruction wants 16-bit values, the accelerator rows that begin at multiples of 16 bytes.
    """
    weight_rows, inner = weight.shape
    rows = x.numel() // inner
    if rows > MOST_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or inner % 8:
        return False
    plan = _plan(rows, weight_rows, inner, gated)
    if plan is None or (scaled and plan.groups * plan.cut.block_n > 8192):  # they would not fit the registers
        return False
    return _is_reachable(x) and _is_reachable(weight)


def _is_reachable(x: Tensor) -> bool:
    """Whether the accelerator can read the rows of ``x``, whose width is a multiple of 8, or a copy of them."""
    apart = _distance(x)
    return apart is None or (x.data_ptr() % 16 == 0 and apart % 8 == 0 and apart >= x.shape[-1])


def _distance(x: Tensor) -> int | None:
    """How far the rows of ``x`` lie apart, in elements; None where one distance does not describe them, so that the
    launcher lays them out anew."""
    if x.is_contiguous():
        return x.shape[-1]
    if x.stride(-1) != 1:
        return None
    sizes = [(size, stride) for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    if any(outer != size * inner for (_, outer), (size, inner) in itertools.pairwise(sizes)):
        return None
    return sizes[-1][1] if sizes else x.shape[-1]


def launch(product: Product) -> None:
    """Fill the results of a product that :func:`covers` has agreed to."""
    out, x, weight, residual = product.out, product.x, product.weight, product.residual
    plan = _plan(x.shape[0], weight.shape[0], x.shape[1], product.gated)
    assert plan is not None, "covers has said that there is one"
    cut, pieces, blocks, groups = plan
    rows, in_features = x.shape
    tiles_o, tiles_n = triton.cdiv(out.shape[-1], TILE_O), triton.cdiv(rows, cut.block_n)
    partial = counters = None
    if cut.split:
        partial = x.new_empty(pieces, rows, tiles_o * (2 if product.gated else 1) * TILE_O, dtype=torch.float32)
        counters = arrival_counters(x.device)
    norm_weight, norm_offset, gained, out_squares = product.following or (None, 0.0, None, None)
    # Outside of a CUDA graph, a kernel that has not finished may be writing the weight.
    ahead = int(product.constant_weight and torch.cuda.is_current_stream_capturing())
    linear_hopper_kernel[(tiles_o * tiles_n, pieces if cut.split else 1)](
        _tiled(weight, TILE_O), _tiled(x, cut.block_n), out, product.bias, residual, product.squares, norm_weight,
        gained, out_squares, partial, counters, ahead, rows, out.shape[-1],
        in_features, 0 if residual is None else residual.stride(0), product.norm_eps, norm_offset,
        BLOCK_N=cut.block_n, BLOCK_K=BLOCK_K, BLOCKS=blocks, PIECES=pieces, SPLIT=cut.split, GROUPS=groups,
        STAGES=cut.stages, ACTIVATION=product.activation.removesuffix("_mul"), GATED=product.gated, PDL=product.pdl,
        num_warps=4, enable_fp_fusion=False, **launch_options(product.pdl),
    )  # fmt: skip
