"""The arguments of the scripts that time kernels and options, or soak a session.

They are words KEY=VALUE, as for ``python -m specgraph bench``: a key of the configuration or of
:class:`~specgraph.bench.config.BenchConfig`, to which a script may add some of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import yaml
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from specgraph.bench.config import BenchConfig
from specgraph.bench.models import SHAPES, shape_config
from specgraph.cli.commands import bench_model
from specgraph.cli.loading import device_and_dtype
from specgraph.config import Config, group_choices, load_config

Options = TypeVar("Options", bound=BenchConfig)


def read_options(words: Sequence[str], kind: type[Options], defaults: Mapping[str, Any]) -> tuple[Config, Options]:
    """The configuration of decoders that ``words`` give over a script's ``defaults``, and that of the whole script.

    Raises:
        ConfigError: an unknown key, or a value that is not allowed.
    """
    pairs = (word.partition("=") for word in words)
    given: dict[str, Any] = {**defaults, **{key: yaml.safe_load(value) for key, _, value in pairs}}
    own = {field.name for field in dataclasses.fields(kind)} - {field.name for field in dataclasses.fields(Config)}
    draft = given.get("draft")
    if draft is not None and draft not in group_choices("draft"):
        given["draft"] = {"model": draft}
    config = load_config({key: value for key, value in given.items() if key not in own})
    return config, kind(**vars(config), **{key: value for key, value in given.items() if key in own})


def place_of(options: BenchConfig) -> tuple[torch.device, str]:
    """The device, and the name of the dtype."""
    device, dtype = device_and_dtype(options.device, options.dtype)
    return torch.device(device), dtype


def target_of(options: BenchConfig) -> PreTrainedModel:
    """The target: of a known shape with random weights, or loaded."""
    return bench_model(options, *device_and_dtype(options.device, options.dtype))


def model_config_of(options: BenchConfig) -> PretrainedConfig:
    """The configuration of the target, of which no weights are needed."""
    if options.target in SHAPES:
        return shape_config(options.target)
    config: PretrainedConfig = AutoConfig.from_pretrained(options.target)
    return config
