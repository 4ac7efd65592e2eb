"""Heads whose row ``t`` takes token ``t + 1`` beside a hidden state of row ``t``: the EAGLE family.

:class:`ShiftedHead` is what their modules have in common, :func:`export_shifted` makes the graphs that
:class:`~specgraph.drafters.chain.ChainDrafter` joins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import DynamicCache
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from specgraph.drafters.chain import BODY, FEATURES, HEAD
from specgraph.frontend.tracing import export_hooked
from specgraph.ir.model_info import ModelInfo

LAYERS: dict[str, tuple[type[nn.Module], type[nn.Module], type[nn.Module]]] = {
    "llama": (modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRotaryEmbedding, modeling_llama.LlamaRMSNorm),
    "qwen3": (modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RotaryEmbedding, modeling_qwen3.Qwen3RMSNorm),
}
"""Decoder layer, rotary embedding and norm by ``model_type``; ``qwen3`` has norms of queries and keys."""


class ShiftedHead(nn.Module):
    """A head that drafts token by token from a hidden state and the token that followed it.

    Attributes:
        embed_tokens, lm_head: embedding and vocabulary projection, often the target's own.
        rotary: the rotary embedding of its layers.
        draft_to_target: int64 ``[Vd]``, the target id of every draft id, or None.
        mask_hidden: ``[A * Ht]``, what a mask token has in the place of the target's features, or None.
        num_features, target_hidden_size: hidden states of the target that it reads, and the width of each.
    """

    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    rotary: nn.Module
    layers: nn.ModuleList
    draft_to_target: Tensor | None
    mask_hidden: nn.Parameter | None
    num_features: int
    target_hidden_size: int

    @property
    def hidden_size(self) -> int:
        """Width of its hidden state."""
        return self.lm_head.in_features

    @abstractmethod
    def combine(self, *features: Tensor) -> Tensor:
        """What the first layer reads of the target: ``[B, T, Ht]`` for each feature to ``[B, T, H]``."""

    @abstractmethod
    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Run rows: int64 ``[B, T]`` twice and ``[B, T, H]`` to ``[B, T, H]``, before the last norm.

        ``options`` go to the attention layers of transformers: a mask, a cache.
        """

    @abstractmethod
    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, Vd]`` and the hidden state ``[B, R, H]`` that is fed on, of rows of :meth:`forward`."""

    def feed_on(self, hidden: Tensor) -> Tensor:
        """What :meth:`predict` feeds on, without the logits."""
        return hidden

    # Training

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, Vd]`` of rows ``[R, H]`` that :meth:`unroll` gave for draft number ``step``."""
        return self.predict(hidden)[0]

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None
    ) -> Iterator[Tensor]:
        """The rows ``[B, S, H]`` behind draft 0, 1, ... of every position of a text, as decoding makes them.

        Step ``i`` has one row per position ``t``, all run at once. It takes token ``x[t+1+i]`` at position ``t + i``.
        At step 0 the hidden state is what the head makes of the target's features at ``t``, later it is the head's own
        output of the step before, with its gradient. Row ``t`` sees the step-0 keys up to ``t`` and the keys of its own
        chain: exactly what it sees when the target has verified everything up to ``x[t+1]``. With a ``mask_token_id``
        the steps after 0 take that token and ``mask_hidden``, so that all steps fit into one call. Rows near the end
        lack their token and take one from the front; nothing that counts sees them.

        Args:
            tokens: int64 ``[B, S]``.
            features: the target's hidden states ``[B, S, Ht]`` that the head reads.
            steps: drafts.
            mask_token_id: None for a chain.
        """
        hidden = self.combine(*features)
        if mask_token_id is None:
            yield from self._chained(tokens, hidden, steps)
        else:
            yield from self._at_once(tokens, hidden, steps, mask_token_id)

    def _chained(self, tokens: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
        """One call per step; the cache holds the keys of the steps before."""
        length, cache, positions = tokens.shape[1], DynamicCache(), _positions(tokens)
        mask = chain_mask(length, steps, tokens.device)
        for step in range(steps):
            hidden = self(tokens.roll(-1 - step, dims=1), positions + step, hidden, past_key_values=cache,
                          attention_mask=mask[..., -length:, : (step + 1) * length])  # fmt: skip
            yield hidden
            hidden = self.feed_on(hidden)

    def _at_once(self, tokens: Tensor, hidden: Tensor, steps: int, mask_token_id: int) -> Iterator[Tensor]:
        """All steps in one call, as in decoding: no step waits for the one before."""
        length = tokens.shape[1]
        assert self.mask_hidden is not None  # a parallel head has one
        masked = self.combine(*self.mask_hidden.view(1, 1, self.num_features, -1).unbind(2))
        masked = masked.expand(len(tokens), (steps - 1) * length, -1)
        unknown = tokens.new_full((len(tokens), (steps - 1) * length), mask_token_id)
        positions = torch.cat([_positions(tokens) + step for step in range(steps)], dim=1)
        rows: Tensor = self(torch.cat([tokens.roll(-1, dims=1), unknown], dim=1), positions,
                            torch.cat([hidden, masked.to(hidden.dtype)], dim=1),
                            attention_mask=chain_mask(length, steps, tokens.device))  # fmt: skip
        yield from rows.chunk(steps, dim=1)

    def match_scale(self, hidden: Tensor) -> None:
        """Adapt a new head to the size of what the target's vocabulary projection reads, ``[B, S, Ht]``."""


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def chain_mask(length: int, steps: int, device: torch.device) -> Tensor:
    """Which keys the rows of all steps see, bool ``[1, 1, steps * length, steps * length]``.

    Of step 0 those up to their own position, of the later steps up to theirs the one at their own position.
    """
    step, row = torch.arange(steps, device=device), torch.arange(length, device=device)
    step, row = step.repeat_interleave(length), row.repeat(steps)
    text = (step == 0) & (row <= row[:, None])
    own = (step > 0) & (step <= step[:, None]) & (row == row[:, None])
    return (text | own)[None, None]


class _Features(nn.Module):
    """The three parts of a head that are exported; names of arguments become those of the graphs' inputs."""

    def __init__(self, head: ShiftedHead) -> None:
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


def export_shifted(head: ShiftedHead) -> dict[str, fx.GraphModule]:
    """Three graphs: features to ``[B, T, H]``, rows to ``[B, T, H]``, and those to logits and what is fed on."""
    weight = head.lm_head.weight
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    rows = {0: batch, 1: length}
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=weight.device)
    positions = torch.arange(5, device=weight.device).expand(3, 5).contiguous()
    hidden = weight.new_zeros(3, 5, head.hidden_size)
    # One tensor each: export takes the same tensor, given twice, for the same input.
    features = tuple(weight.new_zeros(3, 5, head.target_hidden_size) for _ in range(head.num_features))
    parts: dict[str, tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]] = {
        FEATURES: (_Features(head), features, {"features": (rows,) * head.num_features}),
        BODY: (_Body(head), (tokens, positions, hidden), dict.fromkeys(("tokens", "positions", "hidden"), rows)),
        HEAD: (_Predict(head), (hidden,), {"hidden": rows}),
    }
    return {name: export_hooked(part, args, dims, name, "head.") for name, (part, args, dims) in parts.items()}


def body_info(head: ShiftedHead, name: str) -> ModelInfo:
    """Facts about the layers of a head."""
    weight = head.lm_head.weight
    return ModelInfo(name, head.lm_head.out_features, len(head.layers), head.hidden_size, weight.dtype, weight.device,
                     None, head.embed_tokens.num_embeddings)  # fmt: skip
