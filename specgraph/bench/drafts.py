"""Configurations of the drafts that ``drafts=[...]`` lists by their names or folders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import AutoConfig

from specgraph.checkpoints.causal_lm import DAMAGED, is_missing_folder, why_not_loaded
from specgraph.config import Config
from specgraph.config.errors import did_you_mean
from specgraph.config.groups import group_choices
from specgraph.config.load import default_config
from specgraph.config.paths import did_you_mean_path
from specgraph.drafters.registry import drafter_class, open_checkpoint
from specgraph.errors import ConfigError


def is_drafter(draft: str) -> bool:
    """Whether ``draft`` is the name of a drafter, and not a checkpoint."""
    return draft in group_choices("draft")


def needs_head(draft: str) -> bool:
    """Whether ``draft`` is the name of a drafter that can do nothing without the weights of a head."""
    return (
        is_drafter(draft) and draft != "none" and drafter_class(with_draft(Config(), draft).draft.kind).head is not None
    )


def check_drafts(drafts: Iterable[str]) -> None:
    """Refuse drafts that cannot be read, before anything is measured.

    Raises:
        ConfigError: one is neither the name of a drafter, nor the path of a checkpoint, nor the name of a model.
    """
    for draft in drafts:
        if is_drafter(draft):
            continue
        if Path(draft).expanduser().exists():
            open_checkpoint(draft)
            continue
        if not draft or is_missing_folder(draft):
            raise ConfigError(f"drafts={draft}: there is no such folder{did_you_mean_path(draft)}.")
        try:
            AutoConfig.from_pretrained(draft)
        except DAMAGED as error:
            names = group_choices("draft")
            raise ConfigError(
                f"drafts={draft}: there is no such drafter{did_you_mean(draft, names)} and no such folder, and no "
                f"model can be had by this name ({why_not_loaded(error)}); give {', '.join(names)}, or a folder."
            ) from error


def with_draft(config: Config, name: str) -> Config:
    """The configuration with the keys of ``conf/draft/<name>.yaml``."""
    draft: Any = OmegaConf.to_object(default_config(draft=name).draft)
    return dataclasses.replace(config, draft=draft)


def with_rule(config: Config, rule: str) -> Config:
    """The configuration with another verification rule."""
    return dataclasses.replace(config, verify=dataclasses.replace(config.verify, rule=rule))
