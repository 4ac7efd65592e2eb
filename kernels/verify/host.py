"""Verification in Python on a CPU, one sequence after the other, where a draft is right if it is the row's own token.

So it is under ``strict``, and at temperature 0 under every lossless rule. Rows behind the first wrong draft are never
asked for their tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from specgraph.kernels.verify.arguments import Verified, Verify


@dataclass(frozen=True)
class Block:
    """The rows of one sequence.

    Attributes:
        drafts: the K draft tokens.
        num_rows, num_forced: as for :class:`~specgraph.kernels.verify.arguments.Verify`.
        count: how many rows have logits.
        vocab: the size of the vocabulary.
    """

    drafts: list[int]
    num_rows: int
    num_forced: int
    count: int
    vocab: int

    @property
    def first(self) -> int:
        """The row of the block that the first row of logits belongs to."""
        return min(self.num_forced, len(self.drafts) + 1 - self.count)

    def emitted(self, token: Callable[[int], int]) -> list[int]:
        """The tokens that the sequence emits. ``token`` gives the target's own, of a row that has logits."""
        drafts, first = self.drafts, self.first
        accepted = min(self.num_forced, self.num_rows, len(drafts))
        # Of these rows the last one verifies no draft, because no row would give the token that follows it.
        end = min(self.num_rows - 1, first + self.count - 1)
        while first <= accepted < end and 0 <= drafts[accepted] < self.vocab:
            own = token(accepted - first)
            if own != drafts[accepted]:
                return [*drafts[:accepted], own]
            accepted += 1
        if self.num_forced >= self.num_rows:
            return drafts[:accepted]
        return [*drafts[:accepted], token(max(0, min(accepted - first, self.count - 1)))]


def blocks(given: Verify) -> list[Block]:
    """The rows of every sequence."""
    count, vocab = given.logits.shape[1:]
    columns = given.draft_tokens.tolist(), given.num_rows.tolist(), given.num_forced.tolist()
    return [Block(*values, count, vocab) for values in zip(*columns, strict=True)]


def laid_out(
    given: Verify, emitted: list[list[int]], bad: torch.Tensor, logprobs: torch.Tensor | None = None
) -> Verified:
    """The op's result for the tokens of each sequence."""
    width, place = given.positions.shape[1], given.positions.new_tensor
    padding = [[-1] * (width - len(row)) for row in emitted]
    if logprobs is None:
        logprobs = given.logits.new_empty((len(emitted), 0), dtype=torch.float32)
    return Verified(
        place([row + rest for row, rest in zip(emitted, padding, strict=True)]),
        place([len(row) for row in emitted]),
        place([[*range(len(row)), *rest] for row, rest in zip(emitted, padding, strict=True)]),
        logprobs,
        bad,
    )
