"""Turns what a user passes to ``generate`` into checked values, one of each per sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgraph.errors import InputError
from specgraph.runtime.host import HostProcessor
from specgraph.runtime.processing import Processing
from specgraph.runtime.values import PerSequence, check_range, is_number, kind_of, per_sequence, read_token_ids, whole

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
        capped: whether it was to become longer than the decoder's ``max_length``.
        processing: what changes its logits.
        given: the prompt with its padding, 1-D int64 on the CPU.
        host: what the host does with its logits in every step. They are of this request alone.
    """

    prompt: Tensor
    limit: int
    sampling: Sampling
    eos_ids: tuple[int, ...] = ()
    capped: bool = False
    processing: Processing = field(default_factory=Processing)
    given: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    host: tuple[HostProcessor, ...] = ()

    def unused(self) -> frozenset[str]:
        """Options that are off, by the names of the state."""
        return self.sampling.unused() | self.processing.unused()

    @property
    def has_room(self) -> bool:
        """Whether it can grow by a token."""
        return self.limit > self.prompt.numel()

    @property
    def limit_reason(self) -> str:
        """The finish reason of a sequence that reaches its limit."""
        return "max_length" if self.capped else "length"


@dataclass(frozen=True)
class Batch:
    """One ``generate`` call.

    Attributes:
        left_padding: how many ids stand before each prompt as it was given; the output keeps them.
        logprobs: ``none``, ``raw`` or ``processed``.
        device: where prompts were, and where the output goes.
        traced: whether steps say what happens to drafts.
    """

    requests: list[Request]
    left_padding: list[int]
    pad_id: int
    logprobs: str
    device: torch.device
    traced: bool = False


class Prompts(NamedTuple):
    """Prompts as ``given``, 1-D with their padding, and without it, and how much of that was on the left."""

    given: list[Tensor]
    prompts: list[Tensor]
    left_padding: list[int]

    def repeat(self, copies: int) -> Prompts:
        """So many of each, side by side."""
        places = [place for place in range(len(self.prompts)) for _ in range(copies)]
        given, prompts = ([part[place] for place in places] for part in (self.given, self.prompts))
        return Prompts(given, prompts, [self.left_padding[place] for place in places])


def read_prompts(
    input_ids: Tensor | Sequence[Tensor], attention_mask: Any, pad_id: int | None, eos_ids: Sequence[int]
) -> Prompts:
    """Prompts with and without padding.

    ``input_ids`` is int ``[B, S]`` or a list of 1-D tensors or lists of ids, and the mask is of the same form. Without
    a mask, pad ids of a tensor count as padding where the pad id is not also an EOS, as in transformers.
    """
    if isinstance(input_ids, Tensor) and input_ids.dim() == 2:
        ids = _integers(_on_host("input_ids", input_ids))
        mask = _mask(ids, attention_mask, pad_id, eos_ids)
        # There may be thousands of rows, and each op on a single one takes microseconds.
        left = (mask.long().argmax(1) * mask.any(1)).tolist() if mask.shape[1] else [0] * len(mask)
        whole = bool(mask.all())
        rows = [*ids.clone()] if whole else [row[keep] for row, keep in zip(ids, mask, strict=True)]
        return Prompts([*ids], rows, left)
    if isinstance(input_ids, Tensor):
        raise InputError(f"input_ids must be [B, S] or a list of 1-D tensors, not a tensor of {input_ids.dim()} dims.")
    if not isinstance(input_ids, Sequence) or isinstance(input_ids, str):
        raise InputError(
            f"input_ids must be [B, S] or a list of 1-D tensors, not {type(input_ids).__name__}{_instead(input_ids)}."
        )
    rows = [_integers(read_ids(row)) for row in input_ids]
    if attention_mask is None:
        return Prompts(rows, rows, [0] * len(rows))
    if not isinstance(attention_mask, Sequence) or len(attention_mask) != len(rows):
        raise InputError("attention_mask goes with a padded [B, S] tensor; a list of 1-D tensors needs none.")
    each = [
        read_prompts(row.unsqueeze(0), _mask_row(mask), pad_id, eos_ids)
        for row, mask in zip(rows, attention_mask, strict=True)
    ]
    return Prompts(rows, [one.prompts[0] for one in each], [one.left_padding[0] for one in each])


def read_ids(row: Any) -> Tensor:
    """A prompt on the CPU, from a 1-D tensor or a list of ids."""
    if isinstance(row, Tensor):
        ids = _on_host("input_ids", row)
    else:
        try:
            ids = torch.tensor(row, device="cpu", dtype=_dtype_of(row))
        except (TypeError, ValueError, RuntimeError) as error:
            wrong = f"{_wrong(row)}{_instead(row)}"
            raise InputError(f"A prompt is a 1-D tensor or a list of token ids, not {wrong}.") from error
    if ids.dim() != 1:
        raise InputError(
            "input_ids must be [B, S] or a list of 1-D tensors or lists of token ids; for a single prompt, put it into "
            "a list."
        )
    return ids


def _wrong(row: Any) -> str:
    """What is wrong with something that is no prompt."""
    if not isinstance(row, list | tuple):
        return type(row).__name__
    others = [entry for entry in row if not isinstance(entry, int)]
    return f"a list with {others[0]!r:.40}" if others else f"a list with {max(row, key=abs)}, which has over 64 bits"


def _instead(given: Any) -> str:
    """What takes a text or a conversation, which somebody gave as token ids; empty for anything else."""
    inside = given[0] if isinstance(given, list | tuple) and given else given
    if isinstance(inside, str):
        return "; decoder.text() takes texts, and a tokenizer makes ids of them"
    return "; decoder.chat() takes conversations" if isinstance(inside, Mapping) else ""


def _dtype_of(row: Any) -> torch.dtype | None:
    """The dtype of a list; one without items would be of floats."""
    return torch.int64 if isinstance(row, Sequence) and not row else None


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
    values = _on_host("attention_mask", attention_mask)
    mask = values != 0
    if bool((other := mask & (values != 1)).any()):
        value = values[other][0].item()
        raise InputError(f"attention_mask holds {_shown(value)}; it is 0 at padding and 1 elsewhere.")
    if not ids.shape[1]:
        return mask
    borders = (mask[:, 1:] != mask[:, :-1]).sum(1)
    left_and_right = (borders == 2) & ~mask[:, 0]
    if bool(((borders > 1) & ~left_and_right).any()):
        raise InputError(
            "attention_mask has a hole inside a prompt; padding must be on the left or on the right. (Where an "
            "attached model is given no mask, transformers takes every pad id for padding; give one.)"
        )
    return mask


def _shown(value: complex) -> str:
    return "NaN" if value != value else str(value)


def _mask_row(mask: Any) -> Tensor:
    """The mask of one prompt, ``[1, S]``."""
    try:
        return torch.as_tensor(mask).reshape(1, -1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"attention_mask has one list of 0 and 1 per prompt, not {kind_of(mask)}.") from error


def _on_host(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
        what = "on the device meta, where tensors hold no values" if tensor.is_meta else f"of {tensor.layout}"
        what = "nested" if tensor.is_nested else what
        raise InputError(f"{name} is {what}; give a dense tensor on a CPU or a GPU.")
    return tensor.cpu()


def _integers(row: Tensor) -> Tensor:
    if row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        raise InputError(f"input_ids must hold integers, not {row.dtype}.")
    return row.long()


def check_prompts(prompts: Prompts, limits: Limits) -> None:
    """Refuse what cannot be decoded, in one sentence."""
    if not prompts.prompts:
        raise InputError("input_ids is empty; give at least one prompt.")
    for index, (given, prompt) in enumerate(zip(prompts.given, prompts.prompts, strict=True)):
        if prompt.numel() == 0:
            what = f"padding alone ({given.numel()} ids, by the mask or the pad id)" if given.numel() else "empty"
            raise InputError(f"Prompt {index} is {what}; give it at least one token, for example the BOS id.")
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
    # What truncates a distribution changes no greedy choice. Without it the step is shorter, and a trace says what the
    # target thinks of a token that top_k would have cut off.
    return [Sampling(float(t), k, float(p), float(m), s) if t else Sampling(seed=s) for t, k, p, m, s in values]


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


def read_limits(prompts: Prompts, asked: Lengths, longest: int) -> list[tuple[int, bool]]:
    """The length at which each sequence ends, and whether that is only because ``longest`` is less than was asked."""
    name = "max_length" if asked.max_new_tokens is None and asked.max_length is not None else "max_new_tokens"
    ends = (_ends_by_length if name == "max_length" else _ends)(prompts, asked)
    most = max(per_sequence(name, getattr(asked, name), 0, len(ends)), default=0)
    if most > longest and not asked.by_model:
        raise InputError(
            f"{name}={most} is more than the decoder's max_length of {longest}, which counts the prompt, too; ask for "
            "fewer, or compile with a larger max_length."
        )
    return [(min(longest, end), end > longest) for end in ends]


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


def read_logprobs(value: bool | str | None) -> str:
    """The mode of ``return_logprobs``."""
    if not isinstance(value, bool | str | type(None)) or value not in LOGPROBS:
        raise InputError(f"return_logprobs is False, True, 'raw' or 'processed', not {value!r}.")
    return LOGPROBS[value]
