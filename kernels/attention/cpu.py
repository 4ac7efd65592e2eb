"""Paged attention on a CPU, through PyTorch's fused attention.

The definition in :mod:`specgraph.kernels.attention.attention` is some forty small operations, which take several times
as long as the attention itself where a sequence has a few hundred keys. Here every sequence attends to its own rows of
the cache in a few operations: ``scaled_dot_product_attention``, or :func:`few_rows_attention`. Pages that follow each
other in memory are read where they lie, and others are gathered. Looking at a slot or a page costs nothing on a CPU, so
exactly the rows are read that a sequence has, and nothing old has to be masked.

Soft caps and attention sinks are not in that function, and float64 is for checking. Both take the definition. Packed
rows come here as the grid that they stand for (:mod:`specgraph.kernels.attention.packed`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specgraph.kernels.attention.arguments import PADDING_SLOT, PagedAttention

FEW_ROWS = 8
"""Up to this many rows of a sequence, attention in float32 is two matrix products and a softmax.

With 4 query heads and 2 key-value heads of 64, 5 rows and 150 keys took 22 us instead of 33; with 32 and 8 heads 118
instead of 207.
"""
MOST_SEQUENCES = 64
"""Up to this many sequences, one after the other is faster than the definition, which computes all of them at once."""
Span = tuple[int, int]
"""The first of some rows, and the one behind the last."""


def covers_cpu(given: PagedAttention) -> bool:
    """Whether PyTorch's function computes what is asked for, and sooner."""
    few = given.cu_seqlens is None and given.q.shape[0] <= MOST_SEQUENCES
    return few and is_plain(given) and given.q.dtype != torch.float64


def is_plain(given: PagedAttention) -> bool:
    """Whether there are neither soft caps nor sinks."""
    return given.softcap is None and given.sinks is None


def paged_attention_cpu(given: PagedAttention) -> Tensor:
    """:class:`~specgraph.kernels.attention.arguments.PagedAttention` without soft caps and sinks."""
    batch, heads, width, _ = given.q.shape
    slots, pages, starts = given.slots.tolist(), given.block_table.tolist(), given.positions[:, 0].tolist()
    spans = [_real(row) for row in slots]
    if spans == [(0, width)]:
        # Compiled code relies on the strides that the fake implementation gives.
        return _attend(given, 0, spans[0], pages[0], starts[0]).contiguous().unsqueeze(0)
    out = given.q.new_zeros(batch, width, heads, given.v.shape[3])
    for b, (first, end) in enumerate(spans):
        if first < end:
            out[b, first:end] = _attend(given, b, (first, end), pages[b], starts[b])
    return out


def _real(slots: list[int]) -> Span:
    """The rows of a sequence that are written, which follow each other."""
    if PADDING_SLOT not in slots:
        return 0, len(slots)
    first = next((row for row, slot in enumerate(slots) if slot != PADDING_SLOT), len(slots))
    end = next((row for row in range(first, len(slots)) if slots[row] == PADDING_SLOT), len(slots))
    return first, end


def _attend(given: PagedAttention, b: int, rows: Span, pages: list[int], start: int) -> Tensor:
    """Write the real ``rows`` of sequence ``b`` to its pages, and give their attention ``[T, Hq, Dv]``."""
    first, end = rows
    query, key, value = (x[b] if end - first == x.shape[2] else x[b, :, first:end] for x in (given.q, given.k, given.v))
    length = start + end  # of the sequence, with these rows
    keys = _with_rows(given.k_cache, key, pages, length)
    values = _with_rows(given.v_cache, value, pages, length)
    if end - first <= FEW_ROWS and query.dtype.itemsize >= 4:  # sums of lower precision would be rounded on the way
        return few_rows_attention(query, keys, values, given.scale, given.window)
    mask = _seen(end - first, length, given.window)
    found = torch.nn.functional.scaled_dot_product_attention(
        query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=mask, scale=given.scale, enable_gqa=True
    )
    return found[0].transpose(0, 1)


def few_rows_attention(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """The last rows ``query`` ``[Hq, T, D]`` of a sequence attend to all ``S`` of them: ``[T, Hq, Dv]``.

    Keys ``[Hkv, S, D]`` and values ``[Hkv, S, Dv]`` are read once for all heads that share them, which PyTorch's fused
    attention does for each of these heads.
    """
    heads, rows, dim = query.shape
    groups, length, _ = keys.shape
    shared = query.reshape(groups, heads // groups * rows, dim)
    scores = torch.bmm(shared, keys.transpose(1, 2)).mul_(scale)
    hidden = _hidden(rows, length, window)
    if hidden is not None:
        scores.view(groups, -1, rows, length).add_(hidden)
    found = torch.bmm(scores.softmax(-1), values)
    return found.view(heads, rows, -1).transpose(0, 1)


def _with_rows(cache: Tensor, x: Tensor, pages: list[int], length: int) -> Tensor:
    """Write the last rows ``x`` ``[H, T, D]`` of a sequence to its pages, and give all of its rows ``[H, S, D]``."""
    size, rows = cache.shape[1], x.transpose(0, 1)
    own = pages[: -(-length // size)]
    if own == list(range(own[0], own[0] + len(own))):
        view = cache.flatten(0, 1).narrow(0, own[0] * size, length)
        view.narrow(0, length - len(rows), len(rows)).copy_(rows)
    else:
        places = torch.arange(length - len(rows), length, device="cpu")
        numbers = torch.tensor(own, device="cpu")
        cache[numbers[places // size], places % size] = rows
        view = cache[numbers].flatten(0, 1)[:length]
    return view.transpose(0, 1)


@functools.lru_cache(maxsize=8)
def _seen(rows: int, length: int, window: int | None) -> Tensor | None:
    """Which keys the last ``rows`` of ``length`` see, bool ``[T, S]``; None for all. The layers of a step share it."""
    if rows == 1 and (window is None or window >= length):
        return None
    seen = torch.ones(rows, length, dtype=torch.bool, device="cpu").tril(length - rows)
    return seen if window is None else seen.triu(length - rows - window + 1)


@functools.lru_cache(maxsize=8)
def _hidden(rows: int, length: int, window: int | None) -> Tensor | None:
    """:func:`_seen` as what is added to scores, float32 ``[T, S]``: 0 where a key is seen, and -inf elsewhere."""
    seen = _seen(rows, length, window)
    return (
        None
        if seen is None
        else torch.zeros(rows, length, dtype=torch.float32, device="cpu").masked_fill_(~seen, -torch.inf)
    )
