"""The configuration of DFlash heads in the layout of z-lab."""

from __future__ import annotations

from typing import Any

from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash_module import DFlashConfig
from specgraph.drafters.heads import Record
from specgraph.errors import ConfigError


def z_lab_config(head: DraftHead, record: Record) -> dict[str, Any]:
    """The ``config.json`` of a head.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    if 0 in head.features:
        raise ConfigError("The layout of z-lab names outputs of layers, and cannot express a head that reads hs[0].")
    config: DFlashConfig = head.module.config
    layers: Any = config.layers
    own = {"mask_token_id": head.mask_token_id, "target_layer_ids": [k - 1 for k in head.features]}
    return {
        "model_type": layers.model_type,
        **layers.to_diff_dict(),
        "architectures": ["DFlashDraftModel"],
        "rope_theta": layers.rope_parameters["rope_theta"],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "base_model_name_or_path": record.target_name,
        "dflash_config": own,
        **({"sample_from_anchor": True} if config.sample_from_anchor else {}),
        **_masks(config),
    }


def _masks(config: DFlashConfig) -> dict[str, Any]:
    """The keys that say what rows of a block see."""
    windows = {mask.window for mask in config.masks if mask.window is not None}
    causal = {mask.causal for mask in config.masks}
    if len(windows) > 1 or len(causal) > 1 or any(mask.anchored for mask in config.masks):
        raise ConfigError(
            "The layout of z-lab has one window, counted from each row, and layers that are all causal or all not; "
            "this head has others."
        )
    types = ["full_attention" if mask.window is None else "sliding_attention" for mask in config.masks]
    sliding = {"layer_types": types, "sliding_window": windows.pop(), "use_sliding_window": True} if windows else {}
    return {"is_causal": causal.pop(), **sliding}
