"""Writes MTP modules in the layout of speculators."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from torch import Tensor

from specgraph.checkpoints.writing import write_checkpoint
from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp_layouts import LAYOUTS, OPTIONS
from specgraph.drafters.mtp_loading import block_settings, published


def save_modules(head: DraftHead, folder: str | Path, *, target_name: str, shared: Iterable[Tensor] = ()) -> Path:
    """Write ``config.json`` and ``model.safetensors`` to ``folder``, without the tensors in ``shared``.

    The layout holds one module. Further ones are numbered on, and ``mtp_options`` says how they are used.
    """
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "num_nextn_predict_layers": len(head.module),
        OPTIONS: vars(head.module.options),
        "transformer_layer_config": block_settings(head.module[0]),
        "base_model_name_or_path": target_name,
    }
    return write_checkpoint(folder, config, published(head.module, LAYOUTS["speculators"], shared))
