"""The formats that are known."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specgraph.kernels.packed.arranged import FP8_BLOCKS_ARRANGED, INT4_ARRANGED, MXFP4_ARRANGED, Arranged
from specgraph.kernels.packed.eights import (
    FP8_CHANNEL,
    FP8_STATIC,
    FP8_TOKEN,
    INT8_CHANNEL,
    INT8_STATIC,
    INT8_TOKEN,
)
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.fp8 import FP8_BLOCKS
from specgraph.kernels.packed.int4 import INT4
from specgraph.kernels.packed.int4_zeros import INT4_ACT_ORDER, INT4_ZEROS
from specgraph.kernels.packed.mxfp4 import MXFP4
from specgraph.kernels.packed.nvfp4 import NVFP4, NVFP4_ROWS

_KNOWN = (
    INT4, MXFP4, FP8_BLOCKS, INT4_ARRANGED, FP8_BLOCKS_ARRANGED, MXFP4_ARRANGED, INT4_ZEROS, INT4_ACT_ORDER,
    FP8_CHANNEL, FP8_TOKEN, FP8_STATIC, INT8_CHANNEL, INT8_TOKEN, INT8_STATIC, NVFP4, NVFP4_ROWS,
)  # fmt: skip
FORMATS: dict[str, Format] = {made.name: made for made in _KNOWN}
"""Every format by its name, which the ops take as ``format``."""
_ARRANGED = (INT4_ARRANGED, FP8_BLOCKS_ARRANGED, MXFP4_ARRANGED)
ARRANGED: dict[str, Arranged] = {made.published.name: made for made in _ARRANGED}
"""The formats in whose order models are put on a GPU, by the names of those in the published order."""


def arranged_of(name: str, *weights: Sequence[Tensor]) -> Arranged | None:
    """The format in whose order a GPU takes these weights, matrices or stacks, of the format ``name`` as published.

    None if there is no such order, or one of the weights has sizes that it does not take.
    """
    arranged, form = ARRANGED.get(name), format_of(name)
    if arranged is None:
        return None
    for numbers, scale, *_ in weights:
        stacked, inputs = numbers.dim() > 2, numbers.shape[-1] * form.per_element
        if (stacked and not arranged.in_stacks) or not arranged.takes(inputs, scale):
            return None
    return arranged


def format_of(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; allowed is {', '.join(FORMATS)}.")
    return FORMATS[name]
