"""Paged attention on a CPU, through PyTorch's fused attention.

The definition in :mod:`specgraph.kernels.attention.attention` is some forty small operations, which take several times
as long as the attention itself where a sequence has a few hundred keys. Here every sequence is one call of
``scaled_dot_product_attention`` on its rows of the cache. Pages that follow each other in memory are read where they
lie, and others are gathered. Looking at a slot or a page costs nothing on a CPU, so exactly the rows are read that a
sequence has, and nothing old has to be masked.

Soft caps and attention sinks are not in that function, and float64 is for checking. Both take the definition.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from specgraph.kernels.attention.arguments import PADDING_SLOT, PagedAttention

Span = tuple[int, int]
"""The first of some rows, and the one behind the last."""


def covers_cpu(given: PagedAttention) -> bool:
    """Whether PyTorch's function computes what is asked for."""
    return is_plain(given) and given.q.dtype != torch.float64


def is_plain(given: PagedAttention) -> bool:
    """Whether there are neither soft caps nor sinks."""
    return given.softcap is None and given.sinks is None


def paged_attention_cpu(given: PagedAttention) -> Tensor:
    """:class:`~specgraph.kernels.attention.arguments.PagedAttention` without soft caps and sinks."""
    batch, heads, width, _ = given.q.shape
    out = given.q.new_zeros(batch, width, heads, given.v.shape[3])
    slots, pages, starts = given.slots.tolist(), given.block_table.tolist(), given.positions[:, :1].tolist()
    for b in range(batch):
        rows = _real(slots[b])
        if rows[0] < rows[1]:
            _attend(given, b, rows, pages[b], starts[b][0], out[b, rows[0] : rows[1]])
    return out


def _real(slots: list[int]) -> Span:
    """The rows of a sequence that are written, which follow each other."""
    first = next((row for row, slot in enumerate(slots) if slot != PADDING_SLOT), len(slots))
    end = next((row for row in range(first, len(slots)) if slots[row] == PADDING_SLOT), len(slots))
    return first, end


def _attend(given: PagedAttention, b: int, rows: Span, pages: list[int], start: int, out: Tensor) -> None:
    """Write the real ``rows`` of sequence ``b`` to its pages, and their attention ``[T, Hq, Dv]`` to ``out``."""
    first, end = rows
    length = start + end  # of the sequence, with these rows
    new = slice(first, end)
    keys, values = (
        _with_rows(cache, x[b, :, new], pages, length)
        for cache, x in ((given.k_cache, given.k), (given.v_cache, given.v))
    )
    query = given.q[b : b + 1, :, new]
    found = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=_mask(end - first, length, given.window), scale=given.scale, enable_gqa=True
    )
    out.copy_(found[0].transpose(0, 1))


def _with_rows(cache: Tensor, x: Tensor, pages: list[int], length: int) -> Tensor:
    """Write the last rows ``x`` ``[H, T, D]`` of a sequence to its pages, and give all of its rows ``[1, H, S, D]``."""
    size, rows = cache.shape[1], x.transpose(0, 1)
    own = pages[: -(-length // size)]
    together = all(b == a + 1 for a, b in itertools.pairwise(own))
    if together:
        view = cache.flatten(0, 1)[own[0] * size : own[0] * size + length]
        view[length - len(rows) :] = rows
    else:
        places = torch.arange(length - len(rows), length)
        numbers = torch.tensor(own)
        cache[numbers[places // size], places % size] = rows
        view = cache[numbers].flatten(0, 1)[:length]
    return view.transpose(0, 1).unsqueeze(0)


def _mask(rows: int, length: int, window: int | None) -> Tensor | None:
    """Which keys the last ``rows`` of ``length`` see, bool ``[T, S]``; None for all."""
    if rows == 1 and (window is None or window >= length):
        return None
    seen = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    return seen if window is None else seen.triu(length - rows - window + 1)
