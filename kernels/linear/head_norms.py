"""``specgraph::rms_norms``: the RMS norms of several groups of heads in one launch.

Models norm the heads of queries and of keys, each with a weight of its own; a block drafter norms the keys of all of
its layers. One by one, these are launches of a microsecond or more that norm a few kilobytes each, and a layer that
loads weights ahead of its input cannot start before they have ended.

A program takes one head of one row, and computes what :mod:`specgraph.kernels.linear.norm` computes for a row of that
width, with the same bits.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.norm import RmsNorm, rms_norm_reference, rms_norm_row
from specgraph.kernels.linear.strides import aligned, alignment_of, row_options
from specgraph.kernels.ops import declare, triton_or_reference


@dataclass(slots=True)
class RmsNorms:
    """:class:`~specgraph.kernels.linear.norm.RmsNorm` of each of several inputs.

    The results are contiguous, and have the shapes and the dtype of the inputs.

    Attributes:
        inputs: one or more ``[B, T, heads, D]``, of one dtype. They may differ in the number of heads.
        weights: ``[D]`` each, one for every input.
        eps, offset: as for one norm.
    """

    inputs: list[Tensor]
    weights: list[Tensor]
    _: KW_ONLY
    eps: float
    offset: float = 0.0


def rms_norms_reference(given: RmsNorms) -> list[Tensor]:
    """:class:`RmsNorms` in plain PyTorch."""
    _check(given)
    pairs = zip(given.inputs, given.weights, strict=True)
    return [rms_norm_reference(RmsNorm(x, weight, eps=given.eps, offset=given.offset)) for x, weight in pairs]


@triton.jit
def _rms_norms_kernel(
    outs, inputs, weights, HEADS: tl.constexpr, STRIDES: tl.constexpr, APART: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of one row per program. The grid is (rows, heads of all inputs)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    begin: tl.constexpr = 0
    for i in tl.static_range(len(inputs)):
        if (head >= begin) & (head < begin + HEADS[i]):
            # The product with the constant ALIGNMENT tells the compiler what divides it.
            x = inputs[i] + (row * STRIDES[i] + (head - begin) * APART[i]) * ALIGNMENT
            normed = rms_norm_row(x, weights[i], EPS, OFFSET, WIDTH, BLOCK, EXACT)
            out = outs[i] + (row * HEADS[i] + head - begin) * WIDTH + column
            tl.store(out, normed.to(outs[i].dtype.element_ty), mask=column < WIDTH)
        begin += HEADS[i]


def rms_norms_triton(given: RmsNorms) -> list[Tensor]:
    """:class:`RmsNorms` in one kernel."""
    outs = _rms_norms_fake(given)
    batch, rows, _, width = outs[0].shape
    alignment = alignment_of(width)
    inputs = [placed_heads(x, alignment) for x in given.inputs]
    heads = tuple(x.shape[2] for x in inputs)
    launch(
        _rms_norms_kernel, (batch * rows, sum(heads)), tuple(outs), tuple(inputs),
        tuple(aligned(weight) for weight in given.weights), HEADS=heads,
        STRIDES=tuple(x.stride(1) // alignment for x in inputs), APART=tuple(x.stride(2) // alignment for x in inputs),
        EPS=given.eps, OFFSET=given.offset, **row_options(width, outs[0].dtype),
    )
    return outs


def placed_heads(x: Tensor, alignment: int) -> Tensor:
    """``x`` ``[B, T, heads, D]``, or a copy, with rows at one distance from each other, and in each its heads.

    Between the heads may be others, such as gates. All begin at multiples of ``alignment``, so that kernels may assume
    it of all inputs. Their distances are constants of a kernel, and so must not depend on the number of rows.
    """
    rows, heads, width = x.shape[1:]
    inside = x.stride(2) == width or heads * x.stride(2) <= x.stride(1)
    dense = x.stride(3) == 1 and inside and (len(x) == 1 or x.stride(0) == rows * x.stride(1))
    placed = x.stride(1) % alignment == x.stride(2) % alignment == 0 and (alignment == 1 or x.data_ptr() % 16 == 0)
    return x if dense and placed else x.clone(memory_format=torch.contiguous_format)


def _check(given: RmsNorms) -> None:
    inputs, weights = given.inputs, given.weights
    require(len(inputs) == len(weights), lambda: f"{len(inputs)} inputs have {len(weights)} weights")
    check_shapes(given, inputs="B T * D", weights="D")
    dtypes = sorted({str(x.dtype) for x in inputs})
    fits = len(dtypes) == 1 and inputs[0].dtype.is_floating_point
    require(fits, lambda: f"inputs are of one floating-point dtype, not {' and '.join(dtypes)}")


def _rms_norms_fake(given: RmsNorms) -> list[Tensor]:
    _check(given)
    return [x.new_empty(x.shape) for x in given.inputs]


RMS_NORMS = declare("rms_norms", RmsNorms, _rms_norms_fake, triton_or_reference(rms_norms_triton, rms_norms_reference))
