"""Where a sequence ends: its EOS ids, and how long it gets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from specgraph.errors import InputError, warn_caller
from specgraph.runtime.requests.prompts import Prompts
from specgraph.runtime.requests.request import Limits
from specgraph.runtime.requests.values import (
    PerSequence,
    ids_per_sequence,
    per_sequence,
    whole,
)

EosIds = int | Sequence[int] | Sequence[Sequence[int]] | Tensor | None


FALLBACK_NEW_TOKENS = 20
"""What transformers generates where nothing says how much."""


def read_eos(eos_token_id: EosIds, default: tuple[int, ...], vocab_size: int, batch: int) -> list[tuple[int, ...]]:
    """The EOS ids of each sequence. None takes the model's, an empty list switches EOS off, a list of lists has one
    for every sequence."""
    # An id of the model's outside of the vocabulary, such as -1, is a way to say that there is none.
    default = tuple(token for token in default if 0 <= token < vocab_size)
    return ids_per_sequence("eos_token_id", eos_token_id, batch, vocab_size, default)


class End(NamedTuple):
    """The length at which a sequence ends, and whether that is only because the decoder's own is less than asked."""

    limit: int
    capped: bool


def read_limits(prompts: Prompts, given: Mapping[str, Any], model: Mapping[str, Any], limits: Limits) -> list[End]:
    """Where each sequence ends at the latest.

    A caller's ``max_new_tokens`` comes first, then its ``max_length``, which counts the prompt and its padding. If it
    gives neither, both are the model's, which may be more than a decoder was compiled for.
    """
    if "max_new_tokens" in given and "max_length" in given:
        warn_caller("max_new_tokens is given, so max_length has no effect.")
    by_model = given.keys().isdisjoint(("max_new_tokens", "max_length"))
    source, longest = model if by_model else given, limits.max_length
    name = "max_length" if "max_new_tokens" not in source and "max_length" in source else "max_new_tokens"
    asked = source.get(name)
    ends = (_ends_by_length if name == "max_length" else _ends)(prompts, asked)
    most = max(per_sequence(name, asked, 0, len(ends)), default=0)
    if most > longest and not by_model:
        raise InputError(
            f"{name}={most} is more than the decoder's max_length of {longest}, which counts the prompt, too; ask for "
            f"fewer, or {limits.how_to_lengthen()}."
        )
    return [End(min(longest, end), end > longest) for end in ends]


def _ends(prompts: Prompts, asked: PerSequence) -> list[int]:
    counts = per_sequence("max_new_tokens", asked, FALLBACK_NEW_TOKENS, len(prompts.prompts))
    for count in counts:
        if not math.isfinite(count) or int(count) != count or count < 0:
            raise InputError(f"max_new_tokens must be an integer of at least 0, got {count!r}.")
    return [prompt.numel() + int(count) for prompt, count in zip(prompts.prompts, counts, strict=True)]


def _ends_by_length(prompts: Prompts, asked: PerSequence) -> list[int]:
    """Padding counts as in transformers, so that all sequences of a padded batch get as many new tokens."""
    lengths = per_sequence("max_length", asked, 0, len(prompts.prompts))
    ends = []
    for index, (given, prompt, length) in enumerate(zip(prompts.given, prompts.prompts, lengths, strict=True)):
        if whole("max_length", length) <= given.numel():
            padding = ", padding included" if given.numel() > prompt.numel() else ""
            raise InputError(
                f"Prompt {index} has {given.numel()} tokens{padding}, and max_length={length} counts them; pass "
                "max_new_tokens, or shorten it."
            )
        ends.append(prompt.numel() + int(length) - given.numel())
    return ends
