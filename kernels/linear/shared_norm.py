"""``specgraph::mean_squares`` and ``specgraph::rms_norm_part``: RMS norms of rows whose features several devices share.

A device has ``x_d`` ``[..., H / D]`` of a row ``x`` ``[..., H]`` that ``D`` devices share. In float32 (float64 stays)::

    mean_squares   mean(x_d ** 2) / D                         what the device adds to mean(x ** 2)
    rms_norm_part  x_d * rsqrt(mean + eps) * (weight + offset)    with the sum of these over all devices

``mean_squares`` takes several such rows, as those of queries and of keys, so that one ``specgraph::all_reduce_rank``
adds up the means of all of them. A program takes a whole row. The order of a row's sum is therefore a function of the
widths and the dtype alone, and does not depend on other rows.

Source: Zhang and Sennrich 2019, arXiv 1910.07467.
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
from specgraph.kernels.linear.head_norms import placed_heads
from specgraph.kernels.linear.norm import exact_dtype
from specgraph.kernels.linear.strides import Rows, aligned, alignment_of, row_options
from specgraph.kernels.ops import declare, triton_or_reference


@dataclass(slots=True)
class MeanSquares:
    """``mean(x ** 2) / count`` over the last dimension of each input, side by side: ``[B, T, N]``, contiguous.

    It is computed and returned in float32; in float64 for inputs of that dtype.

    Attributes:
        inputs: ``N`` tensors ``[B, T, H_i]`` of one floating-point dtype.
        count: by what the means are divided: the number of devices that share a row.
    """

    inputs: list[Tensor]
    _: KW_ONLY
    count: int


@dataclass(slots=True)
class RmsNormPart:
    """``x * rsqrt(means[..., place] + eps) * (weight + offset)``, the RMS norm of some features of a row.

    Computed in float32 (float64 stays) and rounded once, to the dtype of ``x``. The result is ``[..., H]``, contiguous.

    Attributes:
        x: ``[..., H]``.
        weight: ``[H]`` or None for 1, without the offset.
        means: ``[..., N]`` in float32, or in float64 if ``x`` is: means of squares of whole rows.
        place: which of the ``N`` means is that of ``x``.
        eps, offset: as for :class:`~specgraph.kernels.linear.norm.RmsNorm`.
    """

    x: Tensor
    weight: Tensor | None
    means: Tensor
    _: KW_ONLY
    place: int
    eps: float
    offset: float = 0.0


def mean_squares_reference(given: MeanSquares) -> Tensor:
    """:class:`MeanSquares` in plain PyTorch."""
    means = [x.to(exact_dtype(x.dtype)).square().mean(-1, keepdim=True) for x in given.inputs]
    return torch.cat(means, -1) / given.count


def rms_norm_part_reference(given: RmsNormPart) -> Tensor:
    """:class:`RmsNormPart` in plain PyTorch."""
    x, place = given.x, given.place
    normed = x.to(exact_dtype(x.dtype)) * torch.rsqrt(given.means[..., place : place + 1] + given.eps)
    if given.weight is not None:
        normed = normed * (given.weight.to(normed.dtype) + given.offset)
    return normed.to(x.dtype).contiguous()


@triton.jit(do_not_specialize=["nothing"])
def _mean_squares_kernel(
    out, inputs, nothing, STRIDES: tl.constexpr, WIDTHS: tl.constexpr, ALIGNMENTS: tl.constexpr, COUNT: tl.constexpr,
    BLOCK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of one input per program. The grid is (rows, inputs)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for i in tl.static_range(len(inputs)):
        if tl.program_id(1) == i:
            # The compiler knows by what a stride can be divided, and the order of a sum follows from that. Behind the
            # addition of nothing, it can count on the alignment alone.
            x = inputs[i] + row * STRIDES[i] * ALIGNMENTS[i] + nothing * ALIGNMENTS[i]
            values = tl.load(x + column, mask=column < WIDTHS[i], other=0.0).to(EXACT)
            tl.store(out + row * len(inputs) + i, tl.sum(values * values, axis=0) / WIDTHS[i] / COUNT)


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _rms_norm_part_kernel(
    out, x, weight, means, group, outer, inner, NUMBERS: tl.constexpr, PLACE: tl.constexpr, EPS: tl.constexpr,
    OFFSET: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row per program."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    x += (row // group * outer + row % group * inner) * ALIGNMENT
    values = tl.load(x + column, mask=inside, other=0.0).to(EXACT)
    # ---- x * rsqrt(mean + eps) * (weight + offset): [BLOCK]
    normed = values * tl.rsqrt(tl.load(means + row * NUMBERS + PLACE) + EPS)
    if weight is not None:
        normed = normed * (tl.load(weight + column, mask=inside, other=0.0).to(EXACT) + OFFSET)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


def mean_squares_triton(given: MeanSquares) -> Tensor:
    """:class:`MeanSquares` in one kernel."""
    out, widths = _mean_squares_fake(given), tuple(x.shape[-1] for x in given.inputs)
    alignments = tuple(map(alignment_of, widths))
    rows = [placed_heads(x.unsqueeze(2), alignment) for x, alignment in zip(given.inputs, alignments, strict=True)]
    sizes = row_options(max(widths), given.inputs[0].dtype)
    launch(
        _mean_squares_kernel, (out.shape[:-1].numel(), len(rows)), out, tuple(rows), 0,
        STRIDES=tuple(x.stride(1) // alignment for x, alignment in zip(rows, alignments, strict=True)), WIDTHS=widths,
        ALIGNMENTS=alignments, COUNT=given.count, **{name: sizes[name] for name in ("BLOCK", "EXACT", "num_warps")},
    )  # fmt: skip
    return out


def rms_norm_part_triton(given: RmsNormPart) -> Tensor:
    """:class:`RmsNormPart` in one kernel."""
    out, x, means = given.x.new_empty(given.x.shape), Rows.of(given.x), given.means.contiguous()
    launch(
        _rms_norm_part_kernel, (x.count,), out, x.x, aligned(given.weight), means, *x.arguments(),
        NUMBERS=means.shape[-1], PLACE=given.place, EPS=given.eps, OFFSET=given.offset,
        **row_options(out.shape[-1], out.dtype),
    )  # fmt: skip
    return out


def _mean_squares_fake(given: MeanSquares) -> Tensor:
    first = given.inputs[0]
    check_shapes(given, inputs="B T *")
    alike = first.is_floating_point() and all(x.dtype == first.dtype for x in given.inputs)
    require(alike, lambda: f"inputs must be of one floating-point dtype, not {[str(x.dtype) for x in given.inputs]}")
    require(given.count > 0, lambda: f"count must be at least 1, not {given.count}")
    return first.new_empty((*first.shape[:-1], len(given.inputs)), dtype=exact_dtype(first.dtype))


def _rms_norm_part_fake(given: RmsNormPart) -> Tensor:
    x, means = given.x, given.means
    require(x.dim() >= 1 and x.dtype.is_floating_point, lambda: f"x must be float [..., H], not {x.dtype} {x.dim()}-d")
    check_shapes(given, x="... H", weight="H", means="... N")
    rows_of_x = means.dtype == exact_dtype(x.dtype) and means.shape[:-1] == x.shape[:-1]
    fits = rows_of_x and 0 <= given.place < means.shape[-1]
    require(
        fits,
        lambda: f"means must be {exact_dtype(x.dtype)} {[*x.shape[:-1]]} and more than {given.place} numbers, not "
        f"{means.dtype} {list(means.shape)}",
    )
    return x.new_empty(x.shape)


MEAN_SQUARES = declare(
    "mean_squares", MeanSquares, _mean_squares_fake, triton_or_reference(mean_squares_triton, mean_squares_reference)
)
RMS_NORM_PART = declare(
    "rms_norm_part", RmsNormPart, _rms_norm_part_fake,
    triton_or_reference(rms_norm_part_triton, rms_norm_part_reference),
)  # fmt: skip
