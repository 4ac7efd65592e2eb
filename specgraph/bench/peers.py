"""Decodes with transformers itself, greedily or sampled, so that our speed can be shown beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


def transformers_generate(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    assistant: PreTrainedModel | None = None,
    **options: Any,
) -> list[Tensor]:
    """The new tokens that transformers' ``generate`` gives for every prompt, 1-D int64 on the CPU.

    Several prompts are padded on the left and decoded together. With an ``assistant`` this is transformers' assisted
    generation, with its defaults; it takes one prompt at a time. ``options`` go to ``generate`` as they are.
    """
    width = max(map(len, prompts))
    pad = int(model.generation_config.pad_token_id or 0)  # any id will do where the mask says that it is padding
    ids = torch.stack([torch.nn.functional.pad(prompt, (width - len(prompt), 0), value=pad) for prompt in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(prompt) for prompt in prompts])
    given = {"attention_mask": mask.long().to(model.device), "pad_token_id": pad, **options}
    if assistant is not None:
        given["assistant_model"] = assistant
    generate: Any = model.generate
    rows: Tensor = generate(ids.to(model.device), **given)
    eos = options.get("eos_token_id", getattr(model.generation_config, "eos_token_id", None))
    return [_until_eos(eos, row[width:].cpu()) for row in rows]


def _until_eos(eos: int | list[int] | None, tokens: Tensor) -> Tensor:
    """The tokens up to the first EOS and with it. Behind it, a row of a batch has padding."""
    ends = torch.isin(tokens, torch.tensor(eos if isinstance(eos, list) else [-1 if eos is None else eos]))
    return tokens[: int(ends.int().argmax()) + 1] if bool(ends.any()) else tokens
