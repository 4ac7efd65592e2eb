"""Makes a model from its configuration alone, for questions that do not depend on its weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specgraph.errors import ConfigError
from specgraph.frontend.tracing import check_is_causal_lm
from specgraph.ir.model_info import ModelInfo


def without_weights(name: str, role: str) -> PreTrainedModel:
    """A causal LM made from its configuration, with tensors that have shapes but no values.

    Args:
        name: the folder or name of the model.
        role: the configuration key that named the model, for the error.

    Raises:
        ConfigError: ``name`` has no configuration of a causal LM.
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
    """The facts that tracing would find about a model, as far as its configuration and its projection tell them."""
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    return ModelInfo(type(model).__name__, head.weight.shape[0], config.num_hidden_layers, config.hidden_size,
                     head.weight.dtype, head.weight.device, None)  # fmt: skip
