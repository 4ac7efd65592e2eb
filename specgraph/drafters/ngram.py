"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the sequence itself.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

from __future__ import annotations

from specgraph.config.drafters import NGramConfig
from specgraph.drafters.lookup import LookupDrafter
from specgraph.kernels.step import ngram_lookup


class NGramDrafter(LookupDrafter):
    """Proposes what followed the last occurrence of the longest n-gram at the end of the sequence."""

    Config = NGramConfig
    function = staticmethod(ngram_lookup)
    matched = "min_ngram", "max_ngram"
