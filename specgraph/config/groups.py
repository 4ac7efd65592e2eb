"""Reads the YAML files under ``specgraph.conf``: the configuration groups, their choices, and presets by name."""

from __future__ import annotations

import copy
import functools
from importlib import resources
from typing import Any, cast

import yaml

from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError


def default_groups() -> dict[str, str]:
    """Every configuration group with the name of its default file, as ``conf/config.yaml`` lists them."""
    listed = _content("config.yaml")["defaults"]
    return {group: name for entry in listed if isinstance(entry, dict) for group, name in entry.items()}


@functools.cache
def group_choices(group: str) -> tuple[str, ...]:
    """The names of the files of one configuration group, without ``.yaml``."""
    names = (entry.name for entry in (resources.files("specgraph.conf") / group).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def presets() -> dict[str, str]:
    """Every preset with the group to which it belongs. Presets are the files of the groups, except ``default``."""
    found = {choice: group for group in default_groups() for choice in group_choices(group)}
    found.pop("default", None)
    return found


def read_group(group: str, name: str) -> dict[str, Any]:
    """The content of ``conf/<group>/<name>.yaml``."""
    choices = group_choices(group)
    if name not in choices:
        hint = did_you_mean(name, choices)
        raise ConfigError(f"There is no {group}={name}{hint}; {group} is one of {', '.join(choices)}.")
    return copy.deepcopy(_content(f"{group}/{name}.yaml"))


@functools.cache
def _content(path: str) -> dict[str, Any]:
    """The content of a file below ``conf``. Every compilation asks for some, and reading YAML takes milliseconds."""
    text = resources.files("specgraph.conf").joinpath(path).read_text()
    return cast(dict[str, Any], yaml.safe_load(text) or {})
