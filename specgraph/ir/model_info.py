"""What the compiler needs to know about a traced model besides its graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelInfo:
    """Facts about a traced model, target or draft.

    Attributes:
        name: the name of its class, which reports use.
        vocab_size: the width of its logits.
        num_layers: the number of its layers.
        hidden_size: the width of its hidden states.
        dtype: the dtype of its weights.
        device: the device of its weights.
        max_positions: the length of the longest sequence for which it is correct; None if its configuration names none.
        num_embeddings: the number of ids that its embedding takes; None if that is ``vocab_size``. A head with a
            reduced draft vocabulary, for example, embeds more ids than it drafts.
        num_caches: how many of its layers have a KV cache; None if all have.
    """

    name: str
    vocab_size: int
    num_layers: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int | None
    num_embeddings: int | None = None
    num_caches: int | None = None

    @property
    def attention_layers(self) -> int:
        """The number of its layers that have a KV cache."""
        return self.num_layers if self.num_caches is None else self.num_caches

    @property
    def input_ids(self) -> int:
        """The number of ids that the model takes as input."""
        return self.num_embeddings or self.vocab_size
