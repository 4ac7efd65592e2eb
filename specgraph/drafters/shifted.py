"""The EAGLE family: heads whose row ``t`` takes token ``t + 1`` together with a hidden state of row ``t``.

:class:`ShiftedHead` is the base class of their modules, and :class:`ShiftedDrafter` that of their drafters. A head of
this family adds its module, its configuration, and how its checkpoints are recognised, loaded and saved.
:func:`export_shifted` makes the graphs that :class:`~specgraph.drafters.chain.ChainDrafter` joins.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, fx, nn
from transformers import DynamicCache

from specgraph.drafters.base import DraftHead, Target
from specgraph.drafters.chain import BODY, FEATURES, HEAD, ChainDrafter
from specgraph.drafters.decoder_head import DecoderHead, DecoderHeadDrafter
from specgraph.drafters.parts import TARGET_FEATURES, Part, export_parts
from specgraph.ir.drafter import Mask


class ShiftedHead(DecoderHead):
    """A head that drafts token by token from a hidden state and the token that followed it.

    Attributes:
        mask_hidden: a parameter ``[A * Ht]``, which mask tokens read in the place of the target's features; None if the
            head does not draft in parallel.
    """

    mask_hidden: nn.Parameter | None

    @abstractmethod
    def first_layer(self, embedding: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Join the embeddings and the hidden states ``[B, T, H]``, and run the first layer: ``[B, T, H]``."""

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Run the layers: int64 ``[B, T]`` twice and ``[B, T, H]`` to ``[B, T, H]``, without the last norm.

        ``options`` go to the attention layers of transformers, such as a mask or a cache.
        """
        embedding = self.embed_tokens(tokens)
        options["position_embeddings"] = self.rotary(embedding, positions)
        options.setdefault("attention_mask", None)
        hidden = self.first_layer(embedding, hidden, **options)
        for layer in self.layers[1:]:
            hidden = layer(hidden, **options)
        return hidden

    @abstractmethod
    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, Vd]`` of rows that :meth:`forward` gave, and the hidden state that the next draft reads."""

    def masked(self) -> Tensor:
        """The hidden state ``[1, 1, H]`` that the first layer reads for a mask token."""
        assert self.mask_hidden is not None  # a parallel head has one
        return self.combine(*self.mask_hidden.view(1, 1, self.config.num_features, -1).unbind(2))

    def feed_on(self, hidden: Tensor) -> Tensor:
        """The hidden state that the next draft reads, as :meth:`predict` gives it, without the logits."""
        return hidden

    # Training

    def step_logits(self, hidden: Tensor, step: int) -> Tensor:
        """Logits ``[R, Vd]`` of rows ``[R, H]`` that :meth:`unroll` gave for draft number ``step``."""
        return self.predict(hidden)[0]

    def unroll(
        self, tokens: Tensor, features: tuple[Tensor, ...], steps: int, mask_token_id: int | None,
        rows: Sequence[Tensor] | None = None,
    ) -> Iterator[Tensor]:  # fmt: skip
        """For draft 0, 1, ... of every position of a text, the rows ``[B, S, H]`` from which decoding would draw it.

        Step ``i`` computes draft ``i`` for all positions ``t`` at once. Its row ``t`` takes token ``x[t+1+i]`` at
        position ``t + i``. In step 0, the hidden state is :meth:`combine` of the target's features at ``t``. In later
        steps, it is the head's own output of the step before, with its gradient. Row ``t`` sees the keys of step 0 up
        to ``t`` and the keys of its own chain, which is what it sees in decoding when the target has verified the
        tokens up to ``x[t+1]``. With a ``mask_token_id``, the steps after 0 take that token and ``mask_hidden``, so
        that one call computes all steps. Rows near the end of the text have no such token. They take tokens from its
        beginning, and no row that counts sees them.

        Args:
            tokens: int64 ``[B, S]``.
            features: the target's hidden states ``[B, S, Ht]`` that the head reads.
            steps: the number of drafts.
            mask_token_id: the mask token of parallel drafting; None for a chain.
            rows: for every draft, the indices of those of the ``B * S`` rows that are used; None for all. A head may
                give any values at the others. This one computes all, because later rows of a chain see earlier ones.
        """
        hidden = self.combine(*features)
        if mask_token_id is None:
            yield from self._chained(tokens, hidden, steps)
        else:
            yield from self._at_once(tokens, hidden, steps, mask_token_id)

    def _chained(self, tokens: Tensor, hidden: Tensor, steps: int) -> Iterator[Tensor]:
        """Make one call per step. The cache holds the keys of the steps before."""
        length, cache, positions = tokens.shape[1], DynamicCache(), _positions(tokens)
        mask = chain_mask(length, steps, tokens.device)
        for step in range(steps):
            hidden = self(tokens.roll(-1 - step, dims=1), positions + step, hidden, past_key_values=cache,
                          attention_mask=mask[..., -length:, : (step + 1) * length])  # fmt: skip
            yield hidden
            hidden = self.feed_on(hidden)

    def _at_once(self, tokens: Tensor, hidden: Tensor, steps: int, mask_token_id: int) -> Iterator[Tensor]:
        """Compute all steps in one call, as parallel drafting does."""
        length = tokens.shape[1]
        masked = self.masked().expand(len(tokens), (steps - 1) * length, -1)
        unknown = tokens.new_full((len(tokens), (steps - 1) * length), mask_token_id)
        positions = torch.cat([_positions(tokens) + step for step in range(steps)], dim=1)
        rows: Tensor = self(torch.cat([tokens.roll(-1, dims=1), unknown], dim=1), positions,
                            torch.cat([hidden, masked.to(hidden.dtype)], dim=1),
                            attention_mask=chain_mask(length, steps, tokens.device))  # fmt: skip
        yield from rows.chunk(steps, dim=1)


def _positions(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def chain_mask(length: int, steps: int, device: torch.device) -> Tensor:
    """Which keys the rows of all steps see, bool ``[1, 1, steps * length, steps * length]``.

    A row sees the keys of step 0 up to its own position. Of each later step up to its own step, it sees the one key at
    its own position.
    """
    step, row = torch.arange(steps, device=device), torch.arange(length, device=device)
    step, row = step.repeat_interleave(length), row.repeat(steps)
    text = (step == 0) & (row <= row[:, None])
    own = (step > 0) & (step <= step[:, None]) & (row == row[:, None])
    return (text | own)[None, None]


def export_shifted(head: ShiftedHead) -> dict[str, fx.GraphModule]:
    """Export a head as three graphs, which :class:`~specgraph.drafters.chain.ChainDrafter` names.

    The first turns the target's features into ``[B, T, H]``, the second runs the layers, and the third turns their
    output into logits and the hidden state that the next draft reads.
    """
    parts = {
        FEATURES: Part(head.combine, (TARGET_FEATURES,) * head.config.num_features),
        BODY: Part(head.forward, ("tokens", "positions", "hidden")),
        HEAD: Part(head.predict, ("hidden",)),
    }
    widths = {TARGET_FEATURES: head.config.target_hidden_size, "hidden": head.config.layers.hidden_size}
    return export_parts(head, head.lm_head.weight, widths, parts)


class ShiftedDrafter(ChainDrafter, DecoderHeadDrafter):
    """Runs a :class:`ShiftedHead` as a chain, or in parallel if it has a ``mask_hidden``."""

    @classmethod
    def bind(cls, head: DraftHead, options: Any, target: Target) -> Self:
        """The drafter that runs a loaded head."""
        module: ShiftedHead = head.module
        mask = None
        if head.mask_token_id is not None and module.mask_hidden is not None:
            # The mask's hidden state is projected once, here, and not in every step.
            mask = Mask(head.mask_token_id, module.masked().flatten())
        return cls(options.num_speculative_tokens, export_shifted(module), {BODY: module.info}, head.features,
                   module.draft_to_target, mask, head.parallel)  # fmt: skip
