"""Reads the arguments of ``generate``, ``stream`` and ``submit`` with a model's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgraph.errors import InputError
from specgraph.runtime.defaults import GenerationDefaults
from specgraph.runtime.requests import (
    Batch,
    EosIds,
    Limits,
    PerSequence,
    Request,
    check_prompts,
    read_eos,
    read_limits,
    read_logprobs,
    read_prompts,
    read_sampling,
)


@dataclass(frozen=True)
class Reader:
    """What holds where a caller says nothing, and what a decoder can take."""

    defaults: GenerationDefaults
    limits: Limits

    def batch(
        self, input_ids: Tensor | Sequence[Tensor], attention_mask: Tensor | None = None, *,
        max_new_tokens: PerSequence = None, eos_token_id: EosIds = None, seed: PerSequence = None,
        return_logprobs: bool | str = False, **sampling: PerSequence,
    ) -> Batch:  # fmt: skip
        """A checked call of ``generate``.

        Raises:
            InputError: an argument is out of range; the message says what is allowed.
        """
        defaults, limits = self.defaults, self.limits
        eos_ids = read_eos(eos_token_id, defaults.eos_ids, limits.vocab_size, _count(input_ids))
        prompts, left = read_prompts(input_ids, attention_mask, defaults.pad_id, sum(eos_ids, ()))
        check_prompts(prompts, limits)
        ends = read_limits(prompts, max_new_tokens, defaults, limits.max_length)
        options = read_sampling(len(prompts), seed=seed, **self._sampling(sampling))
        pad_id = defaults.pad_id if defaults.pad_id is not None else (*eos_ids[0], 0)[0]
        parts = zip(prompts, ends, options, eos_ids, strict=True)
        return Batch([Request(*part) for part in parts], left, pad_id, read_logprobs(return_logprobs))

    def one(
        self, prompt: Tensor | Sequence[int], *, max_new_tokens: int | None = None, eos_token_id: EosIds = None,
        seed: int | None = None, **sampling: Any,
    ) -> Request:  # fmt: skip
        """A checked call of ``submit``, whose seed is used as it is.

        Raises:
            InputError: as for :meth:`batch`.
        """
        if not isinstance(prompt, Tensor):
            prompt = _ids(prompt)
        if prompt.dim() != 1:
            raise InputError(f"A prompt is a 1-D tensor or a list of token ids, not a tensor of {prompt.dim()} dims.")
        seeds = None if seed is None else [seed]
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id, "seed": seeds}
        return self.batch([prompt], **options, **sampling).requests[0]

    def _sampling(self, given: dict[str, Any]) -> dict[str, Any]:
        names = ("temperature", "top_k", "top_p", "min_p")
        return {n: getattr(self.defaults, n) if given.get(n) is None else given[n] for n in names}


def _count(input_ids: Any) -> int:
    """The number of prompts; what is no list of prompts is refused where they are read."""
    sized = isinstance(input_ids, Sequence) or (isinstance(input_ids, Tensor) and input_ids.dim() > 0)
    return len(input_ids) if sized else 0


def _ids(prompt: Sequence[int]) -> Tensor:
    try:
        return torch.tensor(prompt, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"A prompt is a 1-D tensor or a list of token ids, not {type(prompt).__name__}.") from error
