"""What follows a structure, token by token: a matcher of the library llguidance, and what it says as one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specgraph.errors import InputError

WORD = 32
"""Tokens per word of a mask."""


class Structure:
    """A matcher of the library, in its place in a structure of the given kind."""

    def __init__(self, matcher: Any, kind: str, eos_ids: Sequence[int]) -> None:
        self._matcher, self._kind, self._eos_ids = matcher, kind, eos_ids

    def copy(self) -> Structure:
        """One in the same place, which goes on by itself.

        This takes microseconds; the library's own way back takes longer, and is wrong where a grammar names tokens by
        number.
        """
        return Structure(self._matcher.deep_copy(), self._kind, self._eos_ids)

    def take(self, token: int) -> None:
        """Go on behind a token."""
        self._matcher.consume_token(token)

    def fill(self, masks: np.ndarray[Any, Any], row: int) -> None:
        """Write which tokens may come next into a row of masks.

        Raises:
            InputError: nobody knows, since the library has given up on the grammar.
        """
        from llguidance.numpy import fill_next_token_bitmask

        matcher = self._matcher
        if not matcher.is_stopped():
            fill_next_token_bitmask(matcher, masks, row)
        if matcher.is_error():
            why = reason(matcher.get_error())
            raise InputError(f"The sequence cannot follow its {self._kind} any further; llguidance says: {why}")
        if matcher.is_stopped():
            masks[row] = 0
            masks.view(np.uint32)[row] |= bits(self._eos_ids, masks.shape[1])

    def allows(self, tokens: Sequence[int]) -> bool:
        """Whether these tokens may come next."""
        return int(self._matcher.validate_tokens([*tokens])) == len(tokens)


def bits(tokens: Sequence[int], words: int) -> np.ndarray[Any, Any]:
    """A row of a mask, uint32, that allows these tokens alone."""
    mask = np.zeros(words, dtype=np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask


def reason(text: str) -> str:
    """The first line of what llguidance says, and where that announces an error below it, the line with the error."""
    first, *others = text.strip().splitlines() or ["it says nothing"]
    errors = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *errors[:1]]).rstrip(".") + "."
