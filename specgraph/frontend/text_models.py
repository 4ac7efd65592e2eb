"""The text model of a multimodal model, as the causal LM that transformers has for it.

A class such as ``Gemma3ForConditionalGeneration`` holds a text model, a projection to the vocabulary, and what turns
images into embeddings. For prompts of tokens alone, it computes what the causal LM of the same configuration does. So
that causal LM is built around the very modules, without copying a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from specgraph.errors import UnsupportedModelError

_NUM_TOKENS = 8
"""How many tokens the two models are compared on."""


def is_multimodal(model: object) -> bool:
    """Whether a model decodes text, and takes something else beside it."""
    return (
        isinstance(model, PreTrainedModel)
        and type(model).__name__.endswith("ForConditionalGeneration")
        and not model.config.is_encoder_decoder
    )


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The causal LM inside of a multimodal model, which shares all modules with it; any other model as it is.

    Raises:
        UnsupportedModelError: transformers has no causal LM for the text model, the model does not hold exactly one of
            what that is made of, or the two compute other logits of the same tokens.
    """
    if not is_multimodal(model):
        return model
    name, config = type(model).__name__, model.config.get_text_config()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise UnsupportedModelError(
            f"{name} is multimodal, and specgraph compiles text models; transformers has no ForCausalLM class for its "
            "text model, so write one with its lm_head."
        )
    with torch.device("meta"):
        text: Any = kind(config)
    held = [module for module in model.modules() if type(module) is type(text.base_model)]
    head = model.get_output_embeddings()
    if len(held) != 1 or head is None:
        raise UnsupportedModelError(
            f"{name} is multimodal, and holds {len(held)} {type(text.base_model).__name__} and "
            f"{'a' if head is not None else 'no'} projection to the vocabulary, where one of each is needed; load its "
            f"text model by {kind.__name__}."
        )
    setattr(text, text.base_model_prefix, held[0])
    text.set_output_embeddings(head)
    text.generation_config = model.generation_config
    text.training = model.training
    _check_same(model, text)
    return text


def _check_same(model: PreTrainedModel, text: PreTrainedModel) -> None:
    """Run both on some tokens. The multimodal class may have its own positions, scales or caps of logits."""
    where = next(model.parameters()).device
    if where.type == "meta":  # refused later, by what it lacks
        return
    ids = torch.arange(1, _NUM_TOKENS + 1, device=where)[None] % int(text.config.vocab_size)
    whole, alone = (_logits(each, ids) for each in (model, text))
    if not torch.equal(whole, alone):
        most = float((whole - alone).abs().max())
        raise UnsupportedModelError(
            f"{type(model).__name__} and the {type(text).__name__} inside of it compute other logits of the same "
            f"tokens (by up to {most:.3g}), so that its text model is not what it decodes text with; load a text model."
        )


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
