"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the sequence itself.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from torch import fx

from specgraph.config import DraftConfig
from specgraph.config.drafters import NGramConfig
from specgraph.drafters.base import Draft, Target
from specgraph.drafters.lookup import LookupDrafter
from specgraph.drafters.step import DraftStep
from specgraph.kernels import step as functions


@dataclass(frozen=True, eq=False)
class NGramDrafter(LookupDrafter):
    """Proposes what followed the last occurrence of the longest n-gram at the end of the sequence.

    Attributes:
        max_ngram, min_ngram: the lengths of the longest and the shortest n-gram that is looked up.
    """

    max_ngram: int = 4
    min_ngram: int = 1

    kind: ClassVar[str] = "ngram"
    Config: ClassVar[type[DraftConfig]] = NGramConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Nothing to bind: it needs the accepted tokens alone."""
        return Draft(ngram(options.num_speculative_tokens, options.max_ngram, options.min_ngram))

    @classmethod
    def requiring(cls, num_speculative_tokens: int, match: int) -> Self:
        """Looks n-grams of ``match`` tokens up, and longer ones up to the default of ``max_ngram``."""
        return cls(num_speculative_tokens, max_ngram=max(match, cls.max_ngram), min_ngram=match)

    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        """Propose what followed the last occurrence of the longest n-gram."""
        return step.propose(
            functions.ngram_lookup, history, step.rows, length, num_speculative_tokens=self.num_speculative_tokens,
            max_ngram=self.max_ngram, min_ngram=self.min_ngram, name=name,
        )  # fmt: skip


def ngram(num_speculative_tokens: int, max_ngram: int, min_ngram: int) -> NGramDrafter:
    """The n-gram drafter; it needs nothing but the token history."""
    return NGramDrafter(num_speculative_tokens, max_ngram=max_ngram, min_ngram=min_ngram)
