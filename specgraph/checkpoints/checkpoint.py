"""A recognised checkpoint of a draft, and the keys that many formats have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specgraph.checkpoints.files import Files, StoredTensor
from specgraph.errors import ConfigError

MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""Where configurations name the mask token, the first that is there counts."""


@dataclass(frozen=True)
class Choice:
    """One option of a checkpoint: its value and what it was taken from."""

    name: str
    value: Any
    source: str


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
        parallel: whether it was trained to draft in parallel.
        mask_token_id: the mask token of parallel drafting, if its configuration names one.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    kind: str
    layout: str
    algorithm: str
    parallel: bool = False

    @staticmethod
    def of(files: Files, kind: str, layout: str, algorithm: str, *, parallel: bool = False) -> Checkpoint:
        """The checkpoint in ``files``."""
        return Checkpoint(files.path, files.config, files.tensors, kind, layout, algorithm, parallel)

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


def architectures(config: Mapping[str, Any]) -> list[str]:
    """The class names that a configuration lists."""
    listed = config.get("architectures") or []
    return [str(name) for name in (listed if isinstance(listed, list) else [listed])]


def _setting(config: Mapping[str, Any], key: str) -> Any:
    """A key of the configuration or of its ``eagle_config``."""
    nested = config.get("eagle_config")
    value = config.get(key)
    return nested.get(key) if value is None and isinstance(nested, dict) else value
