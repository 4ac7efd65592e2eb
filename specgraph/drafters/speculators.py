"""The configuration of EAGLE-3 and P-EAGLE heads in the layout of speculators."""

from __future__ import annotations

from typing import Any

from specgraph.drafters.base import DraftHead
from specgraph.drafters.heads import Record
from specgraph.errors import ConfigError

SPECULATORS_VERSION = "0.9.0"
"""The version of the layout that is written."""
ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}


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


def speculators_config(head: DraftHead, record: Record) -> dict[str, Any]:
    """The ``config.json`` of a head.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    config, algorithm = head.module.config, record.algorithm
    _check(head, algorithm)
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
                    "speculative_tokens": record.num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": record.target_name, "architectures": list(record.target_architectures)},
        },
    }
    return written if head.mask_token_id is None else written | {"mask_token_id": head.mask_token_id}


def _layers(config: Any) -> dict[str, Any]:
    """transformers' configuration of the layers, with the rotary base under both of its keys."""
    written: dict[str, Any] = {"model_type": config.layers.model_type, **config.layers.to_diff_dict()}
    theta = (written.get("rope_parameters") or {}).get("rope_theta")
    return written if theta is None else written | {"rope_theta": theta}
