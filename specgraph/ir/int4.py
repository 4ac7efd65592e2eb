"""Weights of four bits in groups, as modules of models hold them: how one is recognised, and which op computes it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specgraph.ir.scheme import Scheme
from specgraph.kernels.linear.int4 import PER_WORD, SCALE_DTYPES

PACKED, SCALE = "weight_packed", "weight_scale"
"""The names that compressed-tensors gives the tensors of such a weight."""
OTHERS = {"weight_shape", "bias"}
"""What else such a module may hold. A zero point or an order of the inputs would make it another scheme."""


class Int4(Scheme):
    """Symmetric numbers of four bits with a scale for each group of inputs (:mod:`specgraph.kernels.linear.int4`)."""

    def weight_of(self, module: nn.Module) -> tuple[Tensor, ...] | None:
        """The packed numbers and the scales of every module that holds nothing else but a bias and its shape.

        Modules of other packages are recognised, too, since only what they hold is looked at.
        """
        held = {
            name: value for tensors in (module._parameters, module._buffers) for name, value in tensors.items()
            if value is not None
        }  # fmt: skip
        packed, scale = held.pop(PACKED, None), held.pop(SCALE, None)
        if packed is None or scale is None or not held.keys() <= OTHERS:
            return None
        if packed.dtype != torch.int32 or scale.dtype not in SCALE_DTYPES or packed.dim() != 2 or scale.dim() != 2:
            return None
        (outer, words), groups = packed.shape, scale.shape[1]
        fits = scale.shape[0] == outer and groups > 0 and words * PER_WORD % groups == 0
        return (packed, scale) if fits else None

    def why_not_merged(self, weights: Sequence[Sequence[Tensor]]) -> str | None:
        """Joined weights have one number of groups."""
        groups = sorted({scale.shape[1] for _, scale in weights})
        if len(groups) > 1:
            return f"their inputs are in {' and '.join(map(str, groups))} groups"
        return super().why_not_merged(weights)


INT4 = Int4("int4", torch.ops.specgraph.int4_linear.default, ("packed", "scale"))
