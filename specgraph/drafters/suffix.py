"""Suffix decoding: propose the most frequent continuation of the end of the sequence, as long as it is probable.

:class:`~specgraph.kernels.step.suffix.SuffixLookup` has the definition, and the difference to a suffix tree.

The options are those of vLLM's method ``suffix``, which runs Snowflake's Arctic Inference, and so are the defaults but
for one. There ``max_spec_factor`` is 1, because each draft adds a row to the step. Here a step always runs K + 1 rows,
and a draft that is not made saves nothing. With a factor of 8, the limit rarely decides.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import fx

from specgraph.config import DraftConfig
from specgraph.config.drafters import SuffixConfig
from specgraph.drafters.base import Draft, Target
from specgraph.drafters.lookup import LookupDrafter
from specgraph.drafters.step import DraftStep
from specgraph.kernels import step as functions


@dataclass(frozen=True, eq=False)
class SuffixDrafter(LookupDrafter):
    """Proposes the most frequent continuation of the end of the sequence, with adaptive length.

    Attributes:
        max_match, min_match, max_spec_factor, max_spec_offset, min_token_prob: as in the configuration.
    """

    max_match: int = 24
    min_match: int = 1
    max_spec_factor: float = 8.0
    max_spec_offset: float = 0.0
    min_token_prob: float = 0.1

    kind: ClassVar[str] = "suffix"
    Config: ClassVar[type[DraftConfig]] = SuffixConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Nothing to bind: it needs the accepted tokens alone."""
        return Draft(
            cls(
                options.num_speculative_tokens, max_match=options.max_match, min_match=options.min_match,
                max_spec_factor=options.max_spec_factor, max_spec_offset=options.max_spec_offset,
                min_token_prob=options.min_token_prob,
            )
        )  # fmt: skip

    @classmethod
    def requiring(cls, num_speculative_tokens: int, match: int) -> Self:
        """Counts matches of at least ``match`` tokens; all else is as by default."""
        return cls(num_speculative_tokens, max_match=max(match, cls.max_match), min_match=match)

    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        """Propose the continuation with the highest expected number of accepted drafts."""
        return step.propose(
            functions.suffix_lookup, history, step.rows, length, num_speculative_tokens=self.num_speculative_tokens,
            max_match=self.max_match, min_match=self.min_match, max_spec_factor=self.max_spec_factor,
            max_spec_offset=self.max_spec_offset, min_token_prob=self.min_token_prob, name=name,
        )  # fmt: skip
