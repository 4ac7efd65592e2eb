"""The loss of a head over chains of drafts, as decoding makes them ("training-time test").

Step ``i`` has one row per position ``t`` of the text, all run at once. It takes token ``x[t+1+i]`` at position
``t + i`` and predicts ``x[t+2+i]``. At step 0 the hidden state is what the head makes of the target's features at
``t``, later it is the head's own output of the step before, with its gradient. Row ``t`` sees the step-0 keys up to
``t`` and the keys of its own chain: exactly what it sees when the target has verified everything up to ``x[t+1]``.
A parallel head takes the mask token and ``mask_hidden`` in the steps after 0, so that all steps fit into one call.
That is the EAGLE family; every head says itself, by ``unroll`` and ``step_logits``, how it gets from step to step.

Sources: Li et al. 2025, EAGLE-3 (arXiv 2503.01840); P-EAGLE (Amazon, 2026), the ``peagle`` of speculators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specgraph.drafters.base import DraftHead

from .config import ChainConfig
from .teacher import Lesson


class StepOutput(NamedTuple):
    """One step over the rows asked for: the head's logits ``[R, Vd]``, the target's for the same token ``[R, Vd]``, and
    ``counts`` bool ``[R]``: whether the target's most probable token can be drafted at all."""

    logits: Tensor
    wanted: Tensor
    counts: Tensor


class ChainLoss(nn.Module):
    """A head with its loss: what the optimiser trains."""

    def __init__(self, head: DraftHead, steps: int) -> None:
        super().__init__()
        self.head: Any = head.module
        self.parallel = head.parallel
        self.steps = steps
        self.mask_token_id = head.mask_token_id if head.parallel else None

    def forward(self, tokens: Tensor, lesson: Lesson, rows: Sequence[Tensor]) -> Tensor:
        """Mean loss of every step, float32 ``[steps]``, in nats per token.

        Args:
            tokens: int64 ``[B, S]``.
            lesson: what the target says about them.
            rows: for every step, int64 indices into the ``B * S`` rows whose predictions count.
        """
        return torch.stack([mean_loss(out) for out in self.outputs(tokens, lesson, rows)])

    def outputs(self, tokens: Tensor, lesson: Lesson, rows: Sequence[Tensor]) -> Iterator[StepOutput]:
        """What the head and the target say at ``rows``, step by step; arguments as in :meth:`forward`."""
        theirs = lesson.logits.flatten(0, 1)
        vocabulary = self.head.draft_to_target
        dtype = next(parameter.dtype for parameter in self.parameters() if parameter.requires_grad)
        features = tuple(feature.to(dtype) for feature in lesson.features)
        drafts = self.head.unroll(tokens, features, self.steps, self.mask_token_id)
        for index, (hidden, chosen) in enumerate(zip(drafts, rows, strict=True)):
            logits = self.head.step_logits(hidden.flatten(0, 1)[chosen], index)
            wanted = theirs[chosen + 1 + index]
            counts = torch.ones_like(chosen, dtype=torch.bool)
            if isinstance(vocabulary, Tensor):
                counts = torch.isin(wanted.argmax(-1), vocabulary)
                wanted = wanted[:, vocabulary]
            yield StepOutput(logits, wanted, counts)


def mean_loss(out: StepOutput) -> Tensor:
    """Cross-entropy against the target's distribution over what can be drafted, float32 or float64: a scalar."""
    exact = torch.promote_types(out.logits.dtype, torch.float32)
    each = F.cross_entropy(out.logits.to(exact), out.wanted.to(exact).softmax(-1), reduction="none")
    return (each * out.counts).sum() / out.counts.sum().clamp_min(1)


def counted_rows(weights: Tensor, cfg: ChainConfig, generator: torch.Generator | None = None) -> list[Tensor]:
    """For every step, the rows whose prediction counts, as indices into ``B * S``.

    Args:
        weights: ``[B, S - 1]``, what it counts to predict ``tokens[:, 1:]``; not 0 is counted.
        cfg: ``keep`` is the share of rows that a step learns from.
        generator: draws them; None keeps all.
    """
    batch, predicted = weights.shape
    found = []
    for step in range(cfg.steps):
        # Row t predicts tokens[t + 2 + step], whose weight is at t + 1 + step.
        counted = torch.zeros(batch, predicted + 1, dtype=torch.bool)
        counted[:, : max(0, predicted - 1 - step)] = weights[:, 1 + step :] > 0
        rows = counted.flatten().nonzero().flatten()
        share = max(cfg.keep**step, cfg.keep_least)
        if generator is not None and share < 1 and len(rows):
            count = max(1, round(share * len(rows)))
            rows = rows[torch.randperm(len(rows), generator=generator)[:count].sort().values]
        found.append(rows)
    return found


def step_weights(cfg: ChainConfig, device: torch.device) -> Tensor:
    """``decay ** i``, scaled to a sum of 1: float32 ``[steps]``."""
    weights = cfg.decay ** torch.arange(cfg.steps, device=device, dtype=torch.float32)
    return weights / weights.sum()
