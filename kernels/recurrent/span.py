"""Where the rows of a call lie in their sequences, and which of them are certain: what every recurrent op has to know.

A call runs the rows ``begin``, ``begin + 1``, ... of a sequence. Those that later calls can no longer take back are
*settled*: prompt tokens and the newest verified token, but no drafts behind it. A recurrent op folds rows into its
state up to the last multiple of its chunk at which all rows are settled, and caches the rows behind it. How many rows
were settled when a sequence was last run is therefore all that is needed to know where the state of an op stands,
whatever its chunk: ``settled[row] // chunk * chunk``.

A call may also continue rows of earlier calls that are not settled themselves: a chain of drafts runs one row after the
other, before any of them is verified. Such a call has fewer than 0 settled rows, counted from its first one. It reads
the cached rows in front of it, caches its own, and folds nothing.

Source of the idea to cache rows since a state was written: ReplaySSM (Dao AI Lab and NVIDIA, 2026). There, a state is
folded when the cached rows are full, so its bits depend on what was accepted before. Folding at absolute boundaries
makes them a function of the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.launch import contiguous
from specgraph.kernels.ops import declare, triton_or_reference


class Span(NamedTuple):
    """The rows of one sequence in a call, on the host.

    Attributes:
        entry: which sequence of the call it is.
        row: which row of the state it has.
        begin: the position of its first row.
        before: how many of its rows were settled before this call.
        num_rows: how many of the call's rows are real.
        num_settled: how many of these are settled; ``-n`` if the last ``n`` rows in front of the call are not, either.
    """

    entry: int
    row: int
    begin: int
    before: int
    num_rows: int
    num_settled: int

    @property
    def end(self) -> int:
        """The position behind its last row."""
        return self.begin + self.num_rows


@dataclass(slots=True)
class RecurrentSpan:
    """A :class:`Span` without its entry for every sequence of a call, int64 ``[b, 5]``.

    Attributes:
        settled: int64 ``[B]``, how many rows of every sequence were settled when it was last run.
        rows: int64 ``[b]``, the row of the state of each sequence of the call, -1 for no sequence.
        positions: int64 ``[b, T]``.
        num_rows: int64 ``[b]``, how many of the rows are real; they come first.
        num_forced: int64 ``[b]``, how many of the tokens that the rows give are known: one row more is settled. It is
            ``-n - 1`` if the last ``n`` rows in front of the call are not settled.
        max_length: int64 ``[b]``; rows from there on are not real.
    """

    settled: Tensor
    rows: Tensor
    positions: Tensor
    num_rows: Tensor
    num_forced: Tensor
    max_length: Tensor


@dataclass(slots=True)
class SettleSpan:
    """Note in ``settled`` ``[B]`` how many rows are settled after a call with this ``span`` ``[b, 5]``."""

    settled: Tensor
    span: Tensor


def recurrent_span_reference(given: RecurrentSpan) -> Tensor:
    """:class:`RecurrentSpan` in plain PyTorch."""
    begin = given.positions[:, 0]
    count = torch.minimum(given.num_rows, given.max_length - begin).clamp(0, given.positions.shape[1])
    count = count.masked_fill(given.rows < 0, 0)
    before = given.settled[given.rows.clamp_min(0)]
    return torch.stack([given.rows, begin, before, count, torch.minimum(count, given.num_forced + 1)], 1)


def settle_span_reference(given: SettleSpan) -> None:
    """:class:`SettleSpan` in plain PyTorch."""
    active = given.span[given.span[:, 3] > 0]
    given.settled[active[:, 0]] = active[:, 1] + active[:, 4]


@triton.jit(do_not_specialize=["batch", "width", "stride"])
def _recurrent_span_kernel(
    span, settled, rows, positions, num_rows, num_forced, max_length, batch, width, stride, LANES: tl.constexpr
):
    """The spans of all sequences, in one program."""
    b = tl.arange(0, LANES)
    own = b < batch
    row = tl.load(rows + b, mask=own, other=-1)
    begin = tl.load(positions + b * stride, mask=own, other=0)
    before = tl.load(settled + tl.maximum(row, 0), mask=own, other=0)
    count = tl.minimum(tl.load(num_rows + b, mask=own, other=0), tl.load(max_length + b, mask=own, other=0) - begin)
    count = tl.where(row < 0, 0, tl.maximum(tl.minimum(count, width), 0))
    certain = tl.minimum(count, tl.load(num_forced + b, mask=own, other=0) + 1)
    tl.store(span + b * 5, row, mask=own)
    tl.store(span + b * 5 + 1, begin, mask=own)
    tl.store(span + b * 5 + 2, before, mask=own)
    tl.store(span + b * 5 + 3, count, mask=own)
    tl.store(span + b * 5 + 4, certain, mask=own)


@triton.jit(do_not_specialize=["batch"])
def _settle_span_kernel(settled, span, batch, LANES: tl.constexpr):
    """Of all sequences, in one program."""
    b = tl.arange(0, LANES)
    row, begin = tl.load(span + b * 5, mask=b < batch, other=0), tl.load(span + b * 5 + 1, mask=b < batch, other=0)
    certain = tl.load(span + b * 5 + 4, mask=b < batch, other=0)
    tl.store(settled + row, begin + certain, mask=tl.load(span + b * 5 + 3, mask=b < batch, other=0) > 0)


def recurrent_span_triton(given: RecurrentSpan) -> Tensor:
    """:class:`RecurrentSpan` in one kernel."""
    (batch, width), span = given.positions.shape, _recurrent_span_fake(given)
    rows, *vectors = contiguous(given, "rows", "num_rows", "num_forced", "max_length")
    _recurrent_span_kernel[(1,)](
        span, given.settled, rows, given.positions, *vectors, batch, width, given.positions.stride(0),
        LANES=triton.next_power_of_2(batch), num_warps=4,
    )
    return span


def settle_span_triton(given: SettleSpan) -> None:
    """:class:`SettleSpan` in one kernel."""
    batch = given.span.shape[0]
    _settle_span_kernel[(1,)](given.settled, given.span, batch, LANES=triton.next_power_of_2(batch), num_warps=4)


def spans(span: Tensor) -> Iterator[Span]:
    """The sequences that have rows in a call. Waits for the device."""
    for entry, values in enumerate(span.tolist()):
        found = Span(entry, *values)
        if found.num_rows > 0:
            yield found


def known_rows(cache: Tensor, own: Span, first: int) -> Tensor:
    """What a cache ``[N, R, ...]`` holds of a sequence's rows from position ``first`` up to this call: ``[n, ...]``."""
    return cache[own.row, torch.arange(first, own.begin, device=cache.device) % cache.shape[1]]


def keep_rows(cache: Tensor, own: Span, rows: Tensor) -> None:
    """Store the rows ``[n, ...]`` of a call in ``cache`` ``[N, R, ...]``: the last ``R``, if there are more."""
    size = cache.shape[1]
    kept = rows[-size:]
    cache[own.row, torch.arange(own.end - len(kept), own.end, device=cache.device) % size] = kept


def _recurrent_span_fake(given: RecurrentSpan) -> Tensor:
    check_shapes(given, positions="b T", rows="b", num_rows="b", num_forced="b", max_length="b")
    return given.positions.new_empty(given.positions.shape[0], 5)


def _settle_span_fake(given: SettleSpan) -> None:
    check_shapes(given, span="B 5")


RECURRENT_SPAN = declare(
    "recurrent_span", RecurrentSpan, _recurrent_span_fake,
    triton_or_reference(recurrent_span_triton, recurrent_span_reference, moves_only=True),
)
SETTLE_SPAN = declare(
    "settle_span", SettleSpan, _settle_span_fake,
    triton_or_reference(settle_span_triton, settle_span_reference, moves_only=True), mutates=("settled",),
)
