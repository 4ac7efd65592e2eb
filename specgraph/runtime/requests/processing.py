"""What changes the logits of one sequence, as checked values: the options of ``specgraph.kernels.processors``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
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

    @functools.cached_property
    def state(self) -> dict[str, list[float]]:
        """The inputs of a step that the options which are on fill, by name, each with its first values."""
        own = {name: [getattr(self, name)] for name, off in _OFF.items() if getattr(self, name) != off}
        return own | _tables(self.biases) if self.biases else own


def _tables(biases: Sequence[Bias]) -> dict[str, list[float]]:
    """Words, one behind the other, and a list of ends that says where each of them is."""
    return {
        "bias_tokens": [token for bias in biases for token in bias.tokens],
        "bias_ends": [*itertools.accumulate(len(bias.tokens) for bias in biases)],
        "bias_values": [bias.value for bias in biases],
        "bias_until": [bias.until for bias in biases],
    }


_OFF = {option.name: option.default for option in fields(Processing) if option.name != "biases"}
OPTION_STATE = frozenset({*_OFF, *_tables(())})
"""What the options of a sequence fill, by the names of a step's inputs."""
