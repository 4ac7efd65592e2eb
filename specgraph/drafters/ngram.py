"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the sequence itself.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

from __future__ import annotations

from typing import Self

from torch import fx

from specgraph.config.drafters import NGramConfig
from specgraph.drafters.lookup import LookupDrafter
from specgraph.drafters.step import DraftStep
from specgraph.kernels import step as functions


class NGramDrafter(LookupDrafter):
    """Proposes what followed the last occurrence of the longest n-gram at the end of the sequence."""

    Config = NGramConfig

    @classmethod
    def requiring(cls, num_speculative_tokens: int, match: int) -> Self:
        """Looks n-grams of ``match`` tokens up, and longer ones up to the default of ``max_ngram``."""
        options = NGramConfig(max_ngram=max(match, NGramConfig.max_ngram), min_ngram=match)
        return cls(num_speculative_tokens, options=options)

    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        """Propose what followed the last occurrence of the longest n-gram."""
        return step.propose(
            functions.ngram_lookup, history, step.rows, length, num_speculative_tokens=self.num_speculative_tokens,
            max_ngram=self.options.max_ngram, min_ngram=self.options.min_ngram, name=name,
        )  # fmt: skip
