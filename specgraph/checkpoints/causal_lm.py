"""Loads a causal LM of transformers, whole or not at all."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from specgraph.errors import ConfigError

_DAMAGED = (
    OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError, EOFError, SafetensorError,
    pickle.UnpicklingError,
)  # fmt: skip
"""What transformers and the readers of weight files raise for files that are missing, damaged or of another kind."""


def load_causal_lm(name: str | Path, dtype: torch.dtype | str, what: str) -> PreTrainedModel:
    """A causal LM in evaluation mode, on the CPU.

    Args:
        name: the folder or name of a model.
        dtype: that of its weights; ``auto`` is the checkpoint's own.
        what: names it in errors, such as ``model=...``.

    Raises:
        ConfigError: it cannot be loaded, or its files lack a tensor, which transformers would fill at random.
    """
    try:
        with _silent_report():
            loaded, report = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except _DAMAGED as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"{what} cannot be loaded as a causal LM: {reason}.") from error
    _check_complete(loaded, report, what)
    model: PreTrainedModel = loaded.eval()
    return model


@contextlib.contextmanager
def _silent_report() -> Iterator[None]:
    """transformers prints a table of what a checkpoint lacks; here that is one sentence."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


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
