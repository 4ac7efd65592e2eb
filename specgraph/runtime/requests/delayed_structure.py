"""A structure that begins behind a boundary: free text first, then what a grammar allows.

The boundary is a token, or a text that is looked for in the bytes of the new tokens. So it may be spread over several
tokens, and its first occurrence counts. A token may hold the end of the boundary and more bytes behind it. These bytes
belong to the structure: where the structure cannot begin with them, the token is not allowed, and the model has to
write the boundary in other tokens. No EOS is allowed in front of the boundary, so what ends with an EOS has the
structure. What has been seen of the text is kept as the length of the longest beginning of the boundary with which it
ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from specgraph.runtime.requests.structure import Structure, bits


@dataclass(frozen=True)
class TokenBoundary:
    """A single token that separates free text from a structure."""

    token: int

    def step(self, state: int, token: int) -> tuple[int, list[int] | None]:
        """See :class:`TextBoundary`."""
        return 0, [] if token == self.token else None

    def ending_early(self, state: int) -> dict[int, list[int]]:
        """See :class:`TextBoundary`."""
        return {}


@dataclass(frozen=True)
class TextBoundary:
    """A text that separates free text from a structure. A state is what has been seen of it, 0 at the beginning.

    Attributes:
        text: its bytes, at least one.
        vocabulary: the bytes of every token.
        tokenizer: the library's, which makes tokens of bytes.
    """

    text: bytes
    vocabulary: Sequence[bytes]
    tokenizer: Any
    _early: dict[int, dict[int, list[int]]] = field(default_factory=dict)

    def step(self, state: int, token: int) -> tuple[int, list[int] | None]:
        """The state behind a token; and tokens of the bytes behind the boundary, if it ends in this one, else None."""
        seen = self.text[:state] + self.vocabulary[token]
        place = seen.find(self.text)
        if place < 0:
            return next(n for n in reversed(range(len(self.text))) if seen.endswith(self.text[:n])), None
        rest = seen[place + len(self.text) :]
        return 0, [*self.tokenizer.tokenize_bytes(rest)] if rest else []

    def ending_early(self, state: int) -> dict[int, list[int]]:
        """Tokens in which the boundary ends before the token does, and tokens of the bytes behind the boundary."""
        if state not in self._early:
            known = self.text[:state]
            lefts = tuple(self.text[n:] for n in range(1, state + 1) if known.endswith(self.text[:n]))
            found = (n for n, own in self._going_on if self.text in own or own.startswith(lefts))
            ends = {token: self.step(state, token)[1] for token in found}
            self._early[state] = {token: rest for token, rest in ends.items() if rest}
        return self._early[state]

    @cached_property
    def _going_on(self) -> list[tuple[int, bytes]]:
        """The tokens that could go on behind the boundary: its last byte comes before their own last byte."""
        return [(n, own) for n, own in enumerate(self.vocabulary) if self.text[-1] in own[:-1]]


class Later:
    """Follows free text up to a boundary, and then a structure."""

    def __init__(self, boundary: TokenBoundary | TextBoundary, structure: Structure, eos_ids: Sequence[int]) -> None:
        self._boundary, self._structure, self._eos_ids = boundary, structure, eos_ids
        self._state, self._begun = 0, False
        self._free: dict[int, np.ndarray[Any, Any]] = {}

    def copy(self) -> Later:
        """See :class:`~specgraph.runtime.requests.structure.Structure`."""
        other = Later(self._boundary, self._structure.copy() if self._begun else self._structure, self._eos_ids)
        other._state, other._begun, other._free = self._state, self._begun, self._free
        return other

    def take(self, token: int) -> None:
        """See :class:`~specgraph.runtime.requests.structure.Structure`."""
        if self._begun:
            self._structure.take(token)
            return
        self._state, rest = self._boundary.step(self._state, token)
        if rest is not None:
            self._begun, self._structure = True, self._structure.copy()
            for own in rest:
                self._structure.take(own)

    def fill(self, masks: np.ndarray[Any, Any], row: int) -> None:
        """See :class:`~specgraph.runtime.requests.structure.Structure`."""
        if self._begun:
            self._structure.fill(masks, row)
            return
        if self._state not in self._free:
            early = self._boundary.ending_early(self._state)
            wrong = [token for token, rest in early.items() if not self._structure.allows(rest)]
            self._free[self._state] = ~bits([*wrong, *self._eos_ids], masks.shape[1])
        masks.view(np.uint32)[row] = self._free[self._state]
