"""``sample`` of one row on a CPU: the same token, with noise for the few tokens that can win.

The definition, :func:`~specgraph.kernels.sampling.sample.sample`, draws Gumbel noise for every token. Here a *group* is
a set of tokens that share an octet's word: the octet itself, or one token if the row is over a draft's own vocabulary.
The word of an octet gives the largest noise that any of its tokens can have. Added to the largest log-weight of the
group, it bounds the scores of the group. The groups with the highest bounds are scored first. Every group whose bound
is below the best of these scores cannot win, and its tokens need no noise. This is exact, since the bounds are those of
the definition's own noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph.kernels.sampling.sample import gumbel, octet_exponentials, sample

FIRST = 512
"""The number of tokens that are scored first."""
MOST = 16384
"""Noise for so many single tokens takes about as long as that for 65,536 in a row, for which the definition is used."""
SLACK = 1e-4
"""What is added to a bound, because the logarithm of a smaller number may be rounded to a larger one."""


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

    def of_octets(self, count: int) -> Tensor:
        """A bound on the noise of the tokens of each of the first octets, float32 ``[count]``."""
        smallest = octet_exponentials(self.seeds, self.stream, self.key, self.row, count)
        return smallest.log_().neg_().add_(SLACK).view(-1)


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
    width = 8 if token_ids is None else 1
    highest = weights
    if token_ids is None:
        highest = torch.nn.functional.max_pool1d(weights.view(1, 1, -1), width, ceil_mode=True).view(-1)
    race = _Race(weights, noise, token_ids, width)
    alive = (highest > -math.inf).nonzero().view(-1)
    if len(alive) * width <= FIRST:
        return race.best(alive)[0]
    bounds = highest + _bounds(noise, token_ids, len(highest))
    likely, first = bounds.topk(FIRST // width)
    token, score = race.best(first)
    if float(likely[-1]) < score:
        return token
    left = (bounds >= score).nonzero().view(-1)
    if len(left) * width > MOST:
        return int(sample(weights.view(1, 1, -1), noise.seeds, noise.key, noise.row, noise.stream, token_ids))
    return race.best(left)[0]


def _bounds(noise: Noise, token_ids: Tensor | None, groups: int) -> Tensor:
    """A bound on the noise of each group, float32 ``[groups]``."""
    if token_ids is None:
        return noise.of_octets(groups)
    octets = token_ids // 8
    return noise.of_octets(int(octets.max()) + 1)[octets]


@dataclass(frozen=True)
class _Race:
    """The tokens of a row, of which some are scored."""

    weights: Tensor
    noise: Noise
    token_ids: Tensor | None
    width: int

    def best(self, groups: Tensor) -> tuple[int, float]:
        """The first of the tokens with the largest score among some groups, and that score."""
        tokens = (groups.unsqueeze(1) * self.width + torch.arange(self.width)).view(-1)
        tokens = tokens[tokens < len(self.weights)]
        scores = self.weights[tokens] + self.noise.of_tokens(
            tokens if self.token_ids is None else self.token_ids[tokens]
        )
        score = scores.amax()
        return int(tokens[scores == score].min()), float(score)
