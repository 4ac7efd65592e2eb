"""Finds out what decoder layers a head has, and makes transformers' configuration for them."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from specgraph.checkpoints.checkpoint import EMBEDDING, PROJECTION, Checkpoint
from specgraph.checkpoints.reading import Reader, layer_settings
from specgraph.errors import ConfigError

CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@dataclass(frozen=True)
class LayerShape:
    """The kind and number of a head's decoder layers, which its tensors tell, and their rotary embedding.

    Attributes:
        layer_type: ``llama``, or ``qwen3`` if queries and keys are normed.
        num_layers: the number of decoder layers, counted from the names of tensors.
        rope: the rotary embedding, as transformers' ``rope_parameters``.
    """

    layer_type: str
    num_layers: int
    rope: dict[str, Any]


def read_layers(reader: Reader, names: Collection[str], rope_theta: float | None) -> LayerShape:
    """Count the decoder layers of a head and determine their kind.

    Also notes on ``reader`` whether the head has an embedding and a vocabulary projection of its own.

    Args:
        reader: records where every value was taken from.
        names: the names of the head's tensors, in which decoder layers are ``layers.0``, ``layers.1`` and so on.
        rope_theta: the base of the rotary embedding that a user asks for; None takes the checkpoint's.

    Raises:
        ConfigError: the rotary embedding is of a kind that is not supported.
    """
    for name in (EMBEDDING, PROJECTION):
        reader.note(name.removesuffix(".weight"), "its own" if name in names else "the target's", "tensors")
    indices = [int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))]
    normed = "layers.0.self_attn.q_norm.weight" in names
    return LayerShape(
        layer_type=reader.note("layer_type", "qwen3" if normed else "llama", "tensors"),
        num_layers=reader.note("num_layers", max(indices, default=0) + 1, "tensors"),
        rope=reader.rope(rope_theta),
    )


def layer_config(checkpoint: Checkpoint, options: LayerShape, vocab_size: int) -> PretrainedConfig:
    """Llama's or Qwen3's configuration, without biases. ``HeadLoader.add_biases`` adds those that the files have.

    Raises:
        ConfigError: a key is missing or makes no sense.
    """
    heads, size = read_size(checkpoint, "num_attention_heads"), read_size(checkpoint, "hidden_size")
    settings = layer_settings(checkpoint)
    arguments: dict[str, Any] = {
        key: settings[key]
        for key in ("hidden_act", "max_position_embeddings", "rms_norm_eps")
        if settings.get(key) is not None
    }
    arguments |= _windows(checkpoint, options) | {
        "hidden_size": size,
        "intermediate_size": read_size(checkpoint, "intermediate_size"),
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.get("num_key_value_heads") or heads,
        "head_dim": settings.get("head_dim") or size // heads,
        "rope_parameters": dict(options.rope),
        "vocab_size": vocab_size,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }
    if arguments.get("hidden_act", "silu") not in ACT2FN:
        raise ConfigError(f"hidden_act of {checkpoint.path} is {arguments['hidden_act']!r}, unknown; correct it.")
    try:
        return CONFIGS[options.layer_type](**arguments)
    except (StrictDataclassError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(f"The config.json of {checkpoint.path} describes no decoder layer: {reason}.") from None


def read_size(checkpoint: Checkpoint, key: str) -> int:
    """The integer above 0 that the configuration has under ``key``.

    Raises:
        ConfigError: the value is something else, or missing.
    """
    settings = layer_settings(checkpoint)
    value = settings.get(key, checkpoint.config.get(key))
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} in the config.json of {checkpoint.path} is {value!r}; it must be an integer above 0.")
    return value


def _windows(checkpoint: Checkpoint, options: LayerShape) -> dict[str, Any]:
    """The settings of sliding windows by layer, which only layers of Qwen3's kind support."""
    types = list(layer_settings(checkpoint).get("layer_types") or [])[: options.num_layers]
    if "sliding_attention" not in types:
        return {}
    if options.layer_type != "qwen3":
        raise ConfigError(
            f"{checkpoint.path} has sliding_attention in llama-style layers, which specgraph does not run; it runs "
            "sliding windows in qwen3-style layers."
        )
    window = read_size(checkpoint, "sliding_window")
    return {"layer_types": types, "use_sliding_window": True, "sliding_window": window}
