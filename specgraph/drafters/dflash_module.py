"""The PyTorch module of DFlash heads. :mod:`specgraph.drafters.dflash` describes what it computes, and loads it.

Heads of other kinds with the same layers (DSpark) derive their module from :class:`DFlash`.

Source: DFlash (z-lab, 2026), ``dflash/model.py``; the variants are those of speculators.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import rotate_half

from specgraph.drafters.decoder_head import LAYERS, DecoderHead, DecoderHeadConfig
from specgraph.drafters.dflash_blocks import Attend, TextBlocks, attend_in_block
from specgraph.drafters.plan import HeadPlan

Angles = tuple[Tensor, Tensor]
"""Cosine and sine ``[B, T, D]`` of the rotary embedding."""
Sublayer: TypeAlias = Callable[[Tensor], Tensor]
"""The attention or the MLP of a layer, without its norm and its residual: rows ``[B, T, H]`` to the same shape."""


@dataclass(frozen=True)
class BlockMask:
    """Which keys the rows of a block see in one layer.

    Attributes:
        window: the sliding window, in positions; None for all.
        causal: whether rows of the block see no later rows of the block.
        anchored: whether the window is counted from the first row of the block, for all rows.
    """

    window: int | None = None
    causal: bool = False
    anchored: bool = False


@dataclass(frozen=True)
class DFlashConfig(DecoderHeadConfig):
    """The shape of a DFlash head.

    Attributes:
        masks: what the rows of a block see, for each layer.
        block_size: the rows of the blocks that the head was trained on, the anchor included.
        sample_from_anchor: whether a row predicts the token behind its own position, so that the anchor's row gives the
            first draft. Else a row predicts the token at its own position, and the anchor's row gives none.
    """

    masks: tuple[BlockMask, ...]
    block_size: int
    sample_from_anchor: bool = False

    @property
    def first_row(self) -> int:
        """The row of a block that gives the first draft."""
        return 0 if self.sample_from_anchor else 1


class DFlashLayer(nn.Module):
    """A decoder layer that keeps keys and values of context rows, and runs the rows of a block."""

    def __init__(self, config: PretrainedConfig, index: int, mask: BlockMask) -> None:
        super().__init__()
        plain: Any = LAYERS[config.model_type][0](config, index)
        self.mask = mask
        self.input_layernorm, self.self_attn = plain.input_layernorm, plain.self_attn
        self.post_attention_layernorm, self.mlp = plain.post_attention_layernorm, plain.mlp

    def keep(self, context: Tensor, angles: Angles) -> None:
        """Keep keys and values of the rows ``context`` ``[B, T, H]``."""
        torch.ops.specgraph.keep_context(*self.keys_and_values(context, angles))

    def forward(self, hidden: Tensor, angles: Angles, attend: Attend = attend_in_block) -> Tensor:
        """The rows ``[B, T, H]`` of a block to the same shape. ``attend`` computes the attention."""
        attention = partial(self._attention, angles=angles, attend=attend)
        hidden = self.around("attention", attention, self.input_layernorm(hidden), hidden)
        return self.around("mlp", self.mlp, self.post_attention_layernorm(hidden), hidden)

    def around(self, name: str, sublayer: Sublayer, x: Tensor, residual: Tensor) -> Tensor:
        """The residual stream behind a sublayer, ``attention`` or ``mlp``, which runs rows ``[B, T, H]`` of blocks.

        Heads of other kinds add to the sublayer.
        """
        return residual + sublayer(x)

    def _attention(self, x: Tensor, angles: Angles, attend: Attend) -> Tensor:
        k, v = self.keys_and_values(x, angles)
        mixed = attend(self._queries(x, angles), k, v, float(self.self_attn.scaling), self.mask)
        return self.self_attn.o_proj(mixed.flatten(2))

    def _queries(self, x: Tensor, angles: Angles) -> Tensor:
        return self._rotated(self.self_attn.q_proj(x), "q_norm", angles)

    def keys_and_values(self, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
        """Keys ``[B, Hkv, T, D]``, rotated, and values of rows ``[B, T, H]``."""
        return self._rotated(self.self_attn.k_proj(x), "k_norm", angles), self._heads(self.self_attn.v_proj(x))

    def _rotated(self, x: Tensor, norm: str, angles: Angles) -> Tensor:
        """Heads ``[B, H, T, D]`` of ``x``, normed if the layer has that norm, and rotated."""
        normed = getattr(self.self_attn, norm, nn.Identity())(torch.unflatten(x, 2, (-1, self.self_attn.head_dim)))
        heads, (cos, sin) = normed.transpose(1, 2), angles
        return heads * cos.unsqueeze(1) + rotate_half(heads) * sin.unsqueeze(1)

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 2, (-1, self.self_attn.head_dim)).transpose(1, 2)


class DFlash(DecoderHead):
    """A DFlash head. Its parameters have the names of the files."""

    def __init__(self, config: DFlashConfig, *, mask_embedding: bool = False) -> None:
        super().__init__(config)
        layers = self.config.layers
        norm, size, eps = LAYERS[layers.model_type][2], layers.hidden_size, layers.rms_norm_eps
        self.fc = nn.Linear(config.num_features * config.target_hidden_size, size, bias=False)
        self.hidden_norm = norm(size, eps=eps)
        self.layers = nn.ModuleList(map(self.make_layer, range(len(config.masks))))
        self.norm = norm(size, eps=eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.mask_embedding = nn.Parameter(torch.zeros(size)) if mask_embedding else None

    def make_layer(self, index: int) -> DFlashLayer:
        """One of the layers."""
        return DFlashLayer(self.config.layers, index, self.config.masks[index])

    def combine(self, *features: Tensor) -> Tensor:
        """The rows ``[B, T, H]`` of the context, from the target's features ``[B, T, Ht]``."""
        return self.hidden_norm(self.fc(torch.cat(features, dim=-1)))

    def keep(self, hidden: Tensor, positions: Tensor) -> None:
        """Keep keys and values of all layers for rows ``[B, T, H]`` of the context at ``positions`` ``[B, T]``."""
        angles, layers = self.rotary(hidden, positions), cast(list[DFlashLayer], self.layers)
        for layer in layers:
            layer.keep(hidden, angles)

    def forward(self, tokens: Tensor, positions: Tensor, attends: Sequence[Attend] | None = None) -> Tensor:
        """Run the rows of a block: int64 ``[B, T]`` twice to ``[B, T, H]``, without the last norm.

        ``attends`` are the layers' attention, by default that over the context which :meth:`keep` kept.
        """
        hidden = self.embed(tokens)
        angles = self.rotary(hidden, positions)
        for layer, attend in zip(self.layers, attends or (attend_in_block,) * len(self.layers), strict=True):
            hidden = layer(hidden, angles, attend)
        return hidden

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings ``[B, T, H]`` of a block: of the anchor in front, and of mask tokens behind it."""
        if self.mask_embedding is None:
            return self.embed_tokens(tokens)
        anchor = self.embed_tokens(tokens[:, :1])
        masks = self.mask_embedding.expand(tokens.shape[0], tokens.shape[1] - 1, -1)
        return torch.cat([anchor, masks], dim=1)

    def predict(self, hidden: Tensor) -> Tensor:
        """Logits ``[B, R, Vd]`` of rows ``[B, R, H]`` that :meth:`forward` gave."""
        return self.lm_head(self.norm(hidden))

    def draft(self, tokens: Tensor, positions: Tensor, count: int) -> Any:
        """Run the rows of a block as :meth:`forward` does, to the logits ``[B, K, Vd]`` of the first ``count`` drafts.

        Heads of other kinds may return a tuple with what else they compute of these rows.
        """
        return self.predict(self(tokens, positions)[:, self.drafting(count)])

    def drafting(self, count: int) -> slice:
        """The rows of a block that give the first ``count`` drafts."""
        return slice(self.config.first_row, self.config.first_row + count)

    # Training, as :class:`~specgraph.drafters.shifted.ShiftedHead` describes it

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, Vd]`` of rows ``[R, H]`` that :meth:`unroll` gave for draft number ``step``."""
        return self.predict(hidden)

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """For draft 0, 1, ... of every position of a text, the rows ``[B, S, H]`` from which decoding would draw it.

        The drafts behind row ``t`` are those of a block whose anchor is ``x[t+1]``, at position ``t + 1``. It has as
        many rows as decoding runs for ``steps`` drafts, and its context are the features up to ``t``.

        Args:
            tokens: int64 ``[B, S]``.
            features: the target's hidden states ``[B, S, Ht]`` that the head reads.
            steps: the number of drafts.
            mask_token_id: the token of the rows behind the anchor.
            rows: for every draft, the indices of those of the ``B * S`` rows that are used. Blocks that have none of
                them are not run, and their rows are zero. None runs all.
        """
        return itertools.islice(
            self.all_rows(tokens, features, steps, mask_token_id, rows), self.config.first_row, None
        )

    def all_rows(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """The rows that :meth:`unroll` gives and, in front of them, the anchor's if it gives no draft."""
        assert mask_token_id is not None  # every head of this kind has one
        size, context = self.config.first_row + steps, self.combine(*features)
        blocks = TextBlocks.behind(tokens, size, rows)
        angles = self.rotary(context, torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0))
        attends = [
            partial(blocks.attend, *layer.keys_and_values(context, angles))
            for layer in cast(list[DFlashLayer], self.layers)
        ]
        hidden = self(blocks.tokens(tokens, mask_token_id), blocks.positions, attends)
        return (blocks.spread(hidden[:, row], tokens.shape[1]) for row in range(size))

    @torch.no_grad()
    def start(self, plan: HeadPlan) -> None:
        """Borrow the target's embedding and projection, and draw an embedding for the mask token of their size."""
        self.borrow(plan)
        if self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=float(plan.embedding.float().std()))
