"""The last rows of a call, stored behind those that a cache holds already: each at its position modulo the cache.

A kernel that divides a row among its programs must not store what another program still reads. Where a call has more
rows than a step that decodes, the two may share a place in the cache, and then this kernel stores the rows afterwards.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.state import Buffer

_BLOCK = 1024


def common_stride(*parts: Tensor) -> int:
    """A divisor of the distances between sequences in all ``parts``, at most 16.

    As a constant of a kernel that gets the distances divided by it, it tells the compiler how rows are aligned.
    """
    return math.gcd(16, *(part.stride(0) for part in parts))


@triton.jit
def row_span(span, b):
    """Of sequence ``b``: its row of the state, its first position, where it was settled, its rows, the settled ones.

    They are not read from the L1 cache, so that a kernel may read them before it waits for the one before it.
    """
    at = span + b * 5
    row, begin = tl.load(at, cache_modifier=".cg"), tl.load(at + 1, cache_modifier=".cg")
    before, count = tl.load(at + 2, cache_modifier=".cg"), tl.load(at + 3, cache_modifier=".cg")
    return row, begin, before, count, tl.load(at + 4, cache_modifier=".cg")


@triton.jit
def near_span(span, entry):
    """What :func:`row_span` reads, all but the row as int32.

    Only the beginning of a sequence's part of a tensor may be far away; what is added to it per element is int32.
    """
    row, begin, before, count, settled = row_span(span, entry)
    return row, begin.to(tl.int32), before.to(tl.int32), count.to(tl.int32), settled.to(tl.int32)


@triton.jit(do_not_specialize=["outer", "inner", "size"])
def _store_last_rows_kernel(cache, rows, span, outer, inner, size, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store a part of one row. The grid is (B, SLOTS, blocks of elements)."""
    b, slot = tl.program_id(0), tl.program_id(1)
    row, begin, _, count, _ = row_span(span, b)
    last = begin + count - 1
    position = last - (last - slot + SLOTS) % SLOTS
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < size) & (position >= begin) & (count > 0)
    value = tl.load(rows + b.to(tl.int64) * outer + (position - begin) * inner + column, mask=mask)
    tl.store(cache + (row * SLOTS + slot) * size + column, value, mask=mask)


def store_last_rows(cache: Tensor, rows: Tensor, span: Tensor) -> None:
    """Keep the last rows of every sequence.

    ``rows`` ``[B, T, size]`` have the dtype of ``cache`` ``[N, R, size]``, and ``span`` is ``[B, 5]``.
    """
    size, block = rows.shape[2], min(_BLOCK, triton.next_power_of_2(rows.shape[2]))
    grid = (rows.shape[0], cache.shape[1], triton.cdiv(size, block))
    _store_last_rows_kernel[grid](
        cache, rows, span, rows.stride(0), rows.stride(1), size, SLOTS=cache.shape[1], BLOCK=block, num_warps=4
    )


def most_in_place(slots: int, known: int) -> int:
    """The most rows of a call that may be stored while others of its programs read what is known.

    ``slots`` is the size of the cache: as many rows as a call may know that are certain to belong there, which is
    ``known``, one, and twice those that may not.
    """
    return (slots - known - 1) // 2 + 1


def slots_for(known: int, unsettled: int) -> int:
    """The size of a cache for which :func:`most_in_place` are the rows of a step that decodes."""
    return known + 1 + 2 * unsettled


def row_buffer(known: int, unsettled: int, *shape: int, dtype: torch.dtype, chunk: int | None = None) -> Buffer:
    """A cache ``[B, R, *shape]`` of the last rows: ``known`` that are settled, and room for those that are not.

    With a ``chunk``, those before the last multiple of it are there, too, and a copy is of use to another sequence.
    """
    slots = slots_for(known if chunk is None else known + chunk - 1, unsettled)
    return Buffer(("B", slots, *shape), dtype, indexed=True, settled_rows=known, chunk=chunk)
