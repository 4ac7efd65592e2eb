"""No drafts: plain decoding by the same decoder, with which speculative decoding is compared."""

from __future__ import annotations

from typing import Any

from specgraph.config.drafters import NoDraftConfig
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep


class NoDrafter(Drafter):
    """The drafter that proposes nothing."""

    Config = NoDraftConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Return the drafter; there is nothing to load."""
        return Draft(cls())

    def build(self, step: DraftStep) -> int:
        """Append nothing."""
        return 0
