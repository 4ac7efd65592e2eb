"""The small tensor functions that step graphs are written in: positions, slots, row selection, state updates.

Shapes use ``B`` sequences, ``T`` rows per sequence in this call and ``K`` drafts. All ids, positions and counts are
int64. A function whose name ends in an underscore writes arguments in place; :data:`FINAL_WRITES` names those that
nothing may read later in the same step. None of them waits for the device or gives a shape that depends on values, so
that a whole step can be one CUDA graph. Those of many small operations are ops with a Triton form, one launch each
(:mod:`specgraph.kernels.step.rows`, :mod:`~specgraph.kernels.step.tokens`, ...).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

import specgraph.kernels.step.index
import specgraph.kernels.step.ngram
import specgraph.kernels.step.rerun  # noqa: F401  (declares the ops)
from specgraph.kernels.sampling.draft import sample_draft
from specgraph.kernels.step.after_verify import Settled
from specgraph.kernels.step.rerun import RerunRows

WRITES: dict[Callable[..., object], tuple[str, ...]] = {}
"""The parameters that a function writes in place."""
FINAL_WRITES: dict[Callable[..., object], tuple[str, ...]] = {}
"""Those of them that hold the next step's values after the call."""


def writes(*names: str, final: bool = True) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Mark a function that writes the parameters ``names`` in place, so that dead-code elimination does not remove it.

    ``final``: they hold the next step's values after the call, so that nothing may read them later in the same step.
    """

    def declare(function: Callable[..., object]) -> Callable[..., object]:
        WRITES[function], FINAL_WRITES[function] = names, names if final else ()
        fx.node.has_side_effect(function)
        return function

    return declare


def row_positions(start: Tensor, rows: Tensor) -> Tensor:
    """The absolute positions ``[B, T]`` of ``rows`` ``[B, T]``, of which the first row is at ``start`` ``[B]``."""
    (positions,) = torch.ops.specgraph.row_positions(start, rows.shape[1], 1)
    return positions  # type: ignore[no-any-return]


def positions_and_next(start: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The positions ``[B, T]`` of ``rows`` ``[B, T]``, the first at ``start`` ``[B]``, and the ones after them.

    This is :func:`row_positions` twice, from one launch.
    """
    positions, following = torch.ops.specgraph.row_positions(start, rows.shape[1], 2)
    return positions, following


def row_slots(
    positions: Tensor, num_rows: Tensor, block_table: Tensor, max_length: Tensor, *, block_size: int
) -> Tensor:
    """Cache slots ``[B, T]`` of rows at ``positions`` ``[B, T]``.

    Only the first ``num_rows`` ``[B]`` rows are real. They get ``block * block_size + offset`` through ``block_table``
    ``[B, M]``; other rows, and rows before position 0 or at or past ``max_length`` ``[B]``, get ``PADDING_SLOT``.
    """
    slots: Tensor = torch.ops.specgraph.row_slots(positions, num_rows, block_table, max_length, block_size=block_size)
    return slots


def needed_rows(hidden: Tensor, num_forced: Tensor, count: int) -> Tensor:
    """The rows of ``hidden`` ``[B, T, H]`` whose next token is unknown: ``[B, min(T, count), H]``.

    They begin after the ``num_forced`` ``[B]`` rows whose next token is known, or earlier if the block ends before
    ``count`` rows. So a prompt's chunk runs the vocabulary projection for a few rows only. ``verify`` knows which rows
    these are.
    """
    if hidden.shape[1] <= count:
        return hidden
    needed: Tensor = torch.ops.specgraph.take_rows(hidden, num_forced, count, True)
    return needed


def take_rows(values: Tensor, first: Tensor, count: int) -> Tensor:
    """``count`` rows of ``values`` ``[B, T, H]`` from row ``first`` ``[B]`` on: ``[B, count, H]``.

    Indices are clamped into the block. An inactive sequence has no such rows, and what it gets is not used.
    """
    if values.shape[1] == count == 1:
        return values
    taken: Tensor = torch.ops.specgraph.take_rows(values, first, count, False)
    return taken


def along_path(values: Tensor, path: Tensor) -> Tensor:
    """The rows of ``values`` ``[B, T, H]`` that ``path`` ``[B, T']`` names, in its order: ``[B, T', H]``.

    Where ``path`` is -1 there is no row; what is there instead is not used.
    """
    index = path.clamp_min(0).unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return values.gather(1, index)


def draft_tokens(window: Tensor) -> Tensor:
    """The tokens of ``window`` ``[B, T]`` that follow the last accepted one: ``[B, T - 1]``."""
    return window[:, 1:]


def rows_before_last(hidden: Tensor) -> Tensor:
    """The rows of ``hidden`` ``[B, T, H]`` whose next token stands in the window: ``[B, T - 1, H]``, contiguous."""
    return hidden[:, :-1].contiguous()


def bad_rows(logits: Tensor, window: Tensor, num_rows: Tensor, num_forced: Tensor) -> Tensor:
    """What is wrong with the logits ``[B, R, V]`` of the real, unforced rows of each sequence: int32 ``[B]``.

    -1 is a NaN, and a number above 0 says that the row of the block in front of that number has nothing but -inf, see
    :class:`~specgraph.kernels.step.tokens.BadRows`.
    ``window`` ``[B, T]`` gives the number of rows ``T`` of the whole block, from which follows where the ``R`` rows
    lie.
    """
    bad: Tensor = torch.ops.specgraph.bad_rows(logits, num_rows, num_forced, window.shape[1])
    return bad


def cut_at_eos(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """``emitted`` ``[B, T]`` with everything after the first unforced EOS replaced by -1.

    ``eos_ids`` ``[B, E]`` are each sequence's own, padded with -1. Forced tokens belong to the prompt, and an EOS among
    them does not end the sequence.
    """
    cut: Tensor = torch.ops.specgraph.cut_at_eos(emitted, num_forced, eos_ids)
    return cut


def cut_rows(accepted_rows: Tensor, emitted: Tensor) -> Tensor:
    """The rows ``[B, T]`` that gave the ``emitted`` tokens ``[B, T]``: -1 behind an EOS, as the tokens are."""
    return torch.where(emitted >= 0, accepted_rows, -1)


def count_emitted(emitted: Tensor) -> Tensor:
    """The number of tokens that each sequence emits, ``[B]``."""
    return (emitted >= 0).sum(1)


def draft_inputs(window: Tensor, emitted: Tensor, *, vocab_size: int) -> Tensor:
    """The input of an unshifted drafter: the window's first token and all emitted tokens, ``[B, T + 1]``.

    Padding is clamped into the draft's vocabulary. Its rows are not real.
    """
    return torch.cat([window[:, :1], emitted], dim=1).clamp(0, vocab_size - 1)


def next_tokens(emitted: Tensor, *, vocab_size: int) -> Tensor:
    """The input of a shifted drafter, ``[B, T]``: row ``t`` holds the token that followed the target's row ``t``.

    Padding is clamped into the draft's vocabulary. Its rows are not real.
    """
    return emitted.clamp(0, vocab_size - 1)


def last_row(num_rows: Tensor) -> Tensor:
    """The last real row ``[B]`` of each sequence."""
    return num_rows - 1


def expand_draft_inputs(
    tokens: Tensor, num_rows: Tensor, hidden: Tensor | None, mask_hidden: Tensor | None, *, mask_token_id: int,
    count: int,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Put ``count`` mask rows behind the real rows of every sequence, so that one call drafts ``count + 1`` tokens.

    Args:
        tokens: int64 ``[B, T]``, of which the first ``num_rows`` ``[B]`` are real.
        num_rows: int64 ``[B]``.
        hidden: ``[B, T, H]``: the hidden states of these rows, or None.
        mask_hidden: ``[H]``: the hidden state of a mask row.
        mask_token_id: the token of a mask row.
        count: the number of mask rows.

    Returns:
        tokens ``[B, T + count]``, the number of rows that are now real ``[B]`` (an inactive sequence still has none),
        and hidden states ``[B, T + count, H]`` or None. The mask rows directly follow the real ones, so that their
        positions are also counted from the first row.
    """
    tokens, num_rows, expanded = torch.ops.specgraph.expand_rows(
        tokens, num_rows, hidden, mask_hidden, mask_token_id=mask_token_id, count=count
    )
    return tokens, num_rows, hidden if hidden is None or mask_hidden is None else expanded


def catch_up_rows(num_emitted: Tensor) -> Tensor:
    """How many rows of ``draft_inputs`` are real, ``[B]``: one more than were emitted, or none if inactive."""
    return torch.where(num_emitted > 0, num_emitted + 1, 0)


def chain_positions(start: Tensor, num_emitted: Tensor, offset: int) -> Tensor:
    """The position ``[B, 1]`` that is ``offset`` after the last accepted token."""
    return (start + num_emitted + offset).unsqueeze(1)


def unsettled_rows(num_emitted: Tensor, count: int) -> Tensor:
    """Minus ``count`` ``[B]``: of a call's rows, and the ``count - 1`` in front of them, none is settled."""
    return torch.full_like(num_emitted, -count)


def history_length(start: Tensor, num_emitted: Tensor) -> Tensor:
    """The number of accepted tokens ``[B]``. The last one is at position ``start + num_emitted``."""
    return start + num_emitted + 1


def settle(
    tokens: Tensor, window: Tensor, start: Tensor, num_forced: Tensor, eos_ids: Tensor,
    accepted_rows: Tensor | None = None, *, shifted: bool = True, vocab_size: int = 1, chain: int = 0,
) -> Settled:  # fmt: skip
    """Cut the verified ``tokens`` ``[B, T]`` behind an EOS, count them, and give what drafter and next step take.

    This is one launch for :func:`cut_at_eos` and the functions of its result. In the order of
    :class:`~specgraph.kernels.step.after_verify.Settled`: ``cut_at_eos``, ``count_emitted``, ``cut_rows`` (empty
    without ``accepted_rows``), ``next_tokens`` (or ``draft_inputs`` if not ``shifted``), the ``row_positions`` of
    these, how many are real (``catch_up_rows`` if not ``shifted``), ``last_row``, ``history_length``, and
    ``chain_positions`` for the offsets below ``chain``.
    """
    settled: Settled = torch.ops.specgraph.settle(
        tokens, window, start, num_forced, eos_ids, accepted_rows, shifted=shifted, vocab_size=vocab_size, chain=chain
    )
    return settled


def rerun(
    kept_tokens: Tensor, kept_hidden: Tensor, num_kept: Tensor, tokens: Tensor, hidden: Tensor, start: Tensor,
    num_emitted: Tensor,
) -> RerunRows:  # fmt: skip
    """The rows that all modules of a drafter run: kept ones, and behind them those of the window, from one launch.

    :class:`~specgraph.kernels.step.rerun.Rerun` has the arguments.
    """
    rows: RerunRows = torch.ops.specgraph.rerun(kept_tokens, kept_hidden, num_kept, tokens, hidden, start, num_emitted)
    return rows


def next_module_tokens(tokens: Tensor, num_rows: Tensor, draft: Tensor) -> Tensor:
    """What the next module takes, ``[B, W]``: at each row the token that the last one took one row later.

    At the last of the ``num_rows`` ``[B]`` rows of ``tokens`` ``[B, W]`` this is the new ``draft`` ``[B, 1]``.
    """
    shifted: Tensor = torch.ops.specgraph.next_module_tokens(tokens, num_rows, draft)
    return shifted


@writes("kept_tokens", "kept_hidden", "num_kept")
def keep_rows_(
    kept_tokens: Tensor, kept_hidden: Tensor, num_kept: Tensor, tokens: Tensor, hidden: Tensor, num_emitted: Tensor
) -> None:
    """Keep the last accepted rows of what :func:`rerun` gave, for the next step to run again.

    :class:`~specgraph.kernels.step.rerun.KeepRows` has the arguments.
    """
    torch.ops.specgraph.keep_rows(kept_tokens, kept_hidden, num_kept, tokens, hidden, num_emitted)


def gather_state(rows: Tensor, buffers: list[Tensor], fills: list[float]) -> list[Tensor]:
    """The rows ``[b, ...]`` of each of ``buffers`` ``[N, ...]`` that ``rows`` ``[b]`` names, from one launch.

    Where ``rows`` is -1 there is no sequence, and the values are those of ``fills``.
    """
    gathered: list[Tensor] = torch.ops.specgraph.gather_state(rows, buffers, fills)
    return gathered


@writes("buffers")
def scatter_state_(rows: Tensor, buffers: list[Tensor], values: list[Tensor]) -> None:
    """Write ``values`` ``[b, ...]`` back to the rows ``rows`` ``[b]`` of ``buffers`` ``[N, ...]``, in one launch.

    Where ``rows`` is -1 nothing is written.
    """
    torch.ops.specgraph.scatter_state(rows, buffers, values)


def lookup_ngrams(
    history: Tensor, rows: Tensor, length: Tensor, *, num_speculative_tokens: int, max_ngram: int, min_ngram: int
) -> Tensor:
    """Drafts ``[b, K]`` that followed the n-gram at the end of each sequence when it occurred before; -1 for none.

    ``history`` ``[N, S]`` holds accepted tokens, ``rows`` ``[b]`` names the row of each sequence in it, and ``length``
    ``[b]`` is the number of tokens there. :class:`~specgraph.kernels.step.ngram.NgramLookup` has the definition.
    """
    drafts: Tensor = torch.ops.specgraph.ngram_lookup(
        history, rows, length, num_speculative_tokens, max_ngram, min_ngram
    )
    return drafts


@writes("history", final=False)
def record_tokens_(
    history: Tensor, tokens: Tensor, positions: Tensor, num_rows: Tensor, rows: Tensor | None = None
) -> None:
    """Write the first ``num_rows`` ``[B]`` of ``tokens`` ``[B, T]`` at ``positions`` of ``history`` ``[N, S]``.

    ``positions`` ``[B, T]`` ascend; what they put before 0, or at or past ``S``, is left out. ``rows`` ``[B]`` is the
    row of ``history`` of each sequence, -1 for none; without it sequence b has row b.
    """
    torch.ops.specgraph.record_tokens(history, rows, tokens, positions, num_rows)


@writes("draft_logits")
def propose_(
    draft_logits: Tensor | None,
    logits: Tensor,
    start: Tensor,
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

    For rules that need them, the log-weights from which the drafts were drawn are stored in
    ``draft_logits[rows, row : row + R]``, where ``draft_logits`` is ``[N, K, Vd]`` and ``rows`` ``[B]`` is the row
    index; for other rules both are None. Sequences that emitted nothing keep their old values. ``draft_to_target``
    ``[Vd]`` gives the target id of every draft id.
    """
    key = history_length(start, num_emitted)
    return propose_at_(  # type: ignore[return-value]
        draft_logits, logits, key, num_emitted, temperature, seeds, top_k, top_p, min_p, row=row, rule=rule,
        target_vocab_size=target_vocab_size, rows=rows, draft_to_target=draft_to_target,
    )  # fmt: skip


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
    torch.ops.specgraph.store_drafted(kept, new, None, num_emitted, 0)


@writes("draft_logits")
def propose_at_(
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
    """Draw drafts from number ``row`` on from ``logits`` ``[B, R, Vd]``, as target ids ``[B, R]``.

    This is :func:`propose_`, where the number of accepted tokens ``length`` ``[B]`` has been computed before.
    """
    token, processed = sample_draft(
        logits, temperature, seeds, length, top_k, top_p, min_p, row=row, rule=rule,
        target_vocab_size=target_vocab_size, draft_to_target=draft_to_target, return_processed=draft_logits is not None,
    )  # fmt: skip
    if draft_logits is not None:
        torch.ops.specgraph.store_drafted(draft_logits, processed, rows, num_emitted, row)
    return token


@writes("next_window", "start", "num_rows", "num_forced")
def advance_(
    next_window: Tensor,
    start: Tensor,
    num_rows: Tensor,
    num_forced: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    drafts: list[Tensor],
    max_length: Tensor,
    eos_ids: Tensor,
) -> None:
    """Move every active sequence to its new last token and write the next window.

    ``next_window`` ``[B, K + 1]`` becomes the last accepted token followed by the drafts (tensors ``[B, k]`` with at
    most ``K`` columns in all, and -1 where there is no draft; there is none in columns that are not given).
    ``num_rows`` becomes the number of its real rows. It is limited
    such that no token gets a position at ``max_length`` or beyond, and is 0 for a sequence that met an EOS. Sequences
    that emitted nothing keep their window and position.
    """
    torch.ops.specgraph.advance(
        next_window, start, num_rows, num_forced, emitted, num_emitted, drafts, max_length, eos_ids
    )


def for_host(logits: Tensor) -> Tensor:
    """A copy of logits ``[B, R, V]`` that the host may change, float32 at least: a step pauses behind it."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
