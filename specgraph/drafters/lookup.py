"""The base class of drafters that look the end of a sequence up in its own tokens.

Earlier outputs of the decoder may stand in front of these. What is drafted then depends on other requests, and no token
does: under ``strict``, a token is a function of the target and the seed alone. Other rules also look at the draft. With
the seed of an earlier request, that would be one which the same noise had a part in, so the output would be biased.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from torch import Tensor, fx

from specgraph.config.drafters import LookupDraftConfig
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.kernels import step as functions
from specgraph.kernels.state import EARLIER, SEPARATOR, Buffer

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
        """Nothing to bind: it needs accepted tokens alone."""
        if options.max_cached_tokens and target.rule != "strict":
            raise ConfigError(
                f"draft.max_cached_tokens={options.max_cached_tokens} drafts from earlier outputs, and the rule "
                f"{target.rule} would then bias requests with the seed of an earlier one; take strict, or leave it "
                "out."
            )
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
        common = {own.name for own in fields(LookupDraftConfig)}
        own = {each.name: getattr(self.options, each.name) for each in fields(self.Config) if each.name not in common}
        options = {"num_speculative_tokens": self.num_speculative_tokens, **own}
        most = self.options.max_cached_tokens
        if not most:
            return step.propose(self.function, history, step.rows, length, **options, name=name)
        earlier = step.state(EARLIER, Buffer((most,), fill=SEPARATOR, owner="call"))
        joined = step.call(functions.behind_earlier, earlier, history, step.rows, length, name=f"{name}_history")
        texts, lengths = (step.call(operator.getitem, joined, n, name=f"{name}_{n}") for n in range(2))
        found = step.call(self.function, texts, None, lengths, **options, name=f"{name}_found")
        return step.propose(functions.until_separator, found, name=name)
