"""MTP modules in the checkpoint of a target, which transformers does not load: how many, and which tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""The keys by which configurations give the number of modules."""
_NAMED = re.compile(r"(^|\.)mtp(_layers)?\.")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


def declared_modules(config: Mapping[str, Any]) -> int:
    """The number of modules that a ``config.json`` names; 0 if it names none."""
    values = (place.get(key) for place in _places(config) for key in COUNT_KEYS)
    return max((value for value in values if isinstance(value, int)), default=0)


def is_of_module(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a tensor is one of a module: by its name, or by a number of one of the layers behind the target's."""
    if _NAMED.search(name):
        return True
    layer, places = _LAYER.search(name), _places(config)
    layers = next((place["num_hidden_layers"] for place in reversed(places) if "num_hidden_layers" in place), None)
    if layer is None or not isinstance(layers, int):
        return False
    return layers <= int(layer[2]) < layers + declared_modules(config)


def _places(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The configuration, and that of the text model in it."""
    text = config.get("text_config")
    return (config, text) if isinstance(text, dict) else (config,)
