"""The logits processors of transformers that a compiled step has itself, and what they are as options of a decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import generation
from transformers.generation import LogitsProcessor

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


class Reader(NamedTuple):
    """How a processor is read as an option of the decoder.

    Attributes:
        value: gives the value of the option.
        is_same: whether a step with this value does in a call what the processor does.
    """

    value: Callable[[Any], Any]
    is_same: Callable[[Any, Called], bool] = lambda processor, call: True


def _counts_the_prompt(processor: Any, call: Called) -> bool:
    """A step never counts padding, and always the whole prompt.

    So does transformers since it tells the processor how long the padding is (5.23); 5.17 counts padding as a token.
    """
    ignored = getattr(processor, "prompt_ignore_length", None)
    if not isinstance(ignored, Tensor):
        ignored = torch.full_like(call.padding, int(ignored or 0))
    # There is one for each prompt, which may be continued several times.
    same = torch.equal(ignored.cpu().repeat_interleave(len(call.padding) // len(ignored)), call.padding)
    return same and getattr(processor, "logits_indices", None) is None


def _sees_no_padding(call: Called, count: int) -> bool:
    """Whether no prompt has its last ``count`` tokens begin in its padding, which transformers takes for tokens."""
    return not bool(((call.padding > 0) & (call.input_ids.shape[1] - call.padding < count)).any())


def _bans_no_end(processor: Any, call: Called) -> bool:
    """A word that is just an EOS is left out by transformers where it knows the EOS, and by a decoder always."""
    words: Mapping[tuple[int, ...], float] = processor.sequence_bias
    plain = all(bias == -math.inf for bias in words.values()) and not any((token,) in words for token in call.eos_ids)
    return plain and _sees_no_padding(call, max(map(len, words), default=1) - 1)


def _has_the_ends(processor: Any, call: Called) -> bool:
    """Whether a processor and the call know the same EOS ids. Where the call knows none, nothing ends by itself."""
    return sorted(processor.eos_token_id.flatten().tolist()) == list(call.eos_ids)


def _counts_from_the_prompt(processor: Any, call: Called) -> bool:
    return processor.prompt_length_to_skip == call.input_ids.shape[1] and _has_the_ends(processor, call)


def _forces_the_last(processor: Any, call: Called) -> bool:
    last = processor.max_length == call.input_ids.shape[1] + call.max_new_tokens
    return last and processor.eos_token_id.numel() == 1


def _begins_behind_the_prompt(processor: Any, call: Called) -> bool:
    """The beginning is behind the prompt, or behind a BOS that is forced where the prompt is a single token."""
    length = call.input_ids.shape[1]
    return processor.begin_index in ((length,) if length > 1 else (length, length + 1))


_READERS = {
    "sequence_bias": Reader(
        lambda p: dict(p.sequence_bias), lambda p, call: _sees_no_padding(call, max(map(len, p.sequence_bias)) - 1)
    ),
    "repetition_penalty": Reader(lambda p: p.penalty, _counts_the_prompt),
    # Together with with_padded_ngrams. N-grams of padding and new tokens are known only as these come.
    "no_repeat_ngram_size": Reader(lambda p: p.ngram_size, lambda p, call: _sees_no_padding(call, p.ngram_size - 1)),
    "bad_words_ids": Reader(lambda p: [list(word) for word in p.sequence_bias], _bans_no_end),
    "min_length": Reader(lambda p: p.min_length, _has_the_ends),
    "min_new_tokens": Reader(lambda p: p.min_new_tokens, _counts_from_the_prompt),
    "forced_bos_token_id": Reader(lambda p: p.bos_token_id),
    "forced_eos_token_id": Reader(lambda p: int(p.eos_token_id), _forces_the_last),
    "suppress_tokens": Reader(lambda p: p.suppress_tokens.tolist()),
    "begin_suppress_tokens": Reader(lambda p: p.begin_suppress_tokens.tolist(), _begins_behind_the_prompt),
}
OPTION_OF: dict[type[LogitsProcessor], str] = {
    getattr(generation, option.processor): name
    for name, option in LOGIT_OPTIONS.items()
    if option.processor is not None
}
"""The option of the decoder that a processor is, by its class, in transformers' order."""


def read_processor(processor: LogitsProcessor, call: Called) -> Options | None:
    """A processor as an option of the decoder; None if there is none that does the same.

    Forbidding a token commutes with the others, so a step may do so in another place.
    """
    name = OPTION_OF.get(type(processor))
    if name is None or not _READERS[name].is_same(processor, call):
        return None
    return {name: _READERS[name].value(processor)}


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
