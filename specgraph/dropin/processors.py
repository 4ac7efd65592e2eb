"""The logits processors of transformers that a compiled step has itself, and what they are as options of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import generation
from transformers.generation import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    LogitsProcessor,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from specgraph.runtime.requests.logit_option_table import LOGIT_OPTIONS

Options = dict[str, Any]


class Called(Protocol):
    """The facts about a call that readers use: prompts int64 ``[B, S]``, the padding ``[B]`` on the left of each, and
    when it ends."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def padding(self) -> Tensor: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...


def _repetition(processor: RepetitionPenaltyLogitsProcessor, call: Called) -> Options | None:
    """A step never counts padding, and always the whole prompt.

    So does transformers since it tells the processor how long the padding is (5.23); 5.17 counts padding as a token.
    """
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        ignored = torch.full_like(call.padding, int(ignored or 0))
    # There is one for each prompt, which may be continued several times.
    same = torch.equal(ignored.cpu().repeat_interleave(len(call.padding) // len(ignored)), call.padding)
    flat = getattr(processor, "logits_indices", None) is None
    return {"repetition_penalty": processor.penalty} if same and flat else None


def _sees_padding(call: Called, count: int) -> bool:
    """Whether the last ``count`` tokens of a prompt begin in its padding, which transformers takes for tokens."""
    return bool(((call.padding > 0) & (call.input_ids.shape[1] - call.padding < count)).any())


def _sequence_bias(processor: SequenceBiasLogitsProcessor, call: Called) -> Options | None:
    biases: Mapping[tuple[int, ...], float] = processor.sequence_bias
    reach = max(map(len, biases)) - 1
    return None if _sees_padding(call, reach) else {"sequence_bias": dict(biases)}


def _bad_words(processor: NoBadWordsLogitsProcessor, call: Called) -> Options | None:
    """A word that is just an EOS is left out by transformers where it knows the EOS, and by a decoder always."""
    biases: Mapping[tuple[int, ...], float] = processor.sequence_bias
    ends = [(token,) for token in call.eos_ids]
    plain = all(bias == -math.inf for bias in biases.values()) and not any(word in ends for word in biases)
    reach = max(map(len, biases), default=1) - 1
    return {"bad_words_ids": [list(word) for word in biases]} if plain and not _sees_padding(call, reach) else None


def _ngrams(processor: NoRepeatNGramLogitsProcessor, call: Called) -> Options | None:
    """Together with :func:`with_padded_ngrams`. N-grams of padding and new tokens are known only as these come."""
    return None if _sees_padding(call, processor.ngram_size - 1) else {"no_repeat_ngram_size": processor.ngram_size}


def with_padded_ngrams(options: Options, call: Called) -> Options:
    """The options, in which an n-gram that begins in the padding of a prompt does not occur a second time either.

    A step does not count padding. For transformers it is tokens, so these n-grams are words that are forbidden.
    """
    size = options.get("no_repeat_ngram_size", 0)
    if not size or not bool(call.padding.any()):
        return options
    words: Mapping[tuple[int, ...], float] = options.get("sequence_bias", {})
    rows = zip(call.input_ids.tolist(), call.padding.tolist(), strict=True)
    ngrams = [{tuple(ids[at : at + size]): -math.inf for at in range(padding)} for ids, padding in rows]
    return options | {"sequence_bias": [{**words, **own} for own in ngrams]}


def _min_length(processor: MinLengthLogitsProcessor, call: Called) -> Options | None:
    return {"min_length": processor.min_length} if _is_end(processor, call) else None


def _min_new_tokens(processor: MinNewTokensLengthLogitsProcessor, call: Called) -> Options | None:
    known = processor.prompt_length_to_skip == call.input_ids.shape[1]
    return {"min_new_tokens": processor.min_new_tokens} if known and _is_end(processor, call) else None


def _is_end(processor: Any, call: Called) -> bool:
    """Whether a processor and the call know the same EOS ids. Where the call knows none, nothing ends by itself."""
    return sorted(processor.eos_token_id.flatten().tolist()) == list(call.eos_ids)


def _forced_first(processor: ForcedBOSTokenLogitsProcessor, call: Called) -> Options | None:
    return {"forced_bos_token_id": processor.bos_token_id}


def _forced_last(processor: ForcedEOSTokenLogitsProcessor, call: Called) -> Options | None:
    tokens = processor.eos_token_id.flatten().tolist()
    last = processor.max_length == call.input_ids.shape[1] + call.max_new_tokens
    return {"forced_eos_token_id": tokens[0]} if last and len(tokens) == 1 else None


def _suppressed(processor: SuppressTokensLogitsProcessor, call: Called) -> Options | None:
    return {"suppress_tokens": processor.suppress_tokens.tolist()}


def _suppressed_first(processor: SuppressTokensAtBeginLogitsProcessor, call: Called) -> Options | None:
    """The beginning is behind the prompt, or behind a BOS that is forced where the prompt is a single token."""
    length = call.input_ids.shape[1]
    behind = processor.begin_index in ((length,) if length > 1 else (length, length + 1))
    return {"begin_suppress_tokens": processor.begin_suppress_tokens.tolist()} if behind else None


_READERS: dict[str, Callable[[Any, Called], Options | None]] = {
    "sequence_bias": _sequence_bias,
    "repetition_penalty": _repetition,
    "no_repeat_ngram_size": _ngrams,
    "bad_words_ids": _bad_words,
    "min_length": _min_length,
    "min_new_tokens": _min_new_tokens,
    "forced_bos_token_id": _forced_first,
    "forced_eos_token_id": _forced_last,
    "suppress_tokens": _suppressed,
    "begin_suppress_tokens": _suppressed_first,
}
READERS: dict[type[LogitsProcessor], Callable[[Any, Called], Options | None]] = {
    getattr(generation, option.processor): _READERS[name]
    for name, option in LOGIT_OPTIONS.items()
    if option.processor is not None
}
"""By the class of a processor, in transformers' order, what gives the decoder's options for it; None if it does
something else. Forbidding a token commutes with the others, so a step may do so in another place."""
