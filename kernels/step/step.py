"""The small tensor functions that step graphs are written in: positions, slots, row selection, state updates.

Shapes use ``B`` sequences, ``T`` rows per sequence in this call and ``K`` drafts. All ids, positions and counts are
int64. A function whose name ends in an underscore writes arguments in place; :data:`FINAL_WRITES` names those that
nothing may read later in the same step. None of them waits for the device or gives a shape that depends on values, so
that a whole step can be one CUDA graph. Those of many small operations are ops with a Triton form, one launch each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor, fx

import specgraph.kernels.step.ngram  # noqa: F401  (registers the op)
from specgraph.kernels.attention.attention import PADDING_SLOT
from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require, sample_draft
from specgraph.kernels.step.rows import Settled, among, check_batch, cut_reference, cut_row

torch.library.define(
    "specgraph::row_slots",
    "(Tensor positions, Tensor num_rows, Tensor block_table, Tensor max_length, *, int block_size) -> Tensor",
)
torch.library.define("specgraph::nan_rows", "(Tensor logits, Tensor num_rows, Tensor num_forced, int width) -> Tensor")
torch.library.define("specgraph::cut_at_eos", "(Tensor emitted, Tensor num_forced, Tensor eos_ids) -> Tensor")
torch.library.define(
    "specgraph::advance",
    "(Tensor(a!) next_window, Tensor(b!) start, Tensor(c!) num_rows, Tensor(d!) num_forced, Tensor emitted, "
    "Tensor num_emitted, Tensor[] drafts, Tensor max_length, Tensor eos_ids) -> ()",
)

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
    ``[B, M]``; other rows, and rows before position 0 or at or past ``max_length`` ``[B]``, get ``PADDING_SLOT``.
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


def chain_path(emitted: Tensor) -> Tensor:
    """The rows of the window that a chain's ``emitted`` ``[B, T]`` tokens come from: 0, 1, 2, ..., then -1."""
    return torch.arange(emitted.shape[1], device=emitted.device).where(emitted >= 0, -1)


def along_path(values: Tensor, path: Tensor) -> Tensor:
    """The rows of ``values`` ``[B, T, H]`` that ``path`` ``[B, T']`` names, in its order: ``[B, T', H]``.

    Where ``path`` is -1 there is no row; what is there instead is not used.
    """
    index = path.clamp_min(0).unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return values.gather(1, index)


def draft_tokens(window: Tensor) -> Tensor:
    """The tokens of ``window`` ``[B, T]`` that follow the last accepted one: ``[B, T - 1]``."""
    return window[:, 1:]


def nan_rows(logits: Tensor, window: Tensor, num_rows: Tensor, num_forced: Tensor) -> Tensor:
    """Which sequences have a NaN among the logits ``[B, R, V]`` of their real, unforced rows: bool ``[B]``.

    ``window`` ``[B, T]`` gives the number of rows ``T`` of the whole block, which places the ``R`` rows in it.
    """
    bad: Tensor = torch.ops.specgraph.nan_rows(logits, num_rows, num_forced, window.shape[1])
    return bad


def nan_rows_reference(logits: Tensor, num_rows: Tensor, num_forced: Tensor, width: int) -> Tensor:
    """:func:`nan_rows` of a block of ``width`` rows, in plain PyTorch."""
    rows = logits.shape[1]
    first = num_forced.clamp(max=width - rows)
    row = first.unsqueeze(1) + torch.arange(rows, device=logits.device)
    real = (row < num_rows.unsqueeze(1)) & (row >= num_forced.unsqueeze(1))
    return (logits.isnan().any(-1) & real).any(-1)


def cut_at_eos(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """``emitted`` ``[B, T]`` with everything after the first unforced EOS replaced by -1.

    ``eos_ids`` ``[E]`` is padded with -1. Forced tokens are the prompt's: an EOS among them ends nothing.
    """
    cut: Tensor = torch.ops.specgraph.cut_at_eos(emitted, num_forced, eos_ids)
    return cut


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
    tokens: Tensor, window: Tensor, start: Tensor, num_forced: Tensor, eos_ids: Tensor, *, shifted: bool = True,
    vocab_size: int = 1, chain: int = 0,
) -> Settled:  # fmt: skip
    """What :func:`cut_at_eos` and the functions of its result give, from one launch.

    In this order, as :func:`~specgraph.kernels.step.rows.settle_reference` says: ``cut_at_eos``, ``count_emitted``,
    ``next_tokens`` (or ``draft_inputs`` if not ``shifted``), the ``row_positions`` of these, how many are real
    (``catch_up_rows`` if not ``shifted``), ``last_row``, ``history_length``, and ``chain_positions`` for the offsets
    below ``chain``.
    """
    settled: Settled = torch.ops.specgraph.settle(
        tokens, window, start, num_forced, eos_ids, shifted=shifted, vocab_size=vocab_size, chain=chain
    )
    return settled


@writes()
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


def row_slots_reference(
    positions: Tensor, num_rows: Tensor, block_table: Tensor, max_length: Tensor, *, block_size: int
) -> Tensor:
    """:func:`row_slots` in plain PyTorch."""
    page = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    block = block_table.gather(1, page)
    row = torch.arange(positions.shape[1], device=positions.device)
    inside = (positions >= 0) & (positions < max_length.unsqueeze(1))
    real = (row < num_rows.unsqueeze(1)) & inside & (block >= 0)
    return torch.where(real, block * block_size + positions % block_size, PADDING_SLOT)


def cut_at_eos_reference(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """:func:`cut_at_eos` in plain PyTorch."""
    return cut_reference(emitted, num_forced, eos_ids)


def advance_reference(
    next_window: Tensor, start: Tensor, num_rows: Tensor, num_forced: Tensor, emitted: Tensor, num_emitted: Tensor,
    drafts: list[Tensor], max_length: Tensor, eos_ids: Tensor,
) -> None:  # fmt: skip
    """:func:`advance_` in plain PyTorch."""
    active = num_emitted > 0
    last = emitted.gather(1, (num_emitted - 1).clamp_min(0).unsqueeze(1))
    end = start + num_emitted
    ended = (num_emitted > num_forced) & among(last[:, 0], eos_ids)
    window = torch.cat([last, *drafts], dim=1)
    proposed = (window[:, 1:] >= 0).long().cumprod(1).sum(1)
    rows = torch.minimum(proposed + 1, max_length - 1 - end).clamp_min(0)
    next_window.copy_(torch.where(active.unsqueeze(1), window.clamp_min(0), next_window))
    num_rows.copy_(torch.where(active & ~ended, rows, 0))
    start.copy_(torch.where(active, end, start))
    num_forced.zero_()


@triton.jit
def _nan_rows_kernel(bad, logits, num_rows, num_forced, width, rows, vocab, BLOCK: tl.constexpr):
    b, r = tl.program_id(0) // rows, tl.program_id(0) % rows
    forced = tl.load(num_forced + b)
    row = tl.minimum(forced, width - rows) + r
    if (row < tl.load(num_rows + b)) & (row >= forced):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(logits + tl.program_id(0).to(tl.int64) * vocab + token, mask=token < vocab, other=0.0)
        if tl.max((values != values).to(tl.int32), axis=0) > 0:
            tl.store(bad + b, 1)  # several programs may, all of them this value


@triton.jit
def _row_slots_kernel(
    slots, positions, num_rows, block_table, max_length, width, pages, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < width
    position = tl.load(positions + b * width + row, mask=inside, other=0)
    page = tl.minimum(tl.maximum(position // BLOCK_SIZE, 0), pages - 1)
    block = tl.load(block_table + b * pages + page, mask=inside, other=-1)
    real = (row < tl.load(num_rows + b)) & (position >= 0) & (position < tl.load(max_length + b)) & (block >= 0)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(slots + b * width + row, slot, mask=inside)


@triton.jit
def _cut_at_eos_kernel(
    cut, emitted, num_forced, eos_ids, width, NUM_EOS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    row = tl.arange(0, BLOCK)
    token = tl.load(emitted + b * width + row, mask=row < width, other=-1)
    token = cut_row(token, row, tl.load(num_forced + b), eos_ids, NUM_EOS, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(cut + b * width + row, token, mask=row < width)


@triton.jit
def _advance_kernel(
    next_window, start, num_rows, num_forced, emitted, num_emitted, drafts, max_length, eos_ids, width, count,
    NUM_EOS: tl.constexpr, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK)  # more lanes than drafts: those behind the last one have none
    draft = tl.full((BLOCK,), -1, tl.int64)
    place = k
    for index in tl.static_range(len(WIDTHS)):
        inside = (place >= 0) & (place < WIDTHS[index])
        own = tl.load(drafts[index] + b * WIDTHS[index] + place, mask=inside, other=-1)
        draft = tl.where(inside, own, draft)
        place -= WIDTHS[index]
    accepted = tl.load(num_emitted + b)
    begin = tl.load(start + b)
    last = tl.load(emitted + b * width + tl.maximum(accepted - 1, 0))
    end = begin + accepted
    ended = accepted < 0
    for index in range(NUM_EOS):
        ended = ended | (last == tl.load(eos_ids + index))
    ended = ended & (accepted > tl.load(num_forced + b))
    proposed = tl.min(tl.where(draft < 0, k, BLOCK), axis=0)
    rows = tl.maximum(tl.minimum(proposed + 1, tl.load(max_length + b) - 1 - end), 0)
    active = accepted > 0
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    window = next_window + b * (count + 1)
    tl.store(window, tl.maximum(last, 0), mask=active)
    tl.store(window + 1 + k, tl.maximum(draft, 0), mask=active & (k < count))
    tl.store(num_rows + b, tl.where(active & (ended == 0), rows, 0))
    tl.store(start + b, end, mask=active)
    tl.store(num_forced + b, 0)


def _row_slots(
    positions: Tensor, num_rows: Tensor, block_table: Tensor, max_length: Tensor, *, block_size: int
) -> Tensor:
    """:func:`row_slots_reference` in one kernel."""
    slots = positions.new_empty(positions.shape)
    batch, width = positions.shape
    if slots.numel() == 0:
        return slots
    block, pdl = min(triton.next_power_of_2(width), 256), supports_pdl(slots.device)
    _row_slots_kernel[(batch, triton.cdiv(width, block))](
        slots, positions.contiguous(), num_rows.contiguous(), block_table.contiguous(), max_length.contiguous(), width,
        block_table.shape[1], BLOCK_SIZE=block_size, BLOCK=block, PDL=pdl, num_warps=1, **launch_options(pdl),
    )  # fmt: skip
    return slots


def _nan_rows(logits: Tensor, num_rows: Tensor, num_forced: Tensor, width: int) -> Tensor:
    """:func:`nan_rows_reference` in one kernel that reads the rows in question once."""
    batch, rows, vocab = logits.shape
    bad = torch.zeros(batch, dtype=torch.uint8, device=logits.device)
    block = min(triton.next_power_of_2(vocab), 8192)
    if bad.numel() and vocab:
        _nan_rows_kernel[(batch * rows, triton.cdiv(vocab, block))](
            bad, logits.contiguous(), num_rows.contiguous(), num_forced.contiguous(), width, rows, vocab, BLOCK=block,
        )  # fmt: skip
    return bad.view(torch.bool)


def _cut_at_eos(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """:func:`cut_at_eos_reference` in one kernel."""
    cut = emitted.new_empty(emitted.shape)
    batch, width = emitted.shape
    if cut.numel() == 0:
        return cut
    pdl = supports_pdl(cut.device)
    _cut_at_eos_kernel[(batch,)](
        cut, emitted.contiguous(), num_forced.contiguous(), eos_ids.contiguous(), width, NUM_EOS=eos_ids.shape[0],
        BLOCK=triton.next_power_of_2(width), PDL=pdl, num_warps=1 if width <= 256 else 4, **launch_options(pdl),
    )  # fmt: skip
    return cut


def _advance(
    next_window: Tensor, start: Tensor, num_rows: Tensor, num_forced: Tensor, emitted: Tensor, num_emitted: Tensor,
    drafts: list[Tensor], max_length: Tensor, eos_ids: Tensor,
) -> None:  # fmt: skip
    """:func:`advance_reference` in one kernel."""
    state = (next_window, start, num_rows, num_forced)
    if not all(tensor.is_contiguous() for tensor in state):
        advance_reference(*state, emitted, num_emitted, drafts, max_length, eos_ids)
        return
    batch, count = next_window.shape[0], next_window.shape[1] - 1
    drafts = [tensor.contiguous() for tensor in drafts if tensor.shape[1]]
    first, second = ([t.contiguous() for t in part] for part in ((emitted, num_emitted), (max_length, eos_ids)))
    pdl = supports_pdl(start.device)
    # One warp: a second one could read what the first has already replaced.
    _advance_kernel[(batch,)](
        *state, *first, tuple(drafts), *second, emitted.shape[1], count, NUM_EOS=eos_ids.shape[0],
        WIDTHS=tuple(tensor.shape[1] for tensor in drafts), BLOCK=triton.next_power_of_2(count + 1), PDL=pdl,
        num_warps=1, **launch_options(pdl),
    )  # fmt: skip


def _row_slots_fake(
    positions: Tensor, num_rows: Tensor, block_table: Tensor, max_length: Tensor, *, block_size: int
) -> Tensor:
    require(positions.dim() == 2 and block_table.dim() == 2, lambda: "positions must be [B, T], block_table [B, M]")
    for name, values in (("num_rows", num_rows), ("block_table", block_table), ("max_length", max_length)):
        check_batch(name, values, positions.shape[0])
    return positions.new_empty(positions.shape)


def _nan_rows_fake(logits: Tensor, num_rows: Tensor, num_forced: Tensor, width: int) -> Tensor:
    require(logits.dim() == 3, lambda: "logits must be [B, R, V]")
    for name, values in (("num_rows", num_rows), ("num_forced", num_forced)):
        check_batch(name, values, logits.shape[0])
    return logits.new_empty(logits.shape[0], dtype=torch.bool)


def _cut_at_eos_fake(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    require(emitted.dim() == 2 and eos_ids.dim() == 1, lambda: "emitted must be [B, T], eos_ids [E]")
    check_batch("num_forced", num_forced, emitted.shape[0])
    return emitted.new_empty(emitted.shape)


def _advance_fake(
    next_window: Tensor, start: Tensor, num_rows: Tensor, num_forced: Tensor, emitted: Tensor, num_emitted: Tensor,
    drafts: list[Tensor], max_length: Tensor, eos_ids: Tensor,
) -> None:  # fmt: skip
    batch, count = emitted.shape[0], sum(tensor.shape[1] for tensor in drafts)
    require(next_window.shape == (batch, count + 1), lambda: f"next_window must be [B, K + 1], K = {count}")
    named = {"start": start, "num_rows": num_rows, "num_forced": num_forced, "emitted": emitted,
             "num_emitted": num_emitted, "max_length": max_length}  # fmt: skip
    for name, values in named.items():
        check_batch(name, values, batch)


register("row_slots", cpu=row_slots_reference, cuda=_row_slots, fake=_row_slots_fake)
register("nan_rows", cpu=nan_rows_reference, cuda=_nan_rows, fake=_nan_rows_fake)
register("cut_at_eos", cpu=cut_at_eos_reference, cuda=_cut_at_eos, fake=_cut_at_eos_fake)
register("advance", cpu=advance_reference, cuda=_advance, fake=_advance_fake)
