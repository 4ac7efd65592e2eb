"""No drafts: plain decoding through the same decoder, the yardstick of everything else."""

from __future__ import annotations

from specgraph.drafters.base import Drafter


def none() -> Drafter:
    """The drafter that proposes nothing."""
    return Drafter("none", "none", 0, {})
