"""Drafts that lie in several tensors, read as if these lay side by side; a concatenation would be one more launch."""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import dense_rows


def side_by_side(tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...], tuple[int, ...]]:
    """What :func:`column_of` takes: ``tensors`` ``[B, k]`` without those of no column, their widths, and their strides.

    The first columns of a wider tensor are read where they lie, which saves a launch.
    """
    some = tuple(dense_rows(tensor) for tensor in tensors if tensor.shape[1])
    return some, tuple(tensor.shape[1] for tensor in some), tuple(tensor.stride(0) for tensor in some)


@triton.jit
def column_of(tensors, b, column, FILL: tl.constexpr, DTYPE: tl.constexpr, WIDTHS: tl.constexpr, STRIDES: tl.constexpr):
    """What stands in ``column``, a number or several, of the row ``b``, or ``FILL`` behind the last of the tensors."""
    found = tl.full(column.shape, FILL, DTYPE)
    place = column
    for index in tl.static_range(len(WIDTHS)):
        inside = (place >= 0) & (place < WIDTHS[index])
        own = tl.load(tensors[index] + b * STRIDES[index] + place, mask=inside, other=FILL)
        found = tl.where(inside, own, found)
        place -= WIDTHS[index]
    return found
