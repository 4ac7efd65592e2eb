"""A linear layer with symmetric weights of four bits in groups, and how a weight becomes such numbers and scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specgraph.kernels.linear.int4 import PER_WORD, dequantise, int4_linear, pack

HALF_RANGE = 7.5
"""Half of the distance from -8 to 7. The entry of a group that is the largest in magnitude is divided into so many."""


class Int4Linear(nn.Module):
    """A linear layer whose tensors have the names and the layout of compressed-tensors' format ``pack-quantized``.

    Its forward computes what the op ``specgraph::int4_linear`` computes, so that a model with such layers runs in
    transformers, too. Gradients do not pass through it.

    Attributes:
        weight_packed: int32 ``[O, I / 8]``.
        weight_scale: ``[O, I / G]``.
        weight_shape: int64 ``[O, I]``, two numbers on the CPU or wherever the module was moved.
        bias: ``[O]`` or None.
    """

    def __init__(self, packed: Tensor, scale: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape[0], packed.shape[1] * PER_WORD
        self.weight_packed = nn.Parameter(packed, requires_grad=False)
        self.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.weight_shape: Tensor
        self.register_buffer("weight_shape", torch.tensor([self.out_features, self.in_features], device=packed.device))
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def quantised(cls, layer: nn.Linear, group_size: int) -> Int4Linear:
        """The layer with its weight rounded by :func:`quantise_weight`, and the same bias."""
        bias = None if layer.bias is None else layer.bias.detach()
        return cls(*quantise_weight(layer.weight.detach(), group_size), bias)

    @classmethod
    def empty_as(cls, layer: nn.Linear, group_size: int) -> Int4Linear:
        """A layer whose tensors have the shapes that those of ``layer`` would have, on its device."""
        outer, inner = layer.weight.shape
        packed = layer.weight.new_empty(outer, inner // PER_WORD, dtype=torch.int32)
        scale = layer.weight.new_empty(outer, inner // group_size, dtype=scale_dtype_of(layer.weight.dtype))
        return cls(packed, scale, None if layer.bias is None else layer.bias.detach())

    @property
    def group_size(self) -> int:
        """How many inputs have one scale."""
        return self.in_features // self.weight_scale.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """``x @ weight.T + bias``."""
        return int4_linear(x, self.weight_packed, self.weight_scale, self.bias)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight ``[O, I]``, with products in ``dtype``."""
        return dequantise(self.weight_packed.detach(), self.weight_scale.detach(), dtype)

    def extra_repr(self) -> str:
        """What is printed between the brackets of the layer."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}"
        )


def scale_dtype_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the scales of a weight: its own, or float32 for float64."""
    return torch.float32 if dtype == torch.float64 else dtype


def quantise_weight(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Round a weight ``[O, I]`` to the nearest numbers of four bits: ``(packed, scale)``.

    The scale of a group is its largest magnitude divided by 7.5, as compressed-tensors has it for symmetric integers of
    four bits, in the dtype of :func:`scale_dtype_of`. A group of zeros gets the epsilon of that dtype. Numbers are
    rounded half to even and clamped to -8 to 7, so no entry is further from its number than half a scale, but for the
    rounding of the scale itself. All this is computed in float32 (float64 for float64), where compressed-tensors takes
    the dtype of the weight; for weights in float32 both give the same bits.
    """
    exact = torch.promote_types(weight.dtype, torch.float32)
    groups = weight.to(exact).reshape(weight.shape[0], -1, group_size)
    scale = (groups.abs().amax(-1) / HALF_RANGE).to(scale_dtype_of(weight.dtype))
    scale = torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)
    values = (groups / scale.to(exact)[..., None]).round().clamp(-8, 7)
    return pack(values.flatten(-2).to(torch.int8)), scale
