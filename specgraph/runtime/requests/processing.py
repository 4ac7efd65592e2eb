"""What changes the logits of one sequence, as checked values: the options of ``specgraph.kernels.processors``."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

ALWAYS = 1 << 62
"""More tokens than a sequence generates."""


class Bias(NamedTuple):
    """A word, whose last token gets a bias where the tokens before it are the last ones of the sequence.

    Attributes:
        tokens: at least one.
        value: is added to the logit; minus infinity forbids the token.
        until: the number of generated tokens from which on the bias does not hold.
    """

    tokens: tuple[int, ...]
    value: float
    until: int = ALWAYS


@dataclass(frozen=True)
class Processing:
    """Options of one sequence; the defaults change nothing.

    Attributes:
        repetition_penalty: divides positive logits of tokens that occur in the sequence, and multiplies negative ones.
        frequency_penalty: is subtracted from a token's logit once for each time that the token was generated.
        presence_penalty: is subtracted from the logit of tokens that were generated at all.
        biases: words that are made likelier, or less likely, or forbidden.
        no_repeat_ngram_size: no n-gram of so many tokens occurs twice.
        forced_bos_token_id: the token behind a prompt of one token; -1 is off.
        forced_eos_token_id: the last token that a sequence has room for; -1 is off. One of several is the host's.
    """

    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    biases: tuple[Bias, ...] = ()
    no_repeat_ngram_size: int = 0
    forced_bos_token_id: int = -1
    forced_eos_token_id: int = -1

    @property
    def num_bias_tokens(self) -> int:
        """The tokens of all words."""
        return sum(len(bias.tokens) for bias in self.biases)

    def unused(self) -> frozenset[str]:
        """Options that are off, by the names of the state."""
        return _states({name for name, default in _DEFAULTS if getattr(self, name) == default})

    def used(self) -> frozenset[str]:
        """Options that are on, by the names of the state."""
        return _states({name for name, default in _DEFAULTS if getattr(self, name) != default})


_DEFAULTS = [(option.name, option.default) for option in fields(Processing)]
"""Looked up once, since every request asks."""


class Form(enum.Enum):
    """How the value of an option is read: what one sequence has of it."""

    NUMBER = enum.auto()
    COUNT = enum.auto()
    FIRST_TOKEN = enum.auto()
    LAST_TOKENS = enum.auto()
    WORDS = enum.auto()


class Option(NamedTuple):
    """An argument of ``generate``, ``stream`` and ``submit`` that changes logits.

    Attributes:
        form: how a value is read (:mod:`specgraph.runtime.requests.processing_options`).
        off: the value that asks for nothing, whatever the model's configuration says.
        allowed: what is allowed, in the words of an error.
        above, most: the bounds of a number; the lower one is excluded.
        state: what its attribute of :class:`Processing` fills: inputs of the step by name, each with the first values
            of a sequence. Options that have the same state are words with biases.
        processor: the class of transformers that does the same; None if there is none.
    """

    form: Form
    off: Any
    allowed: str = ""
    above: float = -math.inf
    most: float = math.inf
    state: Mapping[str, Callable[[Processing], Sequence[float]]] = {}
    processor: str | None = None


_BIASES: dict[str, Callable[[Processing], Sequence[float]]] = {
    "bias_tokens": lambda own: [token for bias in own.biases for token in bias.tokens],
    "bias_ends": lambda own: [*itertools.accumulate(len(bias.tokens) for bias in own.biases)],
    "bias_values": lambda own: [bias.value for bias in own.biases],
    "bias_until": lambda own: [bias.until for bias in own.biases],
}
"""Words, one behind the other, and a list of ends that says where each of them is."""


def _itself(name: str) -> dict[str, Callable[[Processing], Sequence[float]]]:
    """An option that is an input of the step by itself."""
    return {name: lambda own: [getattr(own, name)]}


MOST_NGRAM = 256
"""The longest n-gram that the kernel looks for."""
OPTIONS: dict[str, Option] = {
    "sequence_bias": Option(
        Form.WORDS, (), "a mapping from tuples of token ids to numbers",
        state=_BIASES, processor="SequenceBiasLogitsProcessor",
    ),
    "repetition_penalty": Option(
        Form.NUMBER, 1.0, "more than 0; 1 is off", above=0,
        state=_itself("repetition_penalty"), processor="RepetitionPenaltyLogitsProcessor",
    ),
    "frequency_penalty": Option(
        Form.NUMBER, 0.0, "a finite number; 0 is off", state=_itself("frequency_penalty"),
    ),
    "presence_penalty": Option(
        Form.NUMBER, 0.0, "a finite number; 0 is off", state=_itself("presence_penalty"),
    ),
    "no_repeat_ngram_size": Option(
        Form.COUNT, 0, f"0 (off) to {MOST_NGRAM}", most=MOST_NGRAM,
        state=_itself("no_repeat_ngram_size"), processor="NoRepeatNGramLogitsProcessor",
    ),
    "bad_words_ids": Option(
        Form.WORDS, (), "a list of words, each a list of token ids",
        state=_BIASES, processor="NoBadWordsLogitsProcessor",
    ),
    "min_length": Option(Form.COUNT, 0, "0 or more", state=_BIASES, processor="MinLengthLogitsProcessor"),
    "min_new_tokens": Option(Form.COUNT, 0, "0 or more", state=_BIASES, processor="MinNewTokensLengthLogitsProcessor"),
    "forced_bos_token_id": Option(
        Form.FIRST_TOKEN, (), state=_itself("forced_bos_token_id"), processor="ForcedBOSTokenLogitsProcessor",
    ),
    "forced_eos_token_id": Option(
        Form.LAST_TOKENS, (), state=_itself("forced_eos_token_id"), processor="ForcedEOSTokenLogitsProcessor",
    ),
    "suppress_tokens": Option(
        Form.WORDS, (), "a list of token ids", state=_BIASES, processor="SuppressTokensLogitsProcessor",
    ),
    "begin_suppress_tokens": Option(
        Form.WORDS, (), "a list of token ids", state=_BIASES, processor="SuppressTokensAtBeginLogitsProcessor",
    ),
}  # fmt: skip
"""Every option that changes logits on the device, in the order in which transformers applies them."""
STATE = {name: value for option in OPTIONS.values() for name, value in option.state.items()}
"""What the options of a sequence fill, by the names of a step's inputs."""


def _states(options: set[str]) -> frozenset[str]:
    """The state that holds options: the biases are in several tables."""
    return frozenset(options - {"biases"}).union(_BIASES) if "biases" in options else frozenset(options)
