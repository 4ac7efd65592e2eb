"""The PyTorch module of EAGLE-3 heads. :mod:`specgraph.drafters.eagle3` describes what it computes, and loads it.

Source: Li et al. 2025 (arXiv 2503.01840); the variants are those of speculators and of NVIDIA's Model-Optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specgraph.drafters.decoder_head import LAYERS, DecoderHeadConfig
from specgraph.drafters.shifted import ShiftedHead


@dataclass(frozen=True)
class Eagle3Config(DecoderHeadConfig):
    """The shape of an EAGLE-3 head.

    Attributes:
        norm_before_residual: whether the first layer's residual is the normed hidden state, and not the hidden state
            itself.
        norm_before_fc: whether one norm is applied to the concatenated features before the projection.
        fc_norm: whether a norm is applied to every single feature before the projection.
        norm_output: whether the hidden state that the next draft reads has passed the last norm.
        fc: whether the features are projected. Without it, there is one feature, which has the head's own width.
        input_norm: whether the first layer norms the embedding.
        last_norm: whether there is a norm before the vocabulary projection.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc: bool = True
    input_norm: bool = True
    last_norm: bool = True

    @property
    def feature_size(self) -> int:
        """The width of the concatenated features."""
        return self.num_features * self.target_hidden_size


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        plain, norm = LAYERS[config.layers.model_type][0], LAYERS[config.layers.model_type][2]
        layer: Any = plain(config.layers, 0)
        size, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = layer.input_layernorm if config.input_norm else nn.Identity()
        self.hidden_norm = norm(size, eps=eps)
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, embedding: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """``[B, T, H]`` twice to ``[B, T, H]``; ``options`` go to the attention of transformers."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=joined, **options)[0]
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3(ShiftedHead):
    """An EAGLE-3 head. Its parameters have the names of the speculators layout."""

    def __init__(self, config: Eagle3Config, *, parallel: bool = False) -> None:
        super().__init__(config)
        layers, width = self.config.layers, config.feature_size
        plain, _, norm = LAYERS[layers.model_type]
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.input_norm = norm(width, eps=eps) if config.norm_before_fc else nn.Identity()
        each = config.num_features if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(norm(config.target_hidden_size, eps=eps) for _ in range(each))
        self.fc: nn.Module = nn.Linear(width, size, bias=False) if config.fc else nn.Identity()
        self.layers = nn.ModuleList(
            [FirstLayer(self.config), *(plain(layers, index) for index in range(1, layers.num_hidden_layers))]
        )
        self.norm = norm(size, eps=eps) if config.last_norm else nn.Identity()
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.mask_hidden = nn.Parameter(torch.zeros(width)) if parallel else None

    def combine(self, *features: Tensor) -> Tensor:
        """The hidden state ``[B, T, H]`` that the first layer reads, from the target's features ``[B, T, Ht]``."""
        if self.config.fc_norm:
            features = tuple(norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True))
        return self.fc(self.input_norm(torch.cat(features, dim=-1)))

    def first_layer(self, embedding: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """The layer that reads both side by side."""
        return self.layers[0](embedding, hidden, **options)

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, Vd]`` of rows that :meth:`forward` gave, and the hidden state that the next draft reads."""
        normed = self.norm(hidden)
        return self.lm_head(normed), normed if self.config.norm_output else hidden

    def feed_on(self, hidden: Tensor) -> Tensor:
        """The hidden state that the next draft reads: before or after the last norm, as ``norm_output`` says."""
        return self.norm(hidden) if self.config.norm_output else hidden
