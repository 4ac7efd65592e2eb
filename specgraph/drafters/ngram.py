"""Prompt lookup: propose what followed the last occurrence of the current n-gram in the sequence itself.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from specgraph.config import DraftConfig
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep
from specgraph.errors import ConfigError
from specgraph.ir.graphs import export_module
from specgraph.kernels import step as functions
from specgraph.kernels.state import Buffer


@dataclass
class NGramConfig(DraftConfig):
    """Keys of ``draft`` that prompt lookup reads."""

    kind: str = "ngram"
    max_ngram: int = 4
    """the longest n-gram looked up."""
    min_ngram: int = 1
    """the shortest one."""

    def check(self) -> None:
        """Raise ``ConfigError`` for lengths that make no sense."""
        super(type(self), self).check()
        if self.min_ngram < 1:
            raise ConfigError(f"draft.min_ngram must be at least 1, got {self.min_ngram}.")
        if self.max_ngram < self.min_ngram:
            raise ConfigError(f"draft.max_ngram ({self.max_ngram}) is below draft.min_ngram.")


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
        drafts: Tensor = torch.ops.specgraph.ngram_lookup(
            history, None, length, self.num_speculative_tokens, self.max_ngram, self.min_ngram
        )
        return drafts


@dataclass(frozen=True, eq=False)
class NGramDrafter(Drafter):
    """Calls its module ``draft`` once with the token history (int64 ``[B, S]``) and its length (``[B]``).

    Its proposals ``[B, K]`` are point masses: it has no distribution to draw from.
    """

    kind: ClassVar[str] = "ngram"
    Config: ClassVar[type[DraftConfig]] = NGramConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        """Export the lookup for the target's device."""
        drafter = ngram(options.num_speculative_tokens, options.max_ngram, options.min_ngram, target.info.device)
        return Draft(drafter)

    def build(self, step: DraftStep) -> int:
        """Record what was accepted, then look the end of it up."""
        history = step.state("history", Buffer(("B", "S")))
        tokens, positions, rows = step.caught_up(step.target_vocab_size)
        step.call(functions.record_tokens_, history, tokens, positions, rows, name="record_tokens_")
        length = step.call(functions.history_length, step.start, step.num_emitted, name="length")
        step.propose("draft", history=history, length=length, name="proposals")
        return 1


def ngram(num_speculative_tokens: int, max_ngram: int, min_ngram: int, device: torch.device) -> NGramDrafter:
    """The n-gram drafter; it needs nothing but the token history."""
    module = NGram(num_speculative_tokens, max_ngram, min_ngram)
    history = torch.zeros(3, 11, dtype=torch.int64, device=device)
    length = torch.full((3,), 5, dtype=torch.int64, device=device)
    batch, longest = torch.export.Dim("batch", min=1), torch.export.Dim("longest", min=1)
    dims = {"history": {0: batch, 1: longest}, "length": {0: batch}}
    graph = export_module(module, (history, length), dims, "draft")
    return NGramDrafter(num_speculative_tokens, {"draft": graph})
