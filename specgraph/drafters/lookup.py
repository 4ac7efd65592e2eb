"""The base class of drafters that look the end of a sequence up in its own tokens."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Self

from torch import fx

from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep
from specgraph.kernels import step as functions
from specgraph.kernels.state import Buffer

HISTORY = Buffer(("B", "S"), indexed=True, tokens=True)
"""The state ``history``: the accepted tokens of every sequence."""


@dataclass(frozen=True, eq=False)
class LookupDrafter(Drafter):
    """Keeps the accepted tokens of every sequence (int64 ``[B, S]``) and looks the end of them up once per step.

    Its proposals ``[b, K]`` are point masses: it has no distribution to draw from.

    Attributes:
        options: an instance of :attr:`Config`.
    """

    options: Any = None

    looks_up = True

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Nothing to bind: it needs the accepted tokens alone."""
        return Draft(cls(options.num_speculative_tokens, options=options))

    def build(self, step: DraftStep) -> int:
        """Record what was accepted, then look the end of it up."""
        history = step.state("history", HISTORY)
        tokens, positions, rows = step.caught_up(step.target_vocab_size)
        step.call(functions.record_tokens_, history, step.rows, tokens, positions, rows, name="record_tokens_")
        self.look_up(step, history, step.length, name="proposals")
        return 1

    @classmethod
    @abstractmethod
    def requiring(cls, num_speculative_tokens: int, match: int) -> Self:
        """A drafter of K tokens that proposes only where the last ``match`` tokens have occurred before."""

    @abstractmethod
    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        """Append the node that proposes drafts ``[b, K]``, -1 for none, from what is recorded."""
