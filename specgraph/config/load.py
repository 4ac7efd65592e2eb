"""Reads and checks the configuration that a user gives."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.config.draft import (
    LOOKUP_PASS,
    LOOKUPS,
    MOST_MATCHED,
    NUMBERS,
    DraftConfig,
    at_least_one,
    read_table,
)
from specgraph.config.drafters import DRAFTERS, drafter_kinds
from specgraph.config.errors import check_keys, did_you_mean, explain, keys, nearest
from specgraph.config.groups import default_groups, presets, read_group
from specgraph.config.paths import did_you_mean_path
from specgraph.config.schema import LOWERINGS, NUMERICS, Config
from specgraph.errors import ConfigError

ConfigLike = DictConfig | Mapping[str, Any] | Config | str | Path | None


def load_config(given: ConfigLike = None) -> Config:
    """The defaults, overridden by what the user gave: a preset name, a YAML path, a mapping, or a ``Config``.

    In a mapping or a file, the name of a file may take the place of a group, as on the command line:
    ``{"verify": "probabilistic"}`` takes ``conf/verify/probabilistic.yaml``. So may keys be joined by dots:
    ``{"draft.num_speculative_tokens": 3}``.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a value of the wrong type or out of range, an unknown
            preset, drafter, rule, lowering or pass.
    """
    overlay = _read(given)
    chosen = {group: overlay.pop(group) for group in default_groups() if isinstance(overlay.get(group), str)}
    base = default_config(**chosen)
    overlay = _nested(overlay)
    _take_own_drafter(overlay, base)
    _obey_given_number(overlay)
    table = _take_table(overlay)
    check_keys(overlay, base, Config)
    try:
        merged = OmegaConf.unsafe_merge(base, overlay)  # which makes no copy of `base`: it is one
        config = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, base, Config, overlay)) from None
    config.passes = cast(dict[str, Any], OmegaConf.to_container(merged.passes, resolve=False))
    if table is not None:
        config.draft.num_speculative_tokens = max(table.values())
        config.draft.num_speculative_tokens_by_load = table
    validate(config)
    return config


def check_no_keys(function: str, given: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not have, most of which are keys of the configuration.

    Raises:
        ConfigError: names the key that was meant, and shows where it goes.
    """
    for name, value in given.items():
        key = nearest(name, keys(default_config()))
        example = f", such as {function}(model, {{{key!r}: {value!r:.30}}})" if key else ""
        raise ConfigError(
            f"{function} takes a model, a configuration and draft=, but no {name}; keys of the configuration go into "
            f"a mapping{example}."
        )


def _nested(overlay: Mapping[Any, Any]) -> dict[Any, Any]:
    """``overlay`` with a mapping for every group of a key that is joined by dots.

    Raises:
        ConfigError: a value is given in both ways.
    """
    dotted = {key: value for key, value in overlay.items() if isinstance(key, str) and "." in key}
    nested = {key: value for key, value in overlay.items() if key not in dotted}
    for key, value in dotted.items():
        node, (*groups, leaf) = nested, key.split(".")
        for group in groups:
            inner = node.get(group, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{key} is given beside {group}={inner!r}; leave one of them out.")
            node[group] = node = dict(inner)
        if leaf in node:
            raise ConfigError(f"{key} is given twice; leave one of them out.")
        node[leaf] = value
    return nested


def _take_own_drafter(overlay: dict[str, Any], base: DictConfig) -> None:
    """Take the keys of ``draft`` from the configuration class of a user's drafter, if ``draft._target_`` names one.

    ``draft.kind`` becomes the full name of the class.
    """
    given = overlay.get("draft")
    if not isinstance(given, Mapping):
        return
    name = given.get("_target_") or given.get("kind")
    if isinstance(name, str) and ("_target_" in given or "." in name):
        base.draft = OmegaConf.structured(own_drafter(name).Config)
        overlay["draft"] = {**{key: value for key, value in given.items() if key != "_target_"}, "kind": name}


def _obey_given_number(overlay: dict[str, Any]) -> None:
    """Let a K that the user gave hold for every step, unless ``draft.adaptive`` is given beside it.

    A whole configuration, such as that of the command line, always has both keys.
    """
    draft = overlay.get("draft")
    if isinstance(draft, Mapping) and {*NUMBERS} & {*draft} and "adaptive" not in draft:
        overlay["draft"] = {**draft, "adaptive": False}


def _take_table(overlay: dict[str, Any]) -> dict[int, int] | None:
    """Take the table of K by load out of ``draft.num_speculative_tokens``, or from the key that is for it alone."""
    draft = overlay.get("draft")
    if not isinstance(draft, Mapping):
        return None
    by_load, count = "num_speculative_tokens_by_load", "num_speculative_tokens"
    key = count if isinstance(draft.get(count), Mapping) else by_load
    if draft.get(key) is None:
        return None
    table = read_table(draft[key])
    overlay["draft"] = {**draft, by_load: None, count: max(table.values())}
    return table


def own_drafter(name: str) -> Any:
    """The class of a user's drafter, by its full name.

    Raises:
        ConfigError: there is no such class, or it has no configuration class.
    """
    module, _, leaf = name.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), leaf)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"draft._target_={name}: {' '.join(str(error).split()).rstrip('.')}; give the full name of a class, "
            "module.Class, whose module can be imported."
        ) from error
    config = getattr(cls, "Config", None)
    if not (isinstance(config, type) and issubclass(config, DraftConfig)):
        raise ConfigError(
            f"draft._target_ names {name}, which is not a specgraph Drafter with a Config derived from DraftConfig."
        )
    return cls


def drafter_options(draft: DraftConfig) -> DraftConfig:
    """``draft`` as an object of the drafter's own configuration class, which has only the keys of that drafter."""
    cls = DRAFTERS.get(draft.kind, type(draft))
    return cls(**{item.name: getattr(draft, item.name) for item in dataclasses.fields(cls)})


def default_config(**chosen: str) -> DictConfig:
    """The structured configuration with the default file of every group, or with the files that are ``chosen``."""
    return copy.deepcopy(_default_config(tuple(sorted(chosen.items()))))


@functools.lru_cache(maxsize=64)
def _default_config(chosen: tuple[tuple[str, str], ...]) -> DictConfig:
    """It is copied for every caller, which takes 3 ms; reading and merging the files takes 46 ms."""
    structured = OmegaConf.structured(Config)
    for group, name in {**default_groups(), **dict(chosen)}.items():
        structured[group] = OmegaConf.merge(structured[group], read_group(group, name))
    return cast(DictConfig, structured)


def _read(given: ConfigLike) -> dict[str, Any]:
    """What the user gave, as a mapping in which interpolations are not resolved."""
    if isinstance(given, str | Path):
        return _read_file(given)
    if isinstance(given, DictConfig):
        return cast(dict[str, Any], OmegaConf.to_container(given, resolve=False))
    if isinstance(given, Config):
        return dataclasses.asdict(given)
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    raise ConfigError(f"A configuration is a mapping, a YAML path or a preset name, not {type(given).__name__}.")


def _read_file(given: str | Path) -> dict[str, Any]:
    path = Path(given)
    if path.suffix not in (".yaml", ".yml"):
        return _read_preset(str(given))
    if not path.is_file():
        near = did_you_mean_path(path)
        raise ConfigError(f"There is no configuration file {str(path)!r}{near}; give a YAML file, or a preset's name.")
    try:
        loaded = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; a configuration is a mapping of keys to values.")
    return loaded or {}


def _read_preset(name: str) -> dict[str, Any]:
    known = presets()
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"Unknown preset {name!r}{hint}; there are {', '.join(sorted(known))}, or give a .yaml path.")
    return {known[name]: name}


def validate(config: Config) -> None:
    """Check values for conditions that types do not express."""
    from specgraph.kernels.sampling.sample import check_rule

    if "." not in config.draft.kind:
        _among("draft.kind", config.draft.kind, drafter_kinds())
    drafter_options(config.draft).check()
    _check_first(config)
    _among("lowering.name", config.lowering.name, LOWERINGS)
    _among("numerics", config.numerics, NUMERICS)
    try:
        check_rule(config.verify.rule)
    except ValueError as error:
        raise ConfigError(f"verify.rule: {error}") from None
    for key, value in (
        ("cache.block_size", config.cache.block_size),
        ("cache.prefill_chunk", config.cache.prefill_chunk),
        ("cache.pool_tokens", config.cache.pool_tokens),
        ("max_batch_size", config.max_batch_size),
        ("max_length", config.max_length),
    ):
        at_least_one(key, value)
    if config.cache.memory_share is not None and not 0 < config.cache.memory_share <= 1:
        raise ConfigError(f"cache.memory_share must be in (0, 1], got {config.cache.memory_share}.")
    if config.cache.snapshots is not None and config.cache.snapshots < 0:
        raise ConfigError(
            f"cache.snapshots must be 0 (recurrent layers share no prefixes) or more, got {config.cache.snapshots}."
        )


def _check_first(config: Config) -> None:
    """Check the lookup in front of the drafter, which need not be known yet: a checkpoint decides about it."""
    draft = config.draft
    if draft.first is None:
        return
    _among("draft.first", draft.first, LOOKUPS)
    if not 1 <= draft.first_match <= MOST_MATCHED:
        raise ConfigError(f"draft.first_match must be from 1 to {MOST_MATCHED}, got {draft.first_match}.")
    if LOOKUP_PASS not in config.pipeline.order:
        raise ConfigError(
            f"draft.first={draft.first} is carried out by the pass {LOOKUP_PASS}, which pipeline.order does not have; "
            "put it behind parallel_draft and before insert_verify."
        )


def _among(key: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} is one of {', '.join(allowed)}, not {value!r}.")
