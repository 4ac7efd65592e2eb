"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the sequence itself.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specgraph.drafters.base import Drafter
from specgraph.ir.graphs import export_module
from specgraph.kernels.step.ngram import ngram_lookup


class NGram(nn.Module):
    """Looks the longest n-gram up first, its most recent earlier occurrence."""

    def __init__(self, num_speculative_tokens: int, max_ngram: int, min_ngram: int) -> None:
        super().__init__()
        self.num_speculative_tokens = num_speculative_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram

    def forward(self, history: Tensor, length: Tensor) -> Tensor:
        """Propose for each sequence.

        Args:
            history: int64 ``[B, S]``, accepted tokens; what lies at or past ``length`` is not read.
            length: int64 ``[B]``, number of accepted tokens.

        Returns:
            int64 ``[B, K]``, -1 where there is no proposal.
        """
        return ngram_lookup(history, None, length, self.num_speculative_tokens, self.max_ngram, self.min_ngram)


def ngram(num_speculative_tokens: int, max_ngram: int, min_ngram: int, device: torch.device) -> Drafter:
    """The n-gram drafter; it needs nothing but the token history."""
    module = NGram(num_speculative_tokens, max_ngram, min_ngram)
    history = torch.zeros(3, 11, dtype=torch.int64, device=device)
    length = torch.full((3,), 5, dtype=torch.int64, device=device)
    batch, longest = torch.export.Dim("batch", min=1), torch.export.Dim("longest", min=1)
    dims = {"history": {0: batch, 1: longest}, "length": {0: batch}}
    graph = export_module(module, (history, length), dims, "draft")
    return Drafter("ngram", "history", num_speculative_tokens, {"draft": graph})
