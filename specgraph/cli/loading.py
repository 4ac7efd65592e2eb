"""Loads what the keys ``model``, ``device`` and ``dtype`` name, and refuses what they cannot name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from specgraph.checkpoints.causal_lm import DAMAGED, is_missing_folder, not_loaded, why_not_loaded
from specgraph.checkpoints.gguf import is_gguf, source_of
from specgraph.compiler.compile import FALLBACK_MAX_LENGTH
from specgraph.config import Config, group_choices
from specgraph.config.errors import did_you_mean
from specgraph.config.paths import did_you_mean_path
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.runtime.requests.request import Limits
from specgraph.schemes.load import load_causal_lm

DTYPES = ("float32", "bfloat16", "float16", "float64")


def device_and_dtype(device: str, dtype: str) -> tuple[str, str]:
    """The device and the dtype of the model, with ``auto`` resolved.

    Raises:
        ConfigError: there is no such device or dtype.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or "unknown").splitlines()[0].rstrip(".")
        use = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        raise ConfigError(f"device={device} cannot be used: {reason}; use {use}.") from None
    if dtype not in ("auto", *DTYPES):
        meant = {"fp": "float", "bf": "bfloat"}.get(dtype[:2].lower(), dtype[:2]) + dtype[2:]
        raise ConfigError(f"There is no dtype={dtype}{did_you_mean(meant, DTYPES)}; it is auto, {', '.join(DTYPES)}.")
    return device, "float32" if dtype == "auto" and device == "cpu" else dtype


def shared_place(config: Config, place: tuple[str, str]) -> tuple[str, str]:
    """Where a model is loaded that several GPUs share, whose names are then written into ``config``: on the CPU, from
    where each gets its part alone. Any other model is loaded where it runs, at ``place``.
    """
    first = torch.device(place[0])
    if config.parallel.tensor == 1 or first.type != "cuda":
        return place
    if config.parallel.devices is None:
        begin = first.index or 0
        config.parallel.devices = [f"cuda:{begin + rank}" for rank in range(config.parallel.tensor)]
    return "cpu", place[1]


def check_folder(name: str, key: str = "model") -> None:
    """Refuse a path that does not exist, before transformers looks for it on the network.

    Raises:
        ConfigError: ``name`` is empty, or can only be a path, and there is no such file or folder.
    """
    if not name:
        raise ConfigError(f"{key} is empty; give the folder or name of a causal LM.")
    if is_missing_folder(name):
        raise ConfigError(
            f"{key}={name}: there is no such {'file' if is_gguf(name) else 'folder'}{did_you_mean_path(name)}."
        )


def check_drafts(drafts: Iterable[str]) -> None:
    """Refuse drafts that cannot be read, before anything is measured.

    Raises:
        ConfigError: one is neither the name of a drafter, nor the path of a checkpoint, nor the name of a model.
    """
    names = group_choices("draft")
    for draft in drafts:
        if draft in names:
            continue
        if Path(draft).expanduser().exists() and not is_gguf(draft):
            open_checkpoint(draft)
            continue
        check_folder(draft, "drafts")
        try:
            place, file = source_of(draft)
            AutoConfig.from_pretrained(place, **file)
        except DAMAGED as error:
            raise ConfigError(
                f"drafts={draft}: there is no such drafter{did_you_mean(draft, names)} and no such folder, and no "
                f"model can be had by this name ({why_not_loaded(error)}); give {', '.join(names)}, or a folder."
            ) from error


@functools.lru_cache(maxsize=1)
def load_model(
    name: str, device: str, dtype: str, trust_remote_code: bool = False, key: str = "model"
) -> PreTrainedModel:  # fmt: skip
    """A causal LM in evaluation mode. The last one is kept for the next job of a sweep.

    ``key`` is the configuration key that named the model, for the error.

    Raises:
        ConfigError: the model cannot be loaded.
    """
    model: Any = load_causal_lm(name, dtype, f"{key}={name}", trust_remote_code)
    if is_gguf(name):
        kind = str(model.dtype).removeprefix("torch.")
        print(f"{key}={name}: the weights of the GGUF file are dequantised to {kind}", file=sys.stderr)
    return cast(PreTrainedModel, model.to(device))


def limits_of(name: str, config: Config, trust_remote_code: bool = False) -> Limits:
    """How many token ids a model has, and how long a sequence can be at most, by the configurations.

    That is no less than what the decoder will allow, which is known when the model has been traced.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    try:
        place, file = source_of(name)
        model: Any = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **file)
        text = model.get_text_config()
        longest = config.max_length or getattr(text, "max_position_embeddings", None) or FALLBACK_MAX_LENGTH
        return Limits(int(text.vocab_size), int(longest))
    except DAMAGED as error:
        raise not_loaded(f"model={name}", name, error) from error


def load_tokenizer(name: str, trust_remote_code: bool = False) -> Any:
    """The tokenizer in the folder of a model.

    Raises:
        ConfigError: there is no tokenizer.
    """
    try:
        place, file = source_of(name)
        return AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code, **file)
    except Exception as error:  # a tokenizer's file is read by libraries that raise errors of their own
        folder = Path(name)
        empty = folder.is_dir() and not any(folder.glob("*token*"))
        why = "there are no files of one beside it" if empty else why_not_loaded(error)
        raise ConfigError(f"model={name} has no tokenizer that can be loaded: {why}.") from error
