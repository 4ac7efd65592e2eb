"""Turns the errors of Hydra and OmegaConf into one sentence each."""

from __future__ import annotations

import re

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.config import Config, default_config
from specgraph.config.errors import did_you_mean, explain, keys, unknown_key, wrong_value


def sentence(error: Exception, schema: type) -> str:
    """One sentence about what is wrong with the overrides of a command; ``schema`` is its configuration's dataclass."""
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, MissingConfigException):
        return _unknown_choice(error)
    if isinstance(error, OmegaConfBaseException):
        return explain(error, every_key(schema), schema, {})
    return _refused_override(error, schema)


def _unreadable(error: OverrideParseException) -> str:
    reason = str(error.message).strip().splitlines()[0].rstrip(".")
    return f"Cannot read {error.override!r} ({reason}); write key=value, and key='\"value\"' around , ( ) {{ }} or =."


def _unknown_choice(error: MissingConfigException) -> str:
    group, _, name = str(error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or [])
    if not group or not options:
        return f"{str(error).splitlines()[0].rstrip('.')}."
    also = ", or the path of a checkpoint" if group == "draft" else ""
    return f"There is no {group}={name}{did_you_mean(name, options)}; {group} is one of {', '.join(options)}{also}."


def _refused_override(error: Exception, schema: type) -> str:
    text = str(error).strip().splitlines()[0]
    key = _match(r"Could not (?:override|append|delete from config\.?) '?([^' ]+)'", text)
    override = _match(r"Error merging override [+~]*(.*)$", text)
    cause = error.__cause__
    if override is not None:
        key, _, value = override.partition("=")
        full_key = str(getattr(cause, "full_key", None) or key)
        if full_key in keys(every_key(schema)):
            return wrong_value(full_key, value, schema)
        return unknown_key(full_key, keys(every_key(schema)))
    if key is None or key in keys(every_key(schema)):
        return f"{text.rstrip('.')}."
    return unknown_key(key, keys(every_key(schema)))


def _match(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None


def every_key(schema: type) -> DictConfig:
    """A configuration that has every key of a command. Its values are not used."""
    structured = OmegaConf.structured(schema)
    if issubclass(schema, Config):
        structured.passes = default_config().passes
    return structured  # type: ignore[no-any-return]


CONFIGURATION_ERRORS = (ConfigCompositionException, MissingConfigException, OverrideParseException,
                        OmegaConfBaseException)  # fmt: skip
