"""Suffix decoding: propose the most frequent continuation of the end of the sequence, as long as it is probable.

:class:`~specgraph.kernels.step.suffix.SuffixLookup` has the definition, and the difference to a suffix tree.

The options are those of vLLM's method ``suffix``, which runs Snowflake's Arctic Inference, and so are the defaults but
for one. There ``max_spec_factor`` is 1, because each draft adds a row to the step. Here a step always runs K + 1 rows,
and a draft that is not made saves nothing. With a factor of 8, the limit rarely decides.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975).
"""

from __future__ import annotations

from specgraph.config.drafters import SuffixConfig
from specgraph.drafters.lookup import LookupDrafter
from specgraph.kernels.step import suffix_lookup


class SuffixDrafter(LookupDrafter):
    """Proposes the continuation of the end of the sequence with the highest expected number of accepted drafts."""

    Config = SuffixConfig
    function = staticmethod(suffix_lookup)
    matched = "min_match", "max_match"
