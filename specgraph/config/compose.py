"""Composes a configuration by Hydra's rules, for Python and for the command line.

Hydra's own ``compose`` takes its files, schemas and settings from objects that the whole process shares. Here, Hydra's
parser of overrides and its defaults lists are given the files of ``conf`` directly. So a composition works inside an
application that has a ``@hydra.main`` of its own and in several threads, and it changes no global state.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList, create_defaults_list
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.config.draft import NUMBERS, DraftConfig
from specgraph.config.drafters import own_drafter
from specgraph.config.errors import check_keys, explain, first_line, keys, unknown_choice, unknown_key, unreadable
from specgraph.config.groups import conf_files, default_groups, own_files
from specgraph.errors import ConfigError

GIVEN = "given"
"""The name of the file that stands for what was given as a mapping."""
COUNT, BY_LOAD = NUMBERS
AUTO = "auto"
"""What stands for a number of drafts that is chosen for every step."""
_ONE_AT_A_TIME = threading.Lock()


def compose(
    schema: type,
    given: Mapping[Any, Any] | None = None,
    overrides: Sequence[str] = (),
    base: str | None = "config",
    folder: str | Path | None = None,
) -> DictConfig:
    """A configuration that has the keys of a dataclass.

    Args:
        schema: the dataclass. Its defaults count least.
        given: values by their keys, which may be nested or joined by dots. The name of a file may take the place of a
            group: ``{"verify": "probabilistic"}``. Values count more than the files.
        overrides: Hydra's overrides, which count most.
        base: the file of ``conf`` whose defaults list names the groups; None for a schema without groups.
        folder: a folder of the user's with further files for the groups.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), an unknown choice, or a value of the wrong type.
    """
    files = _files(base, folder)
    parsed, groups = parse(overrides, files), default_groups() if base else ()
    chosen = {group: name for group, name in (given or {}).items() if group in groups and isinstance(name, str)}
    values = nested({key: value for key, value in (given or {}).items() if key not in chosen})
    drafter = _take_own_drafter(values, parsed, chosen) if base else None
    if drafter is not None:
        schema, chosen["draft"] = with_draft(schema, own_drafter(drafter).Config), "none"
    _take_table(values)
    cfg = _defaults(schema)
    listed = [*([base] if base else []), *({f"override {group}": name} for group, name in chosen.items()), "_self_"]
    defaults = _defaults_list(_Files({**files.files, GIVEN: {"defaults": listed}}), parsed)
    for default in defaults.defaults:
        content = values if default.config_path == GIVEN else files.keys(str(default.config_path))
        _merge(cfg, nested({default.package: content}) if default.package else content)
    for override in defaults.config_overrides:
        _apply(cfg, override)
    if base:
        _obey_given_number(cfg, values, parsed)
    return cfg


def jobs(overrides: Sequence[str], base: str | None = "config", folder: str | Path | None = None) -> list[list[str]]:
    """The overrides of every point of a sweep."""
    values = [
        [f"{item.get_key_element()}={value}" for value in item.sweep_string_iterator()]
        if item.is_sweep_override()
        else [str(item.input_line)]
        for item in parse(overrides, _files(base, folder))
    ]
    return [list(point) for point in itertools.product(*values)]


def parse(overrides: Sequence[str], files: _Files) -> list[Override]:
    """Read overrides by Hydra's grammar. ``files`` has the names that ``glob`` finds.

    Raises:
        ConfigError: one of them cannot be read.
    """
    try:
        with _alone():
            return OverridesParser.create(cast(Any, files)).parse_overrides(list(overrides)) if overrides else []
    except OverrideParseException as error:
        raise ConfigError(unreadable(error)) from None


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """A context for one thread at a time, because Hydra's parser shares tables, and Hydra notes a version to obey."""
    with _ONE_AT_A_TIME:
        before = VersionBase.instance().getbase()
        try:
            yield
        finally:
            VersionBase.instance().version_base = before


class _Files(ConfigRepository):
    """The files from which Hydra makes a defaults list, by their paths without ``.yaml``."""

    def __init__(self, files: dict[str, Any]) -> None:
        self.files = files

    def keys(self, path: str) -> dict[str, Any]:
        """The keys of a file, without its defaults list."""
        return {key: value for key, value in self.files[path].items() if key != "defaults"}

    def load_config(self, config_path: str) -> ConfigResult | None:
        if config_path not in self.files:
            return None
        config = OmegaConf.create({"defaults": self.files[config_path].get("defaults", [])})
        listed = self._create_defaults_list(config_path, self._extract_defaults_list(config_path, config))
        return ConfigResult("specgraph", config_path, config, {"package": None}, listed)

    def group_exists(self, config_path: str) -> bool:
        return any(path.startswith(f"{config_path}/") for path in self.files)

    def config_exists(self, config_path: str) -> bool:
        return config_path in self.files

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = None) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.files if path.rpartition("/")[0] == group_name)

    def get_sources(self) -> list[ConfigSource]:
        return []


def _files(base: str | None, folder: str | Path | None) -> _Files:
    return _Files({} if base is None else own_files(folder) | conf_files())


def _defaults_list(repository: _Files, overrides: list[Override]) -> DefaultsList:
    """The files to merge, in their order, and the overrides that choose no file."""
    for override in overrides:
        if override.is_sweep_override():
            raise ConfigError(
                f"{override.input_line} has several values; write key=[a,b] for a list, key=\"'a,b'\" for a text, or "
                "-m beside it to run once for each."
            )
    try:
        with _alone():
            return create_defaults_list(repository, GIVEN, overrides, prepend_hydra=False, skip_missing=False)
    except MissingConfigException as error:
        raise ConfigError(unknown_choice(error)) from None
    except ConfigCompositionException as error:
        raise ConfigError(first_line(error)) from None


def _merge(cfg: DictConfig, values: Mapping[Any, Any]) -> None:
    check_keys(values, cfg)
    try:
        cfg.merge_with(values)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, cfg, values)) from None


def _apply(cfg: DictConfig, override: Override) -> None:
    """Apply an override that chooses no file. A table of K has a key of its own, because every key has one type, and so
    has ``auto``."""
    key, value = str(override.key_or_group), override.value()
    if key == f"draft.{COUNT}" and OmegaConf.select(cfg, f"draft.{BY_LOAD}", default=False) is not False:
        cfg.draft[BY_LOAD] = None
        key = f"draft.{BY_LOAD}" if isinstance(value, dict) else key
        key, value = ("draft.adaptive", True) if value == AUTO else (key, value)
    group, _, leaf = key.rpartition(".")
    try:
        if override.is_delete():
            node = OmegaConf.select(cfg, group) if group else cfg
            if not isinstance(node, DictConfig) or leaf not in node:
                raise ConfigError(unknown_key(key, keys(cfg)))
            del node[leaf]
        else:
            check_keys(nested({key: value}), cfg)
            OmegaConf.update(cfg, key, value, force_add=True)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, cfg, nested({key: value}))) from None


def _take_table(values: dict[Any, Any]) -> None:
    """Move a table of K, and ``auto``, to the keys that they have alone, because every key has one type."""
    draft = values.get("draft")
    if not isinstance(draft, Mapping) or not (draft.get(COUNT) == AUTO or isinstance(draft.get(COUNT), Mapping)):
        return
    moved = {"adaptive": True} if draft[COUNT] == AUTO else {BY_LOAD: draft[COUNT]}
    values["draft"] = {**{key: value for key, value in draft.items() if key != COUNT}, **moved}


def _obey_given_number(cfg: DictConfig, values: Mapping[Any, Any], overrides: Sequence[Override]) -> None:
    """Let a K that the user gave hold for every step, unless ``draft.adaptive`` is given beside it."""
    draft = values.get("draft")
    given = {f"draft.{key}" for key in draft} if isinstance(draft, Mapping) else set()
    given |= {str(override.key_or_group) for override in overrides if override.value() != AUTO}
    if {f"draft.{key}" for key in NUMBERS} & given and "draft.adaptive" not in given:
        cfg.draft.adaptive = False


def nested(values: Mapping[Any, Any]) -> dict[Any, Any]:
    """``values`` with a mapping for every group of a key that is joined by dots.

    Raises:
        ConfigError: a value is given in both ways.
    """
    dotted = {key: value for key, value in values.items() if isinstance(key, str) and "." in key}
    found = {key: value for key, value in values.items() if key not in dotted}
    for key, value in dotted.items():
        node, (*groups, leaf) = found, key.split(".")
        for group in groups:
            inner = node.get(group, {})
            if not isinstance(inner, Mapping):
                raise ConfigError(f"{key} is given beside {group}={inner!r}; leave one of them out.")
            node[group] = node = dict(inner)
        if leaf in node:
            raise ConfigError(f"{key} is given twice; leave one of them out.")
        node[leaf] = value
    return found


def _take_own_drafter(
    values: dict[Any, Any], overrides: Sequence[Override], chosen: Mapping[str, str]
) -> str | None:  # fmt: skip
    """The full name of a user's drafter that ``draft._target_`` names, which becomes ``draft.kind``; else None."""
    draft = values.get("draft")
    draft = dict(draft) if isinstance(draft, Mapping) else {}
    target, kind = draft.pop("_target_", None), draft.get("kind")
    named = [f"draft={chosen['draft']}"] if "draft" in chosen else []
    for override in overrides:
        if override.key_or_group == "draft._target_":
            target, override.key_or_group = override.value(), "draft.kind"
        elif override.key_or_group in ("draft", "draft.kind"):
            kind = override.value()
            named.append(str(override.input_line))
    if target is None:
        return kind if isinstance(kind, str) and "." in kind else None
    if named:
        raise ConfigError(f"draft._target_={target} names the drafter, and so does {named[0]}; leave one of them out.")
    values["draft"] = {**draft, "kind": target}
    return str(target)


@functools.lru_cache
def with_draft(schema: type, draft: type) -> type:
    """A command's schema with other keys of ``draft``."""
    other = dataclasses.field(default_factory=draft, metadata={"text": ""})
    return dataclasses.make_dataclass(schema.__name__, [("draft", DraftConfig, other)], bases=(schema,))


def _defaults(schema: type) -> DictConfig:
    """The defaults of a dataclass. A copy is quicker than reading the types again, and touches what it copies."""
    with _ONE_AT_A_TIME:
        return copy.deepcopy(_structured(schema))


@functools.lru_cache
def _structured(schema: type) -> DictConfig:
    return cast(DictConfig, OmegaConf.structured(schema))
