"""Turns the tokens of a sequence into pieces of text that can be shown while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "�"
"""What a tokenizer gives for bytes that are no character, also for the first bytes of one whose others are to come."""


class Pieces:
    """The text of one sequence, without special tokens, up to the first stop string.

    Together the pieces are what the tokenizer makes of all tokens, cut in front of the first stop string. A piece holds
    back what later tokens may change: the bytes of an unfinished character, and an end that may be the beginning of a
    stop string.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop_strings = tokenizer, stop_strings
        self._window: list[int] = []
        """The tokens of the last piece and those behind it. A tokenizer may need the first to tell how the others
        begin, such as whether a blank stands before them."""
        self._known = 0
        """How many tokens of the window are in the text already."""
        self._held = ""
        self._ended = False

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The piece of text that can be shown after these tokens; with the ``last`` ones, all that was held back."""
        self._window += tokens
        self._held += self._decoded(last=last)
        if self._ended:
            return ""
        found = [place for text in self._stop_strings if (place := self._held.find(text)) >= 0]
        self._ended = last or bool(found)
        end = min(found) if found else len(self._held) if last else len(self._held) - self._beginning()
        piece, self._held = self._held[:end], self._held[end:]
        return piece

    def _decoded(self, *, last: bool) -> str:
        """The text of the tokens that are new, unless they end inside of a character."""
        before, both = self._decode(self._window[: self._known]), self._decode(self._window)
        if both.endswith(_UNFINISHED) and not last:
            return ""
        new = both[len(before) :]
        self._window = self._window[self._known :] if new else self._window
        self._known = len(self._window)
        return new

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _beginning(self) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(text) - 1 for text in self._stop_strings), default=0)
        ends = (self._held[-length:] for length in range(min(longest, len(self._held)), 0, -1))
        return next((len(end) for end in ends if any(text.startswith(end) for text in self._stop_strings)), 0)
