"""Makes a new head for a target, starts it from a saved one, and copies it for saving."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash_loading import MASK_EMBEDDING, read_mask_embedding
from specgraph.drafters.plan import OPTIONS, SIZES, HeadPlan, plain_layer
from specgraph.errors import ConfigError
from specgraph.training.config import HeadConfig, HeadTrainConfig
from specgraph.training.data import Encoded
from specgraph.training.teacher import feature_layers


def build_head(model: PreTrainedModel, cfg: HeadTrainConfig, pad_id: int, documents: Sequence[Encoded]) -> DraftHead:
    """A new head, made by its drafter, in float32 on the target's device.

    Raises:
        ConfigError: a size does not fit the target.
    """
    drafter, text = cfg.drafter(), cast(Any, model.config.get_text_config())
    embedding, projection = (module.weight for module in cast(Any, (model.get_input_embeddings(),
                                                                    model.get_output_embeddings())))  # fmt: skip
    features = feature_layers(cfg.head.feature_layers, text.num_hidden_layers, drafter)
    plan = HeadPlan(
        model=model,
        layers=_layers(cfg.head, text, len(embedding), drafter.new_layers),
        features=features,
        vocabulary=_vocabulary(cfg.head.draft_vocab_size, len(projection), documents),
        mask_token_id=_mask_token(cfg.head.mask_token_id, pad_id, len(embedding)),
        steps=cfg.chain.steps,
        **{name: getattr(cfg.head, name) for name in OPTIONS},
    )
    return drafter.new_head(cfg.draft, plan)


@torch.no_grad()
def start_from(head: nn.Module, folder: str) -> None:
    """Copy the tensors of a saved head. Layers and what stands for a mask stay as they are if it lacks them.

    Raises:
        ConfigError: there is no saved head, or it has another shape.
    """
    path = Path(folder) / "model.safetensors"
    if not path.is_file():
        raise ConfigError(f"head.init={folder}: there is no model.safetensors; give the folder of a trained head.")
    saved, mask = load_file(path), read_mask_embedding(path)
    if mask is not None:
        saved[MASK_EMBEDDING] = mask[0]
    if not any(name in saved for name, parameter in head.named_parameters() if parameter.requires_grad):
        raise ConfigError(
            f"head.init={folder} holds no tensor by the name of one of this head's parameters, as for MTP modules, "
            "which cannot be trained on; leave head.init out."
        )
    for name, parameter in head.named_parameters():
        if name not in saved or not parameter.requires_grad:
            continue
        if saved[name].numel() != parameter.numel():
            there, here = list(saved[name].shape), list(parameter.shape)
            raise ConfigError(
                f"head.init={folder}: {name} is {there} there and {here} here; train a head of the same sizes, or "
                "leave head.init out."
            )
        parameter.copy_(saved[name].view_as(parameter))


def bf16_copy(head: DraftHead) -> DraftHead:
    """A copy for saving, with trained parameters in bf16. Frozen parameters are the same tensors, not copies."""
    frozen = {id(parameter): parameter for parameter in head.module.parameters() if not parameter.requires_grad}
    module = copy.deepcopy(head.module, memo=dict(frozen))
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    return DraftHead(module, head.features, head.mask_token_id, head.parallel)


def _layers(cfg: HeadConfig, text: Any, num_embeddings: int, usual: int) -> PretrainedConfig:
    """The configuration of the head's decoder layers, which have the target's shape and are ``usual`` by default."""
    sizes = {key: getattr(cfg, key) for key in SIZES}
    config: Any = plain_layer(text, num_embeddings, cfg.model_type, cfg.layers or usual, **sizes)
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if heads % kv_heads:
        raise ConfigError(
            f"head: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}; change one of "
            "them."
        )
    return config


def _vocabulary(size: int | None, full: int, documents: Sequence[Encoded]) -> Tensor | None:
    """The ids of the most frequent tokens of the answers, int64 ``[size]`` ascending; None for all tokens."""
    if size is None or size == full:
        return None
    if size > full:
        raise ConfigError(f"head.draft_vocab_size={size} is more than the target's {full} tokens; lower it.")
    counts = Counter(token for document in documents for token in document.ids[document.prompt_length :])
    ranked = sorted(range(full), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(ranked[:size]))


def _mask_token(given: int | None, pad_id: int, num_embeddings: int) -> int:
    token = pad_id if given is None else given
    if not 0 <= token < num_embeddings:
        raise ConfigError(
            f"head.mask_token_id={token} is outside of the target's embedding: use 0 to {num_embeddings - 1}, an id "
            "that text does not use."
        )
    return token
