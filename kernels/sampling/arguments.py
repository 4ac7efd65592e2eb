"""What ``specgraph::sample_draft`` takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class SampleDraft:
    """Draw the drafts of a step from number ``row`` on.

    Rules that share the target's noise (:data:`~specgraph.kernels.sampling.sample.SHARED_NOISE_RULES`) key it by the
    token's absolute position, which is ``key`` plus the draft's number. The other rules
    (:data:`~specgraph.kernels.sampling.sample.STEP_NOISE_RULES`) draw from their own stream, keyed by ``key`` and the
    draft's number.

    Attributes:
        logits: ``[B, R, Vd]``, the draft's raw logits in its own vocabulary, for ``R`` drafts.
        temperature, top_k, top_p, min_p: ``[B]`` as for :func:`~specgraph.kernels.sampling.sample.process_logits`.
        seeds: int64 ``[B]``, or None as for :func:`~specgraph.kernels.sampling.sample.sample`.
        key: int64 ``[B]``: the absolute position of the first draft that the next step verifies, which is the key of
            that step.
        draft_to_target: int64 ``[Vd]``: the target id of every draft id. None: they are the same.
        row: the number of the first of these drafts within that step, from 0.
        rule: the verification rule, one of :data:`~specgraph.kernels.sampling.sample.RULES`; others raise
            ``ValueError``.
        target_vocab_size: draft ids whose target id is not below this are never drawn. None: every id may be drawn.
        return_processed: whether to return the log-weights.

    Returns:
        The tokens as target ids, int64 ``[B, R]``, and the processed log-weights they were drawn from,
        ``[B, R, Vd]``, or ``[B, R, 0]`` if they are not wanted.
    """

    logits: Tensor
    temperature: Tensor
    seeds: Tensor | None
    key: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    draft_to_target: Tensor | None
    row: int
    rule: str
    target_vocab_size: int | None = None
    return_processed: bool = True
