"""What the host can do with the logits of a sequence: run Python processors, apply masks, and keep what was drawn from.

A sequence may have :class:`HostProcessor` objects of its own. A step of such a sequence pauses behind its logits
(:mod:`specgraph.runtime.execution.pause`). Row i of a sequence belongs to the position behind its tokens and the first
i drafts. Which rows count is only known when the step has been read, so a processor must give the same for the same
tokens, whenever it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specgraph.errors import InputError, SpecgraphError
from specgraph.runtime.requests.values import name_of, read_functions

LogitsFunction = Callable[[Tensor, Tensor], Tensor]
"""As transformers' ``LogitsProcessor``: it gives scores float32 ``[1, V]``, changed as tokens int64 ``[1, S]`` want."""


class Rows(NamedTuple):
    """The rows of one sequence in a step.

    Attributes:
        given: its prompt as it was given, 1-D int64 with its padding.
        new_tokens: what it has emitted.
        drafts: what the step verifies; row i comes behind the first i of them.
        logits: float32 ``[1 + len(drafts), V]``, what verification will read.
        raw: those of the target itself, of the same shape.
        refused: where a processor notes that no token can come out of a row, and why. This is an error of the sequence
            only if one does: a row behind a draft that is rejected does not count.
    """

    given: Tensor
    new_tokens: Sequence[int]
    drafts: Sequence[int]
    logits: Tensor
    raw: Tensor
    refused: dict[int, SpecgraphError]


class HostProcessor:
    """Something that the host does with the rows of a sequence in every step. It belongs to that sequence alone."""

    def masks(self, new_tokens: Sequence[int], drafts: Sequence[int]) -> np.ndarray[Any, Any] | None:
        """Which tokens are allowed in each row: int32 ``[1 + len(drafts), ceil(V / 32)]``, bit i % 32 of word i / 32.

        Is called while the device is busy. ``new_tokens`` are all that the sequence has emitted. None allows all.
        """
        return None

    def change(self, rows: Rows) -> None:
        """Change the logits in place; is called when masks have been applied to them."""

    def emitted(self, count: int) -> None:
        """So many tokens came out of the rows of the last step; the others were drafts that were not accepted."""


class PythonProcessors(HostProcessor):
    """A caller's processors, one after the other, asked for each row with the tokens before it."""

    def __init__(self, processors: Sequence[LogitsFunction]) -> None:
        self._processors = processors

    def change(self, rows: Rows) -> None:
        """Ask for every row.

        Raises:
            InputError: a processor gives something else than scores of the same shape.
        """
        tokens, known = all_tokens(rows)
        for row, logits in enumerate(rows.logits):
            scores = logits.unsqueeze(0).clone()
            for processor in self._processors:
                scores = _checked(processor, processor(tokens[: known + row].unsqueeze(0), scores), logits)
            logits.copy_(scores[0])


def _checked(processor: LogitsFunction, scores: Any, logits: Tensor) -> Tensor:
    if not isinstance(scores, Tensor) or scores.shape != (1, *logits.shape):
        given = f"a tensor {list(scores.shape)}" if isinstance(scores, Tensor) else type(scores).__name__
        raise InputError(
            f"A logits processor returns scores [1, {len(logits)}], but {name_of(processor)} returned {given}."
        )
    if not torch.can_cast(scores.dtype, logits.dtype):
        raise InputError(f"A logits processor returns real numbers, but {name_of(processor)} returned {scores.dtype}.")
    return scores


class Allowed(HostProcessor):
    """transformers' ``prefix_allowed_tokens_fn``: it gives the tokens that may come next in the sequence of a place."""

    def __init__(self, function: Callable[[int, Tensor], Sequence[int]], place: int, *, forces: bool = False) -> None:
        """``forces``: where all that it allows is forbidden already, it comes out nevertheless, as in transformers."""
        self._function, self._place, self._forces = function, place, forces

    def change(self, rows: Rows) -> None:
        """Let all other tokens have no probability.

        Raises:
            InputError: the function gives something else than token ids. That it gives none is noted for the row.
        """
        tokens, known = all_tokens(rows)
        for row, logits in enumerate(rows.logits):
            allowed = _allowed_ids(self._function(self._place, tokens[: known + row]), len(logits))
            if allowed.numel() == 0:
                rows.refused[row] = InputError(
                    f"prefix_allowed_tokens_fn allows no token behind {known + row} of sequence {self._place}; it must "
                    "allow one at least."
                )
                continue
            mask = torch.full_like(logits, -torch.inf)
            mask[allowed.to(logits.device)] = 0
            scores = logits.masked_fill(mask < 0, -torch.inf)
            if self._forces:
                scores = torch.where(scores.amax().isneginf(), mask, scores)
            logits.copy_(scores)


def _allowed_ids(given: Any, vocab_size: int) -> Tensor:
    """Token ids, 1-D int64 on the CPU."""
    try:
        ids = torch.as_tensor(given, device="cpu").flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"prefix_allowed_tokens_fn gives a list of token ids, not {given!r:.60}.") from error
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise InputError(f"prefix_allowed_tokens_fn gives a list of token ids, not {given!r:.60}.")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if wrong.numel():
        raise InputError(
            f"prefix_allowed_tokens_fn gives {int(wrong[0])}, which is not a token id; ids are 0 to {vocab_size - 1}."
        )
    return ids.long()


def all_tokens(rows: Rows) -> tuple[Tensor, int]:
    """The tokens of a sequence and the drafts behind them, 1-D int64 beside the logits; and how many come first."""
    new = torch.tensor([*rows.new_tokens, *rows.drafts], dtype=torch.int64, device="cpu")
    known = rows.given.numel() + len(rows.new_tokens)
    return torch.cat([rows.given, new]).to(rows.logits.device), known


def read_processors(given: Any) -> list[LogitsFunction]:
    """A caller's processors: one, several, or None.

    Raises:
        InputError: something among them cannot be called.
    """
    what = "a LogitsProcessor of transformers or a list of them"
    return read_functions("logits_processor", what, given, "tokens", "scores")
