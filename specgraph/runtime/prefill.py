"""Cuts prompts into the windows of wide steps."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.runtime.prompt_shapes import MOST_ROWS, num_together


class Chunk(NamedTuple):
    """A window of prompt tokens, still on the host.

    Attributes:
        rows: the sequences that it runs.
        forced: how many next tokens each of them is given.
        num_tokens: the number of prompt tokens in it.
        block: int64 ``[b, 3 + W]``, one line per sequence: its row, its number of real rows, the number of next tokens
            that it is given, and its window. It is one tensor, so that one copy takes it to the device.
    """

    rows: list[int]
    forced: list[int]
    num_tokens: int
    block: Tensor


class Prefill:
    """The prompts that are yet to be run, by the rows of their sequences.

    The next tokens of a prompt's rows are known, so they are forced; its last row is the first whose next token is not.
    A wide step runs sequences whose prompt is pending, and no others. One with little left to run joins one with much
    if the padding costs less than a step of its own (:func:`~specgraph.runtime.prompt_shapes.num_together`).
    """

    def __init__(self, width: int, rows: int, overhead: int, most_rows: int = MOST_ROWS) -> None:
        """``width`` is the number of rows of a decode step, which no window is narrower than; ``rows`` is the number of
        sequences for which there is room; ``overhead`` is what a step costs besides its rows, in rows; ``most_rows`` is
        the most rows of a step of several sequences."""
        self._width, self._rows, self._overhead, self._most_rows = width, rows, overhead, most_rows
        self._prompts: dict[int, Tensor] = {}
        self._done: dict[int, int] = {}
        self._ends: dict[int, int] = {}

    def add(self, row: int, prompt: Tensor, done: int = 0, end: int | None = None) -> None:
        """The sequence in ``row`` begins with ``prompt``, 1-D int64, of which ``done`` tokens need not be run.

        Neither need those from ``end`` on, of which the first is given as the next token of the row before it.
        """
        self._prompts[row], self._done[row], self._ends[row] = prompt, done, prompt.numel() if end is None else end

    def drop(self, row: int) -> None:
        """What is left of the prompt in ``row``, if anything is, is not wanted any more."""
        self._prompts.pop(row, None)
        self._done.pop(row, None)
        self._ends.pop(row, None)

    def pending(self) -> list[int]:
        """The rows that still have prompt tokens to run, in the order in which they came."""
        return list(self._prompts)

    def chunk(self, most: int) -> Chunk:
        """The next wide window; call it while sequences are pending.

        It has at most ``most`` columns: the rest of a prompt, or one row less and the token behind it. (There is one
        more column if a token behind the rest is given.)
        """
        rows = self._together(most)
        counts = [self._next_rows(row, most) for row in rows]
        # One token more than rows: what follows the chunk's last row is known, too, unless the prompt ends there.
        known = [self._prompts[r][self._done[r] : self._done[r] + n + 1] for r, n in zip(rows, counts, strict=True)]
        forced = [tokens.numel() - 1 for tokens in known]
        width = max(self._width, *(tokens.numel() for tokens in known))
        block = torch.zeros(len(rows), 3 + width, dtype=torch.int64, device="cpu")
        block[:, :3] = torch.tensor([rows, counts, forced], device="cpu").T
        for line, tokens in zip(block, known, strict=True):
            line[3 : 3 + tokens.numel()] = tokens
        for row, count in zip(rows, counts, strict=True):
            self._advance(row, count)
        return Chunk(rows, forced, sum(counts), block)

    def _advance(self, row: int, count: int) -> None:
        self._done[row] += count
        if self._done[row] == self._ends[row]:
            self.drop(row)

    def _next_rows(self, row: int, most: int) -> int:
        left = self._ends[row] - self._done[row]
        return left if left <= most else max(1, most - 1)

    def _together(self, most: int) -> list[int]:
        """The pending sequences of the next window: those with the most rows to run."""
        waiting = sorted(self.pending(), key=lambda row: self._next_rows(row, most), reverse=True)
        widths = [self._next_rows(row, most) for row in waiting]
        taken = num_together(widths, self._rows, self._overhead, self._most_rows)
        return sorted(waiting[:taken])
