"""Where the rows of a tensor lie, in the form in which kernels that take one row per program read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import merged_dimensions

ALIGNED = 16
"""Widths that are multiples of this are read in vectors. This many elements are at least 16 bytes in every dtype."""


@dataclass(frozen=True)
class Rows:
    """The rows of ``x`` ``[..., W]`` in memory.

    Row ``r`` is at ``(r // group * outer + r % group * inner) * alignment``. Two strides describe the heads of a merged
    projection, ``[B, T, heads, D]``. A view that needs more is copied. ``alignment`` is :data:`ALIGNED` if that divides
    the width, and 1 otherwise. Rows that do not begin at a multiple of ``alignment`` are copied as well, so that
    kernels may assume this alignment of every ``x``. What kernels assume, and hence the layout of their sums, is then a
    function of the width alone.
    """

    x: Tensor
    count: int
    group: int
    outer: int
    inner: int
    alignment: int

    @classmethod
    def of(cls, x: Tensor) -> Rows:
        """The rows of ``x``, or of a contiguous copy."""
        width = x.shape[-1]
        alignment = alignment_of(width)
        strides = _two_strides(x)
        aligned = x.data_ptr() % 16 == 0 if alignment > 1 else True
        if strides is None or not aligned or any(stride % alignment for stride in strides[1:]):
            x = x.clone(memory_format=torch.contiguous_format)
            strides = (1, width, 0)
        group, outer, inner = strides
        return cls(x, x.numel() // width, group, outer // alignment, inner // alignment, alignment)

    def arguments(self) -> tuple[int, int, int]:
        """The arguments that kernels take after their tensors: ``group``, ``outer``, ``inner``."""
        return self.group, self.outer, self.inner


def alignment_of(width: int) -> int:
    """The elements of whose number the beginning of every row of this width is a multiple."""
    return ALIGNED if width % ALIGNED == 0 else 1


def row_options(width: int, dtype: torch.dtype) -> dict[str, Any]:
    """How a program computes a whole row of this width and dtype: its constants, and the number of its warps."""
    block, exact = triton.next_power_of_2(width), tl.float64 if dtype == torch.float64 else tl.float32
    sizes = {"WIDTH": width, "BLOCK": block, "ALIGNMENT": alignment_of(width), "EXACT": exact}
    return {**sizes, "num_warps": min(max(block // 512, 1), 32)}


def _two_strides(x: Tensor) -> tuple[int, int, int] | None:
    """``group``, ``outer`` and ``inner`` of :class:`Rows` in elements; None if two strides do not describe ``x``."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    merged = merged_dimensions(x.shape[:-1], x.stride()[:-1])
    if len(merged) > 2:
        return None
    if len(merged) < 2:
        return 1, merged[0][1] if merged else 0, 0
    (_, outer), (group, inner) = merged
    return group, outer, inner


def aligned(vector: Tensor | None) -> Tensor | None:
    """``vector``, or a copy that begins at a multiple of 16 bytes: a kernel's layout would depend on the alignment."""
    if vector is None or (vector.is_contiguous() and vector.data_ptr() % 16 == 0):
        return vector
    return vector.clone(memory_format=torch.contiguous_format)
