"""Runs recurrent ops over sequences in pieces, of which a part is rejected, as steps of a decoder do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.recurrent.span import RecurrentSpan, SettleSpan, recurrent_span_reference, settle_span_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAR = 1 << 20
ALL = slice(None)
"""Sequences that run together: all."""


def device_of(form: str) -> str:
    """Where a variant is tested."""
    return "cpu" if form == "cpu" else DEVICE


class Window(NamedTuple):
    """A call over one sequence: its first row, how many rows it has, how many of the tokens that these give are known,
    and how many of the rows are those of the sequence.
    """

    begin: int
    rows: int
    forced: int
    accepted: int


def history(length: int, prompt: int, k: int, accept: str, seed: int) -> Iterator[Window]:
    """The windows of a sequence: its prompt in random pieces, then windows of ``k`` drafts until it has ``length``.

    ``accept`` says how many are accepted: ``none``, ``all`` or ``mixed``; with ``drafts``, see :func:`chains`.
    """
    chance, begin = random.Random(seed), 0
    if accept == "drafts":
        yield from chains(length, prompt, k, chance)
        return
    while begin < prompt - 1:
        rows = chance.randint(1, prompt - 1 - begin)
        yield Window(begin, rows, rows, rows)
        begin += rows
    while begin < length:
        rows = min(k + 1, length - begin)
        accepted = {"none": 1, "all": rows, "mixed": chance.randint(1, rows)}[accept]
        yield Window(begin, rows, 0, accepted)
        begin += accepted


def chains(length: int, prompt: int, k: int, chance: random.Random) -> Iterator[Window]:
    """The windows of a draft model: the newest token again and those that were accepted, and then ``k - 1`` rows of a
    chain, of which the first few are those of the sequence.
    """
    begin = 0
    while begin < length - 1:
        accepted = min(chance.randint(1, max(prompt - 1 - begin, k + 1)), length - 1 - begin)
        yield Window(begin, accepted + 1, accepted - 1, accepted + 1)
        right = chance.randint(0, k)
        for row in range(1, min(k, length - begin - accepted)):
            yield Window(begin + accepted + row, 1, -row - 1, int(row <= right))
        begin += accepted


def unsettled(k: int, accept: str) -> int:
    """The most rows of a call of :func:`history` that are not settled: a draft model runs the newest token again."""
    return k + (accept == "drafts")


class Memory:
    """What a module shares among its recurrent ops, for sequences in rows that are in no order."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = torch.tensor(rows)
        self.settled = torch.zeros(max(rows) + 1, dtype=torch.int64)

    def span(self, windows: list[Window | None], width: int) -> Tensor:
        """The span of a call; a sequence without a window is inactive."""
        given = [w or Window(0, 0, 0, 0) for w in windows]
        begins, rows, forced = (torch.tensor([w[i] for w in given]) for i in range(3))
        positions = begins.unsqueeze(1) + torch.arange(width)
        longest = torch.full_like(begins, FAR)
        return recurrent_span_reference(RecurrentSpan(self.settled, self.rows, positions, rows, forced, longest))

    def settle(self, span: Tensor) -> None:
        """Behind a call."""
        settle_span_reference(SettleSpan(self.settled, span))


def assert_near(actual: Tensor, wanted: Tensor, near: float) -> None:
    """Each element equal up to ``near`` in float64, and else up to ``near`` of the largest value."""
    if actual.dtype == torch.float64:
        torch.testing.assert_close(actual.cpu(), wanted, rtol=near, atol=1e-12)
    else:
        assert (actual.cpu().double() - wanted).abs().max() <= near * max(1e-30, float(wanted.abs().max()))


def run(
    inputs: list[tuple[Tensor, ...]], plans: list[list[Window]], memory: Memory, call: Callable[..., Tensor], dim: int
) -> list[Tensor]:
    """The accepted outputs of every sequence.

    ``inputs`` are tensors of the rows of each sequence, in their dimension ``dim``. ``call`` gets those of a call,
    ``[b, ...]`` with padding in every other call, and its span. Rows that are rejected are of other numbers than those
    that follow. A row that is run again gives the same once more.
    """
    outs: list[list[Tensor]] = [[] for _ in inputs]
    for number in range(max(map(len, plans))):
        windows = [plan[number] if number < len(plan) else None for plan in plans]
        width = max(w.rows for w in windows if w is not None) + number % 2
        batch = [_window(own, w, width, dim) for own, w in zip(inputs, windows, strict=True)]
        span = memory.span(windows, width)
        out = call(*map(torch.stack, zip(*batch, strict=True)), span)
        memory.settle(span)
        for own, w, result in zip(outs, windows, out, strict=True):
            if w is not None:
                _keep(own, w.begin, result.narrow(dim, 0, w.accepted).unbind(dim))
                assert not result.narrow(dim, w.rows, width - w.rows).any()
    return [torch.stack(own, dim) for own in outs]


def _keep(known: list[Tensor], begin: int, rows: Sequence[Tensor]) -> None:
    """Add the outputs of rows from position ``begin`` on. Those that are known are the same: in float64 nearly."""
    for position, row in enumerate(rows, begin):
        if position < len(known):
            near = 1e-9 if row.dtype == torch.float64 else 0.0
            torch.testing.assert_close(row, known[position], rtol=near, atol=near)
        else:
            assert position == len(known)
            known.append(row)


def _window(inputs: tuple[Tensor, ...], window: Window | None, width: int, dim: int) -> list[Tensor]:
    """The rows of one sequence in a call: accepted ones, rejected ones with other numbers, and NaN as padding."""
    begin, rows, _, accepted = window or Window(0, 0, 0, 0)
    found = []
    for own in inputs:
        shape = [*own.shape]
        shape[dim] = width - rows
        real = own.narrow(dim, begin, rows).clone()
        real.narrow(dim, accepted, rows - accepted).mul_(0.5)
        found.append(torch.cat([real, own.new_full(shape, torch.nan)], dim))
    return found
