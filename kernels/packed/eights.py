"""Numbers of eight bits, e4m3 or integers, with a scale for each output.

The layouts are those that the package compressed-tensors calls ``float-quantized``, ``int-quantized`` and
``naive-quantized``: ``weight`` in float8_e4m3fn or int8 ``[O, I]`` is multiplied with ``weight_scale`` ``[O, 1]``.
Where files have one scale ``[1]`` for a whole matrix, it is repeated for each output while they are read, so that
matrices can be joined.

Activations may be quantised, too, each row by itself: to numbers of the same kind, whose scale is the largest magnitude
of the row divided by half the distance from the least number to the largest one, or that of the layer, ``input_scale``
``[1]``. Products and sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.packed.format import Format, kept
from specgraph.kernels.packed.static import Static


class EightBits(Format):
    """Symmetric numbers of eight bits with a scale for each output.

    Args:
        name: what the argument ``format`` of the ops is.
        stored: float8_e4m3fn or int8.
        quantises_rows: whether rows of activations are rounded to such numbers, too.
    """

    parts: tuple[str, ...] = ("weight", "weight_scale")
    stack_parts: tuple[str, ...] = ("", "_scale")
    scale_dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    named = True
    expanded = False

    def __init__(self, name: str, stored: torch.dtype, *, quantises_rows: bool) -> None:
        self.name, self.stored, self.quantises_rows = name, stored, quantises_rows
        self.rounded_together = 0 if quantises_rows else 1
        self.cpu_product = "e4m3" if stored.is_floating_point else "int8"

    def numbers(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiples of ``2 ** -9`` from -448 to 448, or integers from -128 to 127."""
        return stored.to(dtype)

    def why_not(self, outputs: int, inputs: int, group_size: int | None) -> str | None:
        """Every weight can be stored."""
        return None if group_size is None else f"{self.name} has a scale for each output, and no groups of {group_size}"

    def shapes(
        self, outputs: int, inputs: int, group_size: int | None, dtype: torch.dtype
    ) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Numbers, and a column of scales in the dtype of the weight (float32 for float64)."""
        return ((outputs, inputs), self.stored), ((outputs, 1), kept(dtype))

    def quantise(self, weight: Tensor, group_size: int | None = None) -> tuple[Tensor, ...]:
        """Round a weight ``[..., O, I]`` to the nearest.

        The scale of an output is its largest magnitude divided by 448, or by 127.5 for integers, as compressed-tensors
        has it, in the dtype of the weight (float32 for float64). An output of zeros gets the epsilon of that dtype. All
        this is computed in float32 (float64 for float64).
        """
        exact = torch.promote_types(weight.dtype, torch.float32)
        scale = self._scale(weight.to(exact), kept(weight.dtype))
        return self._round(weight.to(exact) / scale.to(exact)), scale

    def quantise_rows(self, x: Tensor, weight: Sequence[Tensor] = ()) -> Tensor:
        """Rows ``[..., I]`` whose entries are multiples of a scale of the row, which is float32."""
        if not self.quantises_rows:
            return x
        exact = torch.promote_types(x.dtype, torch.float32)
        scale = self._row_scale(x.to(exact), weight).to(exact)
        return self._round(x.to(exact) / scale).to(exact) * scale

    def _row_scale(self, rows: Tensor, weight: Sequence[Tensor]) -> Tensor:
        return self._scale(rows, torch.float32)

    def _scale(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        limits = torch.finfo(self.stored) if self.stored.is_floating_point else torch.iinfo(self.stored)
        top = values.abs().amax(-1, keepdim=True)
        # A GPU would multiply with the reciprocal of a plain number, which may lose the last bit.
        scale = (top / torch.full_like(top, (limits.max - limits.min) / 2)).to(dtype)
        return torch.where(scale == 0, torch.finfo(dtype).eps, scale)

    def _round(self, values: Tensor) -> Tensor:
        """The stored numbers nearest to ``values``, ties to even."""
        if self.stored.is_floating_point:
            largest = torch.finfo(self.stored).max
            return values.clamp(-largest, largest).float().to(self.stored)
        return values.round().clamp(-128, 127).to(self.stored)


class StaticEights(Static, EightBits):
    """The same with a scale that all rows of a layer have in common."""

    parts = (*EightBits.parts, "input_scale")
    kinds = (*EightBits.kinds, "input scale")
    stack_parts = (*EightBits.stack_parts, "_input_scale")

    def __init__(self, name: str, stored: torch.dtype) -> None:
        super().__init__(name, stored, quantises_rows=True)
        self.rounded_together = 1

    def _row_scale(self, rows: Tensor, weight: Sequence[Tensor]) -> Tensor:
        return weight[2]


FP8_CHANNEL = EightBits("fp8_channel", torch.float8_e4m3fn, quantises_rows=False)
"""Weights in e4m3; activations are not quantised."""
FP8_TOKEN = EightBits("fp8_token", torch.float8_e4m3fn, quantises_rows=True)
"""The same weights, and activations in e4m3 with a scale for each row."""
FP8_STATIC = StaticEights("fp8_static", torch.float8_e4m3fn)
"""The same weights, and activations in e4m3 with a scale for each layer."""
INT8_CHANNEL = EightBits("int8_channel", torch.int8, quantises_rows=False)
"""Weights in int8; activations are not quantised."""
INT8_TOKEN = EightBits("int8_token", torch.int8, quantises_rows=True)
"""The same weights, and activations in int8 with a scale for each row."""
INT8_STATIC = StaticEights("int8_static", torch.int8)
"""The same weights, and activations in int8 with a scale for each layer."""
