"""``specgraph::linear`` for many rows on Hopper: when its kernel is used, its tiles, and its launch.

It computes what :mod:`specgraph.kernels.linear.hopper` computes for few rows, for bfloat16 and float16 with float32
sums, and has the same bits. :mod:`specgraph.kernels.linear.hopper_wide_kernel` holds the kernel.
"""

# Gluon has no types.
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.linear.hopper import descriptor, is_reachable
from specgraph.kernels.linear.hopper_wide_kernel import linear_wide_kernel
from specgraph.kernels.linear.product import Product, as_rows, launch_norm_parts, norm_scale, num_slices, slices_of

BLOCK_N = 128
BLOCK_K = 64


class WidePlan(NamedTuple):
    """How a product is cut. ``slices`` and ``blocks`` decide its bits."""

    tile_o: int  # rows of the weight in a tile, or gate rows
    stages: int
    slices: int
    blocks: int


@functools.cache
def plan(rows: int, weight_rows: int, in_features: int, gated: bool) -> WidePlan:
    """The tiles of a shape: those of 256 rows of the weight, or of 128, whichever are done first.

    Of two small tiles in place of a large one, operands are read from shared memory more often, which took 8% longer
    on an H200. The sums of two slices of a large tile do not fit the registers.
    """
    slices, blocks = slices_of(in_features, num_slices(weight_rows, in_features), BLOCK_K)
    rounds = {
        width: triton.cdiv(triton.cdiv(weight_rows, width) * triton.cdiv(rows, BLOCK_N), gpus.HOPPER.multiprocessors)
        for width in (256, 128)
    }
    large = slices == 1 and 2 * rounds[256] <= 1.08 * rounds[128]
    width, stages = (256, 4) if large else (128, 6)
    return WidePlan(width // 2 if gated else width, stages, slices, blocks)


def covers(x: Tensor, weight: Tensor, gated: bool) -> bool:
    """Whether :func:`launch` can compute a product, and other kernels are not faster.

    The accelerator reads and writes rows that begin at multiples of 16 bytes.
    """
    rows, outputs = x.numel() // x.shape[-1], weight.shape[0]
    if rows < BLOCK_N or x.dtype not in (torch.bfloat16, torch.float16):
        return False
    if rows <= 2 * BLOCK_N and triton.cdiv(outputs, 256) * triton.cdiv(rows, BLOCK_N) < gpus.HOPPER.product_tiles:
        return False
    return x.shape[-1] % 8 == 0 and outputs % (16 if gated else 8) == 0 and is_reachable(x) and is_reachable(weight)


def launch(product: Product) -> None:
    """Fill the results of a product that :func:`covers` has agreed to.

    Programs of the next launch have no room beside these, so none starts early. Where they did, a norm behind the
    product took 20 us instead of 8.
    """
    out, x, weight, residual = product.out, product.x, product.weight, product.residual
    (rows, in_features), out_features = x.shape, out.shape[-1]
    tile_o, stages, slices, blocks = plan(rows, weight.shape[0], in_features, product.gated)
    scale = None
    if product.sum_sq is not None:
        scale = norm_scale(product.sum_sq, in_features, product.norm_eps, product.pdl)
    tiles = triton.cdiv(rows, BLOCK_N) * triton.cdiv(out_features, tile_o)
    linear_wide_kernel[(min(tiles, gpus.HOPPER.multiprocessors),)](
        descriptor(x, BLOCK_N, BLOCK_K), descriptor(weight, tile_o, BLOCK_K),
        descriptor(out.view(rows, out_features), BLOCK_N, min(tile_o, 128)), product.bias, residual, scale, rows,
        out_features, 0 if residual is None else residual.stride(0), BLOCKS=blocks, SLICES=slices, STAGES=stages,
        ACTIVATION=product.activation.removesuffix("_mul"), GATED=product.gated, num_warps=8, maxnreg=168,
        enable_fp_fusion=False,
    )
    if product.next_norm:
        # In the epilogue, the sums of groups took four times as long as this launch.
        launch_norm_parts(as_rows(out), product.next_norm, False)
