"""The logits and scores from which tokens were chosen, in the form in which transformers gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.generation import (
    LogitNormalization,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specgraph.runtime.requests.host_processors import HostProcessor, Rows
from specgraph.runtime.requests.request import Request
from specgraph.runtime.requests.sampling import Sampling


class Wanted(NamedTuple):
    """What of it a caller asks for, and whether scores are to be log-probabilities."""

    scores: bool = False
    logits: bool = False
    normalized: bool = False


class Recorder(HostProcessor):
    """Keeps the logits from which a sequence's tokens were chosen.

    Attributes:
        logits: the target's own for every new token, float32 ``[n, V]`` for each step.
        scores: those behind all processors, but in front of temperature and the like.
    """

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self.logits: list[Tensor] = []
        self.scores: list[Tensor] = []
        self._last: list[tuple[list[Tensor], Tensor]] = []

    def change(self, rows: Rows) -> None:
        """Keep the rows of a step until it is known how many of them count."""
        parts = [(self.logits, rows.raw)] if self._wanted.logits else []
        parts += [(self.scores, rows.logits)] if self._wanted.scores else []
        self._last = [(there, values.float().clone()) for there, values in parts]

    def emitted(self, count: int) -> None:
        """Keep the first ``count`` rows for good."""
        for there, values in self._last:
            there.append(values[:count])
        self._last = []


def recorded_logits(requests: Sequence[Request], lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """The target's logits by new token: float32 ``[B, V]`` each, with zeros behind the end of a sequence."""
    return _by_token([_joined(request, "logits", n) for request, n in zip(requests, lengths, strict=True)])


def recorded_scores(
    requests: Sequence[Request], new_tokens: Sequence[Tensor], *, normalized: bool
) -> tuple[Tensor, ...]:
    """What the tokens were drawn from, by new token: float32 ``[B, V]`` each, with zeros behind the end of a sequence.

    These are logits behind processors, temperature, top-k, top-p and min-p; -inf is a token without probability.
    ``normalized`` makes log-probabilities of them.
    """
    rows = []
    for request, new in zip(requests, new_tokens, strict=True):
        own = _joined(request, "scores", len(new))
        warpers = _warpers(request.sampling)
        if normalized:
            warpers.append(LogitNormalization())
        rows.append(warpers(own.new_zeros(len(own), 0, dtype=torch.int64), own) if warpers and len(own) else own)
    return _by_token(rows)


def _joined(request: Request, kind: str, count: int) -> Tensor:
    """The first ``count`` rows that a sequence's recorder has kept; criteria may have ended it before the last."""
    (recorder,) = (own for own in request.host if isinstance(own, Recorder))
    parts: list[Tensor] = getattr(recorder, kind)
    return torch.cat(parts)[:count] if parts else torch.empty(0, 0)


def _by_token(rows: Iterable[Tensor]) -> tuple[Tensor, ...]:
    given = [*rows]
    vocab = max(row.shape[1] for row in given)
    given = [row if row.shape[1] else row.new_zeros(0, vocab) for row in given]
    return torch.nn.utils.rnn.pad_sequence(given).unbind(0)


def _warpers(sampling: Sampling) -> LogitsProcessorList:
    """transformers' own, in the order in which verification applies them."""
    if sampling.temperature == 0:
        return LogitsProcessorList()
    own = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        own.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        own.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        own.append(MinPLogitsWarper(sampling.min_p))
    return own
