"""How the tensors of a head of decoder layers are used, and the shape of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specgraph.checkpoints.checkpoint import EMBEDDING, PROJECTION, Choice
from specgraph.checkpoints.layers import LayerShape, layer_config, read_size
from specgraph.checkpoints.loading import HeadLoader
from specgraph.errors import ConfigError


@dataclass(frozen=True)
class HeadOptions:
    """The options of a checkpoint.

    Attributes:
        layers: the decoder layers.
        features: the indices k of the hidden states hs[k] that the head reads; None if they depend on the target and
            the target is not known.
        mask_token_id: the mask token; None if the head has none.
        settings: the fields of the module's configuration that the checkpoint decides, by their names there.
        sources: every option with its value and the place from which the value was taken.
    """

    layers: LayerShape
    features: tuple[int, ...] | None
    mask_token_id: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    sources: Sequence[Choice] = ()


def module_settings(loader: HeadLoader, options: HeadOptions) -> dict[str, Any]:
    """The fields of the configuration of a head's module: those that the checkpoint decides, and the sizes.

    Raises:
        ConfigError: nothing says which hidden states the head reads, or a size makes no sense.
    """
    checkpoint, info, stored = loader.checkpoint, loader.info, loader.stored
    if options.features is None:
        raise ConfigError(f"{checkpoint.path} does not say which hidden states it reads; set draft.feature_layers.")
    head, embedding = stored.get(PROJECTION), stored.get(EMBEDDING)
    # An embedding may be longer than the target's, to have a row for a mask token. A shorter one fails the check of
    # shapes.
    rows = len(loader.own[EMBEDDING]) if embedding is None else max(*embedding.shape[:1], info.vocab_size)
    counted = head.shape[0] if head is not None and head.shape else info.vocab_size
    named = checkpoint.config.get("draft_vocab_size") is not None
    return {
        "layers": layer_config(checkpoint, options.layers, rows),
        "target_hidden_size": info.hidden_size,
        "num_features": len(options.features),
        "draft_vocab_size": read_size(checkpoint, "draft_vocab_size") if named else counted,
        **options.settings,
    }


def check_mask_token(loader: HeadLoader, token: int, rows: int) -> None:
    """Refuse a mask token that is none of the ``rows`` rows of the embedding."""
    if not 0 <= token < rows:
        raise ConfigError(
            f"The mask token of {loader.checkpoint.path} is {token}, outside its vocabulary of {rows}; set "
            f"draft.mask_token_id to an id from 0 to {rows - 1}."
        )
