"""EAGLE-3: a small decoder that reads hidden states of the target and the token that followed them.

Row ``t`` takes the embedding of token ``t + 1`` and ``h_t``, the target's features at ``t`` behind one projection, and
predicts token ``t + 2``; further drafts take the head's own last hidden state in the place of ``h_t``. With a
``mask_hidden`` it drafts in parallel (P-EAGLE): a row for a token that is not drafted yet takes a mask token and that
hidden state.

Source: Li et al. 2025 (arXiv 2503.01840); parallel drafting: P-EAGLE (Amazon, 2026), the ``peagle`` of speculators.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PretrainedConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from specgraph.drafters.base import Drafter, Mask
from specgraph.frontend.tracing import export_hooked
from specgraph.ir.model_info import ModelInfo

LAYERS: dict[str, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding, modeling_llama.LlamaRMSNorm),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding, modeling_qwen3.Qwen3RMSNorm),
}
"""Decoder layer, rotary embedding and norm by ``model_type``; ``qwen3`` has norms of queries and keys."""


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    Attributes:
        layers: transformers' configuration of its decoder layers, of a ``model_type`` in :data:`LAYERS`;
            ``vocab_size`` is what its embedding takes.
        target_hidden_size: width of one target feature.
        num_features: how many it reads.
        draft_vocab_size: width of its logits.
        norm_before_residual: the first layer's residual is the normed hidden state instead of the hidden state itself.
        norm_before_fc: one norm of the concatenated features in front of the projection.
        fc_norm: a norm of every single feature in front of the projection.
        norm_output: what is fed on in the chain has gone through the last norm.
        fc: project the features; without it there is one feature of the head's own width.
        input_norm: norm the embedding in the first layer.
        last_norm: norm in front of the vocabulary projection.
    """

    layers: PretrainedConfig
    target_hidden_size: int
    num_features: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc: bool = True
    input_norm: bool = True
    last_norm: bool = True

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features."""
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
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class Eagle3(nn.Module):
    """The head. Names of parameters are those of the speculators layout.

    Buffers: ``draft_to_target`` int64 ``[Vd]`` or None; ``mask_hidden`` ``[A * Ht]`` is a parameter, or None.
    """

    def __init__(self, config: Eagle3Config, *, parallel: bool = False) -> None:
        super().__init__()
        # An unset implementation would run eager attention, which without a mask is not causal.
        layers = copy.deepcopy(config.layers)
        layers._attn_implementation = "sdpa"
        config = replace(config, layers=layers)
        width = config.feature_size
        plain, rotary, norm = LAYERS[layers.model_type]
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(layers.vocab_size, size)
        self.input_norm = norm(width, eps=eps) if config.norm_before_fc else nn.Identity()
        each = config.num_features if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(norm(config.target_hidden_size, eps=eps) for _ in range(each))
        self.fc: nn.Module = nn.Linear(width, size, bias=False) if config.fc else nn.Identity()
        self.layers = nn.ModuleList(
            [FirstLayer(config), *(plain(layers, index) for index in range(1, layers.num_hidden_layers))]
        )
        self.norm = norm(size, eps=eps) if config.last_norm else nn.Identity()
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = rotary(layers)
        self.draft_to_target: Tensor | None
        self.mask_hidden = nn.Parameter(torch.zeros(width)) if parallel else None
        self.register_buffer("draft_to_target", None)

    def combine(self, *features: Tensor) -> Tensor:
        """What the first layer reads of the target: ``[B, T, Ht]`` for each feature to ``[B, T, H]``."""
        if self.config.fc_norm:
            features = tuple(norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True))
        combined: Tensor = self.fc(self.input_norm(torch.cat(features, dim=-1)))
        return combined

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Run rows: int64 ``[B, T]`` twice and ``[B, T, H]`` to ``[B, T, H]``, before the last norm.

        ``options`` go to the attention layers of transformers: a mask, a cache.
        """
        embedding = self.embed_tokens(tokens)
        options["position_embeddings"] = self.rotary(embedding, positions)
        options.setdefault("attention_mask", None)
        first, *others = self.layers
        hidden = first(embedding, hidden, **options)
        for layer in others:
            hidden = layer(hidden, **options)
        return hidden

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, Vd]`` and the hidden state ``[B, R, H]`` that is fed on, of rows of :meth:`forward`."""
        normed = self.norm(hidden)
        return self.lm_head(normed), normed if self.config.norm_output else hidden


@dataclass(frozen=True, eq=False)
class DraftHead:
    """A head and how it is used.

    Attributes:
        module: on the target's device and in its dtype; its parameters are not copied.
        features: indices ``k`` of the target hidden states ``hs[k]``, in the order of the projection's columns.
        mask_token_id: with ``module.mask_hidden``, makes parallel drafting possible.
        parallel: it was trained for that, which is then the default.
    """

    module: Eagle3
    features: tuple[int, ...]
    mask_token_id: int | None = None
    parallel: bool = False


class _Features(nn.Module):
    """The three parts of a head that are exported; names of arguments become those of the graphs' inputs."""

    def __init__(self, head: Eagle3) -> None:
        super().__init__()
        self.head = head

    def forward(self, *features: Tensor) -> Tensor:
        return self.head.combine(*features)


class _Body(_Features):
    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        out: Tensor = self.head(tokens, positions, hidden)
        return out


class _Predict(_Features):
    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return self.head.predict(hidden)


@torch.no_grad()
def eagle3(head: DraftHead, num_speculative_tokens: int) -> Drafter:
    """The drafter that runs an EAGLE-3 head, chained or in parallel."""
    module, config, weight = head.module, head.module.config, head.module.lm_head.weight
    info = ModelInfo("Eagle3", config.draft_vocab_size, len(module.layers), config.layers.hidden_size, weight.dtype,
                     weight.device, None, config.layers.vocab_size)  # fmt: skip
    mask = None
    if head.mask_token_id is not None and module.mask_hidden is not None:
        # Projected here, once, and not in every step.
        parts = torch.split(module.mask_hidden.view(1, 1, -1), config.target_hidden_size, dim=-1)
        mask = Mask(head.mask_token_id, module.combine(*parts).flatten())
    return Drafter("peagle" if head.parallel else "eagle3", "autoregressive", num_speculative_tokens, _export(module),
                   info, head.features, module.draft_to_target, mask, head.parallel)  # fmt: skip


def _export(head: Eagle3) -> dict[str, fx.GraphModule]:
    """Three graphs: features to ``[B, T, H]``, rows to ``[B, T, H]``, and those to logits and what is fed on."""
    config, weight = head.config, head.lm_head.weight
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    rows = {0: batch, 1: length}
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=weight.device)
    positions = torch.arange(5, device=weight.device).expand(3, 5).contiguous()
    hidden = weight.new_zeros(3, 5, config.layers.hidden_size)
    # One tensor each: export takes the same tensor, given twice, for the same input.
    features = tuple(weight.new_zeros(3, 5, config.target_hidden_size) for _ in range(config.num_features))
    parts: dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]] = {
        "draft_features": (_Features(head), features, {"features": (rows,) * config.num_features}),
        "draft_body": (
            _Body(head),
            (tokens, positions, hidden),
            dict.fromkeys(("tokens", "positions", "hidden"), rows),
        ),
        "draft_head": (_Predict(head), (hidden,), {"hidden": rows}),
    }
    return {name: export_hooked(part, args, dims, name, "head.") for name, (part, args, dims) in parts.items()}
