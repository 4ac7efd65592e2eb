"""The loss of a head over chains of drafts, as decoding makes them ("training-time test").

Step ``i`` has one row per position ``t`` of the text, all run at once. It takes token ``x[t+1+i]`` at position
``t + i`` and predicts ``x[t+2+i]``. At step 0 the hidden state is what the head makes of the target's features at
``t``, later it is the head's own output of the step before, with its gradient. Row ``t`` sees the step-0 keys up to
``t`` and the keys of its own chain: exactly what it sees when the target has verified everything up to ``x[t+1]``.
A parallel head takes the mask token and ``mask_hidden`` in the steps after 0, so that all steps fit into one call.

Sources: Li et al. 2025, EAGLE-3 (arXiv 2503.01840); P-EAGLE (Amazon, 2026), the ``peagle`` of speculators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache

from specgraph.drafters.eagle3 import DraftHead, Eagle3

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
        self.head: Eagle3 = head.module
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
        for index, (hidden, chosen) in enumerate(zip(self._chain(tokens, lesson.features), rows, strict=True)):
            logits, _ = self.head.predict(hidden.flatten(0, 1)[chosen])
            wanted = theirs[chosen + 1 + index]
            counts = torch.ones_like(chosen, dtype=torch.bool)
            if isinstance(vocabulary, Tensor):
                counts = torch.isin(wanted.argmax(-1), vocabulary)
                wanted = wanted[:, vocabulary]
            yield StepOutput(logits, wanted, counts)

    def _chain(self, tokens: Tensor, features: tuple[Tensor, ...]) -> Iterator[Tensor]:
        """The output rows ``[B, S, H]`` of every step, before the last norm.

        Rows near the end lack their token and take one from the front; nothing that counts sees them.
        """
        dtype = self.head.norm.get_parameter("weight").dtype
        hidden = self.head.combine(*(feature.to(dtype) for feature in features))
        if self.mask_token_id is None:
            yield from self._chained(tokens, hidden)
        else:
            yield from self._at_once(tokens, hidden, self.mask_token_id)

    def _chained(self, tokens: Tensor, hidden: Tensor) -> Iterator[Tensor]:
        """One call per step; the cache holds the keys of the steps before."""
        length, cache, positions = tokens.shape[1], DynamicCache(), self._positions(tokens)
        mask = chain_mask(length, self.steps, tokens.device)
        for step in range(self.steps):
            hidden = self.head(tokens.roll(-1 - step, dims=1), positions + step, hidden, past_key_values=cache,
                               attention_mask=mask[..., -length:, : (step + 1) * length])  # fmt: skip
            yield hidden
            if self.head.config.norm_output:
                hidden = self.head.norm(hidden)

    def _at_once(self, tokens: Tensor, hidden: Tensor, mask_token_id: int) -> Sequence[Tensor]:
        """All steps in one call, as in decoding: no step waits for the one before."""
        steps, length, config = self.steps, tokens.shape[1], self.head.config
        assert self.head.mask_hidden is not None  # a parallel head has one
        masked = self.head.combine(*self.head.mask_hidden.view(1, 1, config.num_features, -1).unbind(2))
        masked = masked.expand(len(tokens), (steps - 1) * length, -1)
        unknown = tokens.new_full((len(tokens), (steps - 1) * length), mask_token_id)
        positions = torch.cat([self._positions(tokens) + step for step in range(steps)], dim=1)
        rows: Tensor = self.head(torch.cat([tokens.roll(-1, dims=1), unknown], dim=1), positions,
                                 torch.cat([hidden, masked.to(hidden.dtype)], dim=1),
                                 attention_mask=chain_mask(length, steps, tokens.device))  # fmt: skip
        return rows.chunk(steps, dim=1)

    def _positions(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)


def mean_loss(out: StepOutput) -> Tensor:
    """Cross-entropy against the target's distribution over what can be drafted, float32 or float64: a scalar."""
    exact = torch.promote_types(out.logits.dtype, torch.float32)
    each = F.cross_entropy(out.logits.to(exact), out.wanted.to(exact).softmax(-1), reduction="none")
    return (each * out.counts).sum() / out.counts.sum().clamp_min(1)


def chain_mask(length: int, steps: int, device: torch.device) -> Tensor:
    """Which keys the rows of all steps see, bool ``[1, 1, steps * length, steps * length]``.

    Of step 0 those up to their own position, of the later steps up to theirs the one at their own position.
    """
    step, row = torch.arange(steps, device=device), torch.arange(length, device=device)
    step, row = step.repeat_interleave(length), row.repeat(steps)
    text = (step == 0) & (row <= row[:, None])
    own = (step > 0) & (step <= step[:, None]) & (row == row[:, None])
    return (text | own)[None, None]


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
