"""The text model of a multimodal model, as the causal LM that transformers has for it.

A class such as ``Gemma3ForConditionalGeneration`` holds a text model, a projection to the vocabulary, and what turns
images into embeddings. For prompts of tokens alone, it computes what the causal LM of the same configuration does. So
that causal LM is built around the very modules, without copying a weight. Where transformers has none, a projection
behind the text model is one. Both are compared with the whole model before anything is done with them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from specgraph.compiler.selfcheck import TOLERANCE
from specgraph.errors import UnsupportedModelError
from specgraph.frontend.tracing import is_multimodal
from specgraph.ir.exporting import own_copy

_NUM_TOKENS = 8
"""How many tokens the two models are compared on."""


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The causal LM inside of a multimodal model, which shares all modules with it; any other model as it is.

    Raises:
        UnsupportedModelError: the model has no text model with a projection to the vocabulary, or the two compute other
            logits of the same tokens.
    """
    if not is_multimodal(model):
        return model
    config = model.config.get_text_config()
    parts = (module for module in model.modules() if isinstance(module, PreTrainedModel) and module is not model)
    held = [module for module in parts if module.config is config]
    head = model.get_output_embeddings()
    if not held or head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is multimodal, and has no {'text model' if head is not None else 'projection'} of "
            "which a causal LM could be made; load a text model, as from AutoModelForCausalLM.from_pretrained(...)."
        )
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None) or _projected(type(held[0]), config)
    with torch.device("meta"):
        text: Any = kind(config)
    setattr(text, text.base_model_prefix, held[0])
    text.set_output_embeddings(head)
    text.generation_config = model.generation_config
    text.training = model.training
    # Where the whole model was loaded from: its files may hold more than transformers reads, such as MTP modules.
    text.name_or_path, text.loaded_revision = model.name_or_path, getattr(model.config, "_commit_hash", None)
    _check_same(model, text)
    return text


def _projected(kind: type[PreTrainedModel], config: PreTrainedConfig) -> type[PreTrainedModel]:
    """A causal LM that is a text model and a projection behind it."""

    class ProjectedForCausalLM(kind.__base__, GenerationMixin):  # type: ignore[misc,name-defined]
        __module__ = kind.__module__  # whose source transformers reads, to see whether its experts can be replaced
        config_class = type(config)
        base_model_prefix = "model"

        def __init__(self, config: PreTrainedConfig) -> None:
            super().__init__(config)
            self.model, self.lm_head = nn.Identity(), nn.Identity()

        def forward(
            self, input_ids: Tensor | None = None, position_ids: Tensor | None = None, **options: Any
        ) -> CausalLMOutputWithPast:
            asked = options.get("output_hidden_states")
            out = self.model(input_ids=input_ids, position_ids=position_ids, **options)
            logits, hidden = self.lm_head(out.last_hidden_state), out.hidden_states if asked else None
            return CausalLMOutputWithPast(logits=logits, past_key_values=out.past_key_values, hidden_states=hidden)

    ProjectedForCausalLM.__name__ = f"{kind.__name__.removesuffix('Model')}ForCausalLM"
    return ProjectedForCausalLM


def _check_same(model: PreTrainedModel, text: PreTrainedModel) -> None:
    """Run both on one token, and on some.

    The multimodal class may scale embeddings or cap logits on its own. For one token, whose attention sees nothing but
    itself, no rounding hides that. It may also have positions and masks of its own, which make another attention kernel
    round differently at the least.
    """
    where = next(model.parameters()).device
    if where.type == "meta":  # refused later, by what it lacks
        return
    for count, allowed in ((1, 0.0), (_NUM_TOKENS, TOLERANCE[model.dtype])):
        ids = torch.arange(1, count + 1, device=where)[None] % int(text.config.vocab_size)
        whole, alone = (_logits(each, ids).double() for each in (model, text))
        error = float((whole - alone).norm() / whole.norm())
        if not error <= allowed:
            raise UnsupportedModelError(
                f"{type(model).__name__} and the {type(text).__name__} inside of it compute other logits of "
                f"{count} token{'s' * (count > 1)} (relative error {error:.1e}, {allowed:.0e} is allowed), so that its "
                "text model is not what it decodes text with; load a text model."
            )


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = own_copy(model, shared=nn.Parameter).eval()(input_ids=ids, use_cache=False).logits
    return logits
