"""Writes EAGLE-3 and P-EAGLE heads in the speculators layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specgraph.checkpoints.writing import without_shared, write_checkpoint
from specgraph.drafters.base import DraftHead
from specgraph.errors import ConfigError

SPECULATORS_VERSION = "0.9.0"
"""The version of the layout that is written."""
ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}


def save_head(
    head: DraftHead,
    folder: str | Path,
    *,
    target_name: str,
    algorithm: str,
    num_speculative_tokens: int,
    shared: Iterable[Tensor] = (),
    target_architectures: Sequence[str] = (),
) -> Path:
    """Write ``config.json`` and ``model.safetensors`` to ``folder``, which is made if it is missing.

    A file is replaced only when the new one is complete, so a process that is killed leaves the old file.

    Args:
        head: the head; its tensors keep their dtypes.
        folder: the folder to write to.
        target_name: the name or folder of the target, which is recorded.
        algorithm: the method of drafting; ``peagle`` needs a mask token and a ``mask_hidden``.
        num_speculative_tokens: the K that the head was trained for.
        shared: the target's own tensors; an ``embed_tokens`` or ``lm_head`` that is one of them is left out.
        target_architectures: the class names of the target, which are recorded.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    _check(head, algorithm)
    config = _config(head, target_name, list(target_architectures), algorithm, num_speculative_tokens)
    return write_checkpoint(folder, config, _tensors(head, list(shared)))


def _check(head: DraftHead, algorithm: str) -> None:
    config = head.module.config
    if not (config.fc and config.input_norm and config.last_norm):
        raise ConfigError(
            "The speculators layout cannot express a head without fc, input_layernorm or norm, as this head is."
        )
    if algorithm not in ARCHITECTURES:
        raise ConfigError(f"algorithm is one of {', '.join(ARCHITECTURES)}, not {algorithm!r}.")
    if algorithm == "peagle" and (head.mask_token_id is None or head.module.mask_hidden is None):
        raise ConfigError("A peagle head has a mask_token_id and a mask_hidden; make the head with parallel=True.")


def _config(
    head: DraftHead, target_name: str, architectures: list[str], algorithm: str, num_speculative_tokens: int
) -> dict[str, Any]:
    config = head.module.config
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURES[algorithm]],
        "speculators_model_type": algorithm,
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(head.features),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "transformer_layer_config": _layers(config),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target_name, "architectures": architectures},
        },
    }
    return written if head.mask_token_id is None else written | {"mask_token_id": head.mask_token_id}


def _layers(config: Any) -> dict[str, Any]:
    """transformers' configuration of the layers, with the rotary base under both of its keys."""
    written: dict[str, Any] = {"model_type": config.layers.model_type, **config.layers.to_diff_dict()}
    theta = (written.get("rope_parameters") or {}).get("rope_theta")
    return written if theta is None else written | {"rope_theta": theta}


def _tensors(head: DraftHead, shared: Sequence[Tensor]) -> dict[str, Tensor]:
    """The tensors of a head, by their names in the file."""
    found = without_shared(dict(head.module.named_parameters(remove_duplicate=False)), shared)
    if head.module.mask_hidden is not None:
        found["mask_hidden"] = head.module.mask_hidden.view(1, 1, -1)
    vocabulary = head.module.draft_to_target
    if vocabulary is not None:
        found["d2t"] = vocabulary - torch.arange(len(vocabulary), device=vocabulary.device)
        found["t2d"] = torch.zeros(head.module.config.layers.vocab_size, dtype=torch.bool).index_fill(
            0, vocabulary.cpu(), True
        )
    return found
