"""Step-3.7's text model with a vocabulary projection.

transformers has this text model inside of a multimodal one only. Everything but the projection is transformers' own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7PreTrainedModel, Step3p7TextModel


class StepTextConfig(Step3p7TextConfig):  # type: ignore[misc]
    """Of a type of its own, because transformers lets nobody register another class for one of its own types."""

    model_type = "step_text"


class StepTextForCausalLM(Step3p7PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    config_class = StepTextConfig

    def __init__(self, config: StepTextConfig) -> None:
        super().__init__(config)
        self.model = Step3p7TextModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids: Tensor | None = None, position_ids: Tensor | None = None, **options: Any
    ) -> CausalLMOutputWithPast:
        recorded = bool(options.get("output_hidden_states"))
        out = self.model(input_ids, position_ids=position_ids, **options)
        return CausalLMOutputWithPast(
            logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values,
            hidden_states=out.hidden_states if recorded else None,
        )  # fmt: skip


AutoConfig.register(StepTextConfig.model_type, StepTextConfig)
AutoModelForCausalLM.register(StepTextConfig, StepTextForCausalLM)
