"""In which way products with a weight in few bits are computed on a device, for reports.

Nothing is listed here: the ops are asked about a small example, as they are when a product is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR, PackedExpertLinear
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import ARRANGED, FORMATS, arranged_of
from specgraph.kernels.packed.linear import PACKED_LINEAR, PackedLinear
from specgraph.kernels.packed.operands import packed_words

HOPPER, TRITON, CPU, WHOLE = WAYS = ("hopper", "triton", "cpu", "whole")
"""Numbers are expanded in registers, by kernels for Hopper; the same by Triton, or by a function in C++; the
whole weight is made in float32 for each product."""
_SIZE = 256
"""The outputs and the inputs of the example, which all formats can store."""


def published() -> list[Format]:
    """The formats in which files hold weights, without those that are sorted for a GPU."""
    arranged = {form.name for form in ARRANGED.values()}
    return [form for name, form in FORMATS.items() if name not in arranged]


def way_of(form: Format, kind: str, device: torch.device, *, stacked: bool = False) -> str:
    """One of :data:`WAYS` for a row in bfloat16.

    Args:
        form: a format in the published order.
        kind: the device type.
        device: where the example is made.
        stacked: whether the weight is a stack of experts, which formats with ``own_inputs`` do not have.
    """
    x, weight = torch.zeros(1, _SIZE, dtype=torch.bfloat16, device=device), _example(form, device, stacked)
    arranged = arranged_of(form.name, weight) if kind == "cuda" else None
    if arranged is not None:
        form, weight = arranged, [*arranged.arrange(weight)]
    if stacked:
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        name = PACKED_EXPERT_LINEAR.choose(kind, PackedExpertLinear(x, weight, None, ids, format=form.name)).name
    else:
        name = PACKED_LINEAR.choose(kind, PackedLinear(x, weight, None, format=form.name)).name
    if name in (HOPPER, CPU):
        return name
    if name == TRITON and packed_words(form, _SIZE, x.dtype, weight) is not None:
        return TRITON
    return WHOLE


def _example(form: Format, device: torch.device, stacked: bool) -> list[Tensor]:
    front = (2,) if stacked else ()
    return [
        torch.zeros(*front, *shape, dtype=dtype, device=device)
        for shape, dtype in form.shapes(_SIZE, _SIZE, None, torch.bfloat16)
    ]
