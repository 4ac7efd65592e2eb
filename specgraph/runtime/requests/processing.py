"""What changes the logits of one sequence, as checked values: the options of ``specgraph.kernels.processors``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

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


State = Mapping[str, Callable[[Processing], Sequence[float]]]
"""Inputs of a step by name, each with the first values that a sequence has of it."""
BIASES: State = {
    "bias_tokens": lambda own: [token for bias in own.biases for token in bias.tokens],
    "bias_ends": lambda own: [*itertools.accumulate(len(bias.tokens) for bias in own.biases)],
    "bias_values": lambda own: [bias.value for bias in own.biases],
    "bias_until": lambda own: [bias.until for bias in own.biases],
}
"""Words, one behind the other, and a list of ends that says where each of them is."""


def itself(name: str) -> State:
    """An option that is an input of the step by itself."""
    return {name: lambda own: [getattr(own, name)]}


def _states(options: set[str]) -> frozenset[str]:
    """The state that holds options: the biases are in several tables."""
    return frozenset(options - {"biases"}).union(BIASES) if "biases" in options else frozenset(options)
