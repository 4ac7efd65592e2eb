"""The small tensor functions that step graphs are written in: positions, slots, row selection, state updates.

Shapes use ``B`` sequences, ``T`` rows per sequence in this call and ``K`` drafts. All ids, positions and counts are
int64. A function whose name ends in an underscore writes arguments in place;
:data:`~specgraph.kernels.step.writes.FINAL_WRITES` names those that nothing may read later in the same step. None of
them waits for the device or gives a shape that depends on values, so that a whole step can be one CUDA graph. Those of
many small operations are ops with a Triton form, one launch each (:mod:`specgraph.kernels.step.rows`,
:mod:`~specgraph.kernels.step.tokens`, ...), and stand with the other functions in :mod:`specgraph.kernels.step`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.sampling.draft import sample_draft
from specgraph.kernels.step.index import store_drafted_
from specgraph.kernels.step.rows import consecutive_positions, consecutive_rows
from specgraph.kernels.step.writes import writes


def row_positions(start: Tensor, rows: Tensor) -> Tensor:
    """The absolute positions ``[B, T]`` of ``rows`` ``[B, T]``, of which the first row is at ``start`` ``[B]``."""
    return consecutive_positions(start, rows.shape[1], 1)[0]


def positions_and_next(start: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The positions ``[B, T]`` of ``rows`` ``[B, T]``, the first at ``start`` ``[B]``, and the ones after them.

    This is :func:`row_positions` twice, from one launch.
    """
    positions, following = consecutive_positions(start, rows.shape[1], 2)
    return positions, following


def needed_rows(hidden: Tensor, num_forced: Tensor, count: int) -> Tensor:
    """The rows of ``hidden`` ``[B, T, H]`` whose next token is unknown: ``[B, min(T, count), H]``.

    They begin after the ``num_forced`` ``[B]`` rows whose next token is known, or earlier if the block ends before
    ``count`` rows. So a prompt's chunk runs the vocabulary projection for a few rows only. ``verify`` knows which rows
    these are.
    """
    return hidden if hidden.shape[1] <= count else consecutive_rows(hidden, num_forced, count, True)


def take_rows(values: Tensor, first: Tensor, count: int) -> Tensor:
    """``count`` rows of ``values`` ``[B, T, H]`` from row ``first`` ``[B]`` on: ``[B, count, H]``.

    Indices are clamped into the block. An inactive sequence has no such rows, and what it gets is not used.
    """
    return values if values.shape[1] == count == 1 else consecutive_rows(values, first, count, False)


def draft_tokens(window: Tensor) -> Tensor:
    """The tokens of ``window`` ``[B, T]`` that follow the last accepted one: ``[B, T - 1]``."""
    return window[:, 1:]


def rows_before_last(hidden: Tensor) -> Tensor:
    """The rows of ``hidden`` ``[B, T, H]`` whose next token stands in the window: ``[B, T - 1, H]``, contiguous."""
    return hidden[:, :-1].contiguous()


def unsettled_rows(num_emitted: Tensor, count: int) -> Tensor:
    """Minus ``count`` ``[B]``: of a call's rows, and the ``count - 1`` in front of them, none is settled."""
    return torch.full_like(num_emitted, -count)


@writes("point_mass")
def keep_point_mass_(point_mass: Tensor, chosen: Tensor, num_emitted: Tensor) -> None:
    """Keep in ``point_mass`` bool ``[B]`` whether the new drafts are point masses: ``chosen`` bool ``[B]``.

    Sequences that emitted nothing keep their drafts, and so what these are.
    """
    point_mass.copy_(torch.where(num_emitted > 0, chosen, point_mass))


@writes("confidence")
def keep_confidence_(confidence: Tensor, estimates: Tensor, num_emitted: Tensor) -> None:
    """Keep in ``confidence`` float32 ``[B, K]`` the ``estimates`` ``[B, K]`` for the new drafts.

    Sequences that emitted nothing keep their drafts, and so what was thought of these.
    """
    kept, new = confidence.unsqueeze(1), estimates.unsqueeze(1)
    store_drafted_(kept, new, None, num_emitted, 0)


@writes("kept")
def keep_hidden_(kept: Tensor, hidden: Tensor, rows: Tensor, num_emitted: Tensor, *, row: int) -> None:
    """Keep the hidden states ``hidden`` ``[B, 1, H]`` of row ``row`` of the next window in ``kept`` ``[N, K, H]``.

    ``rows`` ``[B]`` is the row index. Sequences that emitted nothing keep their drafts, and so these states.
    """
    store_drafted_(kept, hidden, rows, num_emitted, row)


def newest_row(window: Tensor, positions: Tensor, num_rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The last of the ``num_rows`` ``[B]`` real rows of a window: its token and its position, ``[B, 1]`` each, and how
    many rows these are ``[B]``, which is 0 where a sequence has none."""
    last = (num_rows - 1).clamp_min(0).unsqueeze(1)
    return window.gather(1, last), positions.gather(1, last), num_rows.clamp(max=1)


def complete_rows(kept: Tensor, newest: Tensor, rows: Tensor, num_rows: Tensor, window: Tensor) -> Tensor:
    """The hidden states ``[B, T, H]`` of the rows of a window ``[B, T]``: for the last of the ``num_rows`` ``[B]`` real
    ones ``newest`` ``[B, 1, H]``, and for those before it what is ``kept`` ``[N, K, H]``.

    ``rows`` ``[B]`` is the row index.
    """
    place = torch.arange(window.shape[1], device=window.device)
    own = kept[rows.clamp_min(0).unsqueeze(1), place.clamp(max=kept.shape[1] - 1)]
    return torch.where((place < num_rows.unsqueeze(1) - 1).unsqueeze(2), own, newest)


@writes("draft_logits")
def propose_(
    draft_logits: Tensor | None,
    logits: Tensor,
    length: Tensor,
    num_emitted: Tensor,
    temperature: Tensor,
    seeds: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    *,
    row: int,
    rule: str,
    target_vocab_size: int,
    rows: Tensor | None = None,
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """Draw the next step's drafts from number ``row`` on, ``[B, R]`` target ids, from ``logits`` ``[B, R, Vd]``.

    ``length`` ``[B]`` is the number of accepted tokens. For rules that need them, the log-weights from which the drafts
    were drawn are stored in ``draft_logits[rows, row : row + R]``, where ``draft_logits`` is ``[N, K, Vd]`` and
    ``rows`` ``[B]`` is the row index; for other rules both are None. Sequences that emitted nothing keep their old
    values. ``draft_to_target`` ``[Vd]`` gives the target id of every draft id.
    """
    token, processed = sample_draft(
        logits, temperature, seeds, length, top_k, top_p, min_p, row=row, rule=rule,
        target_vocab_size=target_vocab_size, draft_to_target=draft_to_target, return_processed=draft_logits is not None,
    )
    if draft_logits is not None:
        store_drafted_(draft_logits, processed, rows, num_emitted, row)
    return token


def for_host(logits: Tensor) -> Tensor:
    """A copy of logits ``[B, R, V]`` that the host may change, float32 at least: a step pauses behind it."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
