"""The loss of a head over chains of drafts, made as in decoding ("training-time test").

Step ``i`` computes draft ``i`` for all positions ``t`` of the text at once. In the EAGLE family, its row ``t`` takes
token ``x[t+1+i]`` at position ``t + i`` and predicts ``x[t+2+i]``. In step 0, the hidden state is computed from the
target's features at ``t``. In later steps, it is the head's own output of the step before, with its gradient. Row ``t``
sees the keys of step 0 up to ``t`` and the keys of its own chain, which is what it sees in decoding when the target has
verified the tokens up to ``x[t+1]``. In the steps after 0, a parallel head takes the mask token and ``mask_hidden``, so
that one call computes all steps. A block head runs a block of masks behind every token ``x[t+1]``, or behind some that
are drawn for each batch. A Markov head takes the text's token before each draft. How a head gets from step to step is
defined by its ``unroll`` and ``step_logits``.

Sources: Li et al. 2025, EAGLE-3 (arXiv 2503.01840); P-EAGLE (Amazon, 2026), the ``peagle`` of speculators; DFlash
(z-lab, 2026), the ``dflash`` of speculators; DSpark (DeepSeek, 2026), the ``dspark`` of DeepSpec.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from specgraph.drafters.base import DraftHead
from specgraph.training.config import ChainConfig
from specgraph.training.teacher import Lesson


class StepOutput(NamedTuple):
    """One step at the given rows: the head's logits ``[R, Vd]``, the target's logits for the same token ``[R, Vd]``,
    and ``counts`` bool ``[R]``, which says whether the target's most probable token can be drafted at all.

    ``estimates`` ``[R]`` are the logits of the head's own estimates that its drafts are accepted, or None, and
    ``accepted`` ``[R]`` the probabilities that they are, or None where nothing learns from them.
    """

    logits: Tensor
    wanted: Tensor
    counts: Tensor
    estimates: Tensor | None = None
    accepted: Tensor | None = None


class Chunk(NamedTuple):
    """Some rows of one step: their indices ``rows`` ``[R]`` into ``B * S``, what the head's projection reads of them
    ``[R, H]``, and ``theirs`` ``[R, Ht]``, what the target's reads to predict the same tokens."""

    step: int
    rows: Tensor
    read: Tensor
    theirs: Tensor


class ChainLoss(nn.Module):
    """A head together with its loss, as the module that the optimiser trains.

    Attributes:
        chunk_size: the most logits that the loss computes at once. At 2^27, a tensor of them takes 512 MB in float32,
            and the loss needs about six of these.
    """

    def __init__(self, head: DraftHead, steps: int, overlap: float = 0.0, chunk_size: int = 1 << 27) -> None:
        """``overlap`` is the share of the loss that is the probability of a rejection, see :class:`ChainConfig`."""
        super().__init__()
        self.overlap, self.chunk_size = overlap, chunk_size
        self.head: Any = head.module
        self.steps = steps
        self.mask_token_id = head.mask_token_id

    def forward(self, tokens: Tensor, lesson: Lesson, rows: Sequence[Tensor]) -> Tensor:
        """The mean loss of every step, float32 ``[steps]``: nats per token, or their mix with the probability of a
        rejection; and the loss of the estimates if there are any.

        Args:
            tokens: int64 ``[B, S]``.
            lesson: the target's hidden states for these tokens, and its projection.
            rows: for every step, the indices (int64) of those of the ``B * S`` rows whose predictions count.
        """
        return torch.stack([self._loss(chunks, lesson) for chunks in self.steps_of(tokens, lesson, rows)])

    def _loss(self, chunks: Sequence[Chunk], lesson: Lesson) -> Tensor:
        """The loss of one step. With several chunks, their logits are computed again in the backward pass, so that
        those of one chunk are kept at a time."""
        again = len(chunks) > 1 and torch.is_grad_enabled()
        parts = [
            checkpoint(self._sums, chunk, lesson, use_reentrant=False, preserve_rng_state=False)
            if again
            else self._sums(chunk, lesson)
            for chunk in chunks
        ]
        nats, counted, rejected, estimated = torch.stack(parts).sum(0) if parts else lesson.hidden.new_zeros(4)
        total = max(1, sum(len(chunk.read) for chunk in chunks))
        loss = nats / counted.clamp_min(1)
        return (1 - self.overlap) * loss + self.overlap * rejected / total + estimated / total

    def _sums(self, chunk: Chunk, lesson: Lesson) -> Tensor:
        """Sums over the rows of a chunk, float32 or float64 ``[4]``: the cross-entropy, the rows that count for it, the
        probability of a rejection, and the loss of the estimates."""
        out = self.output(chunk, lesson)
        nats, counted = summed_loss(out)
        rejected = nats.new_zeros(()) if out.accepted is None else (1 - out.accepted).sum()
        return torch.stack([nats, counted.to(nats), rejected, estimate_loss(out) * len(chunk.read)])

    def steps_of(self, tokens: Tensor, lesson: Lesson, rows: Sequence[Tensor]) -> Iterator[list[Chunk]]:
        """The rows of every step in chunks, step by step. The arguments are those of forward."""
        theirs = lesson.hidden.flatten(0, 1)
        dtype = next(parameter.dtype for parameter in self.parameters() if parameter.requires_grad)
        features = tuple(feature.to(dtype) for feature in lesson.features)
        drafts = self.head.unroll(tokens, features, self.steps, self.mask_token_id, rows)
        for index, (hidden, chosen) in enumerate(zip(drafts, rows, strict=True)):
            chunks = torch.split(chosen, max(1, self.chunk_size // lesson.vocab_size))
            flat = hidden.flatten(0, 1)
            yield [Chunk(index, some, flat[some], theirs[some + 1 + index]) for some in chunks]

    def output(self, chunk: Chunk, lesson: Lesson) -> StepOutput:
        """The logits of the head and of the target at the rows of a chunk."""
        vocabulary = self.head.draft_to_target
        estimate = getattr(self.head, "step_estimates", lambda rows: None)  # of heads that estimate
        logits, estimates = self.head.step_logits(chunk.read, chunk.step), estimate(chunk.read)
        wanted = lesson.project(chunk.theirs)
        learned = estimates is not None or self.overlap > 0
        accepted = acceptance(logits, wanted, vocabulary) if learned else None
        counts = torch.ones_like(chunk.rows, dtype=torch.bool)
        if isinstance(vocabulary, Tensor):
            counts = torch.isin(wanted.argmax(-1), vocabulary)
            wanted = wanted[:, vocabulary]
        return StepOutput(logits, wanted, counts, estimates, accepted)


def summed_loss(out: StepOutput) -> tuple[Tensor, Tensor]:
    """The sum of the cross-entropies against the target's distribution over the draft vocabulary, a float32 or float64
    scalar, and the number of rows in it."""
    exact = torch.promote_types(out.logits.dtype, torch.float32)
    each = F.cross_entropy(out.logits.to(exact), out.wanted.to(exact).softmax(-1), reduction="none")
    return (each * out.counts).sum(), out.counts.sum()


def acceptance(logits: Tensor, wanted: Tensor, vocabulary: Tensor | None) -> Tensor:
    """The probability ``[R]`` that rejection sampling accepts a draft drawn at temperature 1.

    It is the sum of the smaller of the two probabilities of every token, which is 1 less the total variation.

    Args:
        logits: the head's, ``[R, Vd]``.
        wanted: the target's, ``[R, V]``.
        vocabulary: the target's ids of the drafts, int64 ``[Vd]``; None for all.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    p, q = wanted.to(exact).softmax(-1), logits.to(exact).softmax(-1)
    return torch.minimum(p if vocabulary is None else p[:, vocabulary], q).sum(-1).clamp_max(1)


def estimate_loss(out: StepOutput) -> Tensor:
    """The binary cross-entropy of the head's estimates against the acceptance, a scalar; 0 if there are none.

    Source: DSpark (DeepSeek, 2026), ``compute_dspark_loss`` of DeepSpec.
    """
    if out.estimates is None or out.accepted is None:
        return out.logits.new_zeros(())
    accepted = out.accepted.detach()
    each = F.binary_cross_entropy_with_logits(out.estimates.to(accepted), accepted, reduction="none")
    return each.sum() / max(1, each.numel())


def counted_rows(weights: Tensor, cfg: ChainConfig, generator: torch.Generator | None = None) -> list[Tensor]:
    """For every step, the rows whose prediction counts, as indices into ``B * S``.

    Args:
        weights: ``[B, S - 1]``, the weights of the predictions of ``tokens[:, 1:]``; those above 0 count.
        cfg: its ``anchors``, ``keep`` and ``keep_least`` give the share of rows from which a step learns.
        generator: draws these rows; None keeps all.
    """
    batch, predicted = weights.shape
    anchors = _anchors(weights, 1.0 if generator is None else cfg.anchors, generator)
    found = []
    for step in range(cfg.steps):
        # Row t predicts tokens[t + 2 + step], whose weight is at t + 1 + step.
        counted = torch.zeros(batch, predicted + 1, dtype=torch.bool)
        counted[:, : max(0, predicted - 1 - step)] = weights[:, 1 + step :] > 0
        rows = (counted & anchors).flatten().nonzero().flatten()
        share = max(cfg.keep**step, cfg.keep_least)
        found.append(rows if generator is None or share >= 1 else _drawn(rows, share, generator))
    return found


def _anchors(weights: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """The rows behind which drafts are made, bool ``[B, S]``: all of them, or a share of those whose next token counts.

    What comes behind the last token of a text counts for no draft, so its row is never drawn.
    """
    batch, predicted = weights.shape
    if share >= 1:
        return torch.ones(batch, predicted + 1, dtype=torch.bool)
    known = torch.cat([weights > 0, torch.zeros(batch, 1, dtype=torch.bool)], dim=1)
    known[:, :-1] &= known[:, 1:]
    chosen = torch.zeros(known.numel(), dtype=torch.bool)
    chosen[_drawn(known.flatten().nonzero().flatten(), share, generator)] = True
    return chosen.view_as(known)


def _drawn(rows: Tensor, share: float, generator: torch.Generator | None) -> Tensor:
    """A share of ``rows``, ascending, and at least one if there are any."""
    count = max(1, round(share * len(rows)))
    return rows[torch.randperm(len(rows), generator=generator)[:count].sort().values]


def step_weights(cfg: ChainConfig, device: torch.device) -> Tensor:
    """The weights ``decay ** i`` of the steps, scaled to a sum of 1, float32 ``[steps]``."""
    weights = cfg.decay ** torch.arange(cfg.steps, device=device, dtype=torch.float32)
    return weights / weights.sum()
