"""Loads a causal LM of transformers, whole or not at all."""

from __future__ import annotations

import contextlib
import pickle
import struct
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from specgraph.checkpoints.files import open_files, read_json
from specgraph.checkpoints.gguf import dequantised, is_gguf, source_of
from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError

DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, EOFError, SafetensorError,
    pickle.UnpicklingError, struct.error, StrictDataclassError,
)  # fmt: skip
"""Exceptions that transformers and the readers of weight files raise for missing, damaged or unknown files."""


def load_by_transformers(
    name: str | Path, dtype: torch.dtype | str, what: str, trust_remote_code: bool = False
) -> PreTrainedModel:  # fmt: skip
    """A causal LM in evaluation mode, on the CPU.

    Args:
        name: the folder or name of a model.
        dtype: that of its weights; ``auto`` is the checkpoint's own.
        what: names it in errors, such as ``model=...``.
        trust_remote_code: whether to run code that comes with the model.

    Raises:
        ConfigError: it cannot be loaded, or its files lack a tensor, which transformers would fill at random.
    """
    return load_whole(name, what, dtype=dtype, trust_remote_code=trust_remote_code).eval()


def load_whole(name: str | Path, what: str, **options: Any) -> Any:
    """The object that ``AutoModelForCausalLM.from_pretrained`` loads; see :func:`load_by_transformers`.

    Raises:
        ConfigError: it cannot be loaded, its files lack a tensor, or its ``generation_config.json`` is damaged, which
            transformers would leave out.
    """
    place, file = source_of(name)
    options |= {**file, **dequantised()} if file else {}
    try:
        with contextlib.ExitStack() as stack:
            # transformers prints a table of what a checkpoint lacks; here that is one sentence.
            stack.callback(logging.set_verbosity, logging.get_verbosity())
            logging.set_verbosity_error()
            loaded, report = AutoModelForCausalLM.from_pretrained(
                place, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
    except DAMAGED as error:
        raise not_loaded(what, name, error) from error
    _check_complete(loaded, report, what)
    if (generation := Path(name) / "generation_config.json").is_file():
        read_json(generation)
    return loaded


def not_loaded(what: str, name: str | Path, error: Exception) -> ConfigError:
    """The error that says why a model cannot be loaded, by its files if these are damaged, else in transformers' words.

    Args:
        what: as for :func:`load_by_transformers`.
        name: the folder or name of the model.
        error: what transformers raised.
    """
    near = "" if Path(name).exists() else did_you_mean_path(name)
    missing = f"there is no such {'file' if is_gguf(name) else 'folder'}"
    reason = f"{missing if is_missing_folder(name) else why_not_loaded(error)}{near}."
    if Path(name).is_dir():
        try:
            open_files(name)
        except ConfigError as damage:
            reason = str(damage)
    return ConfigError(f"{what} cannot be loaded as a causal LM: {reason}")


def is_missing_folder(name: str | Path) -> bool:
    """Whether ``name`` can only be a path, and not that of a folder or of a GGUF file."""
    text = str(name)
    if is_gguf(name):
        return not Path(name).expanduser().is_file()
    return (text.startswith((".", "/", "~")) or text.count("/") > 1) and not Path(name).is_dir()


def why_not_loaded(error: Exception) -> str:
    """The reason that transformers gives why a model or a tokenizer cannot be loaded, without its full stop."""
    text = str(error).strip() or type(error).__name__
    if "trust_remote_code" in text:
        return "it comes with code of its own; read that code, and if you trust it, set trust_remote_code=true"
    first, *others = [line.strip() for line in text.splitlines() if line.strip()]
    return (f"{first} {others[0]}" if first.endswith(":") and others else first).rstrip(".")


def _check_complete(model: PreTrainedModel, report: dict[str, Any], what: str) -> None:
    kind = type(model).__name__
    for name, stored, wanted in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"{what} cannot be loaded as a causal LM: {name} is {list(stored)} in its files, and {list(wanted)} by its "
            "config.json; one of them is of another model."
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"{what} cannot be loaded as a causal LM: its files lack {len(missing)} tensors of a {kind}, such as "
            f"{missing[0]}, which would be random; the checkpoint is incomplete."
        )
