"""Floating-point numbers of four bits with a scale e4m3 for each group of 16 inputs, and one scale of the whole matrix.

The layout is the one that the package compressed-tensors calls ``nvfp4-pack-quantized``. Numbers are e2m1 and stand in
bytes as those of :mod:`specgraph.kernels.packed.mxfp4`. An entry of the weight is ``number * (scale / global_scale)``,
whose quotient is rounded to float32. Files have one ``weight_global_scale`` ``[1]`` for a matrix. Here it is repeated
for each output, ``[O, 1]``, so that matrices with different ones can be joined.

There are two formats. The second one quantises activations, too: 16 neighbouring entries of a row as those of a weight,
with the ``input_global_scale`` ``[1]`` of the layer, so that a row does not depend on others.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.packed.format import Format, join_nibbles, why_not_full
from specgraph.kernels.packed.mxfp4 import MXFP4, nearest_codes
from specgraph.kernels.packed.static import Static

GROUP = 16
"""How many inputs have one scale."""
LARGEST = 6.0
"""The largest number."""
LARGEST_SCALE = 448.0
"""The largest scale, which the group with the largest magnitude of a matrix gets."""
LEAST_SCALE = 0.125
"""The scale of a group whose own one would be rounded to 0, as compressed-tensors has it."""


class Nvfp4(Format):
    """Numbers e2m1, scales e4m3, and a global scale for each output."""

    name = "nvfp4"
    parts: tuple[str, ...] = ("weight_packed", "weight_scale", "weight_global_scale")
    kinds: tuple[str, ...] = ("numbers", "scale", "global scale")
    stack_parts: tuple[str, ...] = ("_packed", "_scale", "_global_scale")
    of_matrix = ("weight_global_scale",)
    stored = torch.uint8
    per_element = 2
    scale_dtypes = (torch.float8_e4m3fn, torch.float32, torch.bfloat16, torch.float16, torch.float64)
    """The wider ones are those of a model that was cast."""
    expanded = False
    cpu_product = "e2m1"

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiples of a half, from -6 to 6."""
        return MXFP4.numbers(stored, dtype)

    def check(self, weight: Sequence[Tensor]) -> tuple[int, int]:
        """As of every format, with a global scale for each output."""
        outputs, inputs = super().check(weight)
        scale, wanted = weight[2], (*weight[0].shape[:-1], 1)
        require(
            scale.dtype in self.scale_dtypes[1:] and tuple(scale.shape) == wanted,
            lambda: (
                f"global_scale is {scale.dtype} {list(scale.shape)}; it must be {list(wanted)} in one of "
                f"{', '.join(map(str, self.scale_dtypes[1:]))}"
            ),
        )
        return outputs, inputs

    def dequantise(self, weight: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """The weight ``[..., O, I]``: quotients of scales in float32, and their products with numbers in ``dtype``."""
        return super().dequantise([weight[0], self.factors(weight)[0]], dtype)

    def factors(self, weight: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Quotients of scales."""
        return weight[1].float() / weight[2].float(), None

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Groups have to be full."""
        return why_not_full("nvfp4", GROUP, inputs, group_size)

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
        of_matrix = (LARGEST_SCALE * LARGEST / groups.abs().amax((-3, -2, -1))).float()[..., None, None]
        of_matrix = torch.where(of_matrix.isfinite(), of_matrix, 1.0)
        numbers, scale = self._rounded(groups, of_matrix)
        return numbers, scale.to(torch.float8_e4m3fn), of_matrix.expand(*scale.shape[:-1], 1).contiguous()

    def _rounded(self, groups: Tensor, of_all: Tensor) -> tuple[Tensor, Tensor]:
        """Bytes of groups ``[..., I / 16, 16]`` and their scales in float32, of which all are numbers e4m3."""
        tops = groups.abs().amax(-1)
        # A GPU would multiply with the reciprocal of a plain number, which may lose the last bit.
        scale = of_all * (tops / torch.full_like(tops, LARGEST))
        scale = scale.clamp(max=LARGEST_SCALE).float().to(torch.float8_e4m3fn).float()
        scale = torch.where(scale == 0, LEAST_SCALE, scale)
        numbers = nearest_codes(groups / (scale / of_all).to(groups.dtype)[..., None])
        return join_nibbles(numbers.flatten(-2), self.stored), scale


class Nvfp4Rows(Static, Nvfp4):
    """The same, and activations in such numbers."""

    name = "nvfp4_rows"
    rounded_together = GROUP
    parts = (*Nvfp4.parts, "input_global_scale")
    kinds = (*Nvfp4.kinds, "input scale")
    stack_parts = (*Nvfp4.stack_parts, "_input_global_scale")

    def quantise_rows(self, x: Tensor, weight: Sequence[Tensor] = ()) -> Tensor:
        """Rows ``[..., I]`` whose every 16 entries are numbers times a scale of their own."""
        of_layer = weight[3].float()
        exact = torch.promote_types(x.dtype, torch.float32)
        numbers, scale = self._rounded(torch.unflatten(x.to(exact), -1, (-1, GROUP)), of_layer)
        return Format.dequantise(self, [numbers, scale / of_layer], exact)


NVFP4, NVFP4_ROWS = Nvfp4(), Nvfp4Rows()
