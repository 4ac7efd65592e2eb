"""Loads heads for a small target and drafts with them, without a cache: every step runs all rows again."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3 import Eagle3DraftConfig as DraftConfig
from specgraph.drafters.eagle3 import Eagle3Drafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.ir.model_info import ModelInfo
from tests.models import make_model


@functools.cache
def target(layers: int = 7, hidden: int = 32) -> PreTrainedModel:
    """A target whose embedding and head are untied."""
    return make_model(
        "llama", num_hidden_layers=layers, hidden_size=hidden, dtype=torch.float64, tie_word_embeddings=False
    )


def info(model: PreTrainedModel) -> ModelInfo:
    config: Any = model.config
    device = next(model.parameters()).device
    return ModelInfo(
        "Llama", config.vocab_size, config.num_hidden_layers, config.hidden_size, model.dtype, device, None
    )


def load(folder: Path, model: PreTrainedModel | None = None, **options: Any) -> DraftHead:
    """A head in float64, for the target."""
    model = target() if model is None else model
    return Eagle3Drafter.load(open_checkpoint(folder), DraftConfig(**options), model, info(model))


@torch.no_grad()
def draft(
    head: DraftHead, tokens: list[int], features: Tensor, count: int, *, parallel: bool = False,
    follow: list[int] | None = None
) -> tuple[list[int], Tensor]:  # fmt: skip
    """``count`` drafts and the logits of every row; ``features`` is ``[T, A, Ht]``.

    ``follow`` are the tokens of the further rows, instead of the drafts.
    """
    module, given = head.module, list(tokens)
    hidden = module.combine(*(feature[None] for feature in features.unbind(1)))
    drafted: list[int] = []
    for index in range(count):
        logits, fed = _rows(head, given, hidden)
        best = int(logits[-1].argmax())
        drafted.append(best if module.draft_to_target is None else int(module.draft_to_target[best]))
        if parallel:
            assert head.mask_token_id is not None and module.mask_hidden is not None
            parts = module.mask_hidden.view(1, 1, -1).chunk(features.shape[1], dim=-1)
            given, hidden = [*given, head.mask_token_id], torch.cat([hidden, module.combine(*parts)], dim=1)
        else:
            given.append(drafted[-1] if follow is None or index >= len(follow) else follow[index])
            hidden = torch.cat([hidden, fed[:, -1:]], dim=1)
    return drafted, logits


def _rows(head: DraftHead, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[T, Vd]`` and what is fed on ``[1, T, H]`` of all rows."""
    length = len(tokens)
    head.module.config.layers._attn_implementation = "eager"
    mask = torch.full((length, length), float("-inf"), dtype=hidden.dtype).triu(1)[None, None]
    out = head.module(torch.tensor([tokens]), torch.arange(length)[None], hidden, attention_mask=mask)
    logits, fed = head.module.predict(out)
    return logits[0], fed
