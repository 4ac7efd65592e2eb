"""Every option that changes logits: how its values are read, and what of transformers does the same."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from specgraph.errors import InputError
from specgraph.runtime.requests.processing import ALWAYS, Bias
from specgraph.runtime.requests.values import (
    check_ids,
    check_range,
    ids_per_sequence,
    is_number,
    per_sequence,
    whole,
    without_tensors,
)

BEGIN = 1
"""``until`` of what holds for the first generated token alone."""
MOST_NGRAM = 256
"""The longest n-gram that the kernel looks for."""


FIRST, LAST = "forced_bos_token_id", "forced_eos_token_id"
"""The token at the beginning, one per sequence, and that at the end, which may be one of several."""


class Option(NamedTuple):
    """An argument of ``generate``, ``stream`` and ``submit`` that changes logits.

    Attributes:
        off: the value that asks for nothing, whatever the model's configuration says.
        read: gives the checked values, one of each sequence, for the name of the argument, what was given (None asks
            for nothing), the number of sequences, and the size of the vocabulary.
        processor: the class of transformers that does the same; None if there is none.
        is_words: whether the values are words with biases, and not an attribute of ``Processing`` with the same name.
    """

    off: Any
    read: Callable[[str, Any, int, int], list[Any]]
    processor: str | None = None
    is_words: bool = False


def _numbers(
    name: str, value: Any, batch: int, vocab_size: int, *, off: float, allowed: str, above: float = -math.inf
) -> list[float]:
    values = per_sequence(name, value, off, batch)
    check_range(name, values, allowed, above, math.inf, above=True)
    return [float(number) for number in values]


def _counts(
    name: str, value: Any, batch: int, vocab_size: int, *, allowed: str = "0 or more", most: float = math.inf
) -> list[int]:
    counts = [whole(name, number) for number in per_sequence(name, value, 0, batch)]
    check_range(name, counts, allowed, 0, most, above=False)
    return counts


def _first_tokens(name: str, value: Any, batch: int, vocab_size: int) -> list[int]:
    """A token for each sequence, from one or a list with one for each; -1 for none, which is an empty list."""
    if value is None or (isinstance(value, list | tuple) and not value):
        return [-1] * batch
    value = value[0] if isinstance(value, list | tuple) and len(value) == 1 else value
    tokens = [whole(name, token) for token in per_sequence(name, value, -1, batch)]
    check_ids(name, tokens, vocab_size)
    return tokens


def _words(
    name: str, value: Any, batch: int, vocab_size: int, *, allowed: str, read: Callable[[Any], list[Bias]],
    is_word: Callable[[Any], bool],
) -> list[list[Bias]]:  # fmt: skip
    """The words of every sequence: the same for all, or from a list with an entry for each.

    ``read`` gives those of a sequence, and ``is_word`` tells a word from the entry of a sequence.
    """
    plain = without_tensors(value)
    if plain is None:
        return [[]] * batch
    wrong = InputError(f"{name} is {allowed}, or a list with one of these per sequence, not {plain!r}.")
    if not isinstance(plain, list | tuple) and not (isinstance(plain, Mapping) and name == "sequence_bias"):
        raise wrong
    several = not isinstance(plain, Mapping) and len(plain) > 0 and not any(map(is_word, plain))
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


def _suppressed(until: int) -> Callable[[str, Any, int, int], list[list[Bias]]]:
    """What reads tokens that are forbidden up to a place in the sequence."""

    def read(tokens: Any) -> list[Bias]:
        return [Bias((token,), -math.inf, until) for token in tokens]

    return functools.partial(_words, allowed="a list of token ids", read=read, is_word=is_number)


def _bad_words(words: Any) -> list[Bias]:
    return [Bias(tuple(word), -math.inf) for word in words]


def _sequence_bias(biases: Any) -> list[Bias]:
    """transformers takes a mapping, and also a list of pairs, since JSON has no keys that are lists."""
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    return [Bias(tuple(word), value) for word, value in pairs]


def _is_ids(entry: Any) -> bool:
    return isinstance(entry, list | tuple) and any(map(is_number, entry))


def _is_pair(entry: Any) -> bool:
    """Whether it is a word and a number, and not the entry of a sequence."""
    return isinstance(entry, list | tuple) and len(entry) == 2 and is_number(entry[1])


def _check_word(name: str, bias: Bias, vocab_size: int) -> None:
    if not bias.tokens:
        raise InputError(f"{name} has a word without tokens; give each at least one.")
    check_ids(name, bias.tokens, vocab_size)
    if not is_number(bias.value) or math.isnan(bias.value) or bias.value == math.inf:
        raise InputError(f"{name} must have numbers below infinity as biases, got {bias.value!r}.")


_penalties = functools.partial(_numbers, off=0.0, allowed="a finite number; 0 is off")
LOGIT_OPTIONS: dict[str, Option] = {
    "sequence_bias": Option(
        (),
        functools.partial(
            _words, allowed="a mapping from tuples of token ids to numbers", read=_sequence_bias, is_word=_is_pair
        ),
        "SequenceBiasLogitsProcessor",
        is_words=True,
    ),
    "repetition_penalty": Option(
        1.0,
        functools.partial(_numbers, off=1.0, allowed="more than 0; 1 is off", above=0),
        "RepetitionPenaltyLogitsProcessor",
    ),
    "frequency_penalty": Option(0.0, _penalties),
    "presence_penalty": Option(0.0, _penalties),
    "no_repeat_ngram_size": Option(
        0,
        functools.partial(_counts, allowed=f"0 (off) to {MOST_NGRAM}", most=MOST_NGRAM),
        "NoRepeatNGramLogitsProcessor",
    ),
    "bad_words_ids": Option(
        (),
        functools.partial(
            _words, allowed="a list of words, each a list of token ids", read=_bad_words, is_word=_is_ids
        ),
        "NoBadWordsLogitsProcessor",
        is_words=True,
    ),
    "min_length": Option(0, _counts, "MinLengthLogitsProcessor"),
    "min_new_tokens": Option(0, _counts, "MinNewTokensLengthLogitsProcessor"),
    FIRST: Option((), _first_tokens, "ForcedBOSTokenLogitsProcessor"),
    LAST: Option((), ids_per_sequence, "ForcedEOSTokenLogitsProcessor"),
    "suppress_tokens": Option((), _suppressed(ALWAYS), "SuppressTokensLogitsProcessor", is_words=True),
    "begin_suppress_tokens": Option((), _suppressed(BEGIN), "SuppressTokensAtBeginLogitsProcessor", is_words=True),
}
"""Every option that changes logits, in the order in which transformers applies them. The step has an order of its own:
that of :data:`~specgraph.kernels.processors.PROCESSORS`."""
