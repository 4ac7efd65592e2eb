"""``specgraph::packed_expert_linear``: a linear layer for mixtures of experts, with weights in few bits.

It computes ``y[s] = weight[e] @ x[s] + bias[e]`` with ``e = expert_ids[s]``, as ``specgraph::expert_linear`` does, for
a stack of weights in a format (:mod:`specgraph.kernels.packed.format`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import runs_gluon
from specgraph.kernels.linear.experts import (
    ExpertLinear,
    Tiles,
    check_gate,
    check_rows,
    expert_linear_triton,
    gated,
    gated_outputs,
    launch_experts,
    packed_tiles,
)
from specgraph.kernels.linear.linear import hopper
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.packed import cpu
from specgraph.kernels.packed.arranged import Arranged
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.linear import PackedLinear, packed_linear_cpu, packed_linear_reference
from specgraph.kernels.packed.operands import packed_operands, packed_words


@dataclass(slots=True)
class PackedExpertLinear:
    """``y[s] = weight[expert_ids[s]] @ x[s // top_k] + bias[expert_ids[s]]``, ``[S, O]`` in the dtype of ``x``.

    Products and sums are float32, or float64 for float64, and rounded once.

    Attributes:
        x: ``[S / top_k, I]``.
        weight: the tensors of a stack ``[E, O, I]`` in a format, numbers first.
        bias: ``[E, O]`` or None.
        expert_ids: int64 ``[S]`` in ``[0, E)``.
        format: a name in :data:`~specgraph.kernels.packed.formats.FORMATS`.
        gate, pairs, top_k: as of :class:`~specgraph.kernels.linear.experts.ExpertLinear`.
    """

    x: Tensor
    weight: list[Tensor]
    bias: Tensor | None
    expert_ids: Tensor
    _: KW_ONLY
    format: str
    gate: str = ""
    pairs: bool = False
    top_k: int = 1


def packed_expert_linear_reference(given: PackedExpertLinear) -> Tensor:
    """:class:`PackedExpertLinear` in plain PyTorch."""
    return _one_after_another(given, packed_linear_reference)


def packed_expert_linear_cpu(given: PackedExpertLinear) -> Tensor:
    """The same by a function that reads weights as they are stored."""
    return _one_after_another(given, packed_linear_cpu)


def _one_after_another(given: PackedExpertLinear, product: Callable[[PackedLinear], Tensor]) -> Tensor:
    """The products of one expert after another."""
    x, ids = given.x.repeat_interleave(given.top_k, 0), given.expert_ids
    out = x.new_empty(len(ids), given.weight[0].shape[1])
    for expert in sorted(set(ids.tolist())):
        chosen = ids == expert
        weight = [part[expert] for part in given.weight]
        bias = None if given.bias is None else given.bias[expert]
        out[chosen] = product(PackedLinear(x[chosen], weight, bias, format=given.format))
    return gated(out, given.gate, given.pairs)


def _cpu_covers(given: PackedExpertLinear) -> bool:
    return cpu.covers(format_of(given.format), given.x, given.weight)


def packed_expert_linear_triton(given: PackedExpertLinear, *, tiling: Tiles | None = None) -> Tensor:
    """:class:`PackedExpertLinear` by the kernels of ``specgraph::expert_linear``.

    They read the weights as they are stored. For groups of a size that they do not take, whole weights are made in
    float32.
    """
    form, x, weight = format_of(given.format), given.x, given.weight
    operands = packed_operands(form, x, weight)
    if operands is None:
        rows, dense = form.quantise_rows(x).float(), form.dequantise(weight, torch.float32)
        bias = None if given.bias is None else given.bias.float()
        product = expert_linear_triton(ExpertLinear(rows, dense, bias, given.expert_ids, top_k=given.top_k)).to(x.dtype)
        return gated(product, given.gate, given.pairs)
    out = x.new_empty(len(given.expert_ids), gated_outputs(weight[0].shape[1], given.gate))
    factors, words, scales = operands
    tiling = tiling or packed_tiles(out.shape[0], words.shape[0], factors.element_size())
    launch_experts(out, factors, words, given, tiling, scales)
    return out


def packed_expert_linear_hopper(given: PackedExpertLinear) -> Tensor:
    """The same by the kernel for few rows on Hopper, which gives the bits of :func:`packed_expert_linear_triton`."""
    x, weight = given.x, given.weight
    operands = packed_words(format_of(given.format), x.shape[1], x.dtype, weight)
    assert operands is not None, "_hopper_covers has seen them"
    out = x.new_empty(len(given.expert_ids), gated_outputs(weight[0].shape[1], given.gate))
    hopper("hopper_experts").launch_experts(out, x, operands[0], given, operands[1])
    return out


def _hopper_covers(given: PackedExpertLinear) -> bool:
    """Few rows of 16-bit values that are not quantised, and arranged words."""
    x, form = given.x, format_of(given.format)
    if not isinstance(form, Arranged) or form.quantises_rows or x.numel() == 0 or not runs_gluon(x.device):
        return False
    found = packed_words(form, x.shape[1], x.dtype, given.weight)
    return found is not None and hopper("hopper_experts").covers_experts(x, len(given.expert_ids), *found)


def _packed_expert_linear_fake(given: PackedExpertLinear) -> Tensor:
    form, x = format_of(given.format), given.x
    check_shapes(given, x="N I", expert_ids="S")
    check_rows(given)
    outputs, inputs = form.check(given.weight)
    numbers, bias = given.weight[0], given.bias
    require(numbers.dim() == 3, lambda: f"numbers are {list(numbers.shape)}; they must be a stack of matrices")
    require(x.shape[-1] == inputs, lambda: f"x has {x.shape[-1]} inputs, and the weight {inputs}: they must agree")
    if bias is not None:
        wanted = numbers.shape[0], outputs
        require(tuple(bias.shape) == wanted, lambda: f"bias is {list(bias.shape)}; it must be {list(wanted)}")
    check_gate(given, outputs)
    return x.new_empty(given.expert_ids.shape[0], gated_outputs(outputs, given.gate))


PACKED_EXPERT_LINEAR = declare(
    "packed_expert_linear", PackedExpertLinear, _packed_expert_linear_fake,
    (
        Variant("hopper", packed_expert_linear_hopper, batch_invariant=True, covers=_hopper_covers),
        *triton_or_reference(
            packed_expert_linear_triton, packed_expert_linear_reference, covers=not_float64("x"),
            cpu=packed_expert_linear_cpu, cpu_covers=_cpu_covers,
        ),
    ),
)
packed_expert_linear = PACKED_EXPERT_LINEAR.function
