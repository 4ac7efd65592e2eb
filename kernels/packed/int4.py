"""Symmetric integers of four bits with a scale for each group of inputs.

The layout is the one that the package compressed-tensors calls ``pack-quantized``: to each number from -8 to 7 8 is
added, and eight numbers of neighbouring inputs stand in one int32, the first of them in its lowest four bits.
``scale`` is ``[O, I / G]``, which also says how large a group is. Activations are not quantised.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.packed.format import Format, join_nibbles, kept, nibbles

OFFSET = 8
"""What is added to a number from -8 to 7 before it is stored."""
GROUP = 128
"""How many inputs have one scale unless it is said."""
WHOLE_ROW = -1
"""The group size that stands for all inputs."""
HALF_RANGE = 7.5
"""Half of the distance from -8 to 7. The entry of a group that is the largest in magnitude is divided into so many."""


class Int4(Format):
    """Symmetric integers of four bits in groups."""

    name = "int4"
    parts: tuple[str, ...] = ("weight_packed", "weight_scale")
    beside = ("weight_shape",)
    stack_parts: tuple[str, ...] = ("_packed", "_scale")
    stored = torch.int32
    per_element = 8
    cpu_product: str | None = "int4"
    scale_dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    """The last one is that of a model which was cast to check it."""

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Integers from -8 to 7."""
        return (nibbles(stored) - OFFSET).to(dtype)

    def check_scale(self, outputs: int, inputs: int, scale: Tensor) -> None:
        """A row of scales for each output, which also says how large a group is."""
        groups = scale.shape[-1]
        require(scale.shape[-2] == outputs, lambda: f"scale is {list(scale.shape)}; it must have {outputs} rows")
        require(
            groups > 0 and inputs % groups == 0,
            lambda: f"scale has {groups} groups for {inputs} inputs; the number of groups must divide that of inputs",
        )

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Groups have to be full, and to consist of whole words."""
        size = group_of(inputs, group_size)
        if size < 1 or size % self.per_element:
            return f"the group size, {size}, is no positive multiple of {self.per_element}"
        return f"its {inputs} inputs are no multiple of the group size, {size}" if inputs % size else None

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Words, and scales in the dtype of the weight."""
        words = (outputs, inputs // self.per_element), self.stored
        return words, ((outputs, inputs // group_of(inputs, group_size)), kept(dtype))

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]``, by groups of 128 inputs unless told.

        The scale of a group is its largest magnitude divided by 7.5, as compressed-tensors has it for symmetric
        integers of four bits, in the dtype of the weight (float32 for float64). A group of zeros gets the epsilon of
        that dtype. Numbers are rounded half to even and clamped to -8 to 7, so no entry is further from its number than
        half a scale, but for the rounding of the scale itself. All this is computed in float32 (float64 for float64),
        where compressed-tensors takes the dtype of the weight; for weights in float32 both give the same bits.
        """
        exact = torch.promote_types(weight.dtype, torch.float32)
        stored = kept(weight.dtype)
        groups = torch.unflatten(weight.to(exact), -1, (-1, group_of(weight.shape[-1], group_size)))
        scale = (groups.abs().amax(-1) / HALF_RANGE).to(stored)
        scale = torch.where(scale == 0, torch.finfo(stored).eps, scale)
        values = (groups / scale.to(exact)[..., None]).round().clamp(-8, 7)
        return join_nibbles(values.flatten(-2).to(torch.int32) + OFFSET, torch.int32), scale


def group_of(inputs: int, group_size: int | None) -> int:
    """How many of so many inputs have one scale: 128 unless told, or all of them for :data:`WHOLE_ROW`."""
    if group_size is None:
        return GROUP
    return inputs if group_size == WHOLE_ROW else group_size


INT4 = Int4()
