"""The configuration: structured, so that a misspelt key is an error that names the nearest valid one.

The YAML files under ``specgraph.conf`` hold the defaults and presets; the classes here hold the keys, their types and
what they mean. ``passes.<name>.<option>`` are the fields of the pass of that name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specgraph.config_errors import check_keys, did_you_mean, explain, unknown_key
from specgraph.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from specgraph.passes.base import Pass

DRAFTERS = ("none", "ngram", "draft_model", "eagle3")
LOWERINGS = ("auto", "eager", "inductor", "gpu")
NUMERICS = ("bitwise", "fast")


@dataclass
class DraftConfig:
    """How drafts are made."""

    kind: str = "ngram"
    """none, ngram, draft_model or eagle3."""
    num_speculative_tokens: int = 4
    """K, drafts per step and sequence (the kind `none` ignores it)."""
    model: str | None = None
    """draft_model, eagle3: the folder of a checkpoint, or the name of a causal LM; `draft=` takes either."""
    parallel: bool | None = None
    """Draft all tokens in one call with mask tokens; null does so if the draft was trained for it."""
    mask_token_id: int | None = None
    """The mask token of parallel drafting; null takes the one the draft's configuration names."""
    feature_layers: list[int] | None = None
    """Heads: the indices k of the target's hidden states hs[k] they read; null takes those of the checkpoint."""
    norm_before_residual: bool | None = None
    """eagle3: the first layer's residual is the normed hidden state; null: as the checkpoint says, else false."""
    norm_output: bool | None = None
    """eagle3: what is fed on has gone through the last norm; null: as the checkpoint says, else false."""
    rope_theta: float | None = None
    """eagle3: the base of the rotary embedding; null: as the checkpoint says, else 10000."""
    max_ngram: int = 4
    """ngram: the longest n-gram looked up."""
    min_ngram: int = 1
    """ngram: the shortest one."""


@dataclass
class VerifyConfig:
    """How drafts are accepted."""

    rule: str = "strict"
    """strict, probabilistic, block; typical and synthetic are lossy."""
    posterior_threshold: float = 0.09
    """typical: the acceptance threshold (epsilon)."""
    posterior_alpha: float = 0.3
    """typical: its factor on exp(-entropy) (delta)."""
    acceptance_rate: float = 0.7
    """synthetic: the probability that a draft is accepted."""


@dataclass
class CacheConfig:
    """The KV cache."""

    block_size: int = 16
    """Tokens per page."""
    prefill_chunk: int = 256
    """Prompt tokens per prefill step."""


@dataclass
class PipelineConfig:
    """Which passes run, in this order, and what is checked in between."""

    order: list[str] = field(default_factory=lambda: list(_group("pipeline", "default")["order"]))
    """Names of passes, applied top to bottom."""
    verify: bool = True
    """Check the program after every pass."""


@dataclass
class LoweringConfig:
    """What runs the graphs."""

    name: str = "auto"
    """eager, inductor (torch.compile), gpu (Triton kernels and a CUDA graph), or auto: gpu on a GPU, else eager."""
    kernels: bool | None = None
    """Rewrite the graphs for our own kernels; null: as the name says."""
    remainder: str | None = None
    """What runs what no kernel of ours covers, eager or inductor; null: as the name says."""
    cuda_graph: bool | None = None
    """Replay the whole step as one CUDA graph; null: as the name says, on a GPU."""


@dataclass
class DebugConfig:
    """What helps to see inside."""

    dump_dir: str | None = None
    """Write the graphs of every stage to this folder after compiling."""
    self_check: bool = True
    """Compare cached decoding with the model's own forward on random tokens before trusting it."""
    self_check_tokens: int = 1024
    """The longest sequence the self-check may use; a larger sliding window is reported as not crossed."""
    progress: bool | None = None
    """Show progress of long work on standard error; null shows it on a terminal."""


@dataclass
class Config:
    """Everything `compile_speculative` can be told."""

    draft: DraftConfig = field(default_factory=DraftConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    passes: dict[str, Any] = field(default_factory=dict)
    lowering: LoweringConfig = field(default_factory=LoweringConfig)
    debug: DebugConfig = field(default_factory=DebugConfig)
    numerics: str = "bitwise"
    """Of the GPU's kernels: bitwise (a row's bits do not depend on the other rows) or fast (any library kernel)."""
    check_numerics: bool = False
    """Run every stage on the same input and name the first pass whose output differs."""
    max_batch_size: int = 64
    """Most sequences of one `generate` call."""
    max_length: int | None = None
    """Longest sequence, prompt included; null takes the model's own limit."""


ConfigLike = DictConfig | Mapping[str, Any] | Config | str | Path | None


def load_config(given: ConfigLike = None) -> Config:
    """Defaults, overlaid with what the user gave: a preset name, a YAML path, a mapping, or a ``Config``.

    In a mapping or a file, a group may be named instead of spelled out: ``{"verify": "probabilistic"}`` is
    ``conf/verify/probabilistic.yaml``, as on the command line.

    Raises:
        ConfigError: an unknown key (with the nearest valid one), a value of the wrong type or out of range, an unknown
            preset, drafter, rule, lowering or pass.
    """
    overlay = _read(given)
    chosen = {group: overlay.pop(group) for group in default_groups() if isinstance(overlay.get(group), str)}
    base = default_config(**chosen)
    check_keys(overlay, base, Config)
    try:
        merged = OmegaConf.merge(base, overlay)
        config = cast(Config, OmegaConf.to_object(merged))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, base, Config, overlay)) from None
    config.passes = cast(dict[str, Any], OmegaConf.to_container(merged.passes, resolve=False))
    validate(config)
    return config


def settle_lowering(config: Config, device: torch.device | str, dtype: torch.dtype | None = None) -> Config:
    """A copy in which ``lowering`` says what happens to a target on ``device``, nothing left to choose.

    float64 is for checking, and the kernels leave it to the reference ops: ``auto`` is eager there.
    """
    given = config.lowering
    fast = str(device).startswith("cuda") and str(dtype) != "torch.float64"
    name = given.name if given.name != "auto" else "gpu" if fast else "eager"
    settled = LoweringConfig(
        name=name,
        kernels=name == "gpu" if given.kernels is None else given.kernels,
        remainder=given.remainder or ("inductor" if name == "inductor" else "eager"),
        cuda_graph=name == "gpu" and fast if given.cuda_graph is None else given.cuda_graph,
    )
    return dataclasses.replace(config, lowering=settled)


def default_config(**chosen: str) -> DictConfig:
    """The structured configuration with the groups of ``conf/config.yaml`` filled in, or those chosen instead."""
    structured = OmegaConf.structured(Config)
    for group, name in {**default_groups(), **chosen}.items():
        structured[group] = OmegaConf.merge(structured[group], _group(group, name))
    return cast(DictConfig, structured)


def default_groups() -> dict[str, str]:
    """Every configuration group and the file of it that is the default, as ``conf/config.yaml`` lists them."""
    listed = yaml.safe_load((resources.files("specgraph.conf") / "config.yaml").read_text())["defaults"]
    return {group: name for entry in listed if isinstance(entry, dict) for group, name in entry.items()}


def group_choices(group: str) -> list[str]:
    """The files of one configuration group, without their ending."""
    names = (entry.name for entry in (resources.files("specgraph.conf") / group).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def presets() -> dict[str, str]:
    """Preset names and the group each belongs to: the files of the groups, the defaults that have no name aside."""
    found = {choice: group for group in default_groups() for choice in group_choices(group)}
    found.pop("default", None)
    return found


def _group(group: str, name: str) -> dict[str, Any]:
    """The content of ``conf/<group>/<name>.yaml``."""
    choices = group_choices(group)
    if name not in choices:
        hint = did_you_mean(name, choices)
        raise ConfigError(f"There is no {group}={name}{hint}; {group} is one of {', '.join(choices)}.")
    text = (resources.files("specgraph.conf") / group / f"{name}.yaml").read_text()
    return cast(dict[str, Any], yaml.safe_load(text) or {})


def _read(given: ConfigLike) -> dict[str, Any]:
    """What the user gave as a mapping, interpolations left alone."""
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
        raise ConfigError(f"There is no configuration file {str(path)!r}.")
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
    """Check values the types cannot."""
    from specgraph.kernels.sample import check_rule

    _among("draft.kind", config.draft.kind, DRAFTERS)
    _among("lowering.name", config.lowering.name, LOWERINGS)
    _among("numerics", config.numerics, NUMERICS)
    try:
        check_rule(config.verify.rule)
    except ValueError as error:
        raise ConfigError(f"verify.rule: {error}") from None
    for key, value in (
        ("draft.num_speculative_tokens", config.draft.num_speculative_tokens),
        ("draft.min_ngram", config.draft.min_ngram),
        ("cache.block_size", config.cache.block_size),
        ("cache.prefill_chunk", config.cache.prefill_chunk),
        ("max_batch_size", config.max_batch_size),
        ("max_length", config.max_length),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{key} must be at least 1, got {value}.")
    if config.draft.max_ngram < config.draft.min_ngram:
        raise ConfigError(f"draft.max_ngram ({config.draft.max_ngram}) is below draft.min_ngram.")


def _among(key: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ConfigError(f"{key} is one of {', '.join(allowed)}, not {value!r}.")


def build_passes(config: Config, device: torch.device | str = "cpu") -> list[Pass]:
    """The passes of ``pipeline.order`` for a target on ``device``, each with its options; a user's own pass enters by
    ``_target_``.

    Raises:
        ConfigError: an unknown pass or option, with the nearest valid name; an own pass that cannot be made.
    """
    from specgraph.passes import PASSES

    settled = OmegaConf.structured(settle_lowering(config, device))
    wanted = cast(dict[str, Any], OmegaConf.to_container(settled.passes, resolve=True))
    own = [name for name, options in wanted.items() if isinstance(options, dict) and "_target_" in options]
    known = [*PASSES, *own]
    for name in [*wanted, *config.pipeline.order]:
        if name not in known:
            raise ConfigError(f"Unknown pass {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}.")
    return [_build(name, wanted.get(name) or {}) for name in config.pipeline.order]


def _build(name: str, options: Any) -> Pass:
    from specgraph.passes import PASSES

    if not isinstance(options, dict):
        raise ConfigError(f"passes.{name} is a group of options, not {options!r}.")
    if "_target_" in options:
        return _instantiate(name, options)
    cls = PASSES[name]
    valid = [f.name for f in dataclasses.fields(cls)]
    for option in options:
        if option not in valid:
            raise ConfigError(unknown_key(f"passes.{name}.{option}", [f"passes.{name}.{v}" for v in valid]))
    return cls(**options)


def _instantiate(name: str, options: dict[str, Any]) -> Pass:
    """A user's own pass."""
    import hydra.utils
    from hydra.errors import InstantiationException

    from specgraph.passes.base import Pass

    try:
        made = hydra.utils.instantiate(options)
    except InstantiationException as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"passes.{name}: {reason}") from error
    if not isinstance(made, Pass):
        raise ConfigError(f"passes.{name}._target_ made a {type(made).__name__}, which is not a specgraph Pass.")
    return made
