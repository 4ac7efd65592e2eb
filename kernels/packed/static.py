"""Formats whose layers hold a scale of activations that calibration has found, so that all rows are rounded by it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.packed.format import Format


class Static(Format):
    """What stands in front of the class of a format that has such a scale ``[1]`` as the last of its parts.

    No weight can be given one here. There are no stacks of such weights.
    """

    own_inputs = "by which scale its inputs are rounded"
    quantises_rows = True

    def check(self, weight: Sequence[Tensor]) -> tuple[int, int]:
        """As of the format without it."""
        found, scale = super().check(weight), weight[-1]
        wide = scale.is_floating_point() and scale.dtype.itemsize > 1
        require(
            weight[0].dim() == 2 and wide and tuple(scale.shape) == (1,),
            lambda: (
                f"numbers are {list(weight[0].shape)}, and {self.parts[-1]} is {scale.dtype} {list(scale.shape)}; they "
                "must be a matrix, and [1] in float32 or another dtype of 16 bits or more"
            ),
        )
        return found

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """As of the format without it, and the scale in float32."""
        return (*super().shapes(outputs, inputs, group_size, dtype), ((1,), torch.float32))

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Refused with ValueError: nothing is known about activations."""
        raise ValueError(f"{self.name} has a scale of activations, which only a calibration finds")
