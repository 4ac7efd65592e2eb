"""Facts about a traced model that the compiler needs besides its graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rope:
    """How far a model reaches whose rotary frequencies change with the length of a sequence, and which it was given.

    Attributes:
        kinds: those of transformers' rope types that are the reason (``dynamic``, ``longrope``).
        original: the longest sequence that has the frequencies of short ones.
        most: the longest sequence for which the model can be traced; None if there is no limit.
        length: the length whose frequencies it has for every token; None if it has those of short sequences.
    """

    kinds: tuple[str, ...]
    original: int
    most: int | None
    length: int | None = None

    def describe(self) -> str:
        """Which frequencies count, for the report."""
        which = "short sequences" if self.length is None else f"{self.length} tokens, for sequences of every length"
        return f"rotary frequencies ({', '.join(self.kinds)}) of {which}; those of short ones end at {self.original}"


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
        num_caches: how many KV caches it has; None if every layer has one. Where devices share the heads of a layer,
            each device has one.
        rope: which rotary frequencies it has; None if these are the same for every length.
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
    rope: Rope | None = None

    @property
    def attention_layers(self) -> int:
        """The number of its KV caches: one for each layer that has attention, and for each device that shares it."""
        return self.num_layers if self.num_caches is None else self.num_caches

    @property
    def input_ids(self) -> int:
        """The number of ids that the model takes as input."""
        return self.num_embeddings or self.vocab_size
