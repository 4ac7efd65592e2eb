"""Writes DFlash heads in the layout of z-lab."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.checkpoints.writing import without_shared, write_checkpoint
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash_module import DFlash, DFlashConfig
from specgraph.errors import ConfigError

MASK_EMBEDDING = "mask_embedding"


def save_head(head: DraftHead, folder: str | Path, *, target_name: str, shared: Iterable[Tensor] = ()) -> Path:
    """Write ``config.json``, ``model.safetensors`` and, if the head has one, ``mask_embedding.pt`` to ``folder``.

    Args:
        head: the head; its tensors keep their dtypes.
        folder: the folder to write to; it is made if it is missing.
        target_name: the name or folder of the target, which is recorded.
        shared: the target's own tensors; an ``embed_tokens`` or ``lm_head`` that is one of them is left out.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    return write_head(head, folder, head_config(head, head.module.config, target_name), shared)


def write_head(head: DraftHead, folder: str | Path, written: dict[str, Any], shared: Iterable[Tensor]) -> Path:
    """Write the files of a head, with ``written`` as its configuration; see :func:`save_head`."""
    module: DFlash = head.module
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    embedding = tensors.pop(MASK_EMBEDDING, None)
    if module.draft_to_target is not None:
        ids = module.draft_to_target
        tensors["d2t"] = ids - torch.arange(len(ids), device=ids.device)
    saved = write_checkpoint(folder, written, without_shared(tensors, shared))
    if embedding is not None:
        kept = {"embedding": embedding.detach().cpu().clone(), "mask_token_id": head.mask_token_id}
        torch.save(kept, saved / f"{MASK_EMBEDDING}.pt")
    return saved


def head_config(head: DraftHead, config: DFlashConfig, target_name: str) -> dict[str, Any]:
    """The configuration of a head in the layout of z-lab.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    if 0 in head.features:
        raise ConfigError("The layout of z-lab names outputs of layers, and cannot express a head that reads hs[0].")
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
        "base_model_name_or_path": target_name,
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
