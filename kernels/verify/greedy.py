"""Verification at temperature 0 on a CPU: the largest logit of each row, and a loop over the drafts.

The definition in :mod:`specgraph.kernels.verify.verify` scales, filters and samples with tensors of the vocabulary's
width, in some sixty small operations. At temperature 0 the target is a point mass, and all lossless rules accept the
same drafts. What is left are comparisons of a few integers, for which Python needs less time than for one operation.
"""

from __future__ import annotations

import torch

from specgraph.kernels.sampling import greedy
from specgraph.kernels.verify.arguments import LOSSLESS_RULES, Verified, Verify, check


def is_greedy(given: Verify) -> bool:
    """Whether nothing is drawn and nothing but tokens is wanted."""
    tokens_alone = given.rule in LOSSLESS_RULES and given.logprobs == "none"
    return tokens_alone and greedy.is_greedy(given.logits, given.temperature, given.seeds)


def verify_greedy(given: Verify) -> Verified | None:
    """Verify drafts at temperature 0; None if a logit is a NaN or infinite, which the definition replaces.

    Raises:
        ValueError: an argument has a wrong shape or dtype, or an option is out of range.
    """
    check(given)
    tokens = greedy.greedy_tokens(given.logits)
    if tokens is None:
        return None
    width, vocab = given.positions.shape[1], given.logits.shape[2]
    columns = given.draft_tokens.tolist(), tokens.tolist(), given.num_rows.tolist(), given.num_forced.tolist()
    emitted = [_emitted(drafts, own, rows, forced, vocab) for drafts, own, rows, forced in zip(*columns, strict=True)]
    place = given.positions.new_tensor
    padding = [[-1] * (width - len(row)) for row in emitted]
    return Verified(
        place([row + rest for row, rest in zip(emitted, padding, strict=True)]),
        place([len(row) for row in emitted]),
        place([[*range(len(row)), *rest] for row, rest in zip(emitted, padding, strict=True)]),
        given.logits.new_empty((len(emitted), 0), dtype=torch.float32),
        given.num_rows.new_zeros(len(emitted), dtype=torch.int32),
    )


def _emitted(drafts: list[int], tokens: list[int], num_rows: int, num_forced: int, vocab: int) -> list[int]:
    """The tokens that one sequence emits. ``tokens`` are the target's own, of the rows that have logits."""
    first = min(num_forced, len(drafts) + 1 - len(tokens))
    accepted = min(num_forced, num_rows, len(drafts))
    # Of these rows the last one verifies no draft, because no row would give the token that follows it.
    end = min(num_rows - 1, first + len(tokens) - 1)
    while first <= accepted < end and 0 <= drafts[accepted] < vocab and drafts[accepted] == tokens[accepted - first]:
        accepted += 1
    own = [tokens[max(0, min(accepted - first, len(tokens) - 1))]] if num_forced < num_rows else []
    return drafts[:accepted] + own
