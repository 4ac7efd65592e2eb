"""What ``specgraph::verify`` takes and gives: shapes, dtypes and options, with messages that say what is allowed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.sampling.sample import check_rule

LOSSLESS_RULES = ("strict", "probabilistic", "block")
"""The rules whose output has exactly the target's distribution. ``typical`` and ``synthetic`` change it."""
LOGPROBS = ("none", "raw", "processed")
VECTORS = {
    "temperature": None, "seeds": torch.int64, "top_k": torch.int64, "top_p": None, "min_p": None,
    "num_rows": torch.int64, "num_forced": torch.int64, "point_mass": torch.bool, "draft_rows": torch.int64,
}
"""The arguments with one value per sequence, and the dtypes that they must have."""


@dataclass(slots=True)
class Verify:
    """Accept drafts by a rule, and draw the target's own token behind the accepted ones, for ``B`` sequences.

    :mod:`specgraph.kernels.verify.verify` says what the rows are.

    Attributes:
        logits: ``[B, R, V]`` raw logits of any float dtype, ``1 <= R <= K + 1``.
        draft_tokens: int ``[B, K]`` target ids, -1 where there is no draft.
        draft_logits: ``[N, Kd, Vd]``, the processed log-weights the drafts were drawn from, of which the first K rows
            are read; None for drafts that were proposed without a distribution.
        temperature: float ``[B]``; 0 is greedy.
        seeds: int64 ``[B]``; None draws nothing, for batches at temperature 0.
        positions: int64 ``[B, K + 1]``, the absolute, unpadded position of the token each row gives.
        top_k, top_p, min_p: ``[B]`` as for :func:`~specgraph.kernels.sampling.sample.process_logits`.
        num_rows: int64 ``[B]``, real rows. 0: the sequence is inactive.
        num_forced: int64 ``[B]``, tokens known already, at most K.
        target_to_draft: int ``[V]`` as :func:`~specgraph.kernels.verify.verify.invert_vocabulary` makes it; None: ids
            mean the same.
        point_mass: bool ``[B]``, the sequences whose drafts were proposed without a distribution although
            ``draft_logits`` are given for others: q is 1 at the draft token and 0 elsewhere. None: without
            ``draft_logits`` all of them, else none.
        rule: one of ``RULES``; those not in ``LOSSLESS_RULES`` change the distribution.
        logprobs: one of :data:`LOGPROBS`, those of the raw or of the processed logits.
        posterior_threshold, posterior_alpha: the bounds of ``typical``.
        acceptance_rate: the probability of ``synthetic``.
        draft_rows: int64 ``[B]``, the row of ``draft_logits`` that belongs to each sequence; -1 for a sequence without
            one, whose drafts are point masses. None: N is B, and sequence b has row b.
        raw_logits: ``[B, R, V]`` of any float dtype: the logits before :mod:`specgraph.kernels.processors` changed
            them, which ``raw`` log-probabilities are of. None: ``logits``.
        odd_acceptance_rate: as ``acceptance_rate``, of sequences with an odd seed. None: the same.
    """

    logits: Tensor
    draft_tokens: Tensor
    draft_logits: Tensor | None
    temperature: Tensor
    seeds: Tensor | None
    positions: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    num_rows: Tensor
    num_forced: Tensor
    target_to_draft: Tensor | None
    point_mass: Tensor | None = None
    rule: str = "strict"
    logprobs: str = "none"
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    acceptance_rate: float = 0.7
    draft_rows: Tensor | None = None
    raw_logits: Tensor | None = None
    odd_acceptance_rate: float | None = None


class Verified(NamedTuple):
    """What verification gives.

    Attributes:
        emitted: the emitted tokens, int64 ``[B, K + 1]`` padded with -1.
        num_emitted: their number, int64 ``[B]``.
        accepted_rows: int64 ``[B, K + 1]``, the row of the block that gave each of them, padded with -1. Row 0 is that
            of the last known token, the rows behind it are those of the drafts; a chain of drafts gives 0, 1, 2, ...
        logprobs: their log-probabilities, float32 ``[B, K + 1]``, 0 for forced tokens and padding; ``[B, 0]`` where
            none are wanted.
        bad: int32 ``[B]``, what is wrong with the logits that a sequence needs: see
            :func:`~specgraph.kernels.step.tokens.bad_rows`.
    """

    emitted: Tensor
    num_emitted: Tensor
    accepted_rows: Tensor
    logprobs: Tensor
    bad: Tensor


def check(given: Verify) -> None:
    """Refuse what does not fit, or an option that does not exist.

    Raises:
        ValueError: names the argument, what it is and what it must be.
    """
    check_block(given)
    check_shapes(given, logits="B R V", **dict.fromkeys(VECTORS, "B"))
    for name, dtype in VECTORS.items():
        _check_dtype(name, getattr(given, name), dtype)


def check_block(given: Verify) -> None:
    """The part of :func:`check` that looks at the block and the options, and not at the values per sequence."""
    check_logprobs(given.logprobs)
    _check_shapes(given)
    _check_options(given)


def check_logprobs(logprobs: str) -> None:
    """Raise ``ValueError`` unless ``logprobs`` is one of :data:`LOGPROBS`."""
    if logprobs not in LOGPROBS:
        raise ValueError(f"logprobs must be one of {', '.join(LOGPROBS)}; got {logprobs!r}.")


def _check_shapes(given: Verify) -> None:
    logits, draft_tokens, positions = given.logits, given.draft_tokens, given.positions
    rows = "B" if given.draft_rows is None else "N"
    shapes = {"draft_logits": f"{rows} Kd Vd", "target_to_draft": "V"}
    check_shapes(given, logits="B R V", draft_tokens="B K", positions="B T", raw_logits="B R V", **shapes)
    require(logits.dtype.is_floating_point, lambda: f"logits must be floating point, got {logits.dtype}.")
    integer = not draft_tokens.dtype.is_floating_point
    require(integer, lambda: f"draft_tokens must be integers, got {draft_tokens.dtype}.")
    count, width, places = logits.shape[1], draft_tokens.shape[1] + 1, positions.shape
    wanted = [places[0], width]
    require(places[1] == width, lambda: f"positions must be [B, K + 1] = {wanted}, one per row, got {list(places)}.")
    require(
        count >= 1 and count <= width,
        lambda: f"logits must have 1 to K + 1 = {width} rows for K = {width - 1} drafts, got {count}.",
    )
    _check_dtype("positions", positions, torch.int64)


def _check_dtype(name: str, value: Tensor | None, dtype: torch.dtype | None) -> None:
    fits = value is None or dtype is None or value.dtype == dtype
    require(fits, lambda: f"{name} must be {str(dtype).removeprefix('torch.')}, got {value.dtype}.")  # type: ignore[union-attr]


def _check_options(given: Verify) -> None:
    check_rule(given.rule)
    threshold, alpha = given.posterior_threshold, given.posterior_alpha
    if threshold < 0 or alpha < 0:
        raise ValueError(f"posterior_threshold and posterior_alpha must not be negative; got {threshold} and {alpha}.")
    for name in ("acceptance_rate", "odd_acceptance_rate"):
        if not 0 <= (getattr(given, name) or 0.0) <= 1:
            raise ValueError(f"{name} must be in [0, 1]; got {getattr(given, name)}.")
