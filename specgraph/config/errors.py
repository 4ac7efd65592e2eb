"""The messages about a wrong configuration: each is one sentence, with the nearest valid key or the allowed values."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.config.draft import ALLOWED
from specgraph.errors import ConfigError

OPEN = ("passes",)
"""The groups whose keys are not fixed. The passes check theirs."""
_TYPES = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """The text ``" (did you mean 'x'?)"``, or an empty text if no valid name is similar."""
    near = nearest(str(name), list(valid))
    return f" (did you mean {near!r}?)" if near else ""


def nearest(name: str, valid: list[str]) -> str | None:
    """The valid name, dotted or not, that ``name`` most likely stands for."""
    group, _, leaf = name.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in valid if key.rpartition(".")[0] == group}
    leaves = {key.rpartition(".")[2]: key for key in reversed(valid)}
    depth = {key: key for key in valid if key.count(".") == name.count(".")}
    starts = [key for word, key in siblings.items() if word.startswith(leaf)]
    if len(leaf) > 2 and starts:
        return starts[0]
    for word, names in ((leaf, siblings), (name, depth), (leaf, leaves)):
        if close := difflib.get_close_matches(word, names, 1, 0.6):
            return names[close[0]]
    return None


def keys(config: DictConfig) -> list[str]:
    """All dotted keys of a configuration."""
    found: list[str] = []

    def visit(node: Mapping[str, Any], prefix: str) -> None:
        for name, value in node.items():
            found.append(f"{prefix}{name}")
            if isinstance(value, dict):
                visit(value, f"{prefix}{name}.")

    visit(typing.cast(dict[str, Any], OmegaConf.to_container(config, resolve=False)), "")
    return found


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The sentence about a key that does not exist."""
    names = list(valid)
    near = nearest(key, names)
    if near:
        return f"Unknown configuration key {key!r}: did you mean {near!r}?"
    group = key.rpartition(".")[0]
    siblings = [name for name in names if name.rpartition(".")[0] == group]
    siblings = siblings or [name for name in names if "." not in name]
    return f"Unknown configuration key {key!r}: valid keys are {', '.join(siblings)}."


def wrong_value(key: str, value: object, config: DictConfig) -> str:
    """The sentence about a value that has the wrong type for a dotted key of a configuration."""
    allowed = allowed_at(key, config)
    given = "a group of keys" if isinstance(value, Mapping | DictConfig) else repr(value)
    return f"{key} is {allowed}, not {given}." if allowed else f"{key} cannot be {given}."


def allowed_at(key: str, config: DictConfig) -> str | None:
    """What a dotted key of a configuration takes, in words; None if its type is not fixed."""
    if key in ALLOWED:
        return ALLOWED[key]
    node: Any = config
    for name in key.split("."):
        node = node._get_node(name) if isinstance(node, DictConfig) else None
    if node is None:
        return None
    if isinstance(node, DictConfig):
        return "a group of keys" if key in OPEN else f"a group of keys ({', '.join(map(str, node))})"
    if isinstance(node, ListConfig):
        items = {str: "a list of texts", int: "a list of integers"}
        words: str | None = items.get(node._metadata.element_type, "a list")
    else:
        words = _TYPES.get(node._metadata.ref_type)
    return f"{words} or null" if words and node._metadata.optional else words


def check_keys(overlay: Mapping[Any, Any], base: DictConfig) -> None:
    """Refuse keys of ``overlay`` that ``base`` does not have, and plain values for keys that are groups.

    Raises:
        ConfigError: names the key, and the nearest valid one or what is allowed there.
    """

    def visit(given: Mapping[Any, Any], node: DictConfig, prefix: str) -> None:
        for name, value in given.items():
            key = f"{prefix}{name}"
            if name not in list(node):  # for a mandatory value that is not set yet, `in` alone is false
                raise ConfigError(unknown_key(key, keys(base)))
            if isinstance(node._get_node(name), DictConfig):
                if not isinstance(value, Mapping | DictConfig):
                    raise ConfigError(wrong_value(key, value, base))
                if key not in OPEN:
                    visit(value, node[name], f"{key}.")
            wrong = [item for item in value if not isinstance(item, str)] if isinstance(value, list) else []
            if wrong and allowed_at(key, base) == "a list of texts":
                raise ConfigError(f"{key} is a list of texts; {wrong[0]!r} in it is not one.")

    visit(overlay, base, "")


def explain(error: OmegaConfBaseException, base: DictConfig, given: Mapping[str, Any]) -> str:
    """One sentence about the reason why OmegaConf refused ``given``."""
    key = str(getattr(error, "full_key", None) or "").partition("[")[0]  # a list stands for its items
    if key and allowed_at(key, base):
        return wrong_value(key, _at(given, key), base)
    return f"{key or 'configuration'}: {first_line(error)}"


def first_line(error: Exception) -> str:
    """The first line of an error's text, as a sentence."""
    return f"{(str(error).strip() or type(error).__name__).splitlines()[0].rstrip('.')}."


def unreadable(error: OverrideParseException) -> str:
    """The sentence about an override that is not of Hydra's grammar."""
    reason = str(error.message).strip().splitlines()[0].rstrip(".")
    return f"Cannot read {error.override!r} ({reason}); write key=value, and key='\"value\"' around , ( ) {{ }} or =."


def unknown_choice(error: MissingConfigException) -> str:
    """The sentence about a file that a group does not have."""
    group, _, name = str(error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or [])
    also = "; a checkpoint goes into draft.model" if group == "draft" else ""
    near = did_you_mean(name, options)
    return f"There is no {group}={name}{near}; {group} is one of {', '.join(options)}{also}."


def _at(given: Mapping[str, Any], key: str) -> Any:
    value: Any = given
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
