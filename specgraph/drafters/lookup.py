"""The base class of drafters that look the end of a sequence up in its own tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor, fx

from specgraph.config import DraftConfig
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

    Class attributes: ``function`` proposes from the history, with the keys that :attr:`Config` adds as its options, and
    ``matched`` names those of the shortest and of the longest match.

    Attributes:
        options: an instance of :attr:`Config`.
    """

    options: Any = None

    looks_up = True
    function: ClassVar[Callable[..., Tensor]]
    matched: ClassVar[tuple[str, str]]

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
    def requiring(cls, num_speculative_tokens: int, match: int) -> Self:
        """A drafter of K tokens that proposes only where the last ``match`` tokens have occurred before.

        All else is as by default, but that longer matches count up to ``match`` at least.
        """
        (least, most), config = cls.matched, cls.Config
        options = config(**{least: match, most: max(match, getattr(config, most))})
        return cls(num_speculative_tokens, options=options)

    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        """Append the node that proposes drafts ``[b, K]``, -1 for none, from what is recorded."""
        common = {own.name for own in fields(DraftConfig)}
        options = {own.name: getattr(self.options, own.name) for own in fields(self.Config) if own.name not in common}
        count = self.num_speculative_tokens
        return step.propose(
            self.function, history, step.rows, length, num_speculative_tokens=count, **options, name=name
        )
