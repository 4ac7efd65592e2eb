"""Plans for untrained heads, from the sizes of the target and the settings of a training run or of ``bench``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

OPTIONS = ("family", "causal", "markov_rank", "markov_kind", "confidence", "norm_before_residual")
"""The fields of a plan that are options of one kind of head."""
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
"""The sizes of decoder layers, beside that of the hidden state, which is the target's."""


@dataclass(frozen=True, eq=False)
class HeadPlan:
    """The sizes and options of an untrained head.

    Attributes:
        model: the target.
        layers: transformers' configuration of the head's decoder layers. Its ``vocab_size`` is the number of rows of
            the embedding.
        features: the indices of the target's hidden states that the head reads.
        vocabulary: int64 ``[Vd]``, the target ids that the head can draft, ascending; None for all.
        mask_token_id: the mask token of a head that drafts in parallel.
        mask_embedding: whether a block head learns an embedding for it.
        steps: the number of drafts that the head is trained for.
        family: an option of MTP, see :class:`~specgraph.drafters.mtp_module.MtpOptions`.
        causal: an option of block heads, see :class:`~specgraph.drafters.dflash_module.BlockMask`.
        markov_rank, markov_kind, confidence: options of DSpark, see
            :class:`~specgraph.drafters.dspark_module.DSparkConfig`. The rank is also that of the selector of DFlash2.
        norm_before_residual: an option of EAGLE-3, see :class:`~specgraph.drafters.eagle3_module.Eagle3Config`.
    """

    model: PreTrainedModel
    layers: PretrainedConfig
    features: tuple[int, ...]
    vocabulary: Tensor | None = None
    mask_token_id: int | None = None
    mask_embedding: bool = True
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
        return module.weight

    @property
    def projection(self) -> Tensor:
        """The rows ``[Vd, Ht]`` of the target's vocabulary projection that the head drafts."""
        module: Any = self.model.get_output_embeddings()
        weight: Tensor = module.weight
        return weight if self.vocabulary is None else weight[self.vocabulary.to(weight.device)]


def plain_layer(
    text: Any, num_embeddings: int, kind: str = "llama", count: int = 1, **sizes: int | None
) -> PretrainedConfig:
    """The configuration of ``count`` decoder layers with the sizes of the target's configuration ``text``.

    Args:
        text: the configuration.
        num_embeddings: the rows of the embedding.
        kind: the ``model_type`` of the layers.
        count: the number of layers.
        sizes: take the place of the target's, by their keys; None takes the target's.
    """
    own: dict[str, Any] = {key: sizes.get(key) or getattr(text, key, None) for key in SIZES}
    heads = own["num_attention_heads"]
    rope = getattr(text, "rope_parameters", None) or {}
    return AutoConfig.for_model(
        kind,
        vocab_size=num_embeddings,
        bos_token_id=None,
        eos_token_id=None,
        hidden_size=text.hidden_size,
        intermediate_size=own["intermediate_size"] or 4 * text.hidden_size,
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=own["num_key_value_heads"] or heads,
        head_dim=own["head_dim"] or text.hidden_size // heads,
        max_position_embeddings=getattr(text, "max_position_embeddings", 2048),
        rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
    )
