"""Integers of four bits with a scale and a zero point for each group of inputs.

An entry of the weight is ``(number - zero_point) * scale``. Numbers and scales are stored as those of
:mod:`specgraph.kernels.packed.int4`. A zero point is an integer from -8 to 7, too. It is stored as the numbers are, but
eight zero points of neighbouring outputs stand in one int32: ``[ceil(O / 8), I / G]``. This is what the package
compressed-tensors calls ``pack-quantized`` with ``symmetric: false``.

There are two formats. In the first one, a group is ``G`` neighbouring inputs. In the second one, which quantisers that
sort inputs by their activations need (``desc_act`` of GPTQ), a fourth tensor ``[I]`` holds the group of each input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.packed.format import join_nibbles, kept
from specgraph.kernels.packed.int4 import OFFSET, Int4, group_of

LEVELS = 15
"""The distance from -8 to 7. The range of a group is divided into so many."""


class Int4Zeros(Int4):
    """Integers of four bits in groups of neighbouring inputs, with zero points."""

    name = "int4_zeros"
    cpu_product: str | None = "int4_zeros"
    parts: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_zero_point")
    kinds: tuple[str, ...] = ("numbers", "scale", "zero point")
    stack_parts: tuple[str, ...] = ("_packed", "_scale", "_zero_point")
    shared = "zero point"
    expanded = False

    def outputs_together(self, inputs: int, scale: Tensor) -> int:
        """Those whose zero points share a word."""
        return self.per_element

    def check(self, weight: Sequence[Tensor]) -> tuple[int, int]:
        """As of every format, with zero points for the groups that scales have."""
        outputs, inputs = super().check(weight)
        scale, zero_point = weight[1:3]
        wanted = (*scale.shape[:-2], -(-outputs // self.per_element), scale.shape[-1])
        require(
            zero_point.dtype == self.stored and tuple(zero_point.shape) == wanted,
            lambda: (
                f"zero_point is {zero_point.dtype} {list(zero_point.shape)}; for scales {list(scale.shape)} it must be "
                f"{self.stored} {list(wanted)}"
            ),
        )
        return outputs, inputs

    def dequantise(self, weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[..., O, I]``. Differences are exact in every dtype, and their products with scales rounded."""
        numbers, scale, zero_point = self._values(weight, dtype)
        groups = torch.unflatten(numbers, -1, (scale.shape[-1], -1))
        return ((groups - zero_point[..., None]) * scale[..., None]).flatten(-2)

    def _values(self, weight: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers ``[..., O, I]``, and scales and zero points ``[..., O, I / G]``."""
        return self.numbers(weight[0], dtype), self.scales(weight[1], dtype), self._zeros(weight, dtype)

    def _zeros(self, weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.numbers(weight[2].mT, dtype).mT[..., : weight[0].shape[-2], :]

    def factors(self, weight: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Scales and zero points ``[O, I / G]``."""
        return self.scales(weight[1], torch.float32), self._zeros(weight, torch.float32)

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Words, scales in the dtype of the weight, and words of zero points."""
        words, scale = super().shapes(outputs, inputs, group_size, dtype)
        return words, scale, ((-(-outputs // self.per_element), scale[0][1]), self.stored)

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]``, by groups of 128 inputs unless told.

        The numbers of a group reach from its smallest entry, or 0, to its largest one, or 0: the scale is a 15th of
        this range, and the zero point the nearest number to 0. The rest is as in
        :meth:`~specgraph.kernels.packed.int4.Int4.quantise`.
        """
        exact = torch.promote_types(weight.dtype, torch.float32)
        stored = kept(weight.dtype)
        groups = torch.unflatten(weight.to(exact), -1, (-1, group_of(weight.shape[-1], group_size)))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scale = ((high - low) / LEVELS).to(stored)
        scale = torch.where(scale == 0, torch.finfo(stored).eps, scale)
        zero_point = (-OFFSET - low / scale.to(exact)).round().clamp(-8, 7)
        values = (groups / scale.to(exact)[..., None] + zero_point[..., None]).round().clamp(-8, 7)
        codes, zeros = (part.to(torch.int32) + OFFSET for part in (values.flatten(-2), zero_point))
        missing = -zeros.shape[-2] % self.per_element  # words are full; the last ones end with zero points of no output
        zeros = torch.nn.functional.pad(zeros, (0, 0, 0, missing))
        return join_nibbles(codes, torch.int32), scale, join_nibbles(zeros.mT, torch.int32).mT.contiguous()


class Int4ActOrder(Int4Zeros):
    """Integers of four bits with zero points, in groups of any inputs. There are no stacks of such weights."""

    name = "int4_act_order"
    cpu_product = None
    parts = (*Int4Zeros.parts, "weight_g_idx")
    kinds = (*Int4Zeros.kinds, "group index")
    stack_parts = (*Int4Zeros.stack_parts, "_g_idx")
    own_inputs = "which of its inputs are a group"

    def inputs_together(self, inputs: int, scale: Tensor) -> int:
        """Those of a word: a part has the scales of all groups."""
        return self.per_element

    def _units(self, weight: Sequence[Tensor], inputs: int, *, of_inputs: bool) -> list[int]:
        return [self.per_element, 0, 0, 1] if of_inputs else super()._units(weight, inputs, of_inputs=False)

    def check(self, weight: Sequence[Tensor]) -> tuple[int, int]:
        """As of the other format, with a group for each input."""
        outputs, inputs = super().check(weight)
        groups = weight[3]
        require(
            weight[0].dim() == 2 and groups.dtype == self.stored and tuple(groups.shape) == (inputs,),
            lambda: (
                f"numbers are {list(weight[0].shape)}, and g_idx is {groups.dtype} {list(groups.shape)}; they must be "
                f"a matrix, and {self.stored} [{inputs}]"
            ),
        )
        return outputs, inputs

    def dequantise(self, weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, with what the group of each input has."""
        numbers, *of_groups = self._values(weight, dtype)
        scale, zero_point = (part.index_select(-1, weight[3]) for part in of_groups)
        return (numbers - zero_point) * scale

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """As of the other format, and the group of each input."""
        return (*super().shapes(outputs, inputs, group_size, dtype), ((inputs,), self.stored))

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """As of the other format: groups are neighbours, since nothing is known about activations."""
        size = group_of(weight.shape[-1], group_size)
        index = torch.arange(weight.shape[-1], dtype=self.stored, device=weight.device) // size
        return (*super().quantise(weight, group_size), index)


INT4_ZEROS, INT4_ACT_ORDER = Int4Zeros(), Int4ActOrder()
