"""What changes the logits of the sequences of a call: reads the options, and says what they mean for each sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers.generation import ForcedEOSTokenLogitsProcessor, LogitsProcessor

from specgraph.errors import InputError, warn_caller
from specgraph.runtime.requests.logit_option_table import BEGIN, FIRST, LAST, LOGIT_OPTIONS
from specgraph.runtime.requests.processing import BIASES, Bias, Processing

_MINIMUMS = ("min_new_tokens", "min_length")
WORDS = [name for name, option in LOGIT_OPTIONS.items() if option.state is BIASES and name not in _MINIMUMS]
"""Options that are words with biases."""
_OWN = [own.name for own in fields(Processing) if own.name in LOGIT_OPTIONS and own.name != LAST]
"""Options that are an attribute of :class:`Processing` as they are."""


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


@dataclass(frozen=True)
class LogitOptions:
    """The options of the sequences of a call.

    Attributes:
        known: what is known of the sequences.
        values: of every option, the value of each sequence.
    """

    known: Sequences
    values: Mapping[str, Sequence[Any]]

    @classmethod
    def read(cls, known: Sequences, asked: Mapping[str, Any]) -> LogitOptions:
        """The options in ``asked``, which may hold other names, too. What is left out, or None, is off.

        Raises:
            InputError: a value is out of range or of the wrong form, or there is not one for each sequence.
        """
        batch, vocab = len(known.eos_ids), known.vocab_size
        values = {name: option.read(name, asked.get(name), batch, vocab) for name, option in LOGIT_OPTIONS.items()}
        return cls(known, values)

    def processing(self) -> list[Processing]:
        """What the step does with the logits of each sequence.

        Raises:
            InputError: no token is left.
        """
        return [self._processing(place, least) for place, least in enumerate(self.minimums)]

    def _processing(self, place: int, least: int) -> Processing:
        known, own = self.known, {name: self.values[name][place] for name in _OWN}
        if known.given_lengths[place] != 1:
            own[FIRST] = -1
        _warn_too_few(place, least, known.rooms[place])
        words = {name: self.values[name][place] for name in WORDS}
        structured = known.structured and known.structured[place]
        biases = _biases(words, known.eos_ids[place], 0 if structured else least)
        if own[FIRST] >= 0:  # then, the first token that is chosen is the second one
            biases = [bias._replace(until=BEGIN + 1) if bias.until == BEGIN else bias for bias in biases]
        if not known.as_transformers:
            _check_not_all(biases, known.vocab_size)
        lasts = self.values[LAST][place]  # one of several is chosen by the host; see forced_ends
        return Processing(**own, biases=tuple(biases), forced_eos_token_id=lasts[0] if len(lasts) == 1 else -1)

    @property
    def minimums(self) -> list[int]:
        """The number of new tokens before which each sequence does not end; 0 or less is no minimum."""
        columns = (*(self.values[name] for name in _MINIMUMS), self.known.given_lengths)
        return [max(new, whole - given) for new, whole, given in zip(*columns, strict=True)]

    def forced_ends(self) -> list[list[LogitsProcessor]]:
        """transformers' processor for each sequence whose last token is one of several; of one, the step takes care."""
        columns = self.values[LAST], self.known.given_lengths, self.known.rooms
        return [
            [ForcedEOSTokenLogitsProcessor(length + room, own, device="cpu")] if len(own) > 1 else []
            for own, length, room in zip(*columns, strict=True)
        ]

    def forbidding(self, place: int, count: int) -> list[str]:
        """The options that forbid tokens behind the first ``count`` new ones of a sequence, by their names."""
        own = {name: each[place] for name, each in self.values.items()}
        length, ends = self.known.given_lengths[place], bool(self.known.eos_ids[place])
        forced = length == 1 and own[FIRST] >= 0
        forbids = {
            name: any(bias.value == -math.inf and count < bias.until + forced for bias in own[name]) for name in WORDS
        }
        forbids |= {
            "min_new_tokens": ends and own["min_new_tokens"] > count,
            "min_length": ends and own["min_length"] - length > count,
            FIRST: forced and count == 0,
            LAST: bool(own[LAST]) and count == self.known.rooms[place] - 1,
            "no_repeat_ngram_size": own["no_repeat_ngram_size"] > 0,
        }
        return [name for name, does in forbids.items() if does]


def _warn_too_few(place: int, least: int, room: int) -> None:
    if 0 < room < least:
        warn_caller(
            f"min_new_tokens or min_length asks for {least} new tokens of sequence {place}, which has room for {room}; "
            "it gets those."
        )


def _biases(words: Mapping[str, list[Bias]], eos_ids: tuple[int, ...], least: int) -> list[Bias]:
    """All words of one sequence, which does not end by itself before ``least`` tokens. A forbidden word that is just an
    EOS is left out, as in transformers."""
    ends = [(token,) for token in eos_ids]
    biases = [Bias(end, -math.inf, least) for end in ends if least > 0]
    for name, own in words.items():
        biases += [bias for bias in own if name != "bad_words_ids" or bias.tokens not in ends]
    return biases


def _check_not_all(biases: Sequence[Bias], vocab_size: int) -> None:
    """Refuse words that leave no token for the first position."""
    if len(biases) < vocab_size:
        return
    forbidden = {bias.tokens for bias in biases if len(bias.tokens) == 1 and bias.value == -math.inf}
    if len(forbidden) == vocab_size:
        raise InputError(
            f"{', '.join(WORDS)} and the minimum of new tokens forbid all {vocab_size} tokens; allow one at least."
        )
