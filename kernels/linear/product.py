"""A product with what surrounds it, as launches see it: how it is cut into tiles, and its launch in Triton.

:mod:`specgraph.kernels.linear.linear` says what is computed, and what decides the bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.launch import MAX_COUNTERS, arrival_counters, dense_rows, launch_options, supports_pdl
from specgraph.kernels.linear.linear_triton import NORM_GROUP, linear_kernel, norm_parts_kernel, norm_scale_kernel


class Tiles(NamedTuple):
    """How a product is tiled.

    ``slices`` decides the bits, and in float32 so does ``block_k``. Neither depends on the number of rows.
    """

    block_o: int  # rows of the weight in a tile, gate and up rows together
    block_n: int  # rows of x in a tile
    block_k: int
    slices: int
    serial: bool  # one program computes all slices
    warps: int
    stages: int


_SLICE_ALIGNMENT = 128
"""Slices begin at multiples of this number of entries, whatever ``block_k`` is; ``block_k`` divides it."""

_SPLIT_K_TILES = 80
"""A weight with fewer tiles of 64 rows is cut into slices. This decides bits, so it is the same on every GPU."""


def num_slices(out_features: int, in_features: int) -> int:
    """The number of slices into which the summed dimension of a weight ``[out_features, in_features]`` is cut.

    There are enough to give most of 132 multiprocessors a tile of 64 rows of the weight. There are not more, because
    merging takes time, and because a program that has a multiprocessor to itself can use all of its shared memory for
    weights that are being loaded.
    """
    row_tiles, slices = triton.cdiv(out_features, 64), 1
    while row_tiles * slices < _SPLIT_K_TILES and slices < 8 and in_features >= 16 * slices * _SLICE_ALIGNMENT:
        slices *= 2
    return slices


def tiles(rows: int, out_features: int, in_features: int, itemsize: int = 2) -> Tiles:
    """The tiling of ``rows`` rows and a weight ``[out_features, in_features]``.

    This is a plain table that was measured on an H200 (see docs/experiments.md). Nothing is timed at run time.
    """
    slices = num_slices(out_features, in_features)
    if itemsize == 4:  # exact float32 has no matrix instruction, and small tiles fit the registers
        return Tiles(64, 16 if rows <= 16 else 32, 32, slices, rows > 256, 4, 3)
    few = out_features < 8192
    if rows <= 16:
        return Tiles(64, 16, 128, slices, False, 4, 4) if few else Tiles(128, 16, 128, slices, False, 4, 3)
    if rows <= 32:
        return Tiles(64, 32, 64, 1, False, 4, 8) if few and slices == 1 else Tiles(64, 32, 128, slices, False, 4, 4)
    if rows <= 64:
        if few:
            return Tiles(64, 64, 128, slices, False, 4, 4 if slices == 1 else 3)
        return Tiles(128, 64, 128, slices, False, 8, 4)
    return _wide_tiles(rows, out_features, in_features, slices)


def _wide_tiles(rows: int, out_features: int, in_features: int, slices: int) -> Tiles:
    """The largest tiles of which there are about as many as there are multiprocessors."""
    large, busy = triton.cdiv(out_features, 128) * triton.cdiv(rows, 128), gpus.HOPPER.product_tiles
    # For each output, partial sums move 8 bytes per row and slice, and the weight moves 2 bytes per input.
    if large < busy and large * slices >= busy and 16 * rows * slices < in_features:
        return Tiles(128, 128, 64, slices, False, 8, 5)
    if large >= 1024:
        return Tiles(128, 256, 64, slices, True, 8, 3)
    if large >= busy:
        return Tiles(128, 128, 64, slices, True, 8, 5)
    if triton.cdiv(out_features, 128) * triton.cdiv(rows, 64) >= busy:
        return Tiles(128, 64, 64, slices, True, 8, 6)
    return Tiles(64, 64, 64, slices, True, 4, 6)


PACKED_SLICE = 256
"""Slices of a weight in a format begin at multiples of this number of entries; ``block_k`` divides it."""


def packed_slices(out_features: int, in_features: int, *, arranged: bool) -> int:
    """As :func:`num_slices`, for a weight in a format.

    More programs hide each other's latency. Of arranged words, two groups of warps of a program take two slices, and
    only where the summed dimension is long, and there are few tiles of the weight, more programs are worth that their
    sums are merged.
    """
    row_tiles, slices = triton.cdiv(out_features, 64), 1
    if not arranged:
        while row_tiles * slices < 200 and slices < 8 and in_features >= 4 * slices * PACKED_SLICE:
            slices *= 2
        return slices
    if in_features >= 8192 and row_tiles < 2 * _SPLIT_K_TILES:
        return 8
    return 2 if in_features >= 4 * PACKED_SLICE else 1


def packed_tiles(rows: int, out_features: int, in_features: int, itemsize: int = 2, *, arranged: bool = False) -> Tiles:
    """The tiling of ``rows`` rows and a weight ``[out_features, in_features]`` in a format."""
    slices = packed_slices(out_features, in_features, arranged=arranged)
    if itemsize == 4:
        return Tiles(64, 16 if rows <= 16 else 32, 128, slices, rows > 256, 4, 2)
    block_n = min(max(triton.next_power_of_2(rows), 16), 64)
    if rows <= 64:
        return Tiles(64, block_n, 128, slices, False, 4, 4)
    return Tiles(128, 64, 128, slices, True, 8, 3)


NextNorm = tuple[Tensor, float, Tensor, Tensor]
"""The norm after a product: its weight, its offset, and the two tensors that receive its parts."""


@dataclass(slots=True)
class Scales:
    """What a weight in a format has beside its numbers, whose int32 words are the weight of a :class:`Product`.

    Attributes:
        format: the name of the format.
        weight: ``[ceil(O / outputs), groups]``, with the experts in front where there are any.
        outputs: how many rows of the weight have one scale.
        group: how many inputs have one scale.
        dot_k: how many inputs are multiplied at a time.
        arranged: whether numbers stand in the order of matrix instructions.
        x: ``[rows, groups]`` in float32, if rows are quantised, too.
    """

    format: str
    weight: Tensor
    outputs: int
    group: int
    dot_k: int
    arranged: bool = False
    x: Tensor | None = None

    def shared_arguments(self) -> dict[str, Any]:
        """What all kernels of products take."""
        return {
            "weight_scale_ptr": self.weight, "weight_scale_stride": self.weight.stride(-2), "x_scale_ptr": self.x,
            "x_scale_stride": None if self.x is None else self.x.stride(0), "FORMAT": self.format,
            "SCALE_ROWS": self.outputs,
        }  # fmt: skip

    def arguments(self, words: Tensor) -> dict[str, Any]:
        """What the Triton kernels of ``specgraph::linear`` and ``specgraph::expert_linear`` take."""
        aligned = all(size % 4 == 0 for size in (*words.stride()[:-1], words.shape[-1]))
        return self.shared_arguments() | {
            "GROUP": self.group, "DOT_K": self.dot_k, "ALIGNED_WORDS": aligned, "ARRANGED": self.arranged,
        }  # fmt: skip


@dataclass(slots=True)
class Product:
    """What a launch computes: the arguments of the op, rows as matrices, and where the results go."""

    out: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    sum_sq: Tensor | None
    norm_eps: float
    activation: str
    constant_weight: bool
    next_norm: NextNorm | None
    pdl: bool

    @property
    def gated(self) -> bool:
        """Whether the weight consists of gate rows over up rows."""
        return is_gated(self.activation)


def is_gated(activation: str) -> bool:
    """Whether an activation multiplies gate and up."""
    return activation.endswith("_mul")


def norm_groups(features: int) -> int:
    """How many sums of squares a kernel reads of a row: a power of two."""
    return triton.next_power_of_2(triton.cdiv(features, NORM_GROUP))


def as_rows(x: Tensor) -> Tensor:
    """``x`` as a matrix of its rows, whose entries lie side by side."""
    return dense_rows(x.reshape(-1, x.shape[-1]))


def launch_tiles(product: Product, tiling: Tiles | None = None, scales: Scales | None = None) -> None:
    """Fill the results of ``product``, in the tiles that :func:`tiles` or :func:`packed_tiles` names unless others are
    given. With ``scales`` the weight is in a format.
    """
    out, x, weight, residual = product.out, product.x, product.weight, product.residual
    (rows, in_features), weight_rows, pdl = x.shape, weight.shape[0], product.pdl
    choose = tiles if scales is None else functools.partial(packed_tiles, arranged=scales.arranged)
    groups, tiling = norm_groups(in_features), tiling or choose(rows, weight_rows, in_features, x.element_size())
    if product.gated and product.next_norm:
        tiling = tiling._replace(block_o=128)  # 64 gate and 64 up rows give whole norm groups of the result
    # Each operand of the epilogue may take 32 registers of a thread if it is read before the product.
    early = max(groups, tiling.block_o) * tiling.block_n <= 1024 * tiling.warps
    scale, sum_sq = None, product.sum_sq
    if sum_sq is not None and not early:
        scale, sum_sq = norm_scale(sum_sq, in_features, product.norm_eps, pdl), None
    # In large tiles the norm groups cross warps. A separate launch for the norm's parts is cheaper then.
    fused_norm = product.next_norm if tiling.block_o * tiling.block_n <= 4096 else None
    norm_weight, norm_offset, weighted, out_sum_sq = fused_norm or (None, 0.0, None, None)
    alignment = _SLICE_ALIGNMENT if scales is None else PACKED_SLICE
    slices, blocks = slices_of(in_features, tiling.slices, tiling.block_k, alignment)
    tiles_o = triton.cdiv(weight_rows, tiling.block_o)
    num_tiles = tiles_o * triton.cdiv(rows, tiling.block_n)
    serial = tiling.serial or num_tiles > MAX_COUNTERS
    partial = counters = None
    if slices > 1 and not serial:
        partial = x.new_empty(slices, rows, tiles_o * tiling.block_o, dtype=torch.float32)
        counters = arrival_counters(x.device)
    even = in_features % (tiling.block_k * blocks * slices) == 0
    linear_kernel[(num_tiles, 1 if serial else slices)](
        out, x, weight, product.bias, residual, sum_sq, scale, norm_weight, weighted, out_sum_sq, partial,
        counters, rows, out.shape[-1], in_features, x.stride(0), weight.stride(0),
        0 if residual is None else residual.stride(0), product.norm_eps, norm_offset,
        BLOCK_O=tiling.block_o, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k, BLOCKS=blocks, SLICES=slices,
        GROUPS=groups, SPLIT=not serial and slices > 1, EVEN_K=even, ACTIVATION=product.activation.removesuffix("_mul"),
        GATED=product.gated, EARLY=early, PREFETCH=pdl and even and rows <= 64 and _allows_bulk_copies(weight), PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, enable_fp_fusion=False, **launch_options(pdl),
        **({} if scales is None else scales.arguments(weight)),
    )
    if product.next_norm and not fused_norm:
        launch_norm_parts(as_rows(out), product.next_norm, pdl)


def norm_scale(sum_sq: Tensor, features: int, norm_eps: float, pdl: bool) -> Tensor:
    """The scale ``rsqrt(sum(sum_sq) / features + norm_eps)`` of a norm, which multiplies a row or its product.

    Args:
        sum_sq: contiguous ``[..., ceil(features / 64)]`` in float32, as ``norm_parts`` gives them.
        features: the number of entries of a row.
        norm_eps: is added to the mean of the squares.
        pdl: whether to use programmatic dependent launch.

    Returns:
        One entry for each row, ``[rows]`` in float32.
    """
    rows = sum_sq.shape[:-1].numel()
    scale = sum_sq.new_empty(rows)
    norm_scale_kernel[(triton.cdiv(rows, 4),)](
        scale, sum_sq, rows, features, norm_eps, GROUPS=norm_groups(features), BLOCK_N=4, PDL=pdl, num_warps=1,
        enable_fp_fusion=False, **launch_options(pdl),
    )
    return scale


def launch_norm_parts(rows: Tensor, next_norm: NextNorm, pdl: bool | None) -> None:
    """Fill the two parts of the norm of ``rows``, which no product has made."""
    norm_weight, norm_offset, weighted, sum_sq = next_norm
    count, features = rows.shape
    pdl = supports_pdl(rows.device) if pdl is None else pdl
    block_o, block_n = 2 * NORM_GROUP, 1 if count <= 16 else 16
    norm_parts_kernel[(triton.cdiv(features, block_o), triton.cdiv(count, block_n))](
        weighted, sum_sq, rows, norm_weight, count, features, rows.stride(0), norm_offset,
        BLOCK_O=block_o, BLOCK_N=block_n, PDL=pdl, num_warps=4, enable_fp_fusion=False, **launch_options(pdl),
    )


def slices_of(
    in_features: int, wanted: int, block_k: int, alignment: int = _SLICE_ALIGNMENT
) -> tuple[int, int]:
    """The number of slices of the summed dimension, and the number of blocks in each of them."""
    alignment = max(alignment, block_k)
    chunks = triton.cdiv(in_features, alignment)
    slices = min(wanted, chunks)
    return slices, triton.cdiv(chunks, slices) * (alignment // block_k)


def _allows_bulk_copies(weight: Tensor) -> bool:
    """Whether the rows of ``weight`` begin at addresses that the hardware's bulk copies accept."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0
