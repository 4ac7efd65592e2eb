"""Floating-point numbers of eight bits, e4m3, with a scale for each block of 128 outputs and 128 inputs.

The layout is that of DeepSeek's and Qwen's checkpoints: ``weight`` in float8_e4m3fn ``[O, I]`` and
``weight_scale_inv`` ``[ceil(O / 128), ceil(I / 128)]``, which in spite of its name is what the numbers are multiplied
with. Activations are quantised in the same way, each row by itself: the scale of 128 inputs is their largest magnitude
divided by 448, the largest number. Products and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.packed.format import Format

BLOCK = 128
"""How many outputs, and how many inputs, have one scale."""
LARGEST = 448.0
"""The largest number."""


class Fp8Blocks(Format):
    """Numbers e4m3 with a scale for each block, and activations quantised by row and block."""

    name = "fp8_blocks"
    parts = ("weight", "weight_scale_inv")
    stack_parts = ("", "_scale_inv")
    stored = torch.float8_e4m3fn
    scale_dtypes = (torch.float32, torch.bfloat16, torch.float64)
    quantises_rows = True
    rounded_together = BLOCK
    cpu_product: str | None = "e4m3"

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiples of ``2 ** -9``, from -448 to 448."""
        return stored.to(dtype)

    def block(self, inputs: int, scale: Tensor) -> tuple[int, int]:
        """128 outputs and 128 inputs; the last blocks may be smaller."""
        return BLOCK, BLOCK

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Every weight can be stored."""
        return None if group_size is None else f"fp8 has blocks of {BLOCK} x {BLOCK}, and no groups of {group_size}"

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Numbers, and scales in float32."""
        scales = -(-outputs // BLOCK), -(-inputs // BLOCK)
        return ((outputs, inputs), torch.float8_e4m3fn), (scales, torch.float32)

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]`` to the nearest: a block's largest magnitude becomes 448.

        Scales are float32. A block of zeros has the scale 1.
        """
        exact = torch.promote_types(weight.dtype, torch.float32)
        outputs, inputs = weight.shape[-2:]
        padded = functional.pad(weight.to(exact), (0, -inputs % BLOCK, 0, -outputs % BLOCK))
        # ---- [..., O / 128, 128, I / 128, 128]
        blocks = torch.unflatten(torch.unflatten(padded, -1, (-1, BLOCK)), -3, (-1, BLOCK))
        top = blocks.abs().amax((-3, -1))
        scale = _scale(top).float()
        numbers = (blocks / scale.to(exact)[..., None, :, None]).clamp(-LARGEST, LARGEST)
        numbers = numbers.flatten(-4, -3).flatten(-2)[..., :outputs, :inputs]
        return numbers.contiguous().to(torch.float8_e4m3fn), scale

    def quantise_rows(self, x: Tensor, weight: Sequence[Tensor] = ()) -> Tensor:
        """Rows ``[..., I]`` whose every 128 entries are multiples of a scale of their own."""
        exact = torch.promote_types(x.dtype, torch.float32)
        inputs = x.shape[-1]
        groups = torch.unflatten(functional.pad(x.to(exact), (0, -inputs % BLOCK)), -1, (-1, BLOCK))
        top = groups.abs().amax(-1, keepdim=True).float()
        scale = _scale(top).to(exact)
        numbers = (groups / scale).clamp(-LARGEST, LARGEST).float().to(torch.float8_e4m3fn)
        return (numbers.to(exact) * scale).flatten(-2)[..., :inputs]


def _scale(top: Tensor) -> Tensor:
    """The scale with which a largest magnitude becomes 448; 1 for zeros.

    On a GPU, PyTorch multiplies with the reciprocal of a divisor that is a plain number, which may lose the last bit.
    Quotients of few bits then fall on the other side of a half.
    """
    return torch.where(top > 0, top / torch.full_like(top, LARGEST), 1.0)


FP8_BLOCKS = Fp8Blocks()
