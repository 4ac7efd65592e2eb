"""Takes keys that are written as flags, such as ``--format jsonl``, for the overrides that they mean."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError

SWITCHES = ("true", "false")
OF_HYDRA = {
    "help": False, "hydra-help": False, "version": False, "cfg": True, "resolve": False, "package": True, "run": False,
    "multirun": False, "shell-completion": False, "config-path": True, "config-name": True, "config-dir": True,
    "experimental-rerun": True, "info": False,
}  # fmt: skip
"""The flags of Hydra itself, and whether each takes a value."""
SHORT = ("-h", "-m", "-c", "-r", "-p", "-i", "-sc", "-cp", "-cn", "-cd")
"""Hydra's own short flags."""


def flags_as_keys(arguments: Sequence[str], keys: Collection[str], switches: Collection[str]) -> list[str]:
    """The arguments with ``--key value`` and ``--key=value`` as ``key=value``; a dash in a key may stand for ``_``.

    Args:
        arguments: those of a command. Hydra's own flags stay as they are.
        keys: its dotted keys.
        switches: those keys that are true or false. Such a flag needs no value, and is then true.

    Raises:
        ConfigError: a flag is neither a key nor one of Hydra's, or a key or a value is missing.
    """
    rest, read = list(arguments), list[str]()
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.removeprefix("--").partition("=")
        key = name.replace("-", "_")
        if argument.startswith("="):
            raise ConfigError(f"There is no key in front of {argument!r}; write key=value.")
        if argument.startswith("-") and not argument.startswith("--") and argument not in SHORT:
            raise ConfigError(f"There is no flag {argument}; --help lists the keys.")
        if not argument.startswith("--"):
            read.append(argument)
        elif name in OF_HYDRA:
            read += [argument, *([rest.pop(0)] if OF_HYDRA[name] and not equals and rest else [])]
        elif key not in keys:
            raise ConfigError(f"There is no flag --{name}{did_you_mean(key, keys)}; --help lists the keys.")
        elif equals:
            read.append(f"{key}={value}")
        elif key in switches and (not rest or rest[0] not in SWITCHES):
            read.append(f"{key}=true")
        elif rest:
            read.append(f"{key}={rest.pop(0)}")
        else:
            raise ConfigError(f"--{name} has no value; write {key}=VALUE.")
    return read
