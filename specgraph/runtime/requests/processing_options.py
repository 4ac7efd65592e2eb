"""Reads the arguments that change logits: checked values of each sequence, from a caller's arguments and defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.generation import ForcedEOSTokenLogitsProcessor, LogitsProcessor

from specgraph.errors import InputError, warn_caller
from specgraph.runtime.requests.processing import ALWAYS, OPTIONS, Bias, Form, Processing
from specgraph.runtime.requests.values import check_range, is_number, per_sequence, read_token_ids, whole

FIRST, LAST = "forced_bos_token_id", "forced_eos_token_id"
"""The token at the beginning, one per sequence, and that at the end, which may be one of several."""


@dataclass(frozen=True)
class Sequences:
    """What is known of the sequences of a call before what changes their logits.

    Attributes:
        given_lengths: tokens of each prompt with its padding, which transformers counts.
        rooms: the most tokens that each sequence adds.
        eos_ids: those of each sequence.
        vocab_size: tokens of the model.
        structured: whether a structure says where each sequence may end; it also keeps the minimum then.
        as_transformers: whether options may forbid all tokens, as in transformers.
    """

    given_lengths: Sequence[int]
    rooms: Sequence[int]
    eos_ids: Sequence[tuple[int, ...]]
    vocab_size: int
    structured: Sequence[bool] = ()
    as_transformers: bool = False


def read_processing(known: Sequences, asked: Mapping[str, Any]) -> list[Processing]:
    """The options of each sequence. What is left out, or None, is off; ``asked`` may hold other names, too.

    Raises:
        InputError: a value is out of range or of the wrong form, or there is not one for each sequence.
    """
    batch = len(known.eos_ids)
    columns: dict[str, Sequence[Any]] = {name: _numbers(name, asked.get(name), batch) for name in _of_form(Form.NUMBER)}
    minimums = read_minimums(known, asked)
    columns[FIRST] = _first_tokens(asked.get(FIRST), batch, known.vocab_size)
    # One of several is chosen by the host; see forced_ends.
    columns[LAST] = [own[0] if len(own) == 1 else -1 for own in _last_tokens(asked.get(LAST), batch, known.vocab_size)]
    columns["no_repeat_ngram_size"] = _counts("no_repeat_ngram_size", asked.get("no_repeat_ngram_size"), batch)
    words = {name: _words(name, asked.get(name), batch, known.vocab_size) for name in WORDS}
    found = []
    for b, length in enumerate(known.given_lengths):
        own = {name: column[b] for name, column in columns.items()}
        if length != 1:
            own[FIRST] = -1
        _warn_too_few(b, minimums[b], known.rooms[b])
        least = 0 if known.structured and known.structured[b] else minimums[b]
        biases = _biases({name: column[b] for name, column in words.items()}, known.eos_ids[b], least)
        if own[FIRST] >= 0:  # then, the first token that is chosen is the second one
            biases = [bias._replace(until=_BEGIN + 1) if bias.until == _BEGIN else bias for bias in biases]
        if not known.as_transformers:
            _check_not_all(biases, known.vocab_size)
        found.append(Processing(**own, biases=tuple(biases)))
    return found


def read_minimums(known: Sequences, asked: Mapping[str, Any]) -> list[int]:
    """The number of new tokens before which each sequence does not end; 0 or less is no minimum.

    Raises:
        InputError: as :func:`read_processing`.
    """
    new, all_ = (_counts(name, asked.get(name), len(known.eos_ids)) for name in ("min_new_tokens", "min_length"))
    return [max(*both) for both in zip(new, _differences(all_, known.given_lengths), strict=True)]


def forbidding(known: Sequences, asked: Mapping[str, Any], place: int, count: int) -> list[str]:
    """The options that forbid tokens behind the first ``count`` new ones of a sequence, by their names."""
    batch = len(known.eos_ids)
    length, found = known.given_lengths[place], []
    forced = length == 1 and _first_tokens(asked.get(FIRST), batch, known.vocab_size)[place] >= 0
    for name in WORDS:
        words = _words(name, asked.get(name), batch, known.vocab_size)[place]
        if any(bias.value == -math.inf and count < bias.until + forced for bias in words):
            found.append(name)
    for name, known_before in (("min_new_tokens", 0), ("min_length", length)):
        if _counts(name, asked.get(name), batch)[place] - known_before > count and known.eos_ids[place]:
            found.append(name)
    found += [FIRST] if forced and count == 0 else []
    last = count == known.rooms[place] - 1 and _last_tokens(asked.get(LAST), batch, known.vocab_size)[place]
    found += [LAST] if last else []
    ngrams = _counts("no_repeat_ngram_size", asked.get("no_repeat_ngram_size"), batch)[place]
    return found + ["no_repeat_ngram_size"] * (ngrams > 0)


def _differences(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(first, second, strict=True)]


def _warn_too_few(place: int, least: int, room: int) -> None:
    if 0 < room < least:
        warn_caller(
            f"min_new_tokens or min_length asks for {least} new tokens of sequence {place}, which has room for {room}; "
            "it gets those."
        )


def forced_ends(known: Sequences, asked: Mapping[str, Any]) -> list[list[LogitsProcessor]]:
    """transformers' processor for each sequence whose last token is one of several; of one, the step takes care.

    Raises:
        InputError: they are no token ids.
    """
    each = zip(
        known.given_lengths, known.rooms, _last_tokens(asked.get(LAST), len(known.rooms), known.vocab_size), strict=True
    )
    return [
        [ForcedEOSTokenLogitsProcessor(length + room, own, device="cpu")] if len(own) > 1 else []
        for length, room, own in each
    ]


_BEGIN = 1
"""``until`` of what holds for the first generated token alone."""


def _biases(words: Mapping[str, list[Bias]], eos_ids: tuple[int, ...], least: int) -> list[Bias]:
    """All words of one sequence, which does not end by itself before ``least`` tokens. A forbidden word that is just an
    EOS is left out, as in transformers."""
    ends = [(token,) for token in eos_ids]
    biases = [Bias(end, -math.inf, least) for end in ends if least > 0]
    for name, own in words.items():
        biases += [bias for bias in own if name != "bad_words_ids" or bias.tokens not in ends]
    return biases


def _numbers(name: str, value: Any, batch: int) -> list[float]:
    option = OPTIONS[name]
    values = per_sequence(name, value, option.off, batch)
    check_range(name, values, option.allowed, option.above, option.most, above=True)
    return [float(number) for number in values]


def _counts(name: str, value: Any, batch: int) -> list[int]:
    option = OPTIONS[name]
    counts = [whole(name, number) for number in per_sequence(name, value, 0, batch)]
    check_range(name, counts, option.allowed, 0, option.most, above=False)
    return counts


def _first_tokens(value: Any, batch: int, vocab_size: int) -> list[int]:
    """A token for each sequence, from one or a list with one for each; -1 for none, which is an empty list."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return [-1] * batch
    value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    tokens = [whole(FIRST, token) for token in per_sequence(FIRST, value, -1, batch)]
    _check_ids(FIRST, tokens, vocab_size)
    return tokens


def _last_tokens(value: Any, batch: int, vocab_size: int) -> list[list[int]]:
    """The tokens of each sequence, as EOS ids are read: one, several, or a list with a list for each sequence."""
    plain = value.tolist() if isinstance(value, Tensor) else value
    each = isinstance(plain, list | tuple) and any(isinstance(own, list | tuple) for own in plain)
    if each and len(plain) != batch:
        raise InputError(f"{LAST} has {len(plain)} lists of ids for {batch} sequences.")
    found = []
    for own in plain if each else [plain]:
        found.append([] if own is None else read_token_ids(LAST, own))
        _check_ids(LAST, found[-1], vocab_size)
    return found if each else found * batch


def _words(name: str, value: Any, batch: int, vocab_size: int) -> list[list[Bias]]:
    """The words of every sequence: the same for all, or from a list with an entry for each."""
    plain = value.tolist() if isinstance(value, Tensor) else value
    read, is_entry = WORDS[name]
    if plain is None:
        return [[]] * batch
    wrong = InputError(f"{name} is {OPTIONS[name].allowed}, or a list with one of these per sequence, not {plain!r}.")
    if not isinstance(plain, list | tuple) and not (isinstance(plain, Mapping) and name == "sequence_bias"):
        raise wrong
    several = not isinstance(plain, Mapping) and len(plain) > 0 and not any(map(is_entry, plain))
    if several and len(plain) != batch:
        raise InputError(f"{name} has {len(plain)} entries for {batch} sequences.")
    found = []
    for own in plain if several else [plain]:
        try:
            found.append([] if own is None else read(own))
        except (TypeError, ValueError, AttributeError):
            raise wrong from None
        for bias in found[-1]:
            _check_word(name, bias, vocab_size)
    return found if several else found * batch


def _suppressed(until: int) -> Callable[[Any], list[Bias]]:
    return lambda tokens: [Bias((token,), -math.inf, until) for token in tokens]


def _bad_words(words: Any) -> list[Bias]:
    return [Bias(tuple(word), -math.inf) for word in words]


def _sequence_bias(biases: Any) -> list[Bias]:
    """transformers takes a mapping, and also a list of pairs, since JSON has no keys that are lists."""
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    return [Bias(tuple(word), value) for word, value in pairs]


def _is_pair(entry: Any) -> bool:
    """Whether it is a word and a number, and not the entry of a sequence."""
    return isinstance(entry, list | tuple) and len(entry) == 2 and is_number(entry[1])


WORDS: dict[str, tuple[Callable[[Any], list[Bias]], Callable[[Any], bool]]] = {
    "sequence_bias": (_sequence_bias, _is_pair),
    "bad_words_ids": (_bad_words, lambda entry: isinstance(entry, list | tuple) and any(map(is_number, entry))),
    "suppress_tokens": (_suppressed(ALWAYS), is_number),
    "begin_suppress_tokens": (_suppressed(_BEGIN), is_number),
}
"""Options that are words: what reads those of a sequence, and what tells such a word from the entry of a sequence."""


def _of_form(form: Form) -> list[str]:
    return [name for name, option in OPTIONS.items() if option.form is form]


def _check_word(name: str, bias: Bias, vocab_size: int) -> None:
    if not bias.tokens:
        raise InputError(f"{name} has a word without tokens; give each at least one.")
    _check_ids(name, bias.tokens, vocab_size)
    if not is_number(bias.value) or math.isnan(bias.value) or bias.value == math.inf:
        raise InputError(f"{name} must have numbers below infinity as biases, got {bias.value!r}.")


def _check_not_all(biases: Sequence[Bias], vocab_size: int) -> None:
    """Refuse words that leave no token for the first position."""
    if len(biases) < vocab_size:
        return
    forbidden = {bias.tokens for bias in biases if len(bias.tokens) == 1 and bias.value == -math.inf}
    if len(forbidden) == vocab_size:
        raise InputError(
            f"{', '.join(WORDS)} and the minimum of new tokens forbid all {vocab_size} tokens; allow one at least."
        )


def _check_ids(name: str, tokens: Sequence[Any], vocab_size: int) -> None:
    for token in tokens:
        if not 0 <= whole(name, token) < vocab_size:
            raise InputError(f"{name} has {token}, which is not a token id; ids are 0 to {vocab_size - 1}.")
