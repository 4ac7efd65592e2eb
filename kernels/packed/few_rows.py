"""Integers of four bits on a CPU: PyTorch's kernel for products with few rows, and its layout.

``aten::_weight_int4pack_mm_for_cpu`` computes ``x @ weight.T`` for ``x`` in bfloat16 with sums in float32, rounds once,
and gives a row the same bits whatever stands beside it. Milliseconds of one thread on an Intel Xeon with AVX-512, for a
weight ``[8192, 2048]`` in groups of 128, with PyTorch 2.13 (*dense*: ``linear`` with the weight in bfloat16):

| rows | int4 | dense |
|---|---|---|
| 1 | 1.3 | 3.7 |
| 2 | 1.6 | 2.9 |
| 4 | 2.1 | 3.0 |
| 8 | 4.6 | 2.9 |
| 16 | 7.9 | 2.7 |

In float32 the same kernel takes ten times as long as ``linear``, so only bfloat16 has this form. It takes the numbers
in an order of its own, which is a second copy of them, and scales in the dtype of ``x``. Groups have 32, 64, 128 or 256
inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.packed.format import nibbles

GROUPS = (32, 64, 128, 256)
"""The sizes of groups that the kernel has."""
OUTPUTS = 32
"""The outputs of a weight are a multiple of this."""
_TILES = 1
"""An argument of the layout that only GPUs look at."""


def int4_tiles(words: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """The tensors that :func:`few_rows_int4` takes in place of ``words`` and ``scale``; None if it has no such form.

    They are uint8 ``[O, I / 2]`` and, in ``dtype``, ``[I / G, O, 2]``: a scale, and a zero.
    """
    outputs, inputs = words.shape[0], words.shape[1] * 8
    group = inputs // scale.shape[1]
    if dtype != torch.bfloat16 or group not in GROUPS or outputs % OUTPUTS:
        return None
    scales = scale.t().to(dtype)
    if not torch.equal(scales.to(scale.dtype), scale.t()):  # rounded, they would give another weight
        return None
    tiles = torch.ops.aten._convert_weight_to_int4pack_for_cpu(nibbles(words), _TILES)
    return tiles, torch.stack([scales, torch.zeros_like(scales)], -1)


def few_rows_int4(x: Tensor, tiles: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x`` ``[..., I]`` times a weight ``[O, I]`` in the layout of :func:`int4_tiles`, plus ``bias``, ``[..., O]``."""
    rows, group = x.reshape(-1, x.shape[-1]), x.shape[-1] // scales.shape[0]
    found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows.contiguous(), tiles, group, scales)
    found = found.view(*x.shape[:-1], found.shape[-1])
    return found if bias is None else found + bias
