"""Suffix decoding: propose the most frequent continuation of the end of the sequence, as long as it is probable.

:class:`~specgraph.kernels.step.suffix.SuffixLookup` has the definition, and the difference to a suffix tree.

The options are those of vLLM's method ``suffix``, which runs Snowflake's Arctic Inference, and so are the defaults but
for one. There ``max_spec_factor`` is 1, because each draft adds a row to the step. Here a step always runs K + 1 rows,
and a draft that is not made saves nothing. With a factor of 8, the limit rarely decides.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975).
"""

from __future__ import annotations

from typing import Self

from torch import fx

from specgraph.config.drafters import SuffixConfig
from specgraph.drafters.lookup import LookupDrafter
from specgraph.drafters.step import DraftStep
from specgraph.kernels import step as functions


class SuffixDrafter(LookupDrafter):
    """Proposes the most frequent continuation of the end of the sequence, with adaptive length."""

    Config = SuffixConfig

    @classmethod
    def requiring(cls, num_speculative_tokens: int, match: int) -> Self:
        """Counts matches of at least ``match`` tokens; all else is as by default."""
        options = SuffixConfig(max_match=max(match, SuffixConfig.max_match), min_match=match)
        return cls(num_speculative_tokens, options=options)

    def look_up(self, step: DraftStep, history: fx.Node, length: fx.Node, name: str) -> fx.Node:
        """Propose the continuation with the highest expected number of accepted drafts."""
        keys = ("max_match", "min_match", "max_spec_factor", "max_spec_offset", "min_token_prob")
        return step.propose(
            functions.suffix_lookup, history, step.rows, length, num_speculative_tokens=self.num_speculative_tokens,
            **{key: getattr(self.options, key) for key in keys}, name=name,
        )  # fmt: skip
