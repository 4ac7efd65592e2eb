"""Reads a user's YAML file of keys, ``config=FILE.yaml``, as the overrides that it stands for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from specgraph.cli.config import quoted, unquoted
from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError

KEY = "config"


def own_file(overrides: Sequence[str]) -> list[str]:
    """The overrides with ``config=FILE.yaml`` replaced by those of the file, which come first.

    A key of the file that is also given on the command line is left out. In the file, groups may be nested or joined by
    dots, and the name of a file may take the place of a group, as in Python: ``verify: probabilistic``.

    Raises:
        ConfigError: there is no such file, it is no YAML of keys, or two files are given.
    """
    given = [override for override in overrides if override.startswith(f"{KEY}=")]
    others = [override for override in overrides if override not in given]
    if not given:
        return others
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[-1]}: give one file of keys.")
    named = {_key(override) for override in others}
    from_file = list(_flat(_read(Path(unquoted(given[0].partition("=")[2])).expanduser()), ""))
    return [*(item for item in from_file if _key(item) not in named), *others]


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _read(path: Path) -> Mapping[Any, Any]:
    where = f"{KEY}={path}"
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        near = did_you_mean_path(path)
        raise ConfigError(f"{where} cannot be read ({error.strerror}){near}; give a YAML file of keys.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: not UTF-8 at byte {error.start}; save the file as UTF-8.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(loaded, Mapping):
        kind = "nothing" if loaded is None else f"a {type(loaded).__name__}"
        raise ConfigError(
            f"{where} holds {kind}; it should be a mapping of keys to values, such as `temperature: 0.8`."
        )
    return loaded


def _flat(node: Mapping[Any, Any], prefix: str) -> Iterator[str]:
    """An override for each value. A mapping whose keys are no texts, such as K by load, is a value itself."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and all(isinstance(inner, str) for inner in value):
            yield from _flat(value, f"{key}.")
        else:
            yield f"{key}={_written(value)}"


def _written(value: Any) -> str:
    """A value in Hydra's grammar."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_written(key)}: {_written(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_written(inner) for inner in value) + "]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return repr(value) if isinstance(value, int | float) else quoted(str(value))
