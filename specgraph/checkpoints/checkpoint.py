"""A draft checkpoint that a drafter has recognised, and the configuration keys that many formats have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specgraph.checkpoints.files import Files
from specgraph.errors import ConfigError

MASK_KEYS = ("ptd_token_id", "pard_token", "mask_token_id")
"""The keys under which configurations name the mask token. The first key that has a value counts."""
EMBEDDING, PROJECTION = "embed_tokens.weight", "lm_head.weight"
"""The parameters of a head that may be the target's own."""
PARTS = ("eagle_config", "dflash_config")
"""The parts of configurations that hold the keys of one kind of head."""


@dataclass(frozen=True)
class Choice:
    """One option of a checkpoint: its name, its value, and the place from which the value was taken."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True, eq=False)
class Checkpoint(Files):
    """A draft checkpoint, recognised but not loaded.

    Attributes:
        kind: the kind of the drafter that runs it.
        layout: the project or format whose tensor names and keys it uses.
        algorithm: the method of drafting that it was trained for.
        parallel: whether it was trained to draft in parallel.
        mask_token_id: the mask token of parallel drafting; None if its configuration names none.
    """

    kind: str
    layout: str
    algorithm: str
    parallel: bool = False

    @staticmethod
    def of(files: Files, kind: str, layout: str, algorithm: str, *, parallel: bool = False) -> Checkpoint:
        """The checkpoint in ``files``."""
        return Checkpoint(**vars(files), kind=kind, layout=layout, algorithm=algorithm, parallel=parallel)

    @property
    def mask_key(self) -> str | None:
        """The key of the configuration that names the mask token; None if there is none."""
        return next((key for key in MASK_KEYS if _setting(self.config, key) is not None), None)

    @property
    def mask_token_id(self) -> int | None:
        if self.mask_key is None:
            return None
        value = _setting(self.config, self.mask_key)
        if not isinstance(value, int):
            raise ConfigError(f"{self.mask_key} of {self.path} is {value!r}; it must be one token id.")
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
    """The value of a key in the configuration, or else in one of its :data:`PARTS`."""
    places = [config, *(part for name in PARTS if isinstance(part := config.get(name), dict))]
    return next((place[key] for place in places if place.get(key) is not None), None)
