"""What ``specgraph::verify`` takes: shapes, dtypes and options, checked with messages that say what is allowed."""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.sampling.sample import check_rule, require

LOGPROBS = ("none", "raw", "processed")


def logprobs_kind(return_logprobs: bool | str) -> str:
    kind = ("raw" if return_logprobs else "none") if isinstance(return_logprobs, bool) else return_logprobs
    if kind not in LOGPROBS:
        raise ValueError(f"return_logprobs must be False, True, 'raw' or 'processed'; got {return_logprobs!r}.")
    return kind


def _shape(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}"


def check_shapes(
    logits: Tensor, draft_tokens: Tensor, draft_logits: Tensor | None, positions: Tensor, target_to_draft: Tensor | None
) -> None:
    require(logits.dim() == 3, lambda: f"target_logits must be [B, R, V], got {_shape(logits)}.")
    require(logits.dtype.is_floating_point, lambda: f"target_logits must be floating point, got {logits.dtype}.")
    batch, rows, _ = logits.shape
    require(
        draft_tokens.dim() == 2 and draft_tokens.shape[0] == batch,
        lambda: f"draft_tokens must be [B, K] with B = {batch} as in target_logits, got {_shape(draft_tokens)}.",
    )
    integer = not draft_tokens.dtype.is_floating_point
    require(integer, lambda: f"draft_tokens must be integers, got {draft_tokens.dtype}.")
    width = draft_tokens.shape[1] + 1
    require(
        rows >= 1 and rows <= width,
        lambda: f"target_logits must have 1 to K + 1 = {width} rows for K = {width - 1} drafts, got {rows}.",
    )
    require(
        positions.dim() == 2 and positions.shape[0] == batch and positions.shape[1] == width,
        lambda: f"positions must be [B, K + 1] = {[batch, width]}, one per row, got {_shape(positions)}.",
    )
    require(positions.dtype == torch.int64, lambda: f"positions must be int64, got {positions.dtype}.")
    if draft_logits is not None:
        _check_draft_logits(draft_logits, batch, width - 1, logits.shape[2], target_to_draft)


def _check_draft_logits(
    draft_logits: Tensor, batch: int, drafts: int, vocab: int, target_to_draft: Tensor | None
) -> None:
    require(
        draft_logits.dim() == 3 and draft_logits.shape[0] == batch and draft_logits.shape[1] <= drafts,
        lambda: (
            f"draft_logits must be [B, at most K, Vd] with B = {batch} and K = {drafts}, got {_shape(draft_logits)}."
        ),
    )
    if target_to_draft is not None:
        require(
            target_to_draft.dim() == 1 and target_to_draft.shape[0] == vocab,
            lambda: (
                f"target_to_draft must be [V] = [{vocab}], one draft id per target id, got {_shape(target_to_draft)}."
            ),
        )


def check_per_sequence(batch: int, **values: Tensor | None) -> None:
    for name, value in values.items():
        if value is not None:
            _check_vector(name, value, batch)


def _check_vector(name: str, value: Tensor, batch: int) -> None:
    require(
        value.dim() == 1 and value.shape[0] == batch,
        lambda: f"{name} must have one value per sequence, [{batch}], got {_shape(value)}.",
    )
    if name in ("seeds", "top_k", "num_rows", "num_forced"):
        require(value.dtype == torch.int64, lambda: f"{name} must be int64, got {value.dtype}.")


def check_options(rule: str, posterior_threshold: float, posterior_alpha: float, acceptance_rate: float) -> None:
    check_rule(rule)
    if posterior_threshold < 0 or posterior_alpha < 0:
        raise ValueError(
            f"posterior_threshold and posterior_alpha must not be negative; "
            f"got {posterior_threshold} and {posterior_alpha}."
        )
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"acceptance_rate must be in [0, 1]; got {acceptance_rate}.")
