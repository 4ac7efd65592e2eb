"""Compares tensors that are large, or that are on two devices, and the memory that tensors show."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

COMPARED = 2**23
"""How many elements are compared at once: some tens of megabytes, whose transfer between devices takes milliseconds."""
FLOAT8 = frozenset(getattr(torch, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu"))


def equal_tensors(a: Tensor, b: Tensor, limit: int = COMPARED) -> bool:
    """Like ``torch.equal``, but at most ``limit`` elements are compared at a time, up to the first part that differs.

    The tensors may have different strides and be on different devices; parts of ``b`` are moved to the device of ``a``.
    NaN equals nothing, and -0.0 equals 0.0. Tensors of different shapes or dtypes are not equal, and neither are
    tensors without data.
    """
    if a.shape != b.shape or a.dtype != b.dtype or a.is_meta or b.is_meta:
        return False
    pairs = ((x, y.to(x.device)) for x, y in chunks(a.detach(), b.detach(), limit))
    if a.dtype in FLOAT8:  # not every device compares them
        return all(torch.equal(widen(x), widen(y)) for x, y in pairs)
    return all(torch.equal(x, y) for x, y in pairs)


def chunks(a: Tensor, b: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of corresponding views of at most ``limit`` elements. Nothing is copied, whatever the strides are."""
    if 0 < a.numel() <= limit:
        yield a, b
    elif a.numel() > 0:
        dim = next(dim for dim, size in enumerate(a.shape) if size > 1)
        for halves in zip(a.tensor_split(2, dim), b.tensor_split(2, dim), strict=True):
            yield from chunks(*halves, limit)


def widen(values: Tensor) -> Tensor:
    """The same values in the widest dtype of their kind, in which differences are exact or nearly exact."""
    if values.is_complex():
        return values.to(torch.complex128)
    return values.to(torch.float64 if values.is_floating_point() else torch.int64)


def view_of(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors which show the same memory in the same way, such as tied weights."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, tensor.is_conj(), tensor.is_neg()
