"""Cuts prompts into the windows of wide steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specgraph.runtime.schedule.prompt_shapes import MOST_ROWS, fill, num_together

LAID_OUT = -1
"""The number of rows that a block gives for a sequence that decodes: those that its last step has laid out."""


class Chunk(NamedTuple):
    """A window of prompt tokens, still on the host.

    Attributes:
        rows: the sequences whose prompts it runs, in order, and behind them those that decode.
        forced: how many next tokens each of the first is given.
        num_tokens: the number of prompt tokens in it.
        num_rows: the most rows that all of them have together.
        block: int64 ``[b, 3 + W]``, one line per sequence: its row, its number of real rows, the number of next tokens
            that it is given, and its window. It is one tensor, so that one copy takes it to the device. A sequence that
            decodes has ``LAID_OUT`` rows.
        reached: the boundaries of prompts at which this window leaves the state of their layers: pairs of a row and the
            number of tokens before the boundary.
    """

    rows: list[int]
    forced: list[int]
    num_tokens: int
    num_rows: int
    block: Tensor
    reached: Sequence[tuple[int, int]] = ()


class Prefill:
    """The prompts that are yet to be run, by the rows of their sequences.

    The next tokens of a prompt's rows are known, so they are forced; its last row is the first whose next token is not.
    Where rows are packed (:meth:`fill`), prompts run in the order in which they came, beside sequences that decode.
    Where a window is run as it is (:meth:`chunk`), it has prompts alone, and one with little left to run joins one with
    much if the padding costs less than a step of its own
    (:func:`~specgraph.runtime.schedule.prompt_shapes.num_together`).

    Attributes:
        width: the number of rows of a decode step.
    """

    def __init__(self, width: int, rows: int, overhead: int, most_rows: int = MOST_ROWS, *, within: int = 1) -> None:
        """``width`` is the number of rows of a decode step, which no window is narrower than; ``rows`` is the number of
        sequences for which there is room; ``overhead`` is what a step costs besides its rows, in rows; ``most_rows`` is
        the most rows of a step of several sequences; ``within`` is how many rows, from a boundary on, a window ends in
        that leaves the state at the boundary."""
        self.width, self._rows, self._overhead, self._most_rows = width, rows, overhead, most_rows
        self._within = within
        self._prompts: dict[int, Tensor] = {}
        self._done: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._boundaries: dict[int, list[int]] = {}

    def add(
        self, row: int, prompt: Tensor, done: int = 0, end: int | None = None, boundaries: Sequence[int] = ()
    ) -> None:
        """The sequence in ``row`` begins with ``prompt``, 1-D int64, of which ``done`` tokens need not be run.

        Neither need those from ``end`` on, of which the first is given as the next token of the row before it. At each
        of the ``boundaries``, in ascending order, a window leaves the state of recurrent layers.
        """
        self._boundaries[row] = list(boundaries)
        self._prompts[row], self._done[row], self._ends[row] = prompt, done, prompt.numel() if end is None else end

    def drop(self, row: int) -> None:
        """What is left of the prompt in ``row``, if anything is, is not wanted any more."""
        self._prompts.pop(row, None)
        self._done.pop(row, None)
        self._ends.pop(row, None)
        self._boundaries.pop(row, None)

    def pending(self) -> list[int]:
        """The rows that still have prompt tokens to run, in the order in which they came."""
        return list(self._prompts)

    def chunk(self, most: int) -> Chunk:
        """The next window that is run as it is; call it while sequences are pending.

        It has at most ``most`` columns: the rest of a prompt, or one row less and the token behind it. (There is one
        more column if a token behind the rest is given.)
        """
        return self._cut({row: self._next_rows(row, most) for row in self._together(most)})

    def fill(self, most: int, budget: int, decoding: Sequence[int] = (), width: int = 1) -> Chunk:
        """The next window whose rows are packed; call it while sequences are pending.

        Args:
            most: the most columns of a prompt, as for :meth:`chunk`.
            budget: the most prompt rows of all sequences together.
            decoding: the rows of sequences that decode in the same step.
            width: how many rows each of these has at most.
        """
        waiting = self.pending()[:budget]
        left = [self._ends[row] - self._done[row] for row in waiting]
        counts = fill(left, most, budget, len(decoding), self.width)
        return self._cut(dict(zip(waiting, counts, strict=False)), decoding, width)

    def _cut(self, counts: Mapping[int, int], decoding: Sequence[int] = (), width: int = 0) -> Chunk:
        """A window with the next rows of some sequences, which are then done."""
        counts = {row: min(count, self._most(row)) for row, count in counts.items()}
        rows = list(counts)
        # One token more than rows: what follows the chunk's last row is known, too, unless the prompt ends there.
        known = [self._prompts[row][self._done[row] : self._done[row] + n + 1].numpy() for row, n in counts.items()]
        forced = [len(tokens) - 1 for tokens in known]
        columns = max(self.width, *map(len, known))
        block = np.zeros((len(rows) + len(decoding), 3 + columns), dtype=np.int64)
        for line, row, tokens in zip(block, rows, known, strict=False):
            line[:3] = row, counts[row], len(tokens) - 1
            line[3 : 3 + len(tokens)] = tokens
        block[len(rows) :, 0] = decoding
        block[len(rows) :, 1] = LAID_OUT
        reached = [(row, boundary) for row, count in counts.items() for boundary in self._advance(row, count)]
        total = sum(counts.values())
        return Chunk([*rows, *decoding], forced, total, total + width * len(decoding), torch.from_numpy(block), reached)

    def _most(self, row: int) -> int:
        """The most rows of a prompt that the next window may run, so that it leaves the state at the next boundary."""
        ahead = self._boundaries[row]
        return (ahead[0] + self._within - 1 if ahead else self._ends[row]) - self._done[row]

    def _advance(self, row: int, count: int) -> list[int]:
        """Some more rows of a prompt are run; gives the boundary that this reaches, if there is one."""
        self._done[row] += count
        reached = [boundary for boundary in self._boundaries[row] if boundary <= self._done[row]]
        del self._boundaries[row][: len(reached)]
        if self._done[row] == self._ends[row]:
            self.drop(row)
        return reached

    def _next_rows(self, row: int, most: int) -> int:
        left = self._ends[row] - self._done[row]
        return left if left <= most else max(1, most - 1)

    def _together(self, most: int) -> list[int]:
        """The pending sequences of the next window: those with the most rows to run."""
        waiting = sorted(self.pending(), key=lambda row: self._next_rows(row, most), reverse=True)
        widths = [self._next_rows(row, most) for row in waiting]
        taken = num_together(widths, self._rows, self._overhead, self._most_rows)
        return sorted(waiting[:taken])
