"""No drafts: plain decoding through the same decoder, the yardstick of everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from specgraph.config import DraftConfig
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep


@dataclass
class NoDraftConfig(DraftConfig):
    """Keys of ``draft`` that decode without drafts: there are none of its own."""

    kind: str = "none"


@dataclass(frozen=True, eq=False)
class NoDrafter(Drafter):
    """The drafter that proposes nothing."""

    kind: ClassVar[str] = "none"
    Config: ClassVar[type[DraftConfig]] = NoDraftConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Nothing to bind."""
        return Draft(cls())

    def build(self, step: DraftStep) -> int:
        """No node."""
        return 0
