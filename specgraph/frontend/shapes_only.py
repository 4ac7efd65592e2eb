"""A model by its configuration alone, for questions that its weights do not answer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specgraph.errors import ConfigError
from specgraph.frontend.tracing import check_is_causal_lm
from specgraph.ir.model_info import ModelInfo


def without_weights(name: str, role: str) -> PreTrainedModel:
    """A causal LM as its configuration describes it, with tensors that have shapes only.

    Raises:
        ConfigError: ``name`` has no configuration of one; ``role`` is the key that named it.
    """
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"{role}={name} has no configuration of a causal LM: {reason}.") from None
    check_is_causal_lm(model)
    return model


def info_of(model: PreTrainedModel) -> ModelInfo:
    """What tracing would say of a model, as far as its configuration and its projection tell."""
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    return ModelInfo(type(model).__name__, head.weight.shape[0], config.num_hidden_layers, config.hidden_size,
                     head.weight.dtype, head.weight.device, None)  # fmt: skip
