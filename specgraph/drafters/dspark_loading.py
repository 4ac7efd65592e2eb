"""The options of DSpark heads, and their configuration in the layout of DeepSpec.

Options that DFlash heads have, too, are read in the same way.

Layouts: that of DeepSpec, whose options are at the top level of the configuration, and that of speculators. Tensors
have the same names.
"""

from __future__ import annotations

from typing import Any

from specgraph.checkpoints.reading import Reader
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash_loading import USUAL
from specgraph.drafters.dflash_saving import z_lab_config
from specgraph.drafters.dspark_module import MARKOV_KINDS, DSparkConfig
from specgraph.drafters.heads import Record
from specgraph.errors import ConfigError

W1, CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
UNUSUAL: dict[str, tuple[Any, ...]] = {**USUAL, "dspark_draft_topk": (None, 0)}
"""Keys of variants, and the values that mean none of that, as in :data:`~specgraph.drafters.dflash_loading.USUAL`."""


def markov_settings(reader: Reader) -> dict[str, Any]:
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


def confidence_settings(reader: Reader, has_markov: bool) -> dict[str, Any]:
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


def deepspec_config(head: DraftHead, record: Record) -> dict[str, Any]:
    """The ``config.json`` of a head in the layout of DeepSpec.

    Raises:
        ConfigError: the layout cannot express the head.
    """
    config: DSparkConfig = head.module.config
    written = z_lab_config(head, record) | {
        "architectures": ["Qwen3DSparkModel"],
        "sample_from_anchor": config.sample_from_anchor,  # which DSpark has by default
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_kind,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    own: dict[str, Any] = written.pop("dflash_config")
    return written | own
