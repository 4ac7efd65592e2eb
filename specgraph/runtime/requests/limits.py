"""Where a sequence ends: its EOS ids, and how long it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from specgraph.errors import InputError
from specgraph.runtime.requests.prompts import (
    Prompts,
)
from specgraph.runtime.requests.request import Limits
from specgraph.runtime.requests.values import (
    PerSequence,
    per_sequence,
    read_token_ids,
    whole,
)

EosIds = int | Sequence[int] | Sequence[Sequence[int]] | Tensor | None


FALLBACK_NEW_TOKENS = 20
"""What transformers generates where nothing says how much."""


def read_eos(eos_token_id: EosIds, default: tuple[int, ...], vocab_size: int, batch: int) -> list[tuple[int, ...]]:
    """The EOS ids of each sequence. None takes the model's, an empty list switches EOS off, a list of lists has one
    for every sequence."""
    plain: Any = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    each = isinstance(plain, list | tuple) and any(isinstance(own, list | tuple) for own in plain)
    # An id outside of the vocabulary, such as -1, is a way to say that there is none.
    default = tuple(token for token in default if 0 <= token < vocab_size)
    if each and len(plain) != batch:
        raise InputError(f"eos_token_id has {len(plain)} lists of ids for {batch} sequences.")
    return [_eos_ids(own, default, vocab_size) for own in (plain if each else [plain] * batch)]


def _eos_ids(plain: Any, default: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The EOS ids of one sequence."""
    if plain is None:
        return default
    ids = read_token_ids("eos_token_id", plain)
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"eos_token_id {token} is not a token id; ids are 0 to {vocab_size - 1}.")
    return tuple(ids)


class Lengths(NamedTuple):
    """How long sequences become: by so many new tokens, or up to a length that counts the prompt and its padding.

    ``by_model``: a caller said nothing, so both are the model's, which may be more than a decoder was compiled for.
    """

    max_new_tokens: PerSequence
    max_length: PerSequence
    by_model: bool = False


class End(NamedTuple):
    """The length at which a sequence ends, and whether that is only because the decoder's own is less than asked."""

    limit: int
    capped: bool


def read_limits(prompts: Prompts, asked: Lengths, limits: Limits) -> list[End]:
    """Where each sequence ends at the latest."""
    longest = limits.max_length
    name = "max_length" if asked.max_new_tokens is None and asked.max_length is not None else "max_new_tokens"
    ends = (_ends_by_length if name == "max_length" else _ends)(prompts, asked)
    most = max(per_sequence(name, getattr(asked, name), 0, len(ends)), default=0)
    if most > longest and not asked.by_model:
        raise InputError(
            f"{name}={most} is more than the decoder's max_length of {longest}, which counts the prompt, too; ask for "
            f"fewer, or {limits.lengthen()}."
        )
    return [End(min(longest, end), end > longest) for end in ends]


def _ends(prompts: Prompts, asked: Lengths) -> list[int]:
    counts = per_sequence("max_new_tokens", asked.max_new_tokens, FALLBACK_NEW_TOKENS, len(prompts.prompts))
    for count in counts:
        if not math.isfinite(count) or int(count) != count or count < 0:
            raise InputError(f"max_new_tokens must be an integer of at least 0, got {count!r}.")
    return [prompt.numel() + int(count) for prompt, count in zip(prompts.prompts, counts, strict=True)]


def _ends_by_length(prompts: Prompts, asked: Lengths) -> list[int]:
    """Padding counts as in transformers, so that all sequences of a padded batch get as many new tokens."""
    lengths = per_sequence("max_length", asked.max_length, 0, len(prompts.prompts))
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
