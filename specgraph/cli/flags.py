"""Separates flags from overrides, and takes keys that are written as flags for the overrides that they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError

SWITCHES = ("true", "false")
FLAGS = {"help": False, "multirun": False, "resolve": False, "cfg": True, "package": True, "config-dir": True}
"""The flags that are no keys, by Hydra's names, and whether each takes a value."""
SHORT = {"-h": "--help", "-m": "--multirun", "-c": "--cfg", "-p": "--package", "-cd": "--config-dir"}


def read_flags(arguments: Sequence[str], keys: Callable[[], Mapping[str, bool]]) -> tuple[dict[str, str], list[str]]:
    """The flags with their values, and the overrides, with ``--key value`` and ``--key=value`` as ``key=value``.

    Args:
        arguments: those of a command.
        keys: its dotted keys, and whether each is true or false. Such a flag needs no value, and is then true. A dash
            in a key may stand for ``_``.

    Raises:
        ConfigError: a flag is neither a key nor one of ours, or a key or a value is missing.
    """
    rest, flags, overrides = list(arguments), dict[str, str](), list[str]()
    while rest:
        argument = SHORT.get(rest[0], rest[0])
        del rest[0]
        name, equals, value = argument.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if argument.startswith("="):
            raise ConfigError(f"There is no key in front of {argument!r}; write key=value.")
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        known = {key: not FLAGS[name]} if name in FLAGS else keys()
        if key not in known or not argument.startswith("--"):
            near = did_you_mean(key, known) if argument.startswith("--") else ""
            raise ConfigError(f"There is no flag {argument.partition('=')[0]}{near}; --help lists the keys.")
        if not equals and known[key] and not (name not in FLAGS and rest and rest[0] in SWITCHES):
            value = "true"
        elif not equals:
            if not rest:
                raise ConfigError(f"--{name} has no value; write {key}=VALUE.")
            value = rest.pop(0)
        if name in FLAGS:
            flags[name] = value
        else:
            overrides.append(f"{key}={value}")
    return flags, overrides
