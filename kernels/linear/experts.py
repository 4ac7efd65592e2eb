"""``specgraph::expert_linear``: a linear layer whose weight is chosen per row, the two halves of a mixture of experts.

Tracing puts one before and one after the activation of every expert layer, so the activation itself stays plain ATen
and no model's gating has to be known here.

On a GPU rows are first grouped by expert, on the device: a list of row numbers and their count for each expert. Then a
program takes one tile of one expert's outputs through all rows of that expert, as columns beside a tile of the weight,
so that a weight is read once for :attr:`Tiles.block_n` rows and not at all for experts without rows. Along the summed
dimension every row meets the same blocks in the same order, whichever columns stand beside it and however many.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.linear import library
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require

torch.library.define(
    "specgraph::expert_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor expert_ids, *, bool transposed=False, bool bitwise=True) -> Tensor",
)


def expert_linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, *, transposed: bool = False,
    bitwise: bool = True,
) -> Tensor:  # fmt: skip
    """``y[s] = weight[expert_ids[s]] @ x[s] + bias[expert_ids[s]]``.

    Args:
        x: ``[S, I]``.
        weight: ``[E, O, I]``, or ``[E, I, O]`` if ``transposed``.
        bias: ``[E, O]`` or None.
        expert_ids: int64 ``[S]`` in ``[0, E)``.
        bitwise: whether a row's bits must not depend on the other rows. If not, a GPU runs a library's product where
            :mod:`specgraph.kernels.linear.library` knows it to be faster. On a CPU it makes no difference.

    Returns:
        ``[S, O]`` in the dtype of ``x``.
    """
    out = x.new_empty(x.shape[0], weight.shape[2] if transposed else weight.shape[1])
    for expert in sorted(set(expert_ids.tolist())):
        rows = expert_ids == expert
        matrix = weight[expert].T if transposed else weight[expert]
        out[rows] = torch.nn.functional.linear(x[rows], matrix, None if bias is None else bias[expert])
    return out


class Tiles(NamedTuple):
    """How a product is cut. ``block_k`` is a function of the weight alone; the others do not change the bits.

    ``wgmma`` takes 64 rows of the weight and any number of columns, and sums each column by itself.
    """

    block_o: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def tiles(rows: int, experts: int, inner: int, itemsize: int) -> Tiles:
    """The tiling for ``rows`` rows over ``experts`` experts whose weights take ``inner`` features."""
    block_k = min(max(triton.next_power_of_2(inner), 16), 128 if itemsize == 2 else 32)
    if itemsize == 2 and rows > 32 * experts:
        return Tiles(128, 64, block_k, 8, 3)
    return Tiles(64, 16, block_k, 4, 4 if itemsize == 2 else 2)


_GROUP_BLOCK = 512


@triton.jit(do_not_specialize=["num_rows"])
def _group_kernel(order, counts, expert_ids, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    count = 0
    first = 0
    while first < num_rows:  # the interpreter's range takes no bound that is known at run time only
        row = first + tl.arange(0, BLOCK)
        mine = tl.load(expert_ids + row, mask=row < num_rows, other=-1) == expert
        place = count + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(order + expert.to(tl.int64) * num_rows + place, row, mask=mine)
        count += tl.sum(mine.to(tl.int32), axis=0)
        first += BLOCK
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_rows"])
def _expert_linear_kernel(
    out, x, weight, bias, order, counts, num_rows, stride_e, stride_o, stride_k, INNER: tl.constexpr,
    OUTER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(1).to(tl.int64)
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_N)
    count = tl.load(counts + expert)
    tile = weight + expert * stride_e + o.to(tl.int64)[:, None] * stride_o
    first = 0
    while first < count:
        real = first + column < count
        row = tl.load(order + expert * num_rows + first + column, mask=real, other=0).to(tl.int64)
        total = tl.zeros((BLOCK_O, BLOCK_N), EXACT)
        for start in range(0, INNER, BLOCK_K):
            inside = start + k < INNER
            matrix = tl.load(
                tile + (start + k).to(tl.int64)[None, :] * stride_k,
                mask=(o < OUTER)[:, None] & inside[None, :], other=0.0,
            )  # fmt: skip
            columns = tl.load(
                x + row[None, :] * INNER + (start + k)[:, None], mask=real[None, :] & inside[:, None], other=0.0
            )
            total = tl.dot(matrix, columns, total, input_precision="ieee", out_dtype=EXACT)
        if bias is not None:
            total += tl.load(bias + expert * OUTER + o, mask=o < OUTER, other=0.0).to(EXACT)[:, None]
        place = out + row[None, :] * OUTER + o[:, None]
        tl.store(place, total.to(out.dtype.element_ty), mask=real[None, :] & (o < OUTER)[:, None])
        first += BLOCK_N
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, *, transposed: bool = False,
    bitwise: bool = True,
) -> Tensor:  # fmt: skip
    """:func:`expert_linear_reference` in two kernels of ours, which read ids on the device, or by a library."""
    if not bitwise and library.is_faster_for_experts(x, weight, transposed):
        return library.expert_linear(x, weight, bias, expert_ids, transposed=transposed)
    (experts, inner, outer), (stride_e, stride_k, stride_o) = weight.shape, weight.stride()
    if not transposed:
        inner, outer, stride_k, stride_o = outer, inner, stride_o, stride_k
    rows = x.shape[0]
    out = x.new_empty(rows, outer)
    if out.numel() == 0:
        return out
    order, counts = expert_ids.new_empty((experts, rows), dtype=torch.int32), expert_ids.new_empty(experts)
    pdl = supports_pdl(x.device)
    _group_kernel[(experts,)](
        order, counts, expert_ids.contiguous(), rows, BLOCK=_GROUP_BLOCK, PDL=pdl, num_warps=4, **launch_options(pdl)
    )
    cut = tiles(rows, experts, inner, x.element_size())
    _expert_linear_kernel[(triton.cdiv(outer, cut.block_o), experts)](
        out, x.contiguous(), weight, None if bias is None else bias.contiguous(), order, counts, rows,
        stride_e, stride_o, stride_k, INNER=inner, OUTER=outer, BLOCK_O=cut.block_o, BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k, EXACT=tl.float64 if x.dtype == torch.float64 else tl.float32, PDL=pdl,
        num_warps=cut.warps, num_stages=cut.stages, **launch_options(pdl),
    )  # fmt: skip
    return out


def _expert_linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, expert_ids: Tensor, *, transposed: bool = False,
    bitwise: bool = True,
) -> Tensor:  # fmt: skip
    inner, outer = (weight.shape[1], weight.shape[2]) if transposed else (weight.shape[2], weight.shape[1])
    require(x.shape[1] == inner, lambda: f"x has {x.shape[1]} features, the experts take {inner}")
    require(expert_ids.shape == x.shape[:1], lambda: "expert_ids must give one expert per row of x")
    if bias is not None:
        require(bias.shape == (weight.shape[0], outer), lambda: "bias must be [E, O]")
    return x.new_empty(x.shape[0], outer)


register("expert_linear", cpu=expert_linear_reference, cuda=expert_linear, fake=_expert_linear_fake)
