"""What changes the logits of a sequence: reads the options of a call, and says what they mean for each sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from transformers.generation import ForcedEOSTokenLogitsProcessor, LogitsProcessor

from specgraph.errors import InputError, warn_caller
from specgraph.runtime.requests.logit_option_table import BEGIN, FIRST, LAST, LOGIT_OPTIONS
from specgraph.runtime.requests.processing import Bias, Processing

_OWN = [own.name for own in fields(Processing) if own.name in LOGIT_OPTIONS and own.name != LAST]
"""Options that are an attribute of :class:`Processing` as they are."""
WORDS = [name for name, option in LOGIT_OPTIONS.items() if option.is_words]
"""Options that are words with biases."""


def read_logit_options(asked: Mapping[str, Any], batch: int, vocab_size: int) -> list[dict[str, Any]]:
    """The options of each sequence in ``asked``, which may hold other names, too. What is left out, or None, is off.

    Raises:
        InputError: a value is out of range or of the wrong form, or there is not one for each sequence.
    """
    columns = {name: option.read(name, asked.get(name), batch, vocab_size) for name, option in LOGIT_OPTIONS.items()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@dataclass(frozen=True)
class LogitOptions:
    """The options of one sequence, and what is known of it before they are read.

    Attributes:
        values: of every option, its value.
        given_length: tokens of its prompt with the padding, which transformers counts.
        room: the most tokens that it adds.
        eos_ids: those that end it.
        structured: whether a structure says where it may end; it also keeps the minimum then.
    """

    values: Mapping[str, Any]
    given_length: int
    room: int
    eos_ids: tuple[int, ...]
    structured: bool = False

    def processing(self, place: int, vocab_size: int, *, may_forbid_all: bool = False) -> Processing:
        """What the step does with the logits. ``place`` is that of the sequence, for a warning.

        Raises:
            InputError: no token is left, unless options may forbid all (``may_forbid_all``), as in transformers.
        """
        own, least = {name: self.values[name] for name in _OWN}, self.minimum
        if self.given_length != 1:
            own[FIRST] = -1
        if 0 < self.room < least:
            warn_caller(
                f"min_new_tokens or min_length asks for {least} new tokens of sequence {place}, which has room for "
                f"{self.room}; it gets those."
            )
        biases = self._biases(0 if self.structured else least)
        if own[FIRST] >= 0:  # then, the first token that is chosen is the second one
            biases = [bias._replace(until=BEGIN + 1) if bias.until == BEGIN else bias for bias in biases]
        if not may_forbid_all:
            _check_not_all(biases, vocab_size)
        lasts = self.values[LAST]  # one of several is chosen by the host; see forced_end
        return Processing(**own, biases=tuple(biases), forced_eos_token_id=lasts[0] if len(lasts) == 1 else -1)

    @property
    def minimum(self) -> int:
        """The number of new tokens before which the sequence does not end; 0 or less is no minimum."""
        return int(max(self.values["min_new_tokens"], self.values["min_length"] - self.given_length))

    def forced_end(self) -> list[LogitsProcessor]:
        """transformers' processor where the last token is one of several; of one, the step takes care."""
        own = self.values[LAST]
        length = self.given_length + self.room
        return [ForcedEOSTokenLogitsProcessor(length, own, device="cpu")] if len(own) > 1 else []

    def forbidding(self, count: int) -> list[str]:
        """The options that forbid tokens behind the first ``count`` new ones, by their names."""
        own, ends = self.values, bool(self.eos_ids)
        forced = self.given_length == 1 and own[FIRST] >= 0
        forbids = {
            name: any(bias.value == -math.inf and count < bias.until + forced for bias in own[name]) for name in WORDS
        }
        forbids |= {
            "min_new_tokens": ends and own["min_new_tokens"] > count,
            "min_length": ends and own["min_length"] - self.given_length > count,
            FIRST: forced and count == 0,
            LAST: bool(own[LAST]) and count == self.room - 1,
            "no_repeat_ngram_size": own["no_repeat_ngram_size"] > 0,
        }
        return [name for name, does in forbids.items() if does]

    def _biases(self, least: int) -> list[Bias]:
        """All words, where the sequence does not end by itself before ``least`` tokens.

        A forbidden word that is just an EOS is left out, as in transformers.
        """
        ends = [(token,) for token in self.eos_ids]
        biases = [Bias(end, -math.inf, least) for end in ends if least > 0]
        for name in WORDS:
            biases += [bias for bias in self.values[name] if name != "bad_words_ids" or bias.tokens not in ends]
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
