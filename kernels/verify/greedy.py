"""Verification at temperature 0 on a CPU: the largest logit of each row, and a loop over the drafts.

The definition in :mod:`specgraph.kernels.verify.verify` scales, filters and samples with tensors of the vocabulary's
width, in some sixty small operations. At temperature 0 the target is a point mass, and all lossless rules accept the
same drafts. What is left are comparisons of a few integers, for which Python needs less time than for one operation.
"""

from __future__ import annotations

import torch

from specgraph.kernels.sampling import greedy
from specgraph.kernels.verify.arguments import LOSSLESS_RULES, Verified, Verify, check
from specgraph.kernels.verify.host import blocks, laid_out


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
    emitted = []
    for own, block in zip(tokens.tolist(), blocks(given), strict=True):
        emitted.append(block.emitted(own.__getitem__))
    return laid_out(given, emitted, given.num_rows.new_zeros(len(emitted), dtype=torch.int32))
