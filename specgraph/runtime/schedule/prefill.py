"""Cuts prompts into the windows of wide steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specgraph.runtime.schedule.prompt_shapes import MOST_ROWS, captured_width, entries, num_together, padded_rows


class Chunk(NamedTuple):
    """A window of prompt tokens, still on the host.

    Attributes:
        state_rows: those of the sequences whose prompts it runs, in order, and behind them of those that decode.
        forced: how many next tokens each of the first is given.
        num_tokens: the number of prompt tokens in it.
        num_rows: for how many rows of all of them together there is room. A prompt's part has as many as drafts behind
            it have, if these are more.
        inputs: int64 ``[b, 3 + W]``, one line per sequence: its state row, its number of real rows, the number of next
            tokens that it is given, and its window. It is one tensor, so that one copy takes it to the device. A
            sequence that decodes has the rows that its last step has laid out, but ``n`` at most: its number is ``-n``.
        reached: the boundaries of prompts at which this window leaves the state of their layers: pairs of a state row
            and the number of tokens before the boundary.
    """

    state_rows: list[int]
    forced: list[int]
    num_tokens: int
    num_rows: int
    inputs: Tensor
    reached: Sequence[tuple[int, int]] = ()

    def captured_shape(self, num_state_rows: int) -> tuple[int, int, int]:
        """The sequences, the columns, and the packed rows of the graph that runs it, where a state has so many rows."""
        count, width = entries(len(self.state_rows), num_state_rows), self.inputs.shape[1] - 3
        joint = len(self.state_rows) > len(self.forced) > 0
        return count, captured_width(width, count) if self.forced else width, padded_rows(self.num_rows, joint=joint)


@dataclass
class PendingPrompt:
    """A prompt of which ``done`` tokens need not be run any more, and neither those from ``end`` on.

    Attributes:
        boundaries: those ahead, in ascending order, at each of which a window leaves the state of recurrent layers.
        within: how many tokens, from a boundary on, a window ends in that leaves the state at the boundary.
    """

    tokens: Tensor
    done: int
    end: int
    boundaries: list[int]
    within: int

    @property
    def left(self) -> int:
        """The number of tokens that are yet to be run."""
        return self.end - self.done

    def up_to_boundary(self, count: int) -> int:
        """How many of the next ``count`` tokens a window may run, so that it leaves the state at the next boundary."""
        return min(count, self.boundaries[0] + self.within - 1 - self.done if self.boundaries else self.left)

    def next(self, most: int) -> int:
        """The tokens in the next window of at most ``most`` columns: all that are left, or one less than columns."""
        return self.left if self.left <= most else max(1, most - 1)

    def known(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The next ``count`` tokens and the one behind them, which is known, too, unless the prompt ends there."""
        return self.tokens[self.done : self.done + count + 1].numpy()

    def advance(self, count: int) -> list[int]:
        """Some more tokens are run; gives the boundaries that this reaches."""
        self.done += count
        reached = [boundary for boundary in self.boundaries if boundary <= self.done]
        del self.boundaries[: len(reached)]
        return reached


def prompt_window(
    parts: Sequence[tuple[int, PendingPrompt, int]], decoding: Mapping[int, int] | None = None, columns: int = 0
) -> Chunk:
    """A window with the next rows of some prompts, which are then done, beside sequences that decode.

    The next tokens of a prompt's rows are known, so they are forced; its last row is the first whose next token is not.

    Args:
        parts: of each prompt the state row, what is pending, and how many rows are run.
        decoding: by the state rows of sequences that decode in the same step, how many rows each has at most.
        columns: the least number of columns.
    """
    known, decoding = [prompt.known(count) for _, prompt, count in parts], decoding or {}
    forced = [len(tokens) - 1 for tokens in known]
    room = [max(count, columns - 1) for _, _, count in parts]
    columns = max([columns, *map(len, known)])
    inputs = np.zeros((len(parts) + len(decoding), 3 + columns), dtype=np.int64)
    for line, (row, _, count), tokens in zip(inputs, parts, known, strict=False):
        line[:3] = row, count, len(tokens) - 1
        line[3 : 3 + len(tokens)] = tokens
    inputs[len(parts) :, 0] = [*decoding]
    inputs[len(parts) :, 1] = [-count for count in decoding.values()]
    reached = [(row, boundary) for row, prompt, count in parts for boundary in prompt.advance(count)]
    rows, total = [row for row, _, _ in parts], sum(count for _, _, count in parts)
    num_rows = sum(room) + sum(decoding.values())
    return Chunk([*rows, *decoding], forced, total, num_rows, torch.from_numpy(inputs), reached)


def shared_window(
    prompts: Mapping[int, PendingPrompt], most: int, width: int, batch: int, overhead: int, most_rows: int = MOST_ROWS
) -> Chunk:
    """The next window of prompts alone, at least one of which is not at its end.

    A prompt with little left to run joins one with much if the padding costs less than a step of its own
    (:func:`~specgraph.runtime.schedule.prompt_shapes.num_together`). A window has at most ``most`` columns: the rest of
    a prompt, or one row less and the token behind it. (There is one more column if a token behind the rest is given.)

    Args:
        prompts: by the state rows of their sequences.
        most: as above.
        width: the number of rows of a decode step, which no window is narrower than.
        batch: the number of sequences for which there is room.
        overhead: what a step costs besides its rows, in rows.
        most_rows: the most rows of a step of several sequences.
    """
    widths = {row: prompt.next(most) for row, prompt in prompts.items() if prompt.left}
    waiting = sorted(widths, key=widths.__getitem__, reverse=True)
    taken = num_together([widths[row] for row in waiting], batch, overhead, most_rows)
    parts = [(row, prompts[row], prompts[row].up_to_boundary(widths[row])) for row in sorted(waiting[:taken])]
    return prompt_window(parts, columns=width)
