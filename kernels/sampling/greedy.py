"""What sampling and verification share on a CPU at temperature 0, where the largest logit is the token."""

from __future__ import annotations

from torch import Tensor

from specgraph.kernels.sampling.constants import GREEDY_BELOW


def is_greedy(logits: Tensor, temperature: Tensor, seeds: Tensor | None) -> bool:
    """Whether there are rows, and nothing is drawn in any of them."""
    return seeds is None and logits.numel() > 0 and bool((temperature < GREEDY_BELOW).all())


def greedy_tokens(logits: Tensor) -> Tensor | None:
    """The first of the largest logits ``[..., V]`` of each row, int64 ``[...]``.

    None if one of these is a NaN or infinite, as that of a row of -inf is: definitions replace such logits before they
    draw.
    """
    largest, tokens = logits.max(-1)
    return tokens if bool(largest.isfinite().all()) else None
