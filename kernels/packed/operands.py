"""What the kernels of products read of rows and of a weight in a format."""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import dense_rows, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.product import Scales, as_rows
from specgraph.kernels.packed.arranged import Arranged
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.fp8 import BLOCK, LARGEST
from specgraph.kernels.packed.mxfp4 import Mxfp4

LARGEST_DOT = 128
"""How many inputs are multiplied at a time, at most."""
LEAST_DOT = 32
"""How many they are at least: a word for each lane of a quad."""


def packed_operands(form: Format, x: Tensor, weight: Sequence[Tensor]) -> tuple[Tensor, Tensor, Scales] | None:
    """The rows, the words and the scales of a product, or None if the kernels do not take the weight.

    Args:
        form: the format.
        x: ``[..., I]`` in bfloat16, float16 or float32.
        weight: the tensors of a weight ``[..., O, I]``.
    """
    found = packed_words(form, x.shape[-1], x.dtype, weight)
    if found is None:
        return None
    words, scales = found
    if not form.quantises_rows:
        return x, words, scales
    rows, scales.x = quantised_rows(x)
    return rows, words, scales


def packed_words(
    form: Format, inputs: int, dtype: torch.dtype, weight: Sequence[Tensor]
) -> tuple[Tensor, Scales] | None:
    """What :func:`packed_operands` gives of a weight with so many inputs, for rows of ``dtype``."""
    if not form.expanded:
        return None
    scale = dense_rows(weight[1])
    outputs, group = form.block(inputs, scale)
    dot_k = math.gcd(group, LARGEST_DOT)
    arranged = isinstance(form, Arranged)
    if isinstance(form, Mxfp4):
        if dtype != torch.float16:  # which would round a number times a scale
            dot_k = 4 * group
        group *= 4 if arranged else 1  # an element has the scales of four
    numbers = dense_rows(weight[0])
    per_word = 4 // numbers.element_size() * form.per_element
    if dot_k < LEAST_DOT or inputs % per_word != 0 or scale.dtype == torch.float64 or not _holds_words(numbers):
        return None
    name = form.published.name if isinstance(form, Arranged) else form.name
    return numbers.view(torch.int32), Scales(name, scale, outputs, group, dot_k, arranged)


def _holds_words(numbers: Tensor) -> bool:
    """Whether numbers can be read as int32."""
    size = numbers.element_size()
    places = (numbers.storage_offset(), *numbers.stride()[:-1])
    return size == 4 or all(place * size % 4 == 0 for place in places)


@triton.jit(do_not_specialize=["rows"])
def quantise_rows_kernel(
    numbers, scales, x, x_stride, rows, features, LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantise rows to numbers e4m3 and a scale for each block. The grid is (blocks, groups of rows)."""
    block = tl.program_id(0)
    n = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    k = block * BLOCK + tl.arange(0, BLOCK)
    real = n < rows
    mask = real[:, None] & (k < features)[None, :]
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    # ---- values, a block of every row: [ROWS, BLOCK]
    values = tl.load(x + n.to(tl.int64)[:, None] * x_stride + k[None, :], mask=mask, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(values), axis=1)
    scale = tl.where(top > 0.0, tl.div_rn(top, tl.full(top.shape, LARGEST, tl.float32)), 1.0)
    values = tl.div_rn(values, tl.broadcast_to(scale[:, None], (ROWS, BLOCK)))
    values = tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values))
    # A number e4m3 is a multiple of 2 ** -3 of its power of two, and of 2 ** -9. Sums with 1.5 * 2 ** 23 times that
    # are rounded there, half to even.
    exponent = tl.maximum((values.to(tl.int32, bitcast=True) >> 23) & 255, 121)
    large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    values = (values + large) - large
    tl.store(numbers + n.to(tl.int64)[:, None] * features + k[None, :], values.to(tl.float16), mask=mask)
    tl.store(scales + n.to(tl.int64) * tl.num_programs(0) + block, scale, mask=real)


def quantised_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """What :meth:`~specgraph.kernels.packed.fp8.Fp8Blocks.quantise_rows` multiplies.

    Returns:
        The numbers of rows ``[rows, I]``, in float16, which has all of them, and their scales ``[rows, ceil(I / 128)]``
        in float32.
    """
    given = as_rows(x)
    rows, features = given.shape
    blocks = triton.cdiv(features, BLOCK)
    numbers = given.new_empty((rows, features), dtype=torch.float16)
    scales = given.new_empty((rows, blocks), dtype=torch.float32)
    at_once = 1 if rows <= 64 else 8
    launch(
        quantise_rows_kernel, (blocks, triton.cdiv(rows, at_once)), numbers, scales, given, given.stride(0), rows,
        features, LARGEST=LARGEST, ROWS=at_once, BLOCK=BLOCK, num_warps=1 if at_once == 1 else 4,
        enable_fp_fusion=False,
    )
    return numbers, scales
