"""The messages about a wrong configuration: each is one sentence, with the nearest valid key or the allowed values."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from specgraph.errors import ConfigError

OPEN = ("passes", "target.model.options", "draft.model.options")
"""The groups whose keys are not fixed. Those who read them check their keys: the passes, and the training."""
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


def wrong_value(key: str, value: object, schema: type) -> str:
    """The sentence about a value that has the wrong type for a dotted key of a dataclass."""
    allowed = allowed_at(key, schema)
    given = "a group of keys" if isinstance(value, Mapping | DictConfig) else repr(value)
    return f"{key} is {allowed}, not {given}." if allowed else f"{key} cannot be {given}."


def allowed_at(key: str, schema: type) -> str | None:
    """The type of a dotted key of a dataclass, in words; None if the type is not fixed."""
    at: Any = schema
    for name in key.split("."):
        at = _type_of(at, name) if dataclasses.is_dataclass(at) else None
    return None if at is None else _words(at)


def _type_of(schema: Any, name: str) -> Any:
    """The type of a field. For a group it is that of the default, which may have more keys than the declared type."""
    made = next((item.default_factory for item in dataclasses.fields(schema) if item.name == name), None)
    return made if dataclasses.is_dataclass(made) else typing.get_type_hints(schema).get(name)


def _words(hint: Any) -> str | None:
    if dataclasses.is_dataclass(hint):
        return f"a group of keys ({', '.join(f.name for f in dataclasses.fields(hint))})"
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join("null" if arg is type(None) else _words(arg) or str(arg) for arg in inner)
    if origin is list:
        return "a list of texts" if inner == (str,) else "a list"
    return "a group of keys" if origin is dict else _TYPES.get(hint)


def check_keys(overlay: Mapping[Any, Any], base: DictConfig, schema: type) -> None:
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
                    raise ConfigError(wrong_value(key, value, schema))
                if key not in OPEN:
                    visit(value, node[name], f"{key}.")
            if isinstance(value, list) and allowed_at(key, schema) == "a list of texts":
                _check_texts(key, value)

    visit(overlay, base, "")


def _check_texts(key: str, values: list[Any]) -> None:
    for value in values:
        if not isinstance(value, str):
            raise ConfigError(f"{key} is a list of texts; {value!r} in it is not one.")


def explain(error: OmegaConfBaseException, base: DictConfig, schema: type, given: Mapping[str, Any]) -> str:
    """One sentence about the reason why OmegaConf refused ``given``."""
    key = str(getattr(error, "full_key", None) or "")
    if isinstance(error, ConfigKeyError | ConfigAttributeError) and key:
        return unknown_key(key, keys(base))
    if key and allowed_at(key, schema):
        return wrong_value(key, _at(given, key), schema)
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
