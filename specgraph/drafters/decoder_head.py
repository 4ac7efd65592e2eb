"""The common base of heads that are small decoders: EAGLE, EAGLE-3, DFlash and DSpark.

Their layers are those of Llama or of Qwen3. :class:`DecoderHead` is the base class of their modules, and
:class:`DecoderHeadDrafter` that of their drafters, which loads a checkpoint: it reads the options, makes the module
without values, compares all names and shapes, and reads the tensors.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.checkpoints.head_options import HeadOptions, check_mask_token, module_settings
from specgraph.checkpoints.loading import HeadLoader, check_size
from specgraph.checkpoints.vocabulary import read_vocabulary
from specgraph.drafters.base import DraftHead
from specgraph.drafters.heads import HeadDrafter
from specgraph.drafters.plan import HeadPlan
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

LAYERS: dict[str, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding, modeling_llama.LlamaRMSNorm),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding, modeling_qwen3.Qwen3RMSNorm),
}
"""The classes of decoder layer, rotary embedding and norm, by ``model_type``. ``qwen3`` norms queries and keys."""


@dataclass(frozen=True)
class DecoderHeadConfig:
    """The shape of a head.

    Attributes:
        layers: transformers' configuration of the decoder layers, with a ``model_type`` in :data:`LAYERS`. Its
            ``vocab_size`` is the number of rows of the embedding.
        target_hidden_size: ``Ht``, the width of one hidden state of the target.
        num_features: ``A``, how many hidden states of the target the head reads.
        draft_vocab_size: ``Vd``, the width of the logits.
    """

    layers: PretrainedConfig
    target_hidden_size: int
    num_features: int
    draft_vocab_size: int


class DecoderHead(nn.Module):
    """A head with decoder layers of its own.

    Attributes:
        config: its shape. Without a mask, the attention of its layers is causal.
        embed_tokens, lm_head: the embedding and the vocabulary projection, often the target's own.
        rotary: the rotary embedding of the layers.
        layers: the decoder layers.
        norm: the last norm.
        mask_embedding: a parameter ``[H]`` that takes the place of the embedding of the mask token, or None.
        draft_to_target: a buffer, int64 ``[Vd]``, the target id of every draft id, or None if the two are the same.
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    rotary: nn.Module
    layers: nn.ModuleList
    norm: nn.Module
    mask_embedding: nn.Parameter | None
    draft_to_target: Tensor | None

    def __init__(self, config: Any) -> None:
        """Make the embedding. ``config`` is a :class:`DecoderHeadConfig`."""
        super().__init__()
        layers = copy.deepcopy(config.layers)
        # An unset implementation would run eager attention, which without a mask is not causal.
        layers._attn_implementation = "sdpa"
        self.config = replace(config, layers=layers)
        self.embed_tokens = nn.Embedding(layers.vocab_size, layers.hidden_size)
        self.rotary = LAYERS[layers.model_type][1](layers)
        self.mask_embedding = None
        self.register_buffer("draft_to_target", None)

    @abstractmethod
    def combine(self, *features: Tensor) -> Tensor:
        """The hidden state ``[B, T, H]`` that the layers read, from the target's features ``[B, T, Ht]``."""

    @property
    def info(self) -> ModelInfo:
        """Facts about the layers."""
        weight = self.lm_head.weight
        vocab_size, size = weight.shape
        return ModelInfo(type(self).__name__, vocab_size, len(self.layers), size, weight.dtype, weight.device, None,
                         self.embed_tokens.num_embeddings)  # fmt: skip

    def borrow(self, plan: HeadPlan) -> None:
        """Take the target's embedding and its projection of the draft vocabulary, as frozen parameters."""
        self.embed_tokens.weight = nn.Parameter(plan.embedding.detach(), requires_grad=False)
        self.lm_head.weight = nn.Parameter(plan.projection.detach(), requires_grad=False)
        if plan.vocabulary is not None:
            self.draft_to_target = plan.vocabulary.to(plan.embedding.device)

    @torch.no_grad()
    def match_scale(self, hidden: Tensor) -> None:
        """Start the last norm with the scale, by channel, of ``hidden`` ``[B, S, Ht]``, which the target's projection
        reads.

        If it started with ones, a learning rate of 1e-3 would need thousands of steps to reach that scale.
        """
        self.norm.get_parameter("weight").copy_(hidden.float().flatten(0, 1).square().mean(0).sqrt())


class DecoderHeadDrafter(HeadDrafter):
    """Runs a :class:`DecoderHead`."""

    what: ClassVar[str]
    """The name of such a head in error messages, such as ``an EAGLE head``."""

    @classmethod
    @abstractmethod
    def read_options(cls, checkpoint: Checkpoint, overrides: Any, target_layers: int | None) -> HeadOptions:
        """Collect the options of a checkpoint. ``target_layers`` is the number of layers of the target, or None.

        ``overrides`` is an instance of :attr:`Config`.

        Raises:
            ConfigError: the head needs something that is not supported, or nothing gives the value of an option.
        """

    @classmethod
    def loader(cls, checkpoint: Checkpoint, model: PreTrainedModel, info: ModelInfo) -> HeadLoader:
        """The loader of a checkpoint, which knows its tensors by the names of the module's parameters."""
        return HeadLoader(checkpoint, checkpoint.tensors, model, info, cls.what)

    @classmethod
    @abstractmethod
    def make_module(cls, loader: HeadLoader, settings: Mapping[str, Any]) -> Any:
        """The module of a checkpoint, without values; ``settings`` are what
        :func:`~specgraph.checkpoints.head_options.module_settings` gives.

        Raises:
            ConfigError: the head does not fit the target.
        """

    @classmethod
    def choices(cls, checkpoint: Checkpoint, options: Any, target_layers: int | None) -> tuple[Choice, ...]:
        """All options of the head."""
        return tuple(cls.read_options(checkpoint, options, target_layers).sources)

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
        """Load a head. :meth:`read_options` chooses its options."""
        if checkpoint.kind != cls.kind:
            raise ConfigError(f"{checkpoint.path} is a draft of the kind {checkpoint.kind}, not {cls.what}.")
        check_size(checkpoint, info)
        found, loader = cls.read_options(checkpoint, options, info.num_layers), cls.loader(checkpoint, model, info)
        settings = module_settings(loader, found)
        with torch.device("meta"):
            module = cls.make_module(loader, settings)
        loader.add_biases(module)
        loader.check(module)
        if found.mask_token_id is not None and module.mask_embedding is None:
            check_mask_token(loader, found.mask_token_id, module.embed_tokens.num_embeddings)
        # Files do not hold the frequencies of the rotary embedding, and those made on ``meta`` have no values.
        with torch.device("cpu"):
            module.rotary = type(module.rotary)(module.rotary.config).to(info.device)
        loader.fill(module)
        module.draft_to_target = read_vocabulary(loader, len(module.lm_head.weight))
        return DraftHead(module.eval(), found.features or (), found.mask_token_id, checkpoint.parallel)
