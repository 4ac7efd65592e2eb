"""Floating-point numbers of four bits with a scale that is a power of two for each group of 32 inputs.

A number is e2m1: a sign, two bits of exponent and one of mantissa, so 0, 0.5, 1, 1.5, 2, 3, 4 or 6. Two numbers of
neighbouring inputs stand in one byte, the first of them in its lower half. A scale is a byte ``e`` and means
``2 ** (e - 127)``. Source: OCP Microscaling Formats, version 1.0. The bytes of a linear layer are those that the
package compressed-tensors calls ``mxfp4-pack-quantized``. The files of gpt-oss have the same ones for stacks of
experts, and give them a dimension of 16 bytes for each group, ``[E, O, I / 32, 16]``. Activations are not quantised.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.packed.format import Format, join_nibbles, nibbles, why_not_full

GROUP = 32
"""How many inputs have one scale."""
BIAS = 127
LARGEST_EXPONENT = 2
"""That of 4 and 6, the largest magnitudes."""


class Mxfp4(Format):
    """Numbers e2m1 and scales e8m0."""

    name = "mxfp4"
    parts = ("weight_packed", "weight_scale")
    stack_parts = ("_blocks", "_scales")
    stored = torch.uint8
    per_element = 2
    scale_dtypes = (torch.uint8,)
    cpu_product: str | None = "e2m1"

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiples of a half, from -6 to 6."""
        values = magnitudes(dtype, stored.device)
        return torch.cat([values, -values])[nibbles(stored).long()]

    def scales(self, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Powers of two."""
        return torch.ldexp(torch.ones_like(scale, dtype=dtype), scale.to(torch.int32) - BIAS)

    def factors(self, weight: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Exponents as they are stored."""
        return weight[1], None

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Groups have to be full."""
        return why_not_full("mxfp4", GROUP, inputs, group_size)

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Bytes of two numbers, and bytes of exponents."""
        return ((outputs, inputs // 2), torch.uint8), ((outputs, inputs // GROUP), torch.uint8)

    def stacked_shape(self, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """A dimension for the bytes of a group."""
        return (*numbers[:-1], numbers[-1] // (GROUP // 2), GROUP // 2)

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]`` to the nearest.

        The exponent of a scale is that of the largest magnitude of its group less 2, that of the largest number, as
        the specification of the formats has it; magnitudes above 6 times the scale become 6 times the scale. Numbers
        halfway between two become the one whose mantissa is even.
        """
        exact = torch.promote_types(weight.dtype, torch.float32)
        groups = torch.unflatten(weight.to(exact), -1, (-1, GROUP))
        _, exponent = torch.frexp(groups.abs().amax(-1))  # magnitudes are in [0.5, 1) times 2 ** exponent
        scale = (exponent - 1 - LARGEST_EXPONENT + BIAS).clamp(0, 254).to(torch.uint8)
        scaled = groups / self.scales(scale, exact)[..., None]
        return join_nibbles(nearest_codes(scaled).flatten(-2), torch.uint8), scale


def magnitudes(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values ``[8]`` of the lowest three bits: 0, 0.5, 1, 1.5, 2, 3, 4 and 6. The fourth bit is the sign."""
    # They are computed, since a CUDA graph cannot copy a list from the host.
    code = torch.arange(8, device=device)
    exponent, half = code // 2, (code % 2).to(dtype) / 2
    return torch.where(exponent == 0, half, torch.ldexp(1 + half, exponent - 1))


def nearest_codes(values: Tensor) -> Tensor:
    """The codes of the numbers nearest to ``values``."""
    known = magnitudes(values.dtype, values.device)
    # Between two codes c and c + 1 lies the midpoint c of this list. One that is exactly there takes the even code.
    midpoints = (known[1:] + known[:-1]) / 2
    magnitude = values.abs().contiguous()
    above = torch.bucketize(magnitude, midpoints)  # as many midpoints are below it
    at_odd = torch.isin(magnitude, midpoints[1::2])
    return (above + at_odd) + 8 * torch.signbit(values)


MXFP4 = Mxfp4()
