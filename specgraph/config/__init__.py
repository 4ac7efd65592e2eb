"""The configuration. It is structured, so a misspelt key is an error, which names the nearest valid key.

The YAML files under ``specgraph.conf`` hold the defaults and presets. The classes in ``schema``, ``draft`` and
``drafters`` define the keys, their types and their meaning. The keys ``passes.<name>.<option>`` are the fields of the
pass of that name.
"""

from specgraph.config.compose import compose
from specgraph.config.draft import DraftConfig, ParallelDraftConfig
from specgraph.config.groups import group_choices, presets
from specgraph.config.load import ConfigLike, check_no_keys, load_config, to_config
from specgraph.config.lowering import choose_lowering, settle_lowering
from specgraph.config.schema import (
    CacheConfig,
    Config,
    DebugConfig,
    LoweringConfig,
    ParallelConfig,
    PipelineConfig,
    VerifyConfig,
)

__all__ = ["CacheConfig", "Config", "ConfigLike", "DebugConfig", "DraftConfig", "LoweringConfig", "ParallelConfig",
           "ParallelDraftConfig", "PipelineConfig", "VerifyConfig", "check_no_keys", "choose_lowering", "compose",
           "group_choices", "load_config", "presets", "settle_lowering", "to_config"]  # fmt: skip
