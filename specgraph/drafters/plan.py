"""Plans for untrained heads, from the sizes of the target and the settings of a training run or of ``bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """What an untrained head is made from.

    Attributes:
        model: the target.
        layers: transformers' configuration of the head's decoder layers. Its ``vocab_size`` is the number of rows of
            the embedding.
        features: the indices of the target's hidden states that the head reads.
        vocabulary: int64 ``[Vd]``, the target ids that the head can draft, ascending; None for all.
        mask_token_id: the mask token of a head that drafts in parallel.
        steps: the number of drafts that the head is trained for.
        family: an option of MTP, see :class:`~specgraph.drafters.mtp_module.MtpOptions`.
        causal: an option of block heads, see :class:`~specgraph.drafters.dflash_module.BlockMask`.
        markov_rank, markov_kind, confidence: options of DSpark, see
            :class:`~specgraph.drafters.dspark_module.DSparkConfig`.
        norm_before_residual: an option of EAGLE-3, see :class:`~specgraph.drafters.eagle3_module.Eagle3Config`.
    """

    model: PreTrainedModel
    layers: PretrainedConfig
    features: tuple[int, ...]
    vocabulary: Tensor | None = None
    mask_token_id: int | None = None
    steps: int = 1
    family: str = "chained"
    causal: bool = False
    markov_rank: int = 0
    markov_kind: str = "vanilla"
    confidence: bool = False
    norm_before_residual: bool = False

    @property
    def embedding(self) -> Tensor:
        """The target's embedding ``[V, Ht]``."""
        module: Any = self.model.get_input_embeddings()
        weight: Tensor = module.weight
        return weight

    @property
    def projection(self) -> Tensor:
        """The rows ``[Vd, Ht]`` of the target's vocabulary projection that the head drafts."""
        module: Any = self.model.get_output_embeddings()
        weight: Tensor = module.weight
        return weight if self.vocabulary is None else weight[self.vocabulary.to(weight.device)]


def random_plan(model: PreTrainedModel, features: tuple[int, ...], steps: int) -> HeadPlan:
    """A plan for a head of one layer, as wide as the target's layers."""
    text: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    return HeadPlan(model, plain_layer(text, len(embedding.weight)), features, steps=steps)


def plain_layer(text: Any, num_embeddings: int, kind: str = "llama", count: int = 1) -> PretrainedConfig:
    """The configuration of ``count`` decoder layers with the sizes of the target's configuration ``text``.

    ``kind`` is the ``model_type`` of the layers.
    """
    heads = text.num_attention_heads
    config: PretrainedConfig = AutoConfig.for_model(
        kind,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        vocab_size=num_embeddings,
        max_position_embeddings=text.max_position_embeddings,
        rms_norm_eps=1e-5,
    )
    return config
