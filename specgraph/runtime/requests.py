"""Turns what a user passes to ``generate`` into checked values, one of each per sequence."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import InputError
from specgraph.runtime.defaults import GenerationDefaults

PerSequence = float | int | Sequence[float] | Sequence[int] | Tensor | None
EosIds = int | Sequence[int] | Sequence[Sequence[int]] | Tensor | None
FALLBACK_NEW_TOKENS = 20
"""What transformers generates where nothing says how much."""
LOGPROBS = {False: "none", None: "none", True: "raw", "raw": "raw", "processed": "processed"}


@dataclass(frozen=True)
class Limits:
    """What a decoder can take: ids below ``vocab_size``, and sequences of up to ``max_length`` tokens."""

    vocab_size: int
    max_length: int


@dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are chosen."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def unused(self) -> frozenset[str]:
        """Options that are off, by the names of the state: a step without them gives the same tokens, sooner."""
        off = {"top_k": self.top_k == 0, "top_p": self.top_p == 1, "min_p": self.min_p == 0}
        return frozenset(name for name, is_off in off.items() if is_off)


@dataclass(frozen=True)
class Request:
    """One sequence to decode.

    Attributes:
        prompt: 1-D int64 on the CPU, without padding.
        limit: the length at which it ends at the latest, prompt included.
        eos_ids: the ids that end it.
    """

    prompt: Tensor
    limit: int
    sampling: Sampling
    eos_ids: tuple[int, ...] = ()

    @property
    def has_room(self) -> bool:
        """Whether it can grow by a token."""
        return self.limit > self.prompt.numel()


@dataclass(frozen=True)
class Batch:
    """One ``generate`` call.

    Attributes:
        left_padding: pad ids before each prompt, as given; the output keeps them.
        logprobs: ``none``, ``raw`` or ``processed``.
    """

    requests: list[Request]
    left_padding: list[int]
    pad_id: int
    logprobs: str


def read_prompts(
    input_ids: Tensor | Sequence[Tensor], attention_mask: Tensor | None, pad_id: int | None, eos_ids: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """Prompts without padding, and how much padding each had on its left.

    ``input_ids`` is int ``[B, S]`` or a list of 1-D tensors. Without a mask, pad ids count as padding where the pad id
    is not also an EOS, as in transformers.
    """
    if isinstance(input_ids, Tensor) and input_ids.dim() == 2:
        mask = _mask(input_ids, attention_mask, pad_id, eos_ids)
        prompts = [_integers(row[keep]) for row, keep in zip(input_ids.cpu(), mask, strict=True)]
        return prompts, [int(row.long().argmax()) if row.any() else 0 for row in mask]
    if isinstance(input_ids, Tensor):
        raise InputError(f"input_ids must be [B, S] or a list of 1-D tensors, not a tensor of {input_ids.dim()} dims.")
    if not isinstance(input_ids, Sequence):
        raise InputError(f"input_ids must be [B, S] or a list of 1-D tensors, not {type(input_ids).__name__}.")
    if attention_mask is not None:
        raise InputError("attention_mask goes with a padded [B, S] tensor; a list of 1-D tensors needs none.")
    if not all(isinstance(row, Tensor) and row.dim() == 1 for row in input_ids):
        raise InputError("input_ids must be [B, S] or a list of 1-D tensors of token ids.")
    return [_integers(row.cpu()) for row in input_ids], [0] * len(input_ids)


def _mask(ids: Tensor, attention_mask: Tensor | None, pad_id: int | None, eos_ids: Sequence[int]) -> Tensor:
    if attention_mask is None:
        real = torch.ones(ids.shape, dtype=torch.bool, device="cpu")
        if pad_id is not None and pad_id not in eos_ids:
            real = ids.cpu().ne(pad_id)
        # A pad id between other tokens is one of the prompt's.
        return real.long().cumsum(1).gt(0) & real.flip(1).long().cumsum(1).flip(1).gt(0)
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != ids.shape:
        given = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise InputError(f"attention_mask is {given}, but must be a tensor {list(ids.shape)} like input_ids.")
    mask = attention_mask.cpu() != 0
    borders = (mask[:, 1:] != mask[:, :-1]).sum(1)
    left_and_right = (borders == 2) & ~mask[:, 0]
    if bool(((borders > 1) & ~left_and_right).any()):
        raise InputError("attention_mask has a hole inside a prompt; padding must be on the left or on the right.")
    return mask


def _integers(row: Tensor) -> Tensor:
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise InputError(f"input_ids must hold integers, not {row.dtype}.")
    return row.long()


def check_prompts(prompts: Sequence[Tensor], limits: Limits) -> None:
    """Refuse what cannot be decoded, in one sentence."""
    if not prompts:
        raise InputError("input_ids is empty; give at least one prompt.")
    for index, prompt in enumerate(prompts):
        if prompt.numel() == 0:
            raise InputError(f"Prompt {index} is empty; give it at least one token, for example the BOS id.")
        if prompt.numel() > limits.max_length:
            raise InputError(
                f"Prompt {index} has {prompt.numel()} tokens, but max_length is {limits.max_length}; shorten it, or "
                "compile with a larger max_length if the model allows."
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= limits.vocab_size:
            raise InputError(
                f"Prompt {index} holds the id {low if low < 0 else high}; ids are 0 to {limits.vocab_size - 1}. Is the "
                "tokenizer this model's?"
            )


def per_sequence(name: str, value: PerSequence, default: float, batch: int) -> list[Any]:
    """One value per sequence from a number or a sequence of them."""
    if value is None:
        return [default] * batch
    plain: Any = value.tolist() if isinstance(value, Tensor) else value
    if is_number(plain):
        return [plain] * batch
    if not isinstance(plain, list | tuple) or not all(map(is_number, plain)):
        raise InputError(f"{name} must be a number or one number per sequence, not {_kind(plain)}.")
    if len(plain) != batch:
        raise InputError(f"{name} has {len(plain)} values for {batch} sequences.")
    return list(plain)


def is_number(value: object) -> bool:
    """A real number of Python's or NumPy's; a bool is none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def whole(name: str, value: Any) -> int:
    """An integer, or a float that is one."""
    if not is_number(value) or not math.isfinite(value) or int(value) != value:
        raise InputError(f"{name} must be an integer, got {value!r}.")
    return int(value)


def _kind(value: object) -> str:
    kind = type(value).__name__
    return f"{kind} of {type(value[0]).__name__}" if isinstance(value, list | tuple) and value else kind


def check_range(name: str, values: Sequence[float], allowed: str, low: float, high: float, *, above: bool) -> None:
    """Every value within ``[low, high]``, or ``(low, high]`` if ``above``."""
    for value in values:
        if not (math.isfinite(value) and (value > low if above else value >= low) and value <= high):
            raise InputError(f"{name} must be {allowed}, got {value}.")


def read_sampling(
    batch: int,
    *,
    temperature: PerSequence,
    top_k: PerSequence,
    top_p: PerSequence,
    min_p: PerSequence,
    seed: PerSequence,
) -> list[Sampling]:
    """Checked sampling options of each sequence.

    ``seed``: None draws fresh seeds, a number gives sequence b hash(seed, b), a list is taken as it is.
    """
    temperatures = per_sequence("temperature", temperature, 0.0, batch)
    ks, ps, mins = (per_sequence(n, v, d, batch) for n, v, d in (("top_k", top_k, 0), ("top_p", top_p, 1.0),
                                                                 ("min_p", min_p, 0.0)))  # fmt: skip
    check_range("temperature", temperatures, "0 or more", 0, 1e30, above=False)
    check_range("top_k", ks, "0 (off) or a positive integer", 0, math.inf, above=False)
    check_range("top_p", ps, "in (0, 1]", 0, 1, above=True)
    check_range("min_p", mins, "in [0, 1]", 0, 1, above=False)
    whole_ks = [min(whole("top_k", k), 1 << 62) for k in ks]
    values = zip(temperatures, whole_ks, ps, mins, read_seeds(seed, batch), strict=True)
    return [Sampling(float(t), k, float(p), float(m), s) for t, k, p, m, s in values]


def read_seeds(seed: PerSequence, batch: int) -> list[int]:
    """64-bit seeds, one per sequence."""
    if seed is None:
        return [int(s) for s in torch.randint(-(1 << 62), 1 << 62, (batch,), device="cpu").tolist()]
    plain: Any = seed.tolist() if isinstance(seed, Tensor) else seed
    if is_number(plain):
        return [hash_seed(whole("seed", plain), index) for index in range(batch)]
    return [_signed(whole("seed", value)) for value in per_sequence("seed", plain, 0, batch)]


def hash_seed(seed: int, index: int) -> int:
    """A 64-bit seed for sequence ``index``: two rounds of the splitmix64 finaliser (Steele et al. 2014)."""
    value = seed
    for word in (0x9E3779B97F4A7C15, (index + 1) * 0xD1B54A32D192ED03):
        value = (value + word) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        value ^= value >> 31
    return _signed(value)


def _signed(value: int) -> int:
    value &= 0xFFFFFFFFFFFFFFFF
    return value - (1 << 64) if value >> 63 else value


def read_eos(eos_token_id: EosIds, default: tuple[int, ...], vocab_size: int, batch: int) -> list[tuple[int, ...]]:
    """The EOS ids of each sequence. None takes the model's, an empty list switches EOS off, a list of lists has one
    for every sequence."""
    plain: Any = eos_token_id.tolist() if isinstance(eos_token_id, Tensor) else eos_token_id
    each = isinstance(plain, list | tuple) and any(isinstance(own, list | tuple) for own in plain)
    if each and len(plain) != batch:
        raise InputError(f"eos_token_id has {len(plain)} lists of ids for {batch} sequences.")
    return [_eos_ids(own, default, vocab_size) for own in (plain if each else [plain] * batch)]


def _eos_ids(plain: Any, default: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The EOS ids of one sequence."""
    if plain is None:
        return default
    if not is_number(plain) and not isinstance(plain, Sequence):
        raise InputError(f"eos_token_id must be a token id or a list of them, not {_kind(plain)}.")
    ids = [whole("eos_token_id", i) for i in ([plain] if is_number(plain) else plain)]
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"eos_token_id {token} is not a token id; ids are 0 to {vocab_size - 1}.")
    return tuple(ids)


def read_limits(
    prompts: Sequence[Tensor], max_new_tokens: PerSequence, defaults: GenerationDefaults, max_length: int
) -> list[int]:
    """The length at which each sequence ends: as asked, else by the model's configuration, else 20 tokens on."""
    if max_new_tokens is None and defaults.max_new_tokens is None and defaults.max_length is not None:
        for index, prompt in enumerate(prompts):
            if prompt.numel() >= defaults.max_length:
                raise InputError(
                    f"Prompt {index} has {prompt.numel()} tokens, and the model's generation_config has "
                    f"max_length={defaults.max_length}, which counts them; pass max_new_tokens, or shorten it."
                )
        return [min(max_length, defaults.max_length) for _ in prompts]
    count = defaults.max_new_tokens if max_new_tokens is None else max_new_tokens
    counts = per_sequence("max_new_tokens", count, FALLBACK_NEW_TOKENS, len(prompts))
    for count in counts:
        if not math.isfinite(count) or int(count) != count or count < 0:
            raise InputError(f"max_new_tokens must be an integer of at least 0, got {count!r}.")
    return [min(max_length, p.numel() + int(n)) for p, n in zip(prompts, counts, strict=True)]


def read_logprobs(value: bool | str | None) -> str:
    """The mode of ``return_logprobs``."""
    if not isinstance(value, bool | str | type(None)) or value not in LOGPROBS:
        raise InputError(f"return_logprobs is False, True, 'raw' or 'processed', not {value!r}.")
    return LOGPROBS[value]
