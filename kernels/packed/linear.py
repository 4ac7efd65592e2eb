"""``specgraph::packed_linear``: a linear layer whose weight is stored in few bits.

It computes what :mod:`specgraph.kernels.linear.linear` computes, ``activation(x @ weight.T * scale + bias) +
residual``, in float32 (float64 for float64) and rounded once to the dtype of ``x``, for a weight in a format
(:mod:`specgraph.kernels.packed.format`). The weight is not rounded to that dtype before it is multiplied: numbers and
scales are taken as they are stored.
"""

from __future__ import annotations

import functools
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.launch import dense_rows, runs_gluon
from specgraph.kernels.linear.linear import (
    Linear,
    LinearNorm,
    NormParts,
    filled,
    finished,
    hopper,
    linear_fake,
    linear_norm_fake,
    linear_reference,
    linear_triton,
    norm_parts_triton,
    with_norm_parts,
)
from specgraph.kernels.linear.product import Tiles, is_gated, launch_tiles
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.packed import cpu
from specgraph.kernels.packed.arranged import Arranged
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.operands import packed_operands, packed_words


@dataclass(slots=True)
class PackedLinear:
    """``activation(x @ weight.T * scale + bias) + residual``, in float32 (float64 for float64), rounded once.

    The result is ``[..., O]`` in the dtype of ``x``. Arguments that are not named here are those of
    :class:`~specgraph.kernels.linear.linear.Linear`.

    Attributes:
        x: ``[..., I]``.
        weight: the tensors of a weight ``[O, I]`` in a format, numbers first.
        format: a name in :data:`~specgraph.kernels.packed.formats.FORMATS`.
    """

    x: Tensor
    weight: list[Tensor]
    bias: Tensor | None = None
    residual: Tensor | None = None
    sum_sq: Tensor | None = None
    _: KW_ONLY
    format: str
    norm_eps: float = 0.0
    activation: str = "none"
    constant_weight: bool = True

    def dense(self, weight: Tensor) -> Linear:
        """The same with a dense weight."""
        return Linear(
            self.x, weight, self.bias, self.residual, self.sum_sq, norm_eps=self.norm_eps, activation=self.activation,
            constant_weight=self.constant_weight,
        )  # fmt: skip


@dataclass(slots=True)
class PackedLinearNorm:
    """:class:`PackedLinear`, then :class:`~specgraph.kernels.linear.linear.NormParts` of its result:
    ``(out, weighted, sum_sq)``.
    """

    x: Tensor
    weight: list[Tensor]
    norm_weight: Tensor
    bias: Tensor | None = None
    residual: Tensor | None = None
    sum_sq: Tensor | None = None
    _: KW_ONLY
    format: str
    norm_eps: float = 0.0
    norm_offset: float = 0.0
    activation: str = "none"
    constant_weight: bool = True

    def dense(self, weight: Tensor) -> LinearNorm:
        """The same with a dense weight."""
        return LinearNorm(
            self.x, weight, self.norm_weight, self.bias, self.residual, self.sum_sq, norm_eps=self.norm_eps,
            norm_offset=self.norm_offset, activation=self.activation, constant_weight=self.constant_weight,
        )  # fmt: skip


def packed_linear_reference(given: PackedLinear | PackedLinearNorm) -> Tensor:
    """:class:`PackedLinear` in plain PyTorch."""
    return linear_reference(_exact(given)).to(given.x.dtype)


def packed_linear_norm_reference(given: PackedLinearNorm) -> tuple[Tensor, Tensor, Tensor]:
    """:class:`PackedLinearNorm` in plain PyTorch."""
    return with_norm_parts(given, packed_linear_reference(given))


def packed_linear_cpu(given: PackedLinear | PackedLinearNorm) -> Tensor:
    """:class:`PackedLinear` by a function that reads the weight as it is stored."""
    return finished(given, cpu.product(format_of(given.format), given.x, given.weight))


def packed_linear_norm_cpu(given: PackedLinearNorm) -> tuple[Tensor, Tensor, Tensor]:
    """The same for :class:`PackedLinearNorm`."""
    return with_norm_parts(given, packed_linear_cpu(given))


def packed_linear_triton(
    given: PackedLinear | PackedLinearNorm, *, tiling: Tiles | None = None, pdl: bool | None = None
) -> Any:
    """:class:`PackedLinear` or :class:`PackedLinearNorm` by the kernel of ``specgraph::linear``.

    It reads the weight as it is stored. For groups of a size that it does not take, the whole weight is made in
    float32.

    Args:
        tiling: in place of :func:`~specgraph.kernels.linear.product.packed_tiles`; one with another number of slices
            may give other bits.
        pdl: whether to use programmatic dependent launch; None uses it where it exists.
    """
    operands = packed_operands(format_of(given.format), given.x, given.weight)
    if operands is not None:
        x, words, scales = operands
        return filled(given.dense(words), functools.partial(launch_tiles, tiling=tiling, scales=scales), pdl, x)
    out = linear_triton(_exact(given)).to(given.x.dtype)
    if isinstance(given, PackedLinear):
        return out
    return (out, *norm_parts_triton(NormParts(out, given.norm_weight, norm_offset=given.norm_offset)))


def packed_linear_hopper(given: PackedLinear | PackedLinearNorm, *, pdl: bool | None = None) -> Any:
    """The same by a kernel for Hopper, which gives the bits of :func:`packed_linear_triton`."""
    operands = packed_operands(format_of(given.format), given.x, given.weight)
    assert operands is not None, "_hopper_covers has seen them"
    x, words, scales = operands
    return filled(given.dense(words), functools.partial(hopper().launch, scales=scales), pdl, x)


def _hopper_covers(given: PackedLinear | PackedLinearNorm) -> bool:
    """Rows of 16-bit values, and arranged words that fit a multiprocessor and are read where they lie."""
    x, form = given.x, format_of(given.format)
    if not isinstance(form, Arranged) or x.numel() == 0 or x.dtype.itemsize != 2 or not runs_gluon(x.device):
        return False
    if any(dense_rows(part) is not part for part in given.weight):  # a copy is not constant: it is written just before
        return False
    found = packed_words(form, x.shape[-1], x.dtype, given.weight)
    return found is not None and hopper().covers_packed(x, *found, is_gated(given.activation), given.sum_sq is not None)


def _cpu_covers(given: PackedLinear | PackedLinearNorm) -> bool:
    return cpu.covers(format_of(given.format), given.x, given.weight)


def _exact(given: PackedLinear | PackedLinearNorm) -> Linear:
    """The product with the dequantised weight, in float32 or float64."""
    form = format_of(given.format)
    exact = torch.promote_types(given.x.dtype, torch.float32)
    bias, residual = (None if part is None else part.to(exact) for part in (given.bias, given.residual))
    x = form.quantise_rows(given.x, given.weight).to(exact)
    return Linear(
        x, form.dequantise(given.weight, exact), bias, residual, given.sum_sq, norm_eps=given.norm_eps,
        activation=given.activation, constant_weight=False,
    )  # fmt: skip


def _fake_dense(given: PackedLinear | PackedLinearNorm) -> Tensor:
    form, x = format_of(given.format), given.x
    require(x.dtype.is_floating_point, lambda: f"x is {x.dtype}; it must be of floating point")
    outputs, inputs = form.check(given.weight)
    require(given.weight[0].dim() == 2, lambda: f"numbers are {list(given.weight[0].shape)}; they must be a matrix")
    require(x.shape[-1] == inputs, lambda: f"x has {x.shape[-1]} inputs, and the weight {inputs}: they must agree")
    require(
        not form.quantises_rows or given.sum_sq is None,
        lambda: f"{form.name} quantises rows, whose norm has to be complete: sum_sq must be None",
    )
    return x.new_empty(outputs, inputs)


def _packed_linear_fake(given: PackedLinear) -> Tensor:
    return linear_fake(given.dense(_fake_dense(given)))


def _packed_linear_norm_fake(given: PackedLinearNorm) -> tuple[Tensor, Tensor, Tensor]:
    return linear_norm_fake(given.dense(_fake_dense(given)))


HOPPER = Variant("hopper", packed_linear_hopper, batch_invariant=True, covers=_hopper_covers)
PACKED_LINEAR = declare(
    "packed_linear", PackedLinear, _packed_linear_fake,
    (HOPPER, *triton_or_reference(
        packed_linear_triton, packed_linear_reference, covers=not_float64("x"), cpu=packed_linear_cpu,
        cpu_covers=_cpu_covers,
    )),
)
PACKED_LINEAR_NORM = declare(
    "packed_linear_norm", PackedLinearNorm, _packed_linear_norm_fake,
    (HOPPER, *triton_or_reference(
        packed_linear_triton, packed_linear_norm_reference, covers=not_float64("x"), cpu=packed_linear_norm_cpu,
        cpu_covers=_cpu_covers,
    )),
)
packed_linear = PACKED_LINEAR.function
