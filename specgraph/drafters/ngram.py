"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the sequence itself.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specgraph.drafters.base import Drafter
from specgraph.ir.graphs import export_module


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
        place = torch.arange(history.shape[1], device=history.device)
        end = length.unsqueeze(1)
        # matched[b, j]: how many tokens before j (j itself included) equal those that end the sequence.
        matched = torch.zeros_like(history)
        equal = torch.ones_like(history, dtype=torch.bool)
        for back in range(self.max_ngram):
            wanted = history.gather(1, (end - 1 - back).clamp(0, None))
            found = history.gather(1, (place - back).clamp(0, None).expand_as(history))
            equal = equal & (found == wanted) & (place >= back) & (end > back)
            matched = matched + equal.long()
        earlier = (place < end - 1) & (matched >= self.min_ngram)
        # The longest match wins, then the most recent one.
        score = torch.where(earlier, matched * history.shape[1] + place, -1)
        best, at = score.max(1, keepdim=True)
        following = at + 1 + torch.arange(self.num_speculative_tokens, device=history.device)
        tokens = history.gather(1, torch.minimum(following, end - 1).clamp(0, None))
        return torch.where((following < end) & (best >= 0), tokens, -1)


def ngram(num_speculative_tokens: int, max_ngram: int, min_ngram: int, device: torch.device) -> Drafter:
    """The n-gram drafter; it needs nothing but the token history."""
    module = NGram(num_speculative_tokens, max_ngram, min_ngram)
    history = torch.zeros(3, 11, dtype=torch.int64, device=device)
    length = torch.full((3,), 5, dtype=torch.int64, device=device)
    batch, longest = torch.export.Dim("batch", min=1), torch.export.Dim("longest", min=1)
    dims = {"history": {0: batch, 1: longest}, "length": {0: batch}}
    graph = export_module(module, (history, length), dims, "draft")
    return Drafter("ngram", "history", num_speculative_tokens, {"draft": graph})
