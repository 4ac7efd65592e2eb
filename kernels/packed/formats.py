"""The formats that are known."""

from __future__ import annotations

from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.fp8 import FP8_BLOCKS
from specgraph.kernels.packed.int4 import INT4
from specgraph.kernels.packed.mxfp4 import MXFP4

FORMATS: dict[str, Format] = {made.name: made for made in (INT4, MXFP4, FP8_BLOCKS)}
"""Every format by its name, which the ops take as ``format``."""


def format_of(name: str) -> Format:
    """The format of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in FORMATS:
        raise ValueError(f"format is {name!r}; allowed is {', '.join(FORMATS)}.")
    return FORMATS[name]
