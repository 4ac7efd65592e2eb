"""The decoder layers of a head, as transformers configures them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.checkpoints.reading import layer_settings
from specgraph.errors import ConfigError

CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}


@dataclass(frozen=True)
class LayerShape:
    """What the tensors, and not the configuration, tell about the decoder layers of a head.

    Attributes:
        layer_type: ``llama``, or ``qwen3`` if queries and keys are normed.
        num_layers: decoder layers, counted.
        rope: transformers' ``rope_parameters``.
    """

    layer_type: str
    num_layers: int
    rope: dict[str, Any]


def layer_config(checkpoint: Checkpoint, options: LayerShape, vocab_size: int) -> PretrainedConfig:
    """Llama's or Qwen3's configuration, without biases: the tensors decide where there are some.

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
    """A number above 0 from the configuration.

    Raises:
        ConfigError: it is something else, or missing.
    """
    settings = layer_settings(checkpoint)
    value = settings.get(key, checkpoint.config.get(key))
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} in the config.json of {checkpoint.path} is {value!r}; it is a number above 0.")
    return value


def _windows(checkpoint: Checkpoint, options: LayerShape) -> dict[str, Any]:
    """Sliding windows, by layer: only Qwen3's layers have them."""
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
