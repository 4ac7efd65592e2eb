"""Turns the prompts that a user passes into checked token ids, one tensor per sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specgraph.errors import InputError
from specgraph.runtime.requests.request import Limits
from specgraph.runtime.requests.values import kind_of


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
        dtype = torch.int64 if isinstance(row, Sequence) and not row else None  # without items, it would be of floats
        try:
            ids = torch.tensor(row, device="cpu", dtype=dtype)
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
                f"{limits.how_to_lengthen()}."
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= limits.vocab_size:
            raise InputError(
                f"Prompt {index} holds the id {low if low < 0 else high}; ids are 0 to {limits.vocab_size - 1}. Is the "
                "tokenizer this model's?"
            )
