"""What the compiler needs to know of a traced model besides its graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a traced model, target or draft.

    Attributes:
        name: its class, as reports call it.
        vocab_size: width of its logits.
        num_layers: its attention layers, each with a KV cache.
        hidden_size: width of its hidden states.
        dtype: of its weights.
        device: where they are.
        max_positions: longest sequence it is right for, or None if its configuration names none.
        num_embeddings: ids its embedding takes, if that is not ``vocab_size``: a reduced draft vocabulary, for one.
    """

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int | None
    num_embeddings: int | None = None

    @property
    def input_ids(self) -> int:
        """How many ids it can be given."""
        return self.num_embeddings or self.vocab_size
