"""The configuration. It is structured, so a misspelt key is an error, which names the nearest valid key.

The YAML files under ``specgraph.conf`` hold the defaults and presets. The classes in ``schema``, ``draft`` and
``drafters`` define the keys, their types and their meaning. The keys ``passes.<name>.<option>`` are the fields of the
pass of that name.
"""

from specgraph.config.compose import compose as compose
from specgraph.config.draft import DraftConfig as DraftConfig
from specgraph.config.draft import ParallelDraftConfig as ParallelDraftConfig
from specgraph.config.groups import group_choices as group_choices
from specgraph.config.groups import presets as presets
from specgraph.config.load import ConfigLike as ConfigLike
from specgraph.config.load import check_no_keys as check_no_keys
from specgraph.config.load import load_config as load_config
from specgraph.config.load import to_config as to_config
from specgraph.config.lowering import choose_lowering as choose_lowering
from specgraph.config.lowering import settle_lowering as settle_lowering
from specgraph.config.schema import CacheConfig as CacheConfig
from specgraph.config.schema import Config as Config
from specgraph.config.schema import DebugConfig as DebugConfig
from specgraph.config.schema import LoweringConfig as LoweringConfig
from specgraph.config.schema import PipelineConfig as PipelineConfig
from specgraph.config.schema import VerifyConfig as VerifyConfig
