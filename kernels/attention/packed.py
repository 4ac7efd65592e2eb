"""Attention of packed rows in plain PyTorch: the grid that they stand for, through the definition, and back.

A row of a sequence attends to that sequence's cache alone, so nothing but the arrangement of the rows differs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from specgraph.kernels.attention.arguments import PADDING_SLOT, PagedAttention
from specgraph.kernels.attention.packing import (
    PackedPlaces,
    PackRows,
    UnpackRows,
    pack_rows_reference,
    packed_places_reference,
    unpack_rows_reference,
)


def attend_packed(given: PagedAttention, attend: Callable[[PagedAttention], Tensor]) -> Tensor:
    """What ``attend`` gives for the grid of the packed rows of ``given``, packed again. It waits for the device."""
    starts = given.cu_seqlens
    assert starts is not None, "the rows are not packed"
    counts = (starts[1:-1] - starts[:-2]).clamp_min(0)
    width = max(1, int(counts.max()) if len(counts) else 1)

    def grid(rows: Tensor) -> Tensor:
        return unpack_rows_reference(UnpackRows(rows, starts, width))

    new: dict[str, Any] = {"slots": grid(given.slots - PADDING_SLOT) + PADDING_SLOT, "positions": grid(given.positions)}
    new |= {name: grid(getattr(given, name).transpose(1, 2)).transpose(1, 2) for name in ("q", "k", "v")}
    if given.cos is not None and given.sin is not None:
        new |= {"cos": grid(given.cos), "sin": grid(given.sin)}
    out = attend(dataclasses.replace(given, **new, cu_seqlens=None))
    _, source = packed_places_reference(PackedPlaces(counts, given.q.shape[2], width))
    return pack_rows_reference(PackRows(out, source, 0))
