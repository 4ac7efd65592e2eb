"""Says what a checkpoint is, how it would be used, and whether it fits a target. No weights of either are loaded."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, open_checkpoint
from specgraph.checkpoints.eagle3 import load_head
from specgraph.checkpoints.files import StoredTensor
from specgraph.checkpoints.options import Overrides, read_options
from specgraph.checkpoints.tokenizers import check_same_tokenizer
from specgraph.errors import ConfigError, SpecgraphError
from specgraph.frontend.tracing import check_is_causal_lm
from specgraph.ir.model_info import ModelInfo
from specgraph.tables import text_table


@dataclass(frozen=True)
class Inspection:
    """What was found.

    Attributes:
        facts: what the checkpoint is, by name.
        options: rows of an option, its value and where it is from.
        tensors: rows of a name, a shape, a dtype, how often and how many bytes.
        fits: whether it fits the target; None if none was given.
        reason: why it cannot be used, if it cannot.
    """

    facts: dict[str, str]
    options: list[tuple[str, ...]]
    tensors: list[tuple[str, ...]]
    fits: bool | None
    reason: str | None

    def __str__(self) -> str:
        parts: list[list[tuple[str, ...]]] = [list(self.facts.items())]
        if self.options:
            parts.append([("option", "value", "from"), *self.options])
        parts.append([("tensor", "shape", "dtype", "count", "size"), *self.tensors])
        text = "\n\n".join(map(text_table, parts))
        return text if self.reason is None else f"{text}\n\n{self.reason}"


def inspect_checkpoint(path: str | Path, overrides: Overrides, target: str | None = None) -> Inspection:
    """Look at a checkpoint, and at whether it fits the target of that name or folder.

    Raises:
        ConfigError: the checkpoint cannot be opened or is of an unsupported kind, or the target is not a causal LM.
    """
    checkpoint = open_checkpoint(path)
    model = None if target is None else _without_weights(target, "target")
    info = None if model is None else _info(model)
    options: list[tuple[str, ...]] = []
    reason = None
    try:
        if checkpoint.kind == "eagle3":
            chosen = read_options(checkpoint, overrides, None if info is None else info.num_layers).sources
            options = [(choice.name, _shown(choice.value), choice.source) for choice in chosen]
        if model is not None and info is not None:
            _check_fit(checkpoint, overrides, model, info)
    except SpecgraphError as error:
        reason = str(error)
    fits = None if model is None else reason is None
    facts = _facts(checkpoint)
    if fits is not None:
        facts["fits the target"] = "yes" if fits else "no"
    return Inspection(facts, options, _tensors(checkpoint.tensors), fits, reason)


def _facts(checkpoint: Checkpoint) -> dict[str, str]:
    total = sum(tensor.bytes for tensor in checkpoint.tensors.values())
    facts = {
        "checkpoint": str(checkpoint.path),
        "kind": checkpoint.kind,
        "layout": checkpoint.layout,
        "algorithm": checkpoint.algorithm,
        "drafts in parallel": _shown(checkpoint.parallel),
        "size": f"{len(checkpoint.tensors)} tensors, {_size(total)}",
    }
    return facts if checkpoint.mask_token_id is None else facts | {"mask token": str(checkpoint.mask_token_id)}


def _tensors(tensors: dict[str, StoredTensor]) -> list[tuple[str, ...]]:
    """One row for all tensors that only differ by an index in their name."""
    keys = {name: (re.sub(r"\.\d+\.", ".*.", name), t.shape, t.dtype) for name, t in tensors.items()}
    counts = Counter(keys.values())
    rows = {}
    for name, tensor in sorted(tensors.items()):
        key, count = keys[name], counts[keys[name]]
        shown = name if count == 1 else key[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows[key] = (shown, str(list(tensor.shape)), dtype, str(count), _size(count * tensor.bytes))
    return list(rows.values())


def _check_fit(checkpoint: Checkpoint, overrides: Overrides, model: PreTrainedModel, info: ModelInfo) -> None:
    if checkpoint.kind == "eagle3":
        load_head(checkpoint, overrides, model, info)
        return
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    draft = _without_weights(str(folder), "draft")
    check_is_causal_lm(draft)
    check_same_tokenizer(model, draft)


def _without_weights(name: str, role: str) -> PreTrainedModel:
    """A model as its configuration describes it, with tensors that have shapes only."""
    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ConfigError(f"{role}={name} has no configuration of a causal LM: {reason}.") from None
    check_is_causal_lm(model)
    return model


def _info(model: PreTrainedModel) -> ModelInfo:
    config: Any = model.config.get_text_config()
    head: Any = model.get_output_embeddings()
    return ModelInfo(
        type(model).__name__,
        head.weight.shape[0],
        config.num_hidden_layers,
        config.hidden_size,
        head.weight.dtype,
        head.weight.device,
        None,
    )


def _shown(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
