"""YAML files of keys: those of ``specgraph.conf``, which are the configuration groups and presets, and a user's own."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import Any

import yaml

from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError


@functools.cache
def conf_files() -> dict[str, Any]:
    """The content of every YAML file under ``conf``, by its path without ``.yaml``."""
    (root, *_) = importlib.import_module("specgraph.conf").__path__
    return yaml_files(Path(root))


def yaml_files(root: Path) -> dict[str, Any]:
    """The content of every YAML file below a folder, by its path without ``.yaml``."""
    return {
        path.relative_to(root).with_suffix("").as_posix(): read_yaml(path)
        for path in sorted(root.rglob("*.yaml"))
    }  # fmt: skip


def default_groups() -> dict[str, str]:
    """Every configuration group with the name of its default file, as ``conf/config.yaml`` lists them."""
    listed = conf_files()["config"]["defaults"]
    return {group: name for entry in listed if isinstance(entry, dict) for group, name in entry.items()}


def group_choices(group: str) -> tuple[str, ...]:
    """The names of the files of one configuration group, without ``.yaml``."""
    return tuple(sorted(name.removeprefix(f"{group}/") for name in conf_files() if name.startswith(f"{group}/")))


def presets() -> dict[str, str]:
    """Every preset with the group to which it belongs. Presets are the files of the groups, except ``default``."""
    found = {choice: group for group in default_groups() for choice in group_choices(group)}
    found.pop("default", None)
    return found


def own_files(folder: str | Path | None) -> dict[str, Any]:
    """The content of the YAML files below a user's folder, by their paths without ``.yaml``."""
    if folder is None:
        return {}
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r}{did_you_mean_path(root)}; give one with YAML files.")
    return yaml_files(root)


def read_yaml(path: Path) -> dict[Any, Any]:
    """The keys of a YAML file; none if it is empty.

    Raises:
        ConfigError: the file cannot be read, or it is no mapping.
    """
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); give a YAML file of keys.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; a configuration is a mapping of keys to values.")
    return loaded or {}
