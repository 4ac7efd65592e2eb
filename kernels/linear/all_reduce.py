"""``specgraph::all_reduce``: the sum of what several devices have computed, in the order of the devices.

A product whose inputs lie on several devices is a sum over them: each device multiplies the inputs that it has. Every
device adds the same numbers in the same order, so that all have the same bits, from run to run and whatever other rows
there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.kernels.checks import require
from specgraph.kernels.ops import Variant, declare


@dataclass(slots=True)
class AllReduce:
    """``parts[0] + parts[1] + ...`` from left to right, in float32 or wider, rounded once to the dtype of the parts.

    Attributes:
        parts: one tensor of each device, by its number; all of one shape and one floating-point dtype.
    """

    parts: list[Tensor]


def all_reduce_reference(given: AllReduce) -> Tensor:
    """:class:`AllReduce` in plain PyTorch."""
    first, *others = given.parts
    total = first.to(torch.promote_types(first.dtype, torch.float32), copy=True)
    for part in others:
        total += part
    return total.to(first.dtype)


def _all_reduce_fake(given: AllReduce) -> Tensor:
    first = given.parts[0]
    require(first.is_floating_point(), lambda: f"parts must be floating-point, not {first.dtype}")
    for part in given.parts:
        alike = part.dtype == first.dtype and part.shape == first.shape
        require(alike, lambda: f"parts must be alike, not {[(str(p.dtype), [*p.shape]) for p in given.parts]}")
    return torch.empty_like(first, memory_format=torch.contiguous_format)


ALL_REDUCE = declare("all_reduce", AllReduce, _all_reduce_fake, (Variant("reference", all_reduce_reference, True),))
