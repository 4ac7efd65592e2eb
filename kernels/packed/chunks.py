"""Converts a large tensor chunk by chunk, so that what a conversion needs beside its result stays small.

Numbers of four bits are unpacked to bytes before they are put into another order, which takes several times their size.
A stack of experts may have a gigabyte, and a model of 65 gigabytes fits a card of 80 only if nothing but the result is
made for all of a stack at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 1 << 24
"""How many bytes are converted at once, unless one row has more."""


def by_chunks(convert: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    """``convert(given)`` for a conversion that treats rows ``[W]`` of ``[..., W]`` independently.

    The result has the shape and the dtype of ``given``.
    """
    if given.nbytes <= CHUNK_BYTES:
        return convert(given)
    rows = given.reshape(-1, given.shape[-1])
    made = torch.empty_like(rows)
    for begin, end in _ranges(len(rows), rows.shape[1] * rows.dtype.itemsize):
        made[begin:end] = convert(rows[begin:end])
    return made.view(given.shape)


def columns_by_chunks(convert: Callable[[Tensor], Tensor], given: Tensor, made: Tensor) -> Tensor:
    """Fill ``made`` ``[C * N, M]`` with ``convert(given)``, and return it.

    ``given`` is ``[R, N]``. The conversion makes ``C`` rows of each column, and treats columns independently.
    """
    columns = given.shape[1]
    each = len(made) // columns
    for begin, end in _ranges(columns, len(given) * given.dtype.itemsize):
        made[begin * each : end * each] = convert(given[:, begin:end])
    return made


def in_chunks(given: Tensor) -> Iterator[Tensor]:
    """Views of ``given``, one behind the other along dimension 0."""
    for begin, end in _ranges(len(given), given[:1].nbytes):
        yield given[begin:end]


def _ranges(count: int, bytes_of_each: int) -> list[tuple[int, int]]:
    """Where chunks of so many rows or columns begin and end."""
    step = max(1, CHUNK_BYTES // max(1, bytes_of_each))
    return [(begin, min(begin + step, count)) for begin in range(0, count, step)]
