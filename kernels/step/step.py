"""The small tensor functions that step graphs are written in: positions, slots, row selection, state updates.

Shapes use ``B`` sequences, ``T`` rows per sequence in this call and ``K`` drafts. All ids, positions and counts are
int64. A function whose name ends in an underscore writes arguments in place; :data:`FINAL_WRITES` names those that
nothing may read later in the same step. None of them waits for the device or gives a shape that depends on values, so
that a whole step can be one CUDA graph. Those of many small operations are ops with a Triton form, one launch each
(:mod:`specgraph.kernels.step.rows` and :mod:`specgraph.kernels.step.tokens`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from specgraph.kernels.sampling.sample import sample_draft
from specgraph.kernels.step.tokens import Settled

FINAL_WRITES: dict[Callable[..., object], tuple[str, ...]] = {}


def writes(*final: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Mark a function that writes in place, which keeps dead-code elimination from dropping it.

    ``final`` names the parameters that hold the next step's values from then on.
    """

    def declare(function: Callable[..., object]) -> Callable[..., object]:
        FINAL_WRITES[function] = final
        fx.node.has_side_effect(function)
        return function

    return declare


def row_positions(start: Tensor, rows: Tensor) -> Tensor:
    """Absolute positions ``[B, T]`` of the rows of ``rows`` ``[B, T]``, the first one at ``start`` ``[B]``."""
    (positions,) = torch.ops.specgraph.row_positions(start, rows.shape[1], 1)
    return positions  # type: ignore[no-any-return]


def positions_and_next(start: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`row_positions`, and the position behind each of them, from one launch."""
    positions, following = torch.ops.specgraph.row_positions(start, rows.shape[1], 2)
    return positions, following


def row_slots(
    positions: Tensor, num_rows: Tensor, block_table: Tensor, max_length: Tensor, *, block_size: int
) -> Tensor:
    """Cache slots ``[B, T]`` of rows at ``positions`` ``[B, T]``.

    Only the first ``num_rows`` ``[B]`` rows are real. They get ``block * block_size + offset`` through ``block_table``
    ``[B, M]``; other rows, and rows at or past ``max_length`` ``[B]``, get ``PADDING_SLOT``.
    """
    slots: Tensor = torch.ops.specgraph.row_slots(positions, num_rows, block_table, max_length, block_size=block_size)
    return slots


def needed_rows(hidden: Tensor, num_forced: Tensor, count: int) -> Tensor:
    """The rows of ``hidden`` ``[B, T, H]`` whose next token is unknown: ``[B, min(T, count), H]``.

    They begin after the ``num_forced`` ``[B]`` rows whose next token is given (or earlier, at the end of the block), so
    a prompt chunk runs the vocabulary projection for a few rows only. ``verify`` knows this alignment.
    """
    if hidden.shape[1] <= count:
        return hidden
    needed: Tensor = torch.ops.specgraph.take_rows(hidden, num_forced, count, True)
    return needed


def take_rows(values: Tensor, first: Tensor, count: int) -> Tensor:
    """``count`` rows of ``values`` ``[B, T, H]`` from row ``first`` ``[B]`` on: ``[B, count, H]``.

    Indices are held inside of the block: an inactive sequence has no such rows, and what it gets is not used.
    """
    if values.shape[1] == count == 1:
        return values
    taken: Tensor = torch.ops.specgraph.take_rows(values, first, count, False)
    return taken


def draft_tokens(window: Tensor) -> Tensor:
    """The tokens of ``window`` ``[B, T]`` that follow the last accepted one: ``[B, T - 1]``."""
    return window[:, 1:]


def nan_rows(logits: Tensor, window: Tensor, num_rows: Tensor, num_forced: Tensor) -> Tensor:
    """Which sequences have a NaN among the logits ``[B, R, V]`` of their real, unforced rows: bool ``[B]``.

    ``window`` ``[B, T]`` gives the number of rows ``T`` of the whole block, which places the ``R`` rows in it.
    """
    bad: Tensor = torch.ops.specgraph.nan_rows(logits, num_rows, num_forced, window.shape[1])
    return bad


def cut_at_eos(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """``emitted`` ``[B, T]`` with everything after the first unforced EOS replaced by -1.

    ``eos_ids`` ``[E]`` is padded with -1. Forced tokens are the prompt's: an EOS among them ends nothing.
    """
    cut: Tensor = torch.ops.specgraph.cut_at_eos(emitted, num_forced, eos_ids)
    return cut


def cut_rows(accepted_rows: Tensor, emitted: Tensor) -> Tensor:
    """The rows ``[B, T]`` that gave the ``emitted`` tokens ``[B, T]``: -1 behind an EOS, as the tokens are."""
    return torch.where(emitted >= 0, accepted_rows, -1)


def count_emitted(emitted: Tensor) -> Tensor:
    """Number of tokens each sequence emits, ``[B]``."""
    return (emitted >= 0).sum(1)


def draft_inputs(window: Tensor, emitted: Tensor, *, vocab_size: int) -> Tensor:
    """What an unshifted drafter runs: the row's first token and all emitted ones, ``[B, T + 1]``.

    Padding is clamped into the draft's vocabulary; its rows are not real.
    """
    return torch.cat([window[:, :1], emitted], dim=1).clamp(0, vocab_size - 1)


def next_tokens(emitted: Tensor, *, vocab_size: int) -> Tensor:
    """What a shifted drafter runs, ``[B, T]``: beside the target's features of row ``t``, the token that followed it.

    Padding is clamped into the draft's vocabulary; its rows are not real.
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
        hidden: ``[B, T, H]`` beside them, or None.
        mask_hidden: ``[H]``, the hidden state of a mask row.
        mask_token_id: the token of a mask row.

    Returns:
        tokens ``[B, T + count]``, the number of rows that are now real ``[B]`` (an inactive sequence keeps none), and
        hidden states ``[B, T + count, H]`` or None. The mask rows directly follow the real ones, so that positions
        counted from the first row are theirs.
    """
    tokens, num_rows, expanded = torch.ops.specgraph.expand_rows(
        tokens, num_rows, hidden, mask_hidden, mask_token_id=mask_token_id, count=count
    )
    return tokens, num_rows, hidden if hidden is None or mask_hidden is None else expanded


def catch_up_rows(num_emitted: Tensor) -> Tensor:
    """How many of the ``draft_inputs`` rows are real, ``[B]``: one more than were emitted, none if inactive."""
    return torch.where(num_emitted > 0, num_emitted + 1, 0)


def chain_positions(start: Tensor, num_emitted: Tensor, offset: int) -> Tensor:
    """Position ``[B, 1]`` of the ``offset``-th draft after the last accepted token."""
    return (start + num_emitted + offset).unsqueeze(1)


def history_length(start: Tensor, num_emitted: Tensor) -> Tensor:
    """Number of accepted tokens ``[B]``: the last one sits at ``start + num_emitted``."""
    return start + num_emitted + 1


def settle(
    tokens: Tensor, window: Tensor, start: Tensor, num_forced: Tensor, eos_ids: Tensor,
    accepted_rows: Tensor | None = None, *, shifted: bool = True, vocab_size: int = 1, chain: int = 0,
) -> Settled:  # fmt: skip
    """What :func:`cut_at_eos` and the functions of its result give, from one launch.

    In the order of :class:`~specgraph.kernels.step.tokens.Settled`: ``cut_at_eos``, ``count_emitted``, ``cut_rows``
    (empty without ``accepted_rows``), ``next_tokens`` (or ``draft_inputs`` if not ``shifted``), the ``row_positions``
    of these, how many are real (``catch_up_rows`` if not ``shifted``), ``last_row``, ``history_length``, and
    ``chain_positions`` for the offsets below ``chain``.
    """
    settled: Settled = torch.ops.specgraph.settle(
        tokens, window, start, num_forced, eos_ids, accepted_rows, shifted=shifted, vocab_size=vocab_size, chain=chain
    )
    return settled


@writes()
def record_tokens_(history: Tensor, tokens: Tensor, positions: Tensor, num_rows: Tensor) -> None:
    """Write the first ``num_rows`` ``[B]`` of ``tokens`` ``[B, T]`` at ``positions`` of ``history`` ``[B, S]``.

    ``positions`` ``[B, T]`` ascend; what they put at or past ``S`` is left out.
    """
    row = torch.arange(tokens.shape[1], device=tokens.device)
    real = (row < num_rows.unsqueeze(1)) & (positions < history.shape[1])
    # A mask as an index would need its number of rows on the host. So every row writes: those that are not real repeat
    # the first one, or where that is not real either, what is there already. Equal values may land in any order.
    first = positions[:, :1].clamp(0, history.shape[1] - 1)
    repeated = torch.where(real[:, :1], tokens[:, :1], history.gather(1, first))
    history.scatter_(1, torch.where(real, positions, first), torch.where(real, tokens, repeated))


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
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """Draw the drafts from number ``row`` on of the next step, ``[B, R]`` target ids, from ``logits`` ``[B, R, Vd]``.

    The values they were drawn from are stored in ``draft_logits[:, row : row + R]`` for rules that need them;
    ``draft_logits`` is ``[B, K, Vd]`` or None. Sequences that emitted nothing keep theirs. ``draft_to_target`` ``[Vd]``
    gives the target id of every draft id.
    """
    key = history_length(start, num_emitted)
    return propose_at_(  # type: ignore[return-value]
        draft_logits, logits, key, num_emitted, temperature, seeds, top_k, top_p, min_p, row=row, rule=rule,
        target_vocab_size=target_vocab_size, draft_to_target=draft_to_target,
    )  # fmt: skip


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
    draft_to_target: Tensor | None = None,
) -> Tensor:
    """:func:`propose_` where the number of accepted tokens ``length`` ``[B]`` is known, as :func:`history_length`."""
    token, processed = sample_draft(
        logits, temperature, seeds, length, top_k, top_p, min_p, row=row, rule=rule,
        target_vocab_size=target_vocab_size, draft_to_target=draft_to_target, return_processed=draft_logits is not None,
    )  # fmt: skip
    if draft_logits is not None:
        kept = draft_logits[:, row : row + logits.shape[1]]
        active = (num_emitted > 0).view(-1, 1, 1)
        kept.copy_(torch.where(active, processed.to(kept.dtype), kept))
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
    """Move every active sequence to its new last token and lay out the next window.

    ``next_window`` ``[B, K + 1]`` becomes the last accepted token and the drafts (``[B, k]`` each, K in all, -1 where
    there is none); ``num_rows`` becomes the number of its real rows, capped so that no token lands at ``max_length`` or
    beyond, and 0 for a sequence that met an EOS. Sequences that emitted nothing keep their window and position.
    """
    torch.ops.specgraph.advance(
        next_window, start, num_rows, num_forced, emitted, num_emitted, drafts, max_length, eos_ids
    )
