"""The facts and tensors of a target that a head needs while it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from specgraph.ir.model_info import ModelInfo

EMBEDDING, PROJECTION = "embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, eq=False)
class TargetTensors:
    """Facts about a target, and the tensors that heads borrow from it, by the names of the heads' parameters."""

    info: ModelInfo
    own: dict[str, nn.Parameter]

    @staticmethod
    def of(model: PreTrainedModel, info: ModelInfo) -> TargetTensors:
        """The facts and tensors of ``model``, whose weights need not be loaded."""
        embeddings: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        return TargetTensors(info, {EMBEDDING: embeddings.weight, PROJECTION: head.weight})
