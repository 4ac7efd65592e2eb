"""``sample`` of one row on a CPU: the same token, with noise for the tokens that can win.

The definition, :func:`~specgraph.kernels.sampling.sample.sample`, draws Gumbel noise for every token. Here the
likeliest tokens are scored first. A token whose log-weight is so small that the largest noise there is
(:data:`MOST_NOISE`) does not lift it to the best of these scores cannot win, and needs no noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from specgraph.kernels.sampling.sample import gumbel, sample

FIRST = 512
"""The number of tokens that are scored first."""
MOST = 16384
"""Noise for so many single tokens takes about as long as that for 65,536 in a row, for which the definition is used."""
MOST_NOISE = 22.9
"""No Gumbel noise is larger: the smallest exponential is 2**-33, and ``-log(2**-33)`` is 22.88."""


@dataclass(frozen=True)
class Noise:
    """Which noise a row takes, as for :func:`~specgraph.kernels.sampling.sample.sample`.

    Attributes:
        seeds: int64 ``[1]``.
        stream: one of the ``STREAM_`` constants.
        key: int64 ``[1, 1]``.
        row: int64 ``[1, 1]``, or None for 0.
    """

    seeds: Tensor
    stream: int
    key: Tensor
    row: Tensor | None = None

    def of_tokens(self, ids: Tensor) -> Tensor:
        """The noise of target token ids int64 ``[N]``, float32 ``[N]``."""
        return gumbel(self.seeds, self.stream, self.key, self.row, ids).view(-1)


def draw_row(weights: Tensor, noise: Noise | None, token_ids: Tensor | None = None) -> int:
    """Draw one token by Gumbel-max.

    Args:
        weights: float32 ``[V]``: log-weights.
        noise: None draws the first of the largest log-weights.
        token_ids: int64 ``[V]``: the target token id whose noise each entry uses. None: the entry's index.

    Returns:
        The index that ``sample`` gives.
    """
    if noise is None or not math.isfinite(float(weights.amax())):
        return int(weights.argmax())
    alive = (weights > -math.inf).nonzero().view(-1)
    if len(alive) > FIRST:
        _, score = _best(weights, noise, token_ids, weights.topk(FIRST).indices)
        alive = (weights + MOST_NOISE >= score).nonzero().view(-1)  # the sum rounds as a score does
    if len(alive) > MOST:
        return int(sample(weights.view(1, 1, -1), noise.seeds, noise.key, noise.row, noise.stream, token_ids))
    return _best(weights, noise, token_ids, alive)[0]


def _best(weights: Tensor, noise: Noise, token_ids: Tensor | None, entries: Tensor) -> tuple[int, float]:
    """The first of ``entries`` with the largest score among them, and that score."""
    scores = weights[entries] + noise.of_tokens(entries if token_ids is None else token_ids[entries])
    score = scores.amax()
    return int(entries[scores == score].min()), float(score)
