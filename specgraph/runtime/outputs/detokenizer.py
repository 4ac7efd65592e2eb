"""Turns the tokens of a sequence into pieces of text that can be shown while it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "�"
"""What a tokenizer gives for bytes that are no character, also for the first bytes of one whose others are to come."""


_MOST = 3
"""The most bytes of a character that is not whole, so the most tokens that can be the beginning of one."""


class IncrementalDetokenizer:
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
        self._whole = 0
        """How many tokens of the window, from the first on, end with a whole character."""
        self._shown = 0
        """How many characters of the window's text are in the text already."""
        self._skipped = _skipped(tokenizer)
        self._held = ""
        self._ended = False

    def add(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """The piece of text that can be shown after these tokens; with the ``last`` ones, all that was held back."""
        self._window += [token for token in tokens if token not in self._skipped]
        self._held += self._decoded(last=last)
        if self._ended:
            return ""
        found = [place for text in self._stop_strings if (place := self._held.find(text)) >= 0]
        self._ended = last or bool(found)
        end = min(found) if found else len(self._held) if last else len(self._held) - self._beginning()
        piece, self._held = self._held[:end], self._held[end:]
        return piece

    def _decoded(self, *, last: bool) -> str:
        """The text that the window adds, without the first bytes of a character that later tokens may complete."""
        if last:
            return self._decode(self._window)[self._shown :]
        most = min(_MOST, len(self._window) - self._whole - 1)
        for count in range(most + 1):
            end = len(self._window) - count
            text = self._decode(self._window[:end])
            if not text.endswith(_UNFINISHED):
                return self._whole_up_to(end, text)
        return self._given_up() if len(self._window) - self._whole > _MOST else ""

    def _whole_up_to(self, end: int, text: str) -> str:
        """What ``text`` of the first ``end`` tokens adds. The window then begins with the tokens that add it."""
        new, rest = text[self._shown :], self._window[end:]
        window = self._window[self._whole if new else 0 : end]
        self._window, self._whole = [*window, *rest], len(window)
        self._shown = len(self._decode(window))
        return new

    def _given_up(self) -> str:
        """What the window adds where it ends inside of a character after more tokens than one has bytes.

        Then only the last of them can still become a character, so the window begins there, and takes no longer to
        decode however many such tokens follow. Their own text may begin with the end of a character that is shown.
        """
        rest = self._window[-_MOST:]
        text, own = self._decode(self._window), self._decode(rest)
        held = min(len(each) - len(each.rstrip(_UNFINISHED)) for each in (text[self._shown :], own))
        new = text[self._shown : len(text) - held]
        self._window, self._whole, self._shown = rest, 0, len(own) - held
        return new

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def _beginning(self) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(text) - 1 for text in self._stop_strings), default=0)
        ends = (self._held[-length:] for length in range(min(longest, len(self._held)), 0, -1))
        return next((len(end) for end in ends if any(text.startswith(end) for text in self._stop_strings)), 0)


def _skipped(tokenizer: Any) -> set[int]:
    """The special tokens, which have no text. Fast tokenizers also skip those that have no role of their own."""
    if getattr(tokenizer, "is_fast", False):
        return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return set(getattr(tokenizer, "all_special_ids", ()))
