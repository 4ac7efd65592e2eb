"""Reads and checks the configuration that a user gives."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.config.compose import compose
from specgraph.config.draft import LOOKUP_PASS, LOOKUPS, MOST_MATCHED, at_least_one, read_table
from specgraph.config.drafters import drafter_kinds, drafter_options
from specgraph.config.errors import did_you_mean, explain, keys, nearest
from specgraph.config.groups import presets, read_yaml
from specgraph.config.paths import did_you_mean_path
from specgraph.config.schema import LOWERINGS, MOST_DEVICES, NUMERICS, Config
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
    return to_config(compose(Config, read_given(given)))


def to_config(cfg: DictConfig) -> Config:
    """The part of a composed configuration that the compiler takes, checked. It may have further keys.

    Raises:
        ConfigError: a value is out of range, or refers to a key that does not exist.
    """
    names = [item.name for item in dataclasses.fields(Config)]
    try:
        made: Any = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, cfg, {})) from None
    config = Config(**{name: getattr(made, name) for name in names})
    config.passes = cast(dict[str, Any], OmegaConf.to_container(cfg.passes, resolve=False))
    if config.draft.num_speculative_tokens_by_load is not None:
        table = read_table(config.draft.num_speculative_tokens_by_load)
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
        key = nearest(name, keys(compose(Config)))
        example = f", such as {function}(model, {{{key!r}: {value!r:.30}}})" if key else ""
        raise ConfigError(
            f"{function} takes a model, a configuration and draft=, but no {name}; keys of the configuration go into "
            f"a mapping{example}."
        )


def read_given(given: ConfigLike) -> dict[Any, Any]:
    """The configuration that the user gave, as a mapping in which interpolations are not resolved.

    Raises:
        ConfigError: it is no configuration, or a preset or a file that does not exist.
    """
    if isinstance(given, str | Path):
        return _read_file(given)
    if isinstance(given, DictConfig):
        return cast(dict[Any, Any], OmegaConf.to_container(given, resolve=False))
    if isinstance(given, Config):
        return dataclasses.asdict(given)
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    raise ConfigError(f"A configuration is a mapping, a YAML path or a preset name, not {type(given).__name__}.")


def _read_file(given: str | Path) -> dict[Any, Any]:
    path, known = Path(given).expanduser(), presets()
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            near = did_you_mean_path(path)
            raise ConfigError(
                f"There is no configuration file {str(path)!r}{near}; give a YAML file, or a preset's name."
            )
        return read_yaml(path)
    if str(given) not in known:
        hint = did_you_mean(given, known)
        raise ConfigError(
            f"Unknown preset {str(given)!r}{hint}; there are {', '.join(sorted(known))}, or give a .yaml path."
        )
    return {known[str(given)]: str(given)}


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
    _check_parallel(config)


def _check_parallel(config: Config) -> None:
    """Check that the devices are as many as are asked for, and of a kind that can share a target."""
    count, devices = config.parallel.tensor, config.parallel.devices
    if not 1 <= count <= MOST_DEVICES:
        raise ConfigError(f"parallel.tensor must be from 1 to {MOST_DEVICES}, got {count}.")
    if devices is not None and len(devices) != count:
        raise ConfigError(
            f"parallel.devices names {len(devices)} devices, and parallel.tensor asks for {count}; give as many."
        )
    named = devices or ()
    if {*named} - {"cpu"} and (len({*named}) < count or not all(re.fullmatch(r"cuda:\d+", name) for name in named)):
        raise ConfigError(
            f"parallel.devices names either GPUs, each once, such as [cuda:0, cuda:1], or cpu as often as "
            f"parallel.tensor says, and not {', '.join(named)}."
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
