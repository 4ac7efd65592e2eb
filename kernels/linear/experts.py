"""``specgraph::expert_linear``: a linear layer whose weight is chosen per row, for mixtures of experts.

It computes ``y[s] = weight[e] @ x[s] + bias[e]`` with ``e = expert_ids[s]``, for ``x`` ``[S, I]``, ``weight``
``[E, O, I]`` (or ``[E, I, O]``), ``bias`` ``[E, O]`` and int64 ``expert_ids`` ``[S]``. The result is ``[S, O]`` in the
dtype of ``x``; sums are float32, or float64 for float64. Tracing puts one such op before and one after the activation
of every expert layer, which it leaves in plain ATen. A pass then turns what combines gate and input into the ``gate``
of the op before it: a program of :mod:`specgraph.kernels.pointwise.program`, so that no model's gating has to be known
here. It is computed in registers, from outputs as they would have been stored, and rounded after every function.

A program takes one tile of one expert's outputs and computes it for all rows of that expert. Rows are columns beside
the tile of the weight, so that a weight is read once for :attr:`Tiles.block_n` rows, and not at all for experts without
rows. If there are far fewer rows than experts, there are programs for each row in place of each expert: one lists the
rows of its row's expert by itself, and ends if one of them comes before its own. Otherwise a launch of its own groups
the rows: a program per expert writes the list of its rows and their number. A tile of a gated product has both outputs
of each pair: neighbours if ``pairs``, else half of its lines are of gates and half of inputs.

Along the summed dimension every row is multiplied with the same blocks in the same order, however many columns stand
beside it. So the bits of a row do not depend on the other rows, nor on its place in the list of its expert. Contraction
is off, so that a gate has the bits of its functions one by one.

The technique is known as a grouped matrix product.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.multiply_packed import multiply_packed, packed_rows
from specgraph.kernels.linear.product import Scales
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.pointwise.pointwise_triton import gate_function
from specgraph.kernels.pointwise.program import evaluate, result_dtypes


@dataclass(slots=True)
class ExpertLinear:
    """``y[s] = weight[expert_ids[s]] @ x[s // top_k] + bias[expert_ids[s]]``, ``[S, O]`` in the dtype of ``x``.

    With a ``gate`` the result is that of the program, ``[S, O / 2]``.

    Attributes:
        x: ``[S / top_k, I]``.
        weight: ``[E, O, I]``, or ``[E, I, O]`` if ``transposed``.
        bias: ``[E, O]`` or None.
        expert_ids: int64 ``[S]`` in ``[0, E)``.
        transposed: whether the weight's inputs come before its outputs.
        gate: a program (:mod:`specgraph.kernels.pointwise.program`) that combines the gates ``x0`` and the inputs
            ``x1``, the halves of ``y`` after its rounding, into values of the dtype of ``x``; or nothing.
        pairs: whether a gate and its input are neighbours in ``y``, and not the first ones of its halves.
        top_k: how many neighbouring ids belong to a row of ``x``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    expert_ids: Tensor
    _: KW_ONLY
    transposed: bool = False
    gate: str = ""
    pairs: bool = False
    top_k: int = 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of experts, and of the inputs and the outputs of each."""
        experts, outer, inner = self.weight.shape
        return (experts, outer, inner) if self.transposed else (experts, inner, outer)


class Behind(Protocol):
    """What stands behind a product of experts, whatever its weight is stored as."""

    x: Tensor
    bias: Tensor | None
    expert_ids: Tensor
    gate: str
    pairs: bool
    top_k: int


def expert_linear_reference(given: ExpertLinear) -> Tensor:
    """:class:`ExpertLinear` in plain PyTorch."""
    weight, bias, ids = given.weight, given.bias, given.expert_ids
    x = given.x.repeat_interleave(given.top_k, 0)
    out = x.new_empty(x.shape[0], given.sizes[2])
    for expert in sorted(set(ids.tolist())):
        rows = ids == expert
        matrix = weight[expert].T if given.transposed else weight[expert]
        out[rows] = functional.linear(x[rows], matrix, None if bias is None else bias[expert])
    return gated(out, given.gate, given.pairs)


def gated(y: Tensor, gate: str, pairs: bool) -> Tensor:
    """What the program ``gate`` makes of ``y`` ``[S, O]``, which is rounded: ``[S, O / 2]``, or ``y`` without one."""
    if not gate:
        return y
    halves = (y[:, ::2], y[:, 1::2]) if pairs else y.chunk(2, -1)
    (result,) = evaluate(gate, halves)
    return result.contiguous()


class Tiles(NamedTuple):
    """How a product is tiled. ``block_k`` is a function of the weight alone, and no other field changes the bits.

    The reason is that ``wgmma`` takes 64 rows of the weight and any number of columns, and sums each column by itself.
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


def packed_tiles(rows: int, experts: int, itemsize: int) -> Tiles:
    """The tiling of weights in a format."""
    if itemsize == 2 and rows > 32 * experts:
        return Tiles(64, 64, 128, 4, 3)
    return Tiles(64, 16, 128, 4, 4 if itemsize == 2 else 2)


_GROUP_BLOCK = 512
_EXPERTS_EACH = 4
"""With fewer experts for each row it pays to group the rows by a launch. A step of 48 layers with 128 experts takes
2.68 ms without it and 3.07 with it at 8 rows, and 7.81 and 7.71 at 64 (H200)."""


@triton.jit(do_not_specialize=["num_rows"])
def _group_kernel(order, counts, expert_ids, num_rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """List the rows of one expert and count them. The grid is (experts)."""
    gdc_wait(PDL)
    expert = tl.program_id(0)
    # ---- order[expert, :count] = the rows of the expert, ascending; BLOCK rows at a time
    count = 0
    first = 0
    while first < num_rows:  # not a range, since the interpreter's range takes no bound known only at run time
        row = first + tl.arange(0, BLOCK)
        belongs = tl.load(expert_ids + row, mask=row < num_rows, other=-1) == expert
        index = count + tl.cumsum(belongs.to(tl.int32), axis=0) - 1
        tl.store(order + expert.to(tl.int64) * num_rows + index, row, mask=belongs)
        count += tl.sum(belongs.to(tl.int32), axis=0)
        first += BLOCK
    gdc_launch_dependents(PDL)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["num_rows"])
def _expert_linear_kernel(
    out, x, weight, bias, order, counts, ids, num_rows, stride_e, stride_o, stride_k, INNER: tl.constexpr,
    OUTER: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr, weight_scale_ptr=None, weight_scale_stride=None, x_scale_ptr=None, x_scale_stride=None,
    FORMAT: tl.constexpr = None, GROUP: tl.constexpr = 0, DOT_K: tl.constexpr = 0, SCALE_ROWS: tl.constexpr = 1,
    ALIGNED_WORDS: tl.constexpr = False, ARRANGED: tl.constexpr = False, scale_stride_e=None,
    GATE: tl.constexpr = None, PAIRS: tl.constexpr = False, TOP_K: tl.constexpr = 1, IDS: tl.constexpr = 0,
):
    """One tile of one expert's outputs for all of its rows. The grid is (tiles of outputs, experts).

    With ``IDS``, a power of two that is not below the number of rows, it is (tiles of outputs, rows), and no launch has
    grouped the rows. Weights in a ``FORMAT`` are read as words, and have scales
    (:mod:`specgraph.kernels.linear.multiply_packed`). ``GATE`` is a function of two outputs, which are neighbours if
    ``PAIRS``. A row of x has ``TOP_K`` results.
    """
    gdc_wait(PDL)
    if IDS > 0:
        # ---- which rows are of the expert, and the place of each among them: [IDS]
        some_row = tl.arange(0, IDS)
        expert = tl.load(ids + tl.program_id(1))
        own = (tl.load(ids + some_row, mask=some_row < num_rows, other=-1) == expert).to(tl.int32)
        rank = tl.cumsum(own, axis=0) - 1
        is_first = tl.sum(tl.where(some_row < tl.program_id(1), own, 0), axis=0) == 0
        count = tl.where(is_first, tl.sum(own, axis=0), 0)
    else:
        expert = tl.program_id(1).to(tl.int64)
        count = tl.load(counts + expert).to(tl.int32)
    line = tl.arange(0, BLOCK_O)
    o = tl.program_id(0) * BLOCK_O + line
    HALF: tl.constexpr = BLOCK_O // 2
    GATES: tl.constexpr = OUTER // 2
    if GATE is not None and not PAIRS:
        # Lines past the last gate are of inputs, and results of such lines are not stored. They get no limit, because
        # with one the compiler would not see that lines are neighbours, and would not request their loads ahead.
        o = tl.program_id(0) * HALF + line % HALF + line // HALF * GATES
    k = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_N)
    # Outputs are lines: [BLOCK_O]. The expert's rows are columns, BLOCK_N at a time.
    tile = weight + expert * stride_e + o.to(tl.int64)[:, None] * stride_o
    first = 0
    while first < count:
        real = first + column < count
        if IDS > 0:
            # ---- the row of each column, which is one of [IDS]: [BLOCK_N]
            is_row = (own > 0)[:, None] & (rank[:, None] == (first + column)[None, :])
            row = tl.sum(tl.where(is_row, some_row[:, None], 0), axis=0).to(tl.int64)
        else:
            row = tl.load(order + expert * num_rows + first + column, mask=real, other=0).to(tl.int64)
        if FORMAT is not None:
            # ---- total = weight x^T, rows past the end of a weight being its last: [BLOCK_O, BLOCK_N]
            word_rows, scale_rows = packed_rows(
                weight, weight_scale_ptr, tl.minimum(o, OUTER - 1), stride_o, weight_scale_stride, expert * stride_e,
                expert * scale_stride_e, SCALE_ROWS, ALIGNED_WORDS,
            )
            x_scale_rows = x_scale_ptr + row // TOP_K * x_scale_stride if x_scale_ptr is not None else None
            total = multiply_packed(
                word_rows, scale_rows, x + row // TOP_K * INNER, x_scale_rows, real, 0, INNER, BLOCK_O, BLOCK_N,
                BLOCK_K, (INNER + BLOCK_K - 1) // BLOCK_K, INNER % BLOCK_K == 0, FORMAT, GROUP, DOT_K, ALIGNED_WORDS,
                ARRANGED,
            )
        else:
            # ---- total = weight x^T, BLOCK_K inputs at a time: [BLOCK_O, BLOCK_K] x [BLOCK_K, BLOCK_N]
            total = tl.zeros((BLOCK_O, BLOCK_N), EXACT)
            for start in range(0, INNER, BLOCK_K):
                inside = start + k < INNER
                matrix = tl.load(
                    tile + (start + k).to(tl.int64)[None, :] * stride_k,
                    mask=(o < OUTER)[:, None] & inside[None, :],
                    other=0.0,
                )
                columns = tl.load(
                    x + (row // TOP_K)[None, :] * INNER + (start + k)[:, None],
                    mask=real[None, :] & inside[:, None],
                    other=0.0,
                )
                total = tl.dot(matrix, columns, total, input_precision="ieee", out_dtype=EXACT)
        # ---- out = total + bias: [BLOCK_O, BLOCK_N]
        if bias is not None:
            total += tl.load(bias + expert * OUTER + o, mask=o < OUTER, other=0.0).to(EXACT)[:, None]
        y = total.to(out.dtype.element_ty)
        if GATE is not None:
            # ---- out = gate of the rounded outputs: [HALF, BLOCK_N]
            if PAIRS:
                two = tl.permute(tl.reshape(y, (HALF, 2, BLOCK_N)), (0, 2, 1))
            else:
                two = tl.permute(tl.reshape(y, (2, HALF, BLOCK_N)), (1, 2, 0))
            first_of_two, second = tl.split(two.to(tl.float32))
            combined = GATE(first_of_two, second).to(out.dtype.element_ty)
            place = tl.program_id(0) * HALF + tl.arange(0, HALF)
            address = out + row[None, :] * GATES + place[:, None]
            tl.store(address, combined, mask=real[None, :] & (place < GATES)[:, None])
        else:
            address = out + row[None, :] * OUTER + o[:, None]
            tl.store(address, y, mask=real[None, :] & (o < OUTER)[:, None])
        first += BLOCK_N
    gdc_launch_dependents(PDL)


def expert_linear_triton(given: ExpertLinear) -> Tensor:
    """:class:`ExpertLinear` in one or two kernels, which read ids on the device."""
    experts, inner, outer = given.sizes
    x, weight = given.x, given.weight.mT if given.transposed else given.weight
    out = x.new_empty(len(given.expert_ids), gated_outputs(outer, given.gate))
    tiling = tiles(out.shape[0], experts, inner, x.element_size())
    launch_experts(out, x, weight, given, tiling)
    return out


def launch_experts(
    out: Tensor, x: Tensor, weight: Tensor, given: Behind, tiling: Tiles, scales: Scales | None = None
) -> None:
    """Fill ``out`` with :class:`ExpertLinear` of a weight ``[E, O, I]``, or of its words and ``scales``.

    ``given`` has the other arguments.
    """
    if out.numel() == 0:
        return
    rows, inner, (experts, outer, _) = out.shape[0], x.shape[1], weight.shape
    bias, ids = given.bias, given.expert_ids.contiguous()
    order = counts = None
    few = rows * _EXPERTS_EACH <= experts
    if not few:
        order, counts = ids.new_empty((experts, rows), dtype=torch.int32), ids.new_empty(experts)
        launch(_group_kernel, (experts,), order, counts, ids, rows, BLOCK=_GROUP_BLOCK, num_warps=4)
    packed = {} if scales is None else {**scales.arguments(weight), "scale_stride_e": scales.weight.stride(0)}
    launch(
        _expert_linear_kernel, (triton.cdiv(outer, tiling.block_o), rows if few else experts), out, x.contiguous(),
        weight, None if bias is None else bias.contiguous(), order, counts, ids, rows, *weight.stride(), INNER=inner,
        OUTER=outer, BLOCK_O=tiling.block_o, BLOCK_N=tiling.block_n, BLOCK_K=tiling.block_k,
        EXACT=tl.float64 if x.dtype == torch.float64 else tl.float32, num_warps=tiling.warps, num_stages=tiling.stages,
        GATE=gate_function(given.gate, out.dtype) if given.gate else None, PAIRS=given.pairs, TOP_K=given.top_k,
        IDS=triton.next_power_of_2(experts // _EXPERTS_EACH) if few else 0, enable_fp_fusion=False, **packed,
    )


def _expert_linear_fake(given: ExpertLinear) -> Tensor:
    weight = "E I O" if given.transposed else "E O I"
    check_shapes(given, weight=weight, x="N I", expert_ids="S", bias="E O")
    check_rows(given)
    check_gate(given, given.sizes[2])
    return given.x.new_empty(given.expert_ids.shape[0], gated_outputs(given.sizes[2], given.gate))


def check_rows(given: Behind) -> None:
    """Raise ``ValueError`` unless there are ``top_k`` ids for each row."""
    rows, ids, top_k = given.x.shape[0], given.expert_ids.shape[0], given.top_k
    require(rows * top_k == ids, lambda: f"{rows} rows with top_k = {top_k} need {rows * top_k} expert_ids, not {ids}")


def check_gate(given: Behind, outputs: int) -> None:
    """Raise ``ValueError`` unless the gate is a program for so many outputs, with a result in the dtype of ``x``."""
    gate, dtype = given.gate, given.x.dtype
    if gate:
        require(outputs % 2 == 0, lambda: f"a gate takes pairs of outputs, not {outputs}; leave it out or add one")
        results = result_dtypes(gate, ((dtype, 2),) * 2)
        require(results == (dtype,), lambda: f"gate must give one result in {dtype}, not {results} as {gate!r} does")


def gated_outputs(outputs: int, gate: str) -> int:
    """The features of the result, given those of the weight."""
    return outputs // 2 if gate else outputs


def covers_gate(given: Behind) -> bool:
    """Whether the kernel computes the gate, which is one in float32 or less."""
    return not given.gate or given.x.dtype != torch.float64


EXPERT_LINEAR = declare(
    "expert_linear", ExpertLinear, _expert_linear_fake,
    triton_or_reference(expert_linear_triton, expert_linear_reference, covers=covers_gate),
)
