"""Structured output: tokens that a JSON schema, a regular expression or a grammar allows, by the library llguidance.

A matcher of the library follows the tokens of a sequence. For every step there is a mask for each row of the window: it
copies the matcher, and lets the copy take the drafts one after the other as if they had been accepted. A draft that the
grammar does not allow has no probability in its row, so verification rejects it, and what comes out is what comes out without
drafts. Drafts themselves are not masked, since the host would have to wait once more for each of them.
"""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from specgraph.errors import InputError, SpecgraphError, SpecgraphWarning
from specgraph.runtime.arguments import STRUCTURE
from specgraph.runtime.host import HostProcessor, Rows

WHITESPACE = r" |\n {0,24}"
"""What may stand between the parts of JSON: a space, or a new line and its indentation. A model that likes blanks would
write nothing else where any number of them is allowed. A schema's own ``x-guidance`` counts before this."""
_WORD = 32
_Made = dict[tuple[str, tuple[int, ...]], Any]


class Following(Protocol):
    """What follows the tokens of a sequence, one after the other."""

    def copy(self) -> Following:
        """One in the same place, which goes on by itself."""

    def take(self, token: int) -> None:
        """Go on behind a token."""

    def fill(self, masks: np.ndarray[Any, Any], row: int) -> None:
        """Write which tokens may come next into a row of masks.

        Raises:
            InputError: nobody knows, since the library has given up on the grammar.
        """


class Structure:
    """A matcher of the library, in its place in a structure of the given kind."""

    def __init__(self, matcher: Any, kind: str, eos_ids: Sequence[int]) -> None:
        self._matcher, self._kind, self._eos_ids = matcher, kind, eos_ids

    def copy(self) -> Structure:
        """See :class:`Following`. This takes microseconds; the library's own way back takes longer, and is wrong where
        a grammar names tokens by number."""
        return Structure(self._matcher.deep_copy(), self._kind, self._eos_ids)

    def take(self, token: int) -> None:
        """See :class:`Following`."""
        self._matcher.consume_token(token)

    def fill(self, masks: np.ndarray[Any, Any], row: int) -> None:
        """See :class:`Following`."""
        from llguidance.numpy import fill_next_token_bitmask

        matcher = self._matcher
        if not matcher.is_stopped():
            fill_next_token_bitmask(matcher, masks, row)
        if matcher.is_error():
            reason = _reason(matcher.get_error())
            raise InputError(f"The sequence cannot follow its {self._kind} any further; llguidance says: {reason}")
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
        mask[token // _WORD] |= np.uint32(1 << token % _WORD)
    return mask


class Matching(HostProcessor):
    """Masks for one sequence, from what follows it."""

    def __init__(self, following: Following, vocab_size: int, eos_ids: Sequence[int], minimum: int = 0) -> None:
        """``minimum`` is the number of tokens before which the sequence does not end, unless nothing else may come."""
        self._following, self._minimum = following, minimum
        self._words, self._eos_ids = -(-vocab_size // _WORD), eos_ids
        self._ends = bits(eos_ids, self._words)
        self._known = 0
        self._refused: dict[int, SpecgraphError] = {}
        self._too_short: list[int] = []

    def masks(self, new_tokens: Sequence[int], drafts: Sequence[int]) -> np.ndarray[Any, Any]:
        """See :class:`HostProcessor`. Rows behind a draft that is not allowed, which cannot count, allow everything."""
        for token in new_tokens[self._known :]:
            self._following.take(token)
        self._known, self._refused, self._too_short = len(new_tokens), {}, []
        masks = np.full((1 + len(drafts), self._words), -1, dtype=np.int32)
        ahead = self._following
        for row in range(len(masks)):
            try:
                ahead.fill(masks, row)
            except InputError as error:
                self._refused[row] = error
                break
            if len(new_tokens) + row < self._minimum:
                self._hold_back(masks[row].view(np.uint32), row)
            if row == len(drafts) or not self._goes_on(masks[row], drafts[row]):
                break
            ahead = ahead.copy() if row == 0 else ahead
            ahead.take(drafts[row])
        return masks

    def change(self, rows: Rows) -> None:
        """Say in which rows the structure could not be followed."""
        rows.refused.update(self._refused)

    def emitted(self, count: int) -> None:
        """Warn where the structure has ended the sequence before its minimum."""
        if any(row < count for row in self._too_short):
            warnings.warn(
                f"The structure of a sequence leaves nothing but its end behind {self._known + self._too_short[0]} new "
                f"tokens, before the {self._minimum} that min_new_tokens or min_length asks for; the structure counts.",
                SpecgraphWarning,
                stacklevel=2,
            )

    def _hold_back(self, mask: np.ndarray[Any, Any], row: int) -> None:
        """Let the sequence go on in this row, if there is anything but an end."""
        others = mask & ~self._ends
        if others.any():
            mask[:] = others
        else:
            self._too_short.append(row)

    def _goes_on(self, mask: np.ndarray[Any, Any], draft: int) -> bool:
        """Whether a draft is allowed, and is not the end, behind which no row counts."""
        return draft not in self._eos_ids and _allows(mask, draft)


def _allows(mask: np.ndarray[Any, Any], token: int) -> bool:
    return 0 <= token < mask.size * _WORD and bool(int(mask[token // _WORD]) >> token % _WORD & 1)


class Grammars:
    """Compiles grammars for one model. What the library makes of a tokenizer is kept, since that takes it a second."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizers: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()

    def read(
        self,
        others: Mapping[str, Any],
        tokenizer: Callable[[], Any],
        eos_ids: Sequence[tuple[int, ...]],
        minimums: Sequence[int],
    ) -> list[Matching | None]:
        """What each sequence has to follow, for the arguments of a call.

        Args:
            others: the arguments; ``json_schema``, ``regex`` and ``grammar`` are for all sequences, or a list with one
                for each, None for those without.
            tokenizer: gives the model's; is asked only if there is a grammar.
            eos_ids: of each sequence, those that may end it where the grammar does.
            minimums: the tokens before which it shall not end, if the grammar goes on.

        Raises:
            InputError: the library is not there or does not accept a grammar, there are several kinds, or a sequence
                has no EOS with which it could end.
        """
        given = {kind: others[kind] for kind in sorted(STRUCTURE) if others.get(kind) is not None}
        if not given:
            return [None] * len(eos_ids)
        if len(given) > 1:
            raise InputError(
                f"{' and '.join(given)} are given, but a call follows one of {', '.join(sorted(STRUCTURE))}."
            )
        ((kind, value),) = given.items()
        each = value if isinstance(value, list | tuple) else [value] * len(eos_ids)
        if len(each) != len(eos_ids):
            raise InputError(f"{kind} has {len(each)} entries for {len(eos_ids)} sequences.")
        own, made = tokenizer(), _Made()
        wanted = zip(each, eos_ids, minimums, strict=True)
        return [None if v is None else self._matching(kind, v, own, eos, least, made) for v, eos, least in wanted]

    def _matching(
        self, kind: str, value: Any, tokenizer: Any, eos_ids: tuple[int, ...], minimum: int, made: _Made
    ) -> Matching:
        """A matcher of its own; ``made`` has those of the call that are compiled."""
        if not eos_ids:
            raise InputError(f"{kind} needs an EOS id with which a sequence can end; pass eos_token_id.")
        text = _grammar(kind, value)
        if (text, eos_ids) not in made:
            made[text, eos_ids] = self._matcher(kind, text, tokenizer, eos_ids)
        structure = Structure(made[text, eos_ids].deep_copy(), kind, eos_ids)
        return Matching(structure, self._vocab_size, eos_ids, minimum)

    def _matcher(self, kind: str, text: str, tokenizer: Any, eos_ids: tuple[int, ...]) -> Any:
        library = _library()
        own = self._own_tokenizer(tokenizer, eos_ids)
        wrong = library.LLMatcher.validate_grammar(text, own)
        if wrong:
            raise InputError(f"{kind} is not one that llguidance takes: {_reason(wrong)}")
        return library.LLMatcher(own, text, log_level=0)

    def _own_tokenizer(self, tokenizer: Any, eos_ids: tuple[int, ...]) -> Any:
        """The library's form of a tokenizer."""
        library = _library()
        with self._lock:
            known = self._tokenizers.setdefault(tokenizer, {})
            if eos_ids not in known:
                if not getattr(tokenizer, "is_fast", False):
                    name = type(tokenizer).__name__
                    raise InputError(f"Grammars need a fast tokenizer of transformers, and {name} is none.")
                try:
                    known[eos_ids] = library.hf.from_tokenizer(tokenizer, self._vocab_size, [*eos_ids])
                except ValueError as error:
                    raise InputError(f"llguidance does not take this tokenizer: {_reason(str(error))}") from error
            return known[eos_ids]


def are_structured(others: Mapping[str, Any], count: int) -> list[bool]:
    """Whether each of ``count`` sequences has a structure, by the arguments of a call, which may still be wrong."""
    given = [others[kind] for kind in STRUCTURE if others.get(kind) is not None]
    each = [value if isinstance(value, list | tuple) and len(value) == count else [value] * count for value in given]
    return [any(values[place] is not None for values in each) for place in range(count)]


def _grammar(kind: str, value: Any) -> str:
    """A grammar in the library's own form.

    Raises:
        InputError: the value is of another type, or the library does not accept it.
    """
    matcher = _library().LLMatcher
    if kind == "json_schema":
        value = value.model_json_schema() if hasattr(value, "model_json_schema") else value
        if not isinstance(value, str | Mapping | bool):
            raise InputError(
                f"json_schema is a mapping, its JSON text or a pydantic model, not {type(value).__name__}."
            )
        value = {} if value is True else value  # both allow anything, and the library takes only the one
        value = value if isinstance(value, str) else _as_json(value)
    elif not isinstance(value, str):
        raise InputError(f"{kind} is a text, not {type(value).__name__}.")
    try:
        if kind == "json_schema":
            text: str = matcher.grammar_from_json_schema(value, defaults={"whitespace_pattern": WHITESPACE})
        else:
            text = (matcher.grammar_from_regex if kind == "regex" else matcher.grammar_from_lark)(value)
    except ValueError as error:
        raise InputError(f"{kind} is not one that llguidance takes: {_reason(str(error))}") from error
    return text


def _as_json(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InputError(f"json_schema holds something that JSON does not have: {_reason(str(error))}") from error


def _library() -> Any:
    try:
        import llguidance
        import llguidance.hf
    except ImportError as error:
        raise InputError(
            "json_schema, regex and grammar need the library llguidance; pip install -e '.[grammar]' in specgraph's "
            "folder, or leave them out."
        ) from error
    return llguidance


def _reason(text: str) -> str:
    """The first line of what llguidance says, and where that announces an error below it, the line with the error."""
    first, *others = text.strip().splitlines() or ["it says nothing"]
    errors = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *errors[:1]]).rstrip(".") + "."
