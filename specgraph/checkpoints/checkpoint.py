"""Recognises what a checkpoint is: keys of its configuration first, names of its tensors second."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specgraph.checkpoints.files import Files, StoredTensor, open_files
from specgraph.errors import ConfigError

Kind = Literal["eagle3", "draft_model"]
Layout = Literal["eagle", "specforge", "nvidia", "speculators", "pard", "transformers"]
Algorithm = Literal["eagle3", "peagle", "pard", "draft_model"]

SUPPORTED = "EAGLE-3 and P-EAGLE heads (EAGLE, SpecForge, NVIDIA and speculators layouts), PARD and plain causal LMs"
MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""Where configurations name the mask token, the first that is there counts."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A draft checkpoint, recognised but not loaded.

    Attributes:
        path: as it was given.
        config: its ``config.json``.
        tensors: what its weights files hold, by the names there.
        kind: the drafter that runs it.
        layout: whose names and keys it uses.
        algorithm: how it was trained to draft.
        mask_token_id: the mask token of parallel drafting, if its configuration names one.
        parallel: whether it was trained to draft in parallel.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    kind: Kind
    layout: Layout
    algorithm: Algorithm

    @property
    def parallel(self) -> bool:
        return self.algorithm in ("peagle", "pard")

    @property
    def mask_key(self) -> str | None:
        """The key that names the mask token."""
        return next((key for key in MASK_KEYS if _setting(self.config, key) is not None), None)

    @property
    def mask_token_id(self) -> int | None:
        if self.mask_key is None:
            return None
        value = _setting(self.config, self.mask_key)
        if not isinstance(value, int):
            raise ConfigError(f"{self.mask_key} of {self.path} is {value!r}; a mask token is one id.")
        return value

    @property
    def about(self) -> str:
        """One line for reports."""
        return f"draft: {self.algorithm} in the {self.layout} layout, {self.path}"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open the folder or the weights file of a draft and say what it is.

    Raises:
        ConfigError: files are missing or damaged, or the draft is of a kind that is not supported, which is named.
    """
    files = open_files(path)
    _refuse_unsupported(files)
    kind, layout, algorithm = _recognise(files)
    return Checkpoint(files.path, files.config, files.tensors, kind, layout, algorithm)


def _recognise(files: Files) -> tuple[Kind, Layout, Algorithm]:
    config, names = files.config, files.tensors
    parallel = "mask_hidden" in names
    declared = config.get("speculators_model_type")
    if declared is not None:
        return "eagle3", "speculators", "peagle" if declared == "peagle" else "eagle3"
    if any(name.endswith("Eagle3") for name in _architectures(config)) or _is_eagle3(names):
        return "eagle3", _eagle3_layout(config, names), "peagle" if parallel else "eagle3"
    if config.get("pard_token") is not None or config.get("spd_type") == "pard":
        return "draft_model", "pard", "pard"
    if _is_causal_lm(config):
        return "draft_model", "transformers", "draft_model"
    shown = ", ".join(list(names)[:3])
    raise ConfigError(
        f"{files.path} is no draft that specgraph knows (architectures {_architectures(config)}, tensors {shown} ...); "
        f"it reads {SUPPORTED}."
    )


def _eagle3_layout(config: Mapping[str, Any], names: Mapping[str, Any]) -> Layout:
    if not any(name.startswith("midlayer.") for name in names):
        return "nvidia"
    return "specforge" if any(name.endswith("Eagle3") for name in _architectures(config)) else "eagle"


def _is_eagle3(names: Mapping[str, Any]) -> bool:
    return any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names


def _is_causal_lm(config: Mapping[str, Any]) -> bool:
    listed = _architectures(config)
    return "model_type" in config and (not listed or any("CausalLM" in name or "LMHead" in name for name in listed))


def _refuse_unsupported(files: Files) -> None:
    found = _declared_unsupported(files.config) or _named_unsupported(files.tensors)
    if found is not None:
        raise ConfigError(f"{files.path} is {found}, which specgraph does not read; it reads {SUPPORTED}.")


def _declared_unsupported(config: Mapping[str, Any]) -> str | None:
    """What the configuration says it is, if that is not supported."""
    declared = config.get("speculators_model_type")
    if declared is not None and declared not in ("eagle3", "peagle"):
        return f"a {declared} head"
    if "medusa_num_heads" in config:
        return "a Medusa head"
    if "dflash_config" in config:
        return "a DFlash head"
    if config.get("model_type") == "mlp_speculator":
        return "an MLP speculator"
    for name in _architectures(config):
        if name == "Eagle3DeepseekV2ForCausalLM":
            return f"an EAGLE-3 head with MLA attention ({name})"
        for part, words in (("DFlash", "a DFlash"), ("DSpark", "a DSpark"), ("MTP", "an MTP"), ("Medusa", "a Medusa")):
            if part in name:
                return f"{words} head ({name})"
    return None


def _named_unsupported(names: Mapping[str, Any]) -> str | None:
    """What the tensors' names give away, if that is not supported."""
    if _is_eagle3(names):
        return None
    whole_model = any(re.match(r"(model|transformer|gpt_neox)\.", name) for name in names)
    if any(re.match(r"medusa_head\.|\d+\.\d+\.linear\.weight$|lm_heads\.\d+\.", name) for name in names):
        return "a Medusa head"
    if any(name.startswith("speculator.") for name in names):
        return "an MLP speculator"
    # A causal LM may carry MTP layers beside its own; transformers leaves them out.
    if not whole_model and any(re.search(r"^mtp(_layers)?\.|\.eh_proj\.|\.enorm\.", name) for name in names):
        return "an MTP head"
    if "fc.weight" in names and "hidden_norm.weight" in names:
        return "a DFlash head"
    if "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names:
        return "an EAGLE-1 or EAGLE-2 head"
    return None


def _architectures(config: Mapping[str, Any]) -> list[str]:
    listed = config.get("architectures") or []
    return [str(name) for name in (listed if isinstance(listed, list) else [listed])]


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """A key of the configuration or of its ``eagle_config``."""
    nested = config.get("eagle_config")
    value = config.get(key)
    return nested.get(key) if value is None and isinstance(nested, dict) else value
