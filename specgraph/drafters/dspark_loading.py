"""Loads DSpark heads, and writes them in the layout of DeepSpec. What they share with DFlash heads is read as theirs.

Layouts: that of DeepSpec, whose options are at the top level of the configuration, and that of speculators. Tensors
have the same names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.checkpoints.reading import Reader
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash_loading import (
    USUAL,
    HeadOptions,
    common_options,
    head_reader,
    refuse_variants,
    sample_from_anchor,
)
from specgraph.drafters.dflash_module import DFlashConfig
from specgraph.drafters.dflash_saving import head_config, write_head
from specgraph.drafters.dspark_module import MARKOV_KINDS, DSpark, DSparkConfig
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

W1, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
UNUSUAL: dict[str, tuple[Any, ...]] = {**USUAL, "dspark_draft_topk": (None, 0)}
"""Keys of variants, and the values that mean none of that, as in :data:`~specgraph.drafters.dflash_loading.USUAL`."""


@dataclass(frozen=True)
class SparkOptions(HeadOptions):
    """How the tensors of a checkpoint are used; see :class:`~specgraph.drafters.dspark_module.DSparkConfig`."""

    markov_rank: int
    markov_kind: str
    markov_rows: int
    confidence: bool
    confidence_with_markov: bool

    def module(self, config: DFlashConfig, *, mask_embedding: bool) -> DSpark:
        """The module without weights."""
        added = DSparkConfig.__dataclass_fields__.keys() - DFlashConfig.__dataclass_fields__.keys()
        values = vars(config) | {name: getattr(self, name) for name in added}
        return DSpark(DSparkConfig(**values), mask_embedding=mask_embedding)


def read_options(checkpoint: Checkpoint, overrides: Any, target_layers: int | None = None) -> SparkOptions:
    """Collect the options of a checkpoint. ``target_layers`` is the number of layers of the target, or None.

    Args:
        overrides: an instance of :class:`~specgraph.drafters.dspark.DSparkDraftConfig`.

    Raises:
        ConfigError: the head needs something that is not supported, or nothing gives the value of an option.
    """
    reader = head_reader(checkpoint)
    refuse_variants(reader, UNUSUAL, "DSpark")
    added = _markov(reader)
    added |= _confidence(reader, added["markov_rank"] > 0)
    common = common_options(reader, overrides, target_layers, sample_from_anchor(reader, True))
    return SparkOptions(**vars(common), **added)


def _markov(reader: Reader) -> dict[str, Any]:
    """The options of the Markov head. A configuration that says nothing leaves its rank and its kind to the tensors."""
    checkpoint = reader.checkpoint
    config, stored = checkpoint.config, checkpoint.tensors.get(W1)
    rank, source = config.get("markov_rank"), "config.json"
    if rank is None:
        rank, source = 0 if stored is None else stored.shape[-1], "tensors"
    if not isinstance(rank, int) or rank < 0:
        raise ConfigError(f"markov_rank of {checkpoint.path} is {rank!r}; it must be an integer of 0 or more.")
    reader.note("markov_rank", rank, source)
    kind = str(config.get("markov_head_type") or MARKOV_KINDS[0])
    if kind not in MARKOV_KINDS:
        raise ConfigError(
            f"markov_head_type of {checkpoint.path} is {kind!r}; specgraph runs {', '.join(MARKOV_KINDS)}."
        )
    if rank:
        reader.note("markov_head_type", kind, "config.json" if config.get("markov_head_type") else "default")
    return {"markov_rank": rank, "markov_kind": kind, "markov_rows": stored.shape[0] if rank and stored else 0}


def _confidence(reader: Reader, has_markov: bool) -> dict[str, Any]:
    """The options of the confidence head, which by default is there if its tensors are."""
    there = CONFIDENCE in reader.checkpoint.tensors
    enabled = reader.flag("enable_confidence_head", there)
    with_markov = enabled and reader.flag("confidence_head_with_markov", has_markov)
    if with_markov and not has_markov:
        raise ConfigError(
            f"{reader.checkpoint.path} has confidence_head_with_markov, but no Markov head (markov_rank is 0); correct "
            "its config.json."
        )
    return {"confidence": enabled, "confidence_with_markov": with_markov}


def check_tokens(checkpoint: Checkpoint, options: SparkOptions, info: ModelInfo) -> None:
    """Refuse a Markov head that does not embed every token of the target.

    Raises:
        ConfigError: names both sizes.
    """
    if W1 in checkpoint.tensors and options.markov_rank and options.markov_rows < info.vocab_size:
        raise ConfigError(
            f"{checkpoint.path} does not fit: {W1} has {options.markov_rows} rows, but the target {info.name} has a "
            f"vocabulary of {info.vocab_size}."
        )


def save_head(head: DraftHead, folder: str | Path, *, target_name: str, shared: Iterable[Tensor] = ()) -> Path:
    """Write ``config.json`` and ``model.safetensors`` to ``folder``, as DeepSpec does.

    Arguments and errors are those of :func:`specgraph.drafters.dflash_saving.save_head`.
    """
    config: DSparkConfig = head.module.config
    written = head_config(head, config, target_name) | {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": config.sample_from_anchor,  # which DSpark has by default
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    written |= written.pop("dflash_config")
    return write_head(head, folder, written, shared)
