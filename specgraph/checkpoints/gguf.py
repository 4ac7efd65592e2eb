"""Names of GGUF files as those of models: what transformers must be told to load one."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import transformers

from specgraph.errors import ConfigError

SUFFIX = ".gguf"


def is_gguf(name: str | Path) -> bool:
    """Whether a name is that of a GGUF file."""
    return Path(name).suffix == SUFFIX


def source_of(name: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """The folder or name that transformers loads a model, a tokenizer or a configuration from, and its options.

    Raises:
        ConfigError: it is a GGUF file, and the package that reads those is not installed.
    """
    if not is_gguf(name):
        return name, {}
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"{name} is a GGUF file, which the package gguf reads; install it with pip install -e '.[gguf]'."
        )
    path = Path(name).expanduser()
    return str(path.parent), {"gguf_file": path.name}


def dequantised() -> dict[str, Any]:
    """The options by which a GGUF file becomes ordinary weights; older transformers make nothing else of it."""
    config: Any = getattr(transformers, "GgufConfig", None)
    if config is None or "dequantize" not in inspect.signature(config).parameters:
        return {}
    return {"quantization_config": config(dequantize=True)}
