"""``specgraph::linear`` on Hopper, for few rows or of packed weights for any number: when its kernel is used, its
tiling, and its launch.

It computes ``activation(x @ weight.T * scale + bias) + residual``, and on request the parts of the norm that follows,
as :mod:`specgraph.kernels.linear.linear` defines them, for rows ``x`` ``[N, I]`` and a weight ``[O, I]`` or
``[2 * O, I]`` of bfloat16 or float16, with float32 sums. The kernel is written in Gluon, the language below Triton;
:mod:`specgraph.kernels.linear.hopper_kernel` holds it and says how it divides the work.

The bits are those of :mod:`specgraph.kernels.linear.linear_triton`, and so do not depend on the number of rows. Both
kernels multiply 64 rows of the weight with the same instruction, add 16 products at a time in the same order, and add
the slices in the same order. What was measured is in ``docs/experiments.md``.
"""

# Gluon has no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specgraph.kernels import gpus
from specgraph.kernels.launch import arrival_counters, launch_options
from specgraph.kernels.linear.hopper_kernel import TILE_O, linear_hopper_kernel
from specgraph.kernels.linear.hopper_packed import REQUESTING_REGISTERS
from specgraph.kernels.linear.product import (
    PACKED_SLICE,
    Product,
    Scales,
    norm_groups,
    num_slices,
    packed_slices,
    slices_of,
)

BLOCK_K = 128


class Ring(NamedTuple):
    """How a product is tiled and how many stages its ring has. None of this decides bits."""

    block_n: int  # rows of x
    split: bool  # whether every slice of the summed dimension has a program of its own
    stages: int
    parts: int = 1  # blocks of a stage
    warp_groups: int = 1  # two groups of four warps take a slice each
    registers: int | None = None  # of a thread, on average

    def second_registers(self) -> int:
        """What a thread of the second group of warps may have, in eights: as much as one of the first. The warp that
        requests blocks takes the place of four."""
        return (3 * (self.registers or 0) - REQUESTING_REGISTERS) // 2 // 8 * 8


MOST_ROWS = 256
"""Of more rows than that, larger tiles are always better."""


def ring(rows: int, out_features: int, slices: int, gated: bool) -> Ring | None:
    """The ring for ``rows`` rows, as measured on an H200 (see docs/experiments.md).

    If there are enough programs, two share a multiprocessor and its shared memory; otherwise a program has it to
    itself. A gated product also has one program per multiprocessor, and four stages are enough for it.

    Returns None where the larger tiles of the Triton kernel are better. This is so above 256 rows. Above 64 rows it is
    so for gated products, and for other products unless the weight has so few tiles of 64 rows that half of the
    multiprocessors would have no work.
    """
    tiles_o = triton.cdiv(out_features, TILE_O)
    if rows > MOST_ROWS or (rows > 64 and (gated or 2 * tiles_o > gpus.HOPPER.multiprocessors)):
        return None
    split = rows <= 64 and slices > 1
    block_n = max(8, triton.next_power_of_2(rows) // (1 if rows <= 64 else 2))
    if gated:
        return Ring(block_n, split, 4)
    programs = tiles_o * triton.cdiv(rows, block_n) * (slices if split else 1)
    shared_bytes = gpus.HOPPER.shared_bytes // (1 if programs <= gpus.HOPPER.multiprocessors else 2)
    return Ring(block_n, split, min(10, shared_bytes // ((TILE_O + block_n) * BLOCK_K * 2)))


def packed_ring(rows: int, out_features: int, slices: int, gated: bool, four_bits: bool) -> Ring:
    """As :func:`ring` for arranged words, and for any number of rows.

    Numbers are expanded by two groups of warps, one for each slice, of a program that has a multiprocessor to itself.
    Gated products have two tiles of the weight for a tile of x, and programs enough for two on a multiprocessor; with
    many rows the registers are enough for one group, which takes both slices. Of programs with a slice each, four are
    on a multiprocessor.
    """
    if rows > 64:
        return _wide_packed_ring(rows, out_features, slices, gated, four_bits)
    block_n = min(max(8, triton.next_power_of_2(rows)), 32)
    few = block_n <= 16
    if slices != 2 or (gated and not few):
        stages, parts = (2, 2) if few or gated else (3, 1)
        return Ring(block_n, slices > 2, stages, parts, registers=64 if slices > 2 else 128)
    return Ring(block_n, False, 3 if four_bits else 2, 1, 2, 80) if gated else Ring(block_n, False, 2, 2, 2, 168)


def _wide_packed_ring(rows: int, out_features: int, slices: int, gated: bool, four_bits: bool) -> Ring:
    """The ring for more than 64 rows: the numbers of a tile are expanded once for 128 of them, whose sums the registers
    just hold, or for 64 where tiles would be too few. A program takes all slices."""
    tiles = triton.cdiv(out_features, TILE_O) * triton.cdiv(rows, 128)
    wide = not gated and rows >= 128 and tiles >= gpus.HOPPER.product_tiles
    block_n = 128 if wide else 64
    if slices != 2:
        return Ring(block_n, False, 2 if wide or gated else 3, 1, registers=128)
    stages = 2 if wide else 2 + four_bits + (not gated)
    return Ring(block_n, False, stages, 1, 2, 168)


@functools.cache
def _layout(rows: int, width: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([rows, width], getattr(gl, str(dtype).removeprefix("torch.")))


def descriptor(matrix: Tensor, rows: int, width: int) -> TensorDescriptor:
    """A descriptor of ``matrix`` for the tensor memory accelerator, in blocks of ``rows`` rows of ``width`` entries.

    Reads beyond the edges give 0.
    """
    count, features = matrix.shape
    strides = [matrix.stride(0) if count > 1 else features, 1]
    return TensorDescriptor(matrix, [count, features], strides, [rows, width], _layout(rows, width, matrix.dtype))


class Plan(NamedTuple):
    """How a product is launched; ``slices`` and ``blocks`` decide its bits."""

    tiling: Ring
    slices: int
    blocks: int
    groups: int


@functools.cache
def _packed_plan(rows: int, weight_rows: int, in_features: int, gated: bool, four_bits: bool) -> Plan:
    """The plan for a shape with arranged words."""
    wanted = packed_slices(weight_rows, in_features, arranged=True)
    slices, blocks = slices_of(in_features, wanted, BLOCK_K, PACKED_SLICE)
    tiling = packed_ring(rows, weight_rows // 2 if gated else weight_rows, slices, gated, four_bits)
    return Plan(tiling, slices, blocks, norm_groups(in_features))


def _packed_bytes(plan: Plan, tiles: int, row_bytes: int, scales: Scales) -> int:
    """The shared memory of a program: its ring, the scales of its blocks, and what the second group of warps gives.

    A row of a block of the weight has ``row_bytes``.
    """
    ring, blocks = plan.tiling, plan.blocks * (1 if plan.tiling.split else plan.slices)
    places, padded = ring.warp_groups * ring.stages * ring.parts, triton.next_power_of_2(blocks // ring.warp_groups)
    ring_bytes = places * (tiles * TILE_O * row_bytes + ring.block_n * BLOCK_K * 2)
    scale_bytes = ring.warp_groups * tiles * padded * TILE_O * scales.weight.element_size()
    x_bytes = triton.next_power_of_2(blocks) * ring.block_n * 4  # of formats that quantise rows
    return ring_bytes + scale_bytes + x_bytes + tiles * TILE_O * ring.block_n * 4


def takes_words(x: Tensor, scales: Scales) -> bool:
    """Whether rows are 16-bit values, words are arranged, and each block of them has a scale."""
    return scales.arranged and x.dtype.itemsize == 2 and scales.group == BLOCK_K and scales.dot_k == BLOCK_K


def covers_packed(x: Tensor, words: Tensor, scales: Scales, gated: bool, scaled: bool) -> bool:
    """Whether :func:`launch` can compute a product with words and scales."""
    inner = x.shape[-1]
    rows = x.numel() // inner
    if not takes_words(x, scales):
        return False
    plan = _packed_plan(rows, words.shape[0], inner, gated, words.shape[1] * 8 == inner)
    if scaled and plan.groups * plan.tiling.block_n > 8192:  # they would not fit the registers
        return False
    row_bytes = words.shape[1] * words.element_size() * BLOCK_K // inner
    if _packed_bytes(plan, 2 if gated else 1, row_bytes, scales) > gpus.HOPPER.shared_bytes:
        return False
    return is_reachable(x) and words.is_contiguous() and words.data_ptr() % 16 == 0


@functools.cache
def _plan(rows: int, weight_rows: int, in_features: int, gated: bool) -> Plan | None:
    """The plan for a shape, which is asked for several times in each call; None if larger tiles are better."""
    slices, blocks = slices_of(in_features, num_slices(weight_rows, in_features), BLOCK_K)
    tiling = ring(rows, weight_rows // 2 if gated else weight_rows, slices, gated)
    return None if tiling is None else Plan(tiling, slices, blocks, norm_groups(in_features))


def covers(x: Tensor, weight: Tensor, gated: bool, scaled: bool) -> bool:
    """Whether :func:`launch` can compute a product, and larger tiles are not better; ``scaled``: by sums of squares.

    The matrix instruction wants 16-bit values, the accelerator rows that begin at multiples of 16 bytes.
    """
    weight_rows, inner = weight.shape
    rows = x.numel() // inner
    if rows > MOST_ROWS or x.dtype not in (torch.bfloat16, torch.float16) or inner % 8:
        return False
    plan = _plan(rows, weight_rows, inner, gated)
    if plan is None or (scaled and plan.groups * plan.tiling.block_n > 8192):  # they would not fit the registers
        return False
    return is_reachable(x) and is_reachable(weight)


def is_reachable(x: Tensor) -> bool:
    """Whether the accelerator can read the rows of ``x``, whose width is a multiple of 8, or a copy of them."""
    distance = _distance(x)
    return distance is None or (x.data_ptr() % 16 == 0 and distance % 8 == 0 and distance >= x.shape[-1])


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


def launch(product: Product, scales: Scales | None = None) -> None:
    """Fill the results of a product that :func:`covers` or, with scales, :func:`covers_packed` has agreed to."""
    out, x, weight, residual = product.out, product.x, product.weight, product.residual
    shape = x.shape[0], weight.shape[0], x.shape[1], product.gated
    plan = _plan(*shape) if scales is None else _packed_plan(*shape, weight.shape[1] * 8 == x.shape[1])
    assert plan is not None, "covers has said that there is one"
    tiling, slices, blocks, groups = plan
    packed = {}
    if scales is not None:
        packed = scales.shared_arguments() | {
            "PARTS": tiling.parts, "WARP_GROUPS": tiling.warp_groups, "REGISTERS": tiling.second_registers(),
            "maxnreg": tiling.registers,
        }  # fmt: skip
    rows, in_features = x.shape
    tiles_o, tiles_n = triton.cdiv(out.shape[-1], TILE_O), triton.cdiv(rows, tiling.block_n)
    partial = counters = None
    if tiling.split:
        partial = x.new_empty(slices, rows, tiles_o * (2 if product.gated else 1) * TILE_O, dtype=torch.float32)
        counters = arrival_counters(x.device)
    norm_weight, norm_offset, weighted, out_sum_sq = product.next_norm or (None, 0.0, None, None)
    # Outside of a CUDA graph, a kernel that has not finished may be writing the weight.
    weight_is_constant = int(product.constant_weight and torch.cuda.is_current_stream_capturing())
    width = BLOCK_K * weight.shape[1] // in_features  # of words, eight inputs or so are one entry
    linear_hopper_kernel[(tiles_o * tiles_n, slices if tiling.split else 1)](
        descriptor(weight, TILE_O, width), descriptor(x, tiling.block_n, BLOCK_K), out, product.bias, residual,
        product.sum_sq, norm_weight, weighted, out_sum_sq, partial, counters, weight_is_constant, rows, out.shape[-1],
        in_features, 0 if residual is None else residual.stride(0), product.norm_eps, norm_offset,
        BLOCK_N=tiling.block_n, BLOCK_K=BLOCK_K, BLOCKS=blocks, SLICES=slices, SPLIT=tiling.split, GROUPS=groups,
        STAGES=tiling.stages, ACTIVATION=product.activation.removesuffix("_mul"), GATED=product.gated, PDL=product.pdl,
        num_warps=4, enable_fp_fusion=False, **packed, **launch_options(product.pdl),
    )
