"""Paged attention on a CPU, through PyTorch's fused attention.

The definition in :mod:`specgraph.kernels.attention.attention` is some forty small operations, which take several times
as long as the attention itself where a sequence has a few hundred keys. Here every sequence attends to its own rows of
the cache in a few operations, so its result does not depend on which other sequences are in the batch. Pages that
follow each other in memory are read where they lie, and others are gathered. Looking at a slot or a page costs nothing
on a CPU, so exactly the rows are read that a sequence has, and nothing old has to be masked.

Soft caps and attention sinks are not in that function, and float64 is for checking. Both take the definition. Packed
rows come here as the grid that they stand for (:mod:`specgraph.kernels.attention.packed`).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from specgraph.kernels.attention.arguments import PADDING_SLOT, PagedAttention

FEW_ROWS = 16
"""Up to this many rows of a sequence, query heads that share keys become rows of one head.

In float32 attention is then two products and a softmax: with 4 query heads and 2 key-value heads of 64, 5 rows and 150
keys took 22 us instead of 33. In bfloat16, with 14 query heads and 2 key-value heads of 64, one row and 120 keys take
14 us instead of 104 (AMD EPYC with AVX-512, two threads), 5 rows 40 instead of 62, 16 rows 94 instead of 97. With 32
rows and heads of 128, it was 230 instead of 205.
"""
MOST_SEQUENCES = 64
"""Up to this many sequences, one after the other is faster than the definition, which computes all of them at once."""
Span = tuple[int, int]
"""The first of some rows, and the one behind the last."""


def covers_cpu(given: PagedAttention) -> bool:
    """Whether PyTorch's function computes what is asked for, and sooner. It rotates nothing."""
    few = given.cu_seqlens is None and given.q.shape[0] <= MOST_SEQUENCES
    return few and given.cos is None and is_plain(given) and given.q.dtype != torch.float64


def is_plain(given: PagedAttention) -> bool:
    """Whether there are neither soft caps nor sinks."""
    return given.softcap is None and given.sinks is None


def paged_attention_cpu(given: PagedAttention) -> Tensor:
    """:class:`~specgraph.kernels.attention.arguments.PagedAttention` without soft caps and sinks."""
    batch, heads, width, _ = given.q.shape
    slots, pages, starts = given.slots.tolist(), given.block_table.tolist(), given.positions[:, 0].tolist()
    spans = [_real(row) for row in slots]
    whole = spans == [(0, width)] * batch
    _write(given, whole)
    if whole:
        # Compiled code relies on the strides that the fake implementation gives.
        return torch.stack([_attend(given, b, (0, width), pages[b], starts[b]) for b in range(batch)])
    out = given.q.new_zeros(batch, width, heads, given.v.shape[3])
    for b, (first, end) in enumerate(spans):
        if first < end:
            out[b, first:end] = _attend(given, b, (first, end), pages[b], starts[b])
    return out


def _write(given: PagedAttention, whole: bool) -> None:
    """Write the keys and values to their slots; ``whole`` says that no row is padded."""
    slots = given.slots.flatten()
    real = None if whole else (slots != PADDING_SLOT).nonzero().squeeze(1)
    for cache, x in ((given.k_cache, given.k), (given.v_cache, given.v)):
        rows = x.transpose(1, 2).flatten(0, 1)
        cache.flatten(0, 1)[slots if real is None else slots[real]] = rows if real is None else rows[real]


def _real(slots: list[int]) -> Span:
    """The rows of a sequence that are written, which follow each other."""
    if PADDING_SLOT not in slots:
        return 0, len(slots)
    first = next((row for row, slot in enumerate(slots) if slot != PADDING_SLOT), len(slots))
    end = next((row for row in range(first, len(slots)) if slots[row] == PADDING_SLOT), len(slots))
    return first, end


def _attend(given: PagedAttention, b: int, rows: Span, pages: list[int], start: int) -> Tensor:
    """Attention ``[T, Hq, Dv]`` of the real ``rows`` of sequence ``b``, whose row 0 is at position ``start``."""
    first, end = rows
    size, window = given.k_cache.shape[1], given.window
    unseen = 0 if window is None else max(0, start + first + 1 - window) // size  # pages that are not read
    own = pages[unseen : -(-(start + end) // size)]
    keys, values = (_cached(cache, own, start + end - unseen * size) for cache in (given.k_cache, given.v_cache))
    return _over(given.q[b, :, first:end], keys, values, given.scale, given.window).transpose(0, 1)


def _cached(cache: Tensor, pages: list[int], length: int) -> Tensor:
    """The first ``length`` rows of these pages of a sequence, ``[H, S, D]``."""
    if pages == list(range(pages[0], pages[0] + len(pages))):
        own = cache.narrow(0, pages[0], len(pages))
    else:
        own = cache.index_select(0, torch.tensor(pages, device="cpu"))
    return own.flatten(0, 1).narrow(0, 0, length).transpose(0, 1)


def _over(query: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """The last rows ``query`` ``[Hq, T, D]`` of a sequence attend to all ``S`` of them: ``[Hq, T, Dv]``.

    PyTorch's fused attention reads keys ``[Hkv, S, D]`` and values ``[Hkv, S, Dv]`` once for each query head. Of few
    rows, the heads that share keys are therefore given to it as rows of one head.
    """
    heads, rows, dim = query.shape
    sharing = heads // keys.shape[0] if rows <= FEW_ROWS else 1
    shared = query.reshape(heads // sharing, sharing * rows, dim)
    hidden = _hidden(rows, keys.shape[1], window, sharing, query.dtype)
    if rows <= FEW_ROWS and (query.dtype.itemsize >= 4 or dim != values.shape[2]):
        return _two_products(shared, keys, values, scale, hidden).view(heads, rows, -1)
    found = torch.nn.functional.scaled_dot_product_attention(
        shared.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), attn_mask=hidden, scale=scale, enable_gqa=True
    )
    return found.reshape(heads, rows, -1)


def _two_products(query: Tensor, keys: Tensor, values: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """Attention of heads with keys of their own, summed in float32 or wider.

    PyTorch has no fused attention for values that are not as long as keys, and for few rows in float32 this is faster.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    scores = torch.bmm(query.to(exact), keys.to(exact).transpose(1, 2)).mul_(scale)
    if hidden is not None:
        scores.add_(hidden)
    return torch.bmm(scores.softmax(-1), values.to(exact)).to(query.dtype)


def _hidden(rows: int, length: int, window: int | None, copies: int, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of the last ``rows`` of ``length``: 0 where a key is seen, and -inf elsewhere.

    ``[copies * T, S]``, the same for each copy; None where all keys are seen.
    """
    if rows == 1 and (window is None or window >= length):
        return None
    # A row sees a key by its distance alone, so sequences of other lengths have the end of the same matrix.
    return _hidden_in(rows, 1 << (length - 1).bit_length(), window, copies, dtype)[:, -length:]


@functools.lru_cache(maxsize=8)
def _hidden_in(rows: int, length: int, window: int | None, copies: int, dtype: torch.dtype) -> Tensor:
    """:func:`_hidden`, computed. The layers of a step share it."""
    seen = torch.ones(rows, length, dtype=torch.bool, device="cpu").tril(length - rows)
    seen = seen if window is None else seen.triu(length - rows - window + 1)
    return torch.zeros(rows, length, dtype=dtype, device="cpu").masked_fill_(~seen, -torch.inf).repeat(copies, 1)
