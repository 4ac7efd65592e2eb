"""Floating-point numbers of four bits with a scale e4m3 for each group of 16 inputs, and one scale of the whole matrix.

The layout is the one that the package compressed-tensors calls ``nvfp4-pack-quantized``. Numbers are e2m1 and stand in
bytes as those of :mod:`specgraph.kernels.packed.mxfp4`. An entry of the weight is ``number * (scale / global_scale)``,
whose quotient is rounded to float32. Files have one ``weight_global_scale`` ``[1]`` for a matrix. Here it is repeated
for each output, ``[O, 1]``, so that matrices with different ones can be joined. Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.packed.format import Format, join_nibbles
from specgraph.kernels.packed.mxfp4 import MAGNITUDES, MXFP4, _round

GROUP = 16
"""How many inputs have one scale."""
LARGEST = MAGNITUDES[-1]
"""The largest number."""
LARGEST_SCALE = 448.0
"""The largest scale, which the group with the largest magnitude of a matrix gets."""
LEAST_SCALE = 0.125
"""The scale of a group whose own one would be rounded to 0, as compressed-tensors has it."""


class Nvfp4(Format):
    """Numbers e2m1, scales e4m3, and a global scale for each output."""

    name = "nvfp4"
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    kinds = ("numbers", "scale", "global scale")
    stack_parts = ("_packed", "_scale", "_global_scale")
    of_matrix = ("weight_global_scale",)
    stored = torch.uint8
    per_element = 2
    scale_dtypes = (torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    """The wider ones are those of a model that was cast."""
    expanded = False

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiples of a half, from -6 to 6."""
        return MXFP4.numbers(stored, dtype)

    def check(self, weight: Sequence[Tensor]) -> tuple[int, int]:
        """As of every format, with a global scale for each output."""
        outputs, inputs = super().check(weight)
        found, wanted = weight[2], (*weight[0].shape[:-1], 1)
        require(
            found.dtype in self.scale_dtypes[1:] and tuple(found.shape) == wanted,
            lambda: (
                f"global_scale is {found.dtype} {list(found.shape)}; it must be of one of "
                f"{', '.join(map(str, self.scale_dtypes[1:]))}, and {list(wanted)}"
            ),
        )
        return outputs, inputs

    def dequantise(self, weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[..., O, I]``: quotients of scales in float32, and their products with numbers in ``dtype``."""
        numbers, scale, of_matrix = weight
        return super().dequantise([numbers, scale.float() / of_matrix.float()], dtype)

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Groups have to be full."""
        if group_size not in (None, GROUP):
            return f"groups of nvfp4 have {GROUP} inputs, not {group_size}"
        return f"its {inputs} inputs are no multiple of {GROUP}" if inputs % GROUP else None

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Bytes of two numbers, scales in e4m3, and global scales in float32."""
        scales = (outputs, inputs // GROUP), torch.float8_e4m3fn
        return ((outputs, inputs // 2), self.stored), scales, ((outputs, 1), torch.float32)

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]`` to the nearest.

        The scale of a group is its largest magnitude divided by 6, times the global scale, which makes the largest one
        of a matrix 448. A matrix of zeros has the global scale 1. All this is computed in float32 (float64 for
        float64), where compressed-tensors takes the dtype of the weight; for weights in float32 both give the same
        bits. Numbers halfway between two become the one whose mantissa is even.
        """
        exact = torch.promote_types(weight.dtype, torch.float32)
        groups = torch.unflatten(weight.to(exact), -1, (-1, GROUP))
        tops = groups.abs().amax(-1)  # [..., O, I / 16]
        of_matrix = (LARGEST_SCALE * LARGEST / tops.amax((-2, -1), keepdim=True)).float()
        of_matrix = torch.where(of_matrix.isfinite(), of_matrix, 1.0)
        scale = (of_matrix * (tops / LARGEST)).clamp(max=LARGEST_SCALE).float().to(torch.float8_e4m3fn).float()
        scale = torch.where(scale == 0, LEAST_SCALE, scale)
        numbers = _round(groups / (scale / of_matrix).to(exact)[..., None])
        of_matrix = of_matrix.expand(*tops.shape[:-1], 1).contiguous()
        return join_nibbles(numbers.flatten(-2), self.stored), scale.to(torch.float8_e4m3fn), of_matrix


NVFP4 = Nvfp4()
