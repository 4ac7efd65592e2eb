"""Structured output: tokens that a JSON schema, a regular expression or a grammar allows, by the library llguidance.

A matcher of the library follows the tokens of a sequence. For every step there is a mask for each row of the window: a
copy of the matcher takes the drafts one after the other as if they had been accepted. A draft that the grammar does not
allow has no probability in its row, so verification rejects it, and what comes out is what comes out without drafts. A
structure may begin behind a boundary (:mod:`specgraph.runtime.requests.delayed_structure`). Drafts themselves are not
masked, since the host would have to wait once more for each of them.
"""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specgraph.errors import InputError, SpecgraphError, SpecgraphWarning
from specgraph.ir.known_shapes import Recent
from specgraph.runtime.requests.arguments import KINDS
from specgraph.runtime.requests.delayed_structure import Later, TextBoundary, TokenBoundary
from specgraph.runtime.requests.host_processors import HostProcessor, Rows
from specgraph.runtime.requests.structure import WORD, Structure, bits, reason

WHITESPACE = r" |\n {0,24}"
"""What may stand between the parts of JSON: a space, or a new line and its indentation. A model that likes blanks would
write nothing else where any number of them is allowed. A schema's own ``x-guidance`` counts before this."""
_Made = dict[tuple[str, tuple[int, ...]], Any]


class Matching(HostProcessor):
    """Masks for one sequence, from what follows it."""

    def __init__(self, following: Structure | Later, vocab_size: int, eos_ids: Sequence[int], minimum: int = 0) -> None:
        """``minimum`` is the number of tokens before which the sequence does not end, unless nothing else may come."""
        self._following, self._minimum = following, minimum
        self._words, self._eos_ids = -(-vocab_size // WORD), eos_ids
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
        known = draft not in self._eos_ids and 0 <= draft < mask.size * WORD
        return known and bool(int(mask[draft // WORD]) >> draft % WORD & 1)


MOST_BOUNDARIES = 32
"""The most texts of ``structure_after`` that are kept for a tokenizer."""


class StructureOptions(NamedTuple):
    """The structure of a sequence, as it was given.

    Attributes:
        kind: the argument, one of ``KINDS``.
        value: what was given for it.
        after: what the structure begins behind; None: it begins with the sequence.
    """

    kind: str
    value: Any
    after: Any


def read_structures(asked: Mapping[str, Any], count: int) -> list[StructureOptions | None]:
    """The structure of each of ``count`` sequences, None for those without, from the arguments of a call.

    ``json_schema``, ``regex``, ``grammar`` and ``structure_after`` are for all sequences, or a list with one for each.

    Raises:
        InputError: there are several kinds, or there is not an entry for each sequence.
    """
    given, after = [kind for kind in sorted(KINDS) if asked.get(kind) is not None], asked.get("structure_after")
    if not given:
        if after is not None:
            raise InputError(f"structure_after needs a structure; give {' or '.join(sorted(KINDS))}, or leave it out.")
        return [None] * count
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} are given, but a call follows one of {', '.join(sorted(KINDS))}.")
    (kind,) = given
    pairs = zip(_each(kind, asked[kind], count), _each("structure_after", after, count), strict=True)
    return [None if value is None else StructureOptions(kind, value, own) for value, own in pairs]


class Grammars:
    """Compiles grammars for one model. What the library makes of a tokenizer is kept, since that takes it a second."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._tokenizers: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
        self._boundaries: weakref.WeakKeyDictionary[Any, Recent[TextBoundary]] = weakref.WeakKeyDictionary()

    def read(
        self, wanted: Sequence[StructureOptions | None], tokenizer: Callable[[], Any],
        eos_ids: Sequence[tuple[int, ...]], minimums: Sequence[int],
    ) -> list[Matching | None]:  # fmt: skip
        """What each sequence has to follow.

        Args:
            wanted: its structure.
            tokenizer: gives the model's; is asked only if there is a structure.
            eos_ids: of each sequence, those that may end it where the grammar does.
            minimums: the tokens before which it shall not end, if the grammar goes on.

        Raises:
            InputError: the library is not there or does not accept a grammar, or a sequence has no EOS with which it
                could end.
        """
        own, made = tokenizer() if any(wanted) else None, _Made()
        each = zip(wanted, eos_ids, minimums, strict=True)
        return [None if one is None else self._matching(one, own, eos, least, made) for one, eos, least in each]

    def _matching(
        self, wanted: StructureOptions, tokenizer: Any, eos_ids: tuple[int, ...], minimum: int, made: _Made
    ) -> Matching:
        """A matcher of its own; ``made`` has those of the call that are compiled."""
        kind, value, after = wanted
        if not eos_ids:
            raise InputError(f"{kind} needs an EOS id with which a sequence can end; pass eos_token_id.")
        text = _grammar(kind, value)
        if (text, eos_ids) not in made:
            made[text, eos_ids] = self._matcher(kind, text, tokenizer, eos_ids)
        structure = Structure(made[text, eos_ids].deep_copy(), kind, eos_ids)
        later = None if after is None else Later(self._boundary(after, tokenizer, eos_ids), structure, eos_ids)
        return Matching(later or structure, self._vocab_size, eos_ids, minimum)

    def _boundary(self, after: Any, tokenizer: Any, eos_ids: tuple[int, ...]) -> TokenBoundary | TextBoundary:
        """What a structure begins behind. That of a text knows all tokens, and is kept.

        Raises:
            InputError: it is neither a text nor a token, or the token ends the sequence.
        """
        if isinstance(after, str) and after:
            known = self._boundaries.setdefault(tokenizer, Recent(MOST_BOUNDARIES))
            boundary = known.find((after, eos_ids))
            if boundary is None:
                own = self._own_tokenizer(tokenizer, eos_ids)
                others = [*known.values.values()]
                vocabulary = next((other.vocabulary for other in others if other.tokenizer is own), None)
                vocabulary = vocabulary or [own.decode_bytes([token]) for token in range(self._vocab_size)]
                boundary = TextBoundary(after.encode(), vocabulary, own)
                known.keep((after, eos_ids), boundary)
            return boundary
        if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after < self._vocab_size:
            raise InputError(
                f"structure_after is a text or a token id (0 to {self._vocab_size - 1}), or a list with one for each "
                f"sequence, not {after!r:.60}."
            )
        if after in eos_ids:
            raise InputError(
                f"structure_after={after} is an EOS, which ends a sequence before its structure; give another token, "
                "or leave this one out of eos_token_id."
            )
        return TokenBoundary(after)

    def _matcher(self, kind: str, text: str, tokenizer: Any, eos_ids: tuple[int, ...]) -> Any:
        library = _library()
        own = self._own_tokenizer(tokenizer, eos_ids)
        wrong = library.LLMatcher.validate_grammar(text, own)
        if wrong:
            raise InputError(f"{kind} is not one that llguidance takes: {reason(wrong)}")
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
                    raise InputError(f"llguidance does not take this tokenizer: {reason(str(error))}") from error
            return known[eos_ids]


def _each(name: str, value: Any, count: int) -> Sequence[Any]:
    """The entry of each sequence."""
    each = value if isinstance(value, list | tuple) else [value] * count
    if len(each) != count:
        raise InputError(f"{name} has {len(each)} entries for {count} sequences.")
    return each


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
        raise InputError(f"{kind} is not one that llguidance takes: {reason(str(error))}") from error
    return text


def _as_json(schema: Any) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InputError(f"json_schema holds something that JSON does not have: {reason(str(error))}") from error


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
