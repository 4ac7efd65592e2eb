"""Configurations of the drafts that ``drafts=[...]`` lists by their names or folders."""

from __future__ import annotations

import dataclasses
from typing import Any

from omegaconf import OmegaConf

from specgraph.config import Config, compose
from specgraph.config.groups import group_choices
from specgraph.drafters.registry import drafter_class


def is_drafter(draft: str) -> bool:
    """Whether ``draft`` is the name of a drafter, and not a checkpoint."""
    return draft in group_choices("draft")


def needs_head(draft: str) -> bool:
    """Whether ``draft`` is the name of a drafter that can do nothing without the weights of a head."""
    return (
        is_drafter(draft) and draft != "none" and drafter_class(with_draft(Config(), draft).draft.kind).head is not None
    )


def checkpoint_of(draft: str) -> str | None:
    """The checkpoint that ``draft`` names, if it is not the name of a drafter."""
    return None if is_drafter(draft) else draft


def with_draft(config: Config, name: str) -> Config:
    """The configuration with the keys of ``conf/draft/<name>.yaml``; those of a checkpoint are the defaults."""
    draft: Any = OmegaConf.to_object(compose(Config, {"draft": name} if is_drafter(name) else {}).draft)
    return dataclasses.replace(config, draft=draft)


def with_rule(config: Config, rule: str) -> Config:
    """The configuration with another verification rule."""
    return dataclasses.replace(config, verify=dataclasses.replace(config.verify, rule=rule))
