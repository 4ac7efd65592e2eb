"""Writes the configuration and the tensors of a trained head as a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from specgraph.ir.tensors import view_of


def write_checkpoint(folder: str | Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    """Write ``config.json`` and ``model.safetensors`` to ``folder``, which is made if it is missing.

    A file is replaced only when the new one is complete, so a process that is killed leaves the old file. Tensors keep
    their dtypes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors.tmp"
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    save_file(copies, weights, metadata={"format": "pt"})
    os.replace(weights, folder / "model.safetensors")
    text = folder / "config.json.tmp"
    text.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(text, folder / "config.json")
    return folder


def without_shared(tensors: Mapping[str, Tensor], shared: Iterable[Tensor]) -> dict[str, Tensor]:
    """The tensors without those that are in ``shared``, which a loader takes from the target."""
    frozen = set(map(view_of, shared))
    return {name: tensor for name, tensor in tensors.items() if view_of(tensor) not in frozen}
