"""``specgraph::packed_expert_linear`` for few rows on Hopper: arranged words of the experts that rows have chosen.

There are two launches. The first sorts rows by expert on the device: a program per row finds its place, and copies it
there. In the second, written in Gluon, a program takes a tile of 64 outputs of one expert and computes it for the
expert's rows, which now lie together, so that the tensor memory accelerator can read them. Its main loop is that of
:mod:`specgraph.kernels.linear.hopper_packed`. Programs of spans without rows end at once.

The bits are those of :mod:`specgraph.kernels.linear.experts`: each row is multiplied with the same blocks in the same
order, as columns that ``wgmma`` sums by themselves.
"""

# Gluon's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specgraph.kernels import launch as launches
from specgraph.kernels.linear.experts import Behind
from specgraph.kernels.linear.hopper import BLOCK_K, Ring, descriptor, takes_words
from specgraph.kernels.linear.hopper_kernel import OUT, TILE_O
from specgraph.kernels.linear.hopper_packed import load_scales, multiply_packed
from specgraph.kernels.linear.hopper_ring import fill_weight, fill_x
from specgraph.kernels.linear.multiply_packed import per_word
from specgraph.kernels.linear.product import Scales
from specgraph.kernels.pointwise.pointwise_triton import gate_function

MOST_ROWS_EACH = 16
"""More rows for each expert, on average, go to larger tiles. They are not timed."""
_TILE_O = gl.constexpr(TILE_O)
_IDS = 512


@triton.jit(do_not_specialize=["num_rows"])
def _sort_rows_kernel(
    order, spans, sorted_x, expert_ids, x, num_rows, num_experts, INNER: tl.constexpr, TOP_K: tl.constexpr,
    BY_ROW: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Copy a row behind those of lower experts, and earlier ones of its own. The grid is (rows,).

    The place of every row, ``order[place] = row``, is stored, too, and the spans ``[spans, 3]``: an expert, the place
    of its first row, and that behind its last. There is one for each expert, or if ``BY_ROW``, which fewer
    rows than experts need, one for each place, which is empty unless an expert's first row lies there.
    """
    launches.gdc_wait(PDL)
    launches.gdc_launch_dependents(PDL)
    program = tl.program_id(0)
    own = tl.load(expert_ids + program)
    expert = own if BY_ROW else program
    place = 0
    begin = 0
    end = 0
    first = 0
    while first < num_rows:  # not a range, since the interpreter's range takes no bound known only at run time
        # ---- ids of experts: [IDS]
        row = first + tl.arange(0, IDS)
        ids = tl.load(expert_ids + row, mask=row < num_rows, other=num_experts)
        place += tl.sum(((ids < own) | ((ids == own) & (row < program))).to(tl.int32), axis=0)
        begin += tl.sum((ids < expert).to(tl.int32), axis=0)
        end += tl.sum((ids <= expert).to(tl.int32), axis=0)
        first += IDS
    if BY_ROW or program < num_experts:
        span = spans + 3 * (place if BY_ROW else program)
        tl.store(span, expert)
        tl.store(span + 1, begin)
        tl.store(span + 2, tl.where(place == begin, end, begin) if BY_ROW else end)
    tl.store(order + place, program)
    for column in range(0, INNER, BLOCK):
        # ---- entries of the row: [BLOCK]
        k = column + tl.arange(0, BLOCK)
        values = tl.load(x + (program // TOP_K).to(tl.int64) * INNER + k, mask=k < INNER)
        tl.store(sorted_x + tl.cast(place, tl.int64) * INNER + k, values, mask=k < INNER)


@gluon.jit
def _rounded(y, bias_ptr, expert, first, end, out_features, KIND: gl.constexpr):
    """``y + bias`` of the outputs from ``first`` on, ``[64, BLOCK_N]``: values of ``KIND`` in float32."""
    y = gl.convert_layout(y, OUT)
    if bias_ptr is not None:
        o = first + gl.arange(0, _TILE_O, gl.SliceLayout(1, OUT))
        bias = gl.load(bias_ptr + expert.to(gl.int64) * out_features + o, mask=o < end, other=0.0)
        y = y + bias.to(gl.float32)[:, None]
    return y.to(KIND).to(gl.float32)


@gluon.jit
def experts_hopper_kernel(
    weight, x, out_ptr, bias_ptr, order_ptr, spans_ptr, scale_ptr, scale_stride, scale_stride_e, out_features,
    in_features, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    PARTS: gl.constexpr, FORMAT: gl.constexpr, GATE: gl.constexpr, PAIRS: gl.constexpr, PDL: gl.constexpr,
):
    """A tile of one expert's outputs for all of its rows. The grid is (tiles of outputs, spans).

    ``weight``, the matrices of all experts one below the other, and ``x``, whose rows are sorted, are descriptors.
    ``GATE`` is a function of two outputs, which are neighbours if ``PAIRS``, or else in two tiles.
    """
    BLOCK_W: gl.constexpr = BLOCK_K // per_word(FORMAT)
    TILES: gl.constexpr = 1 if GATE is None or PAIRS else 2
    WEIGHT_BITS: gl.constexpr = TILES * _TILE_O * BLOCK_W * weight.dtype.primitive_bitwidth
    BYTES: gl.constexpr = PARTS * (WEIGHT_BITS + BLOCK_N * BLOCK_K * x.dtype.primitive_bitwidth) // 8
    ring = gl.allocate_shared_memory(weight.dtype, [STAGES * PARTS * TILES, _TILE_O, BLOCK_W], weight.layout)
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES * PARTS, BLOCK_N, BLOCK_K], x.layout)
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if PDL:  # in this order: with few rows, programs that start early cost more than they gain (docs/experiments.md)
        gdc_wait()
        gdc_launch_dependents()
    row = gl.program_id(0) * _TILE_O
    span = spans_ptr + 3 * gl.program_id(1)
    expert = gl.load(span)
    begin = gl.load(span + 1)
    end = gl.load(span + 2)
    lines = out_features // TILES  # where tiles are two, those of the first are the first half
    KIND: gl.constexpr = out_ptr.dtype.element_ty
    for first_n in range(begin, end, BLOCK_N):
        weight_row = expert * out_features + row
        fill_weight(
            weight, ring, barriers, weight_row, lines, 0, 1, BLOCKS, BLOCK_W, PARTS, STAGES, 1, TILES, BYTES, False,
        )
        scales = load_scales(
            scale_ptr + expert.to(gl.int64) * scale_stride_e, scale_stride, row, lines, 0, in_features, BLOCKS, 1,
            TILES, 1,
        )  # fmt: skip
        fill_x(x, x_ring, barriers, first_n, 0, BLOCKS, BLOCK_K, PARTS, STAGES, 1, False)
        # ---- the products of one or two tiles of the weight and rows: [64, BLOCK_N] each
        y, second = multiply_packed(
            weight, x, ring, x_ring, scales, None, barriers, free, weight_row, lines, first_n, 0, BLOCKS, 1, PARTS,
            STAGES, 1, TILES, BYTES, FORMAT, 0,
        )  # fmt: skip
        if first_n + BLOCK_N < end:  # barriers are used again
            for stage in gl.static_range(STAGES):
                mbarrier.invalidate(barriers.index(stage))
                mbarrier.invalidate(free.index(stage))
        y = _rounded(y, bias_ptr, expert, row, lines, out_features, KIND)
        first_o = row
        if TILES == 2:
            y = GATE(y, _rounded(second, bias_ptr, expert, row + lines, out_features, out_features, KIND))
        elif PAIRS:
            # ---- neighbours: [32, BLOCK_N] each
            y, second = gl.split(gl.permute(gl.reshape(y, (_TILE_O // 2, 2, BLOCK_N)), (0, 2, 1)))
            y = gl.convert_layout(GATE(y, second), OUT)
            first_o = row // 2
        # ---- the results of the rows that belong to the expert, at their places: [64 or 32, BLOCK_N]
        results = out_features if GATE is None else out_features // 2
        o = first_o + gl.arange(0, y.shape[0], gl.SliceLayout(1, OUT))
        n = first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, OUT))
        place = gl.load(order_ptr + n, mask=n < end, other=0).to(gl.int64)
        mask = (o < results)[:, None] & (n < end)[None, :]
        gl.store(out_ptr + place[None, :] * results + o[:, None], y.to(KIND), mask=mask)


def expert_ring(rows: int, experts: int, two_tiles: bool) -> Ring:
    """The ring for so many rows, as timed on an H200 with the shapes of gpt-oss-20b, which have one tile.

    A short ring leaves room for five programs on a multiprocessor, which hide each other's waiting. With two tiles
    there is room for three, and for their registers.
    """
    return Ring(8 if rows <= 4 * experts else 16, False, stages=4, registers=80 if two_tiles else 48)


def covers_experts(x: Tensor, rows: int, words: Tensor, scales: Scales) -> bool:
    """Whether :func:`launch_experts` can compute so many rows, and larger tiles are not better."""
    if rows > MOST_ROWS_EACH * words.shape[0] or not takes_words(x, scales) or scales.outputs != 1:
        return False
    return words.is_contiguous() and words.shape[-1] % 4 == 0 and words.data_ptr() % 16 == 0 and x.shape[1] % 8 == 0


def launch_experts(out: Tensor, x: Tensor, words: Tensor, given: Behind, scales: Scales) -> None:
    """Fill ``out`` from rows ``[S / top_k, I]`` and the words of a stack; ``given`` has the other arguments."""
    rows, inner, (experts, outer, _), ids, bias = out.shape[0], x.shape[1], words.shape, given.expert_ids, given.bias
    # A program that ends at once takes its time, too: with few rows there are fewer places than experts.
    by_row = rows < experts
    order, spans = ids.new_empty(rows, dtype=torch.int32), ids.new_empty(min(rows, experts), 3, dtype=torch.int32)
    sorted_x = x.new_empty(rows, inner)
    launches.launch(
        _sort_rows_kernel, (rows,), order, spans, sorted_x, ids.contiguous(), x.contiguous(), rows, experts,
        INNER=inner, TOP_K=given.top_k, BY_ROW=by_row, BLOCK=launches.block_size(inner, 4096), IDS=_IDS, num_warps=4,
    )  # fmt: skip
    pdl = launches.supports_pdl(x.device)
    pairs = given.pairs and bool(given.gate)
    two_tiles = bool(given.gate) and not pairs
    ring = expert_ring(rows, experts, two_tiles)
    blocks = ring.parts * triton.cdiv(inner, BLOCK_K * ring.parts)
    experts_hopper_kernel[(triton.cdiv(outer // 2 if two_tiles else outer, TILE_O), len(spans))](
        descriptor(words.view(experts * outer, -1), TILE_O, BLOCK_K * words.shape[-1] // inner),
        descriptor(sorted_x, ring.block_n, BLOCK_K), out, None if bias is None else bias.contiguous(), order, spans,
        scales.weight, scales.weight.stride(-2), scales.weight.stride(0), outer, inner, BLOCK_N=ring.block_n,
        BLOCK_K=BLOCK_K, BLOCKS=blocks, STAGES=ring.stages, PARTS=ring.parts, FORMAT=scales.format,
        GATE=_gate(given.gate, out.dtype) if given.gate else None, PAIRS=pairs, PDL=pdl, num_warps=4,
        enable_fp_fusion=False, maxnreg=ring.registers, **launches.launch_options(pdl),
    )


@functools.cache
def _gate(program: str, dtype: torch.dtype) -> Any:
    """A gate as a function of Gluon's, which has the same source."""
    return gluon.jit(gate_function(program, dtype).fn)
