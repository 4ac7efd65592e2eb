"""Makes the pass objects that a configuration lists."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from specgraph.config.errors import did_you_mean, unknown_key
from specgraph.config.lowering import settle_lowering
from specgraph.config.schema import Config
from specgraph.errors import ConfigError
from specgraph.passes import PASSES
from specgraph.passes.base import Pass
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.shard import Shard


def build_passes(config: Config, device: torch.device | str = "cpu") -> list[Pass]:
    """The passes of ``pipeline.order`` for a target on ``device``, each with its options.

    A pass of a user is named by ``_target_``.

    Raises:
        ConfigError: a pass or an option does not exist (the message names the nearest that does), or a pass of a user
            cannot be made.
    """
    settled = OmegaConf.create(dataclasses.asdict(settle_lowering(config, device)))
    wanted = cast(dict[str, Any], OmegaConf.to_container(settled.passes, resolve=True))
    own = [name for name, options in wanted.items() if isinstance(options, dict) and "_target_" in options]
    known = [*PASSES, *own]
    for name in [*wanted, *config.pipeline.order]:
        if name not in known:
            raise ConfigError(f"Unknown pass {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}.")
    return [_build(name, wanted.get(name) or {}) for name in _with_shard(config)]


def _with_shard(config: Config) -> list[str]:
    """The passes in order. If several devices share the target, ``shard`` comes before state is inserted."""
    order, before = [*config.pipeline.order], InsertKVCache.name
    if config.parallel.tensor > 1 and Shard.name not in order and before in order:
        order.insert(order.index(before), Shard.name)
    return order


def _build(name: str, options: Any) -> Pass:
    if not isinstance(options, dict):
        raise ConfigError(f"passes.{name} is a group of options, not {options!r}.")
    if "_target_" in options:
        return _instantiate(name, options)
    cls = PASSES[name]
    valid = [f.name for f in dataclasses.fields(cls)]
    if options and not valid:
        raise ConfigError(f"passes.{name} has no options, got {', '.join(map(str, options))}; leave them out.")
    for option in options:
        if option not in valid:
            raise ConfigError(unknown_key(f"passes.{name}.{option}", [f"passes.{name}.{v}" for v in valid]))
    return cls(**options)


def _instantiate(name: str, options: dict[str, Any]) -> Pass:
    """Make a pass of a user."""
    import hydra.utils
    from hydra.errors import InstantiationException

    try:
        made = hydra.utils.instantiate(options)
    except InstantiationException as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"passes.{name}: {reason}") from error
    if not isinstance(made, Pass):
        raise ConfigError(f"passes.{name}._target_ made a {type(made).__name__}, which is not a specgraph Pass.")
    return made
