"""Finds out what a checkpoint is, how it would be used, and whether it fits a target, without loading any weights."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.checkpoints.files import StoredTensor
from specgraph.checkpoints.loading import check_size
from specgraph.config import DraftConfig
from specgraph.config.drafters import drafter_options
from specgraph.drafters.registry import drafter_class, open_checkpoint
from specgraph.errors import SpecgraphError
from specgraph.frontend.shapes_only import info_of, without_weights
from specgraph.schemes.layouts import read_layout
from specgraph.tables import text_table


@dataclass(frozen=True)
class Inspection:
    """The results of :func:`inspect_checkpoint`.

    Attributes:
        facts: what the checkpoint is, by name.
        options: rows of an option's name, its value, and the place from which the value was taken.
        tensors: rows of a name, a shape, a dtype, the number of such tensors, and their bytes.
        reason: why the checkpoint cannot be used; None if it can.
    """

    facts: dict[str, str]
    options: list[tuple[str, ...]]
    tensors: list[tuple[str, ...]]
    reason: str | None

    def __str__(self) -> str:
        parts: list[list[tuple[str, ...]]] = [list(self.facts.items())]
        if self.options:
            parts.append([("option", "value", "from"), *self.options])
        parts.append([("tensor", "shape", "dtype", "count", "size"), *self.tensors])
        text = "\n\n".join(map(text_table, parts))
        return text if self.reason is None else f"{text}\n\n{self.reason}"


def inspect_checkpoint(path: str | Path, draft: DraftConfig, target: str | None = None) -> Inspection:
    """Inspect a checkpoint and, if ``target`` names a model, check whether the checkpoint fits it.

    Raises:
        ConfigError: the checkpoint cannot be opened or is of an unsupported kind, or the target is not a causal LM.
    """
    checkpoint = open_checkpoint(path, draft.kind)
    drafter, given = drafter_class(checkpoint.kind), drafter_options(replace(draft, kind=checkpoint.kind))
    model = None if target is None else without_weights(target, "target")
    info = None if model is None else info_of(model)
    options: list[tuple[str, ...]] = []
    facts = _facts(checkpoint)
    reason: str | None = None
    try:
        if stated := checkpoint.config.get("quantization_config"):
            facts["weights"] = read_layout(stated).form.name
        if info is not None:
            check_size(checkpoint, info)
    except SpecgraphError as error:
        reason = str(error)
    try:
        layers = None if info is None or reason is not None else info.num_layers
        chosen = drafter.choices(checkpoint, given, layers)
        options = [(choice.name, _shown(choice.value), choice.source) for choice in chosen]
        if model is not None and info is not None and reason is None:
            drafter.check_fit(checkpoint, given, model, info)
    except SpecgraphError as error:
        reason = reason or str(error)
    if model is not None:
        facts["fits the target"] = "yes" if reason is None else "no"
    return Inspection(facts, options, _tensors(checkpoint.tensors), reason)


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
    """One row for each group of tensors whose names differ only in their indices."""
    keys = {name: (re.sub(r"(?<![^.])\d+(?=\.)", "*", name), t.shape, t.dtype) for name, t in tensors.items()}
    counts = Counter(keys.values())
    rows = {}
    for name, tensor in sorted(tensors.items()):
        key, count = keys[name], counts[keys[name]]
        shown = name if count == 1 else key[0]
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows[key] = (shown, str(list(tensor.shape)), dtype, str(count), _size(count * tensor.bytes))
    return list(rows.values())


def _shown(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _size(count: int) -> str:
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"
