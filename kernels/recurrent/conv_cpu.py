"""The short convolution on a CPU: all sequences of a call at once, as products and sums of one row with one weight.

``conv1d`` takes another algorithm for another number of rows, and PyTorch's ``silu`` rounds the last elements of a
tensor in another way than the others. Products, sums, quotients and ``exp`` do not, so the bits of a row are a function
of the inputs that it sees. As in the Triton form, the sum is of float32, and rounded to the dtype of the weights.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.recurrent.arguments import CachedConv
from specgraph.kernels.recurrent.span import Span, spans


class _Places(NamedTuple):
    """Where the rows of a call lie, for a cache of which each row is a line, ``[N * R, D]``.

    Attributes:
        absent: bool ``[B, w - 1, 1]``, which inputs in front of the new rows lie in front of the sequence, too; None if
            none does.
        padding: bool ``[B, T, 1]``, which of the new rows are not real; None if all are.
        old: int64 ``[B * (w - 1)]``, the lines of the inputs in front of the new rows.
        kept, lines: int64 ``[n]``, which rows of ``[B * (w - 1 + T)]`` are kept, and in which line each.
    """

    absent: Tensor | None
    padding: Tensor | None
    old: Tensor
    kept: Tensor
    lines: Tensor


def cached_conv_cpu(given: CachedConv) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedConv` in float32 or lower precision."""
    batch, channels, rows = given.x.shape
    before, cache = given.weight.shape[1] - 1, given.inputs.flatten(0, 1)
    places = _places(tuple(spans(given.span)), batch, rows, before, given.inputs.shape[1])
    old = cache.index_select(0, places.old).view(batch, before, channels)
    if places.absent is not None:
        old.masked_fill_(places.absent, 0)
    every = torch.cat([old, given.x.transpose(1, 2)], 1)
    kept = every.flatten(0, 1).index_select(0, places.kept)
    cache.index_copy_(0, places.lines, kept)
    out = _convolve(every.float(), given)
    if places.padding is not None:
        out.masked_fill_(places.padding, 0)
    return out.to(given.x.dtype).transpose(1, 2)


def _convolve(every: Tensor, given: CachedConv) -> Tensor:
    """The rows ``[B, T, D]`` behind the first ``w - 1`` of ``every``, float32 with the digits of the weights' dtype."""
    weight, bias, dtype = given.weight.t().float().contiguous(), given.bias, given.weight.dtype
    count, rows = weight.shape[0], given.x.shape[2]
    out = every[:, :rows] * weight[0]
    for i in range(1, count):
        out += every[:, i : i + rows] * weight[i]
    if bias is not None:
        out += bias.float()
    out = out.to(dtype).float()
    return out.div_(out.neg().exp_().add_(1)).to(dtype) if given.activation else out


@functools.lru_cache(maxsize=8)
def _places(active: tuple[Span, ...], batch: int, rows: int, before: int, slots: int) -> _Places:
    """Computed once for all layers of a step."""
    old, kept, lines = [0] * (batch * before), list[int](), list[int]()
    absent, padding = [False] * (batch * before), [True] * (batch * rows)
    for own in active:
        first, new = max(0, own.num_rows - slots), own.entry * (before + rows) + before
        for i, position in enumerate(range(own.begin - before, own.begin), own.entry * before):
            old[i], absent[i] = own.row * slots + max(0, position) % slots, position < 0
        padding[own.entry * rows : own.entry * rows + own.num_rows] = [False] * own.num_rows
        kept += range(new + first, new + own.num_rows)
        lines += [own.row * slots + position % slots for position in range(own.begin + first, own.end)]
    return _Places(_mask(absent, batch), _mask(padding, batch), _index(old), _index(kept), _index(lines))


def _mask(mask: list[bool], batch: int) -> Tensor | None:
    return torch.tensor(mask, device="cpu").view(batch, -1, 1) if any(mask) else None


def _index(index: list[int]) -> Tensor:
    return torch.tensor(index, dtype=torch.int64, device="cpu")
