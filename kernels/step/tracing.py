"""Functions of step graphs that say why drafts were accepted or not, for the steps of requests that ask for it.

``specgraph::trace_tokens`` gives the tokens whose log-probabilities under the target are wanted, ``drawn_ids`` those
whose log-probabilities under the drafter are wanted, and ``trace_columns`` puts together what the host is told. In
between, ``specgraph::score`` (:mod:`specgraph.kernels.verify.score`) computes the log-probabilities, and
``specgraph::rank`` (:mod:`specgraph.kernels.verify.rank`) the ranks of the first tokens. ``B`` is the number of
sequences, ``T`` that of the rows of the window, and ``R`` that of the rows of logits; ids and counts are int64.

Each of the three is one launch; as separate ATen operations they took 37, for which a small model has to wait. Each
program makes what belongs to one sequence, or in ``drawn_ids`` to one token. Nothing is computed but integers, and
floats are copied, so that no sequence influences another.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.side_by_side import column_of, side_by_side

_NAN_BITS, _NO_ENTRY = tl.constexpr(0x7FC00000), tl.constexpr(2**31 - 1)
"""The bits of ``torch.nan`` as a float32, and the number of an entry that no vocabulary has."""
_MOST_AT_ONCE = 8192
"""Entries of a draft's vocabulary that a program compares at a time."""


@dataclass(slots=True)
class TraceTokens:
    """The drafts that the ``R`` rows of ``logits`` ``[B, R, V]`` verify, and the tokens that they have emitted.

    Attributes:
        window: ``[B, T]``, the last token that was known, and behind it the drafts, if a sequence decodes.
        num_rows, num_forced: ``[B]``, how many rows of the window are real, and how many of their next tokens are
            known, which is 0 for a sequence that decodes.
        emitted: ``[B, T]``, which begins with the known tokens. As for ``verify``, the first row of the logits is that
            of the first token which is not known, or an earlier one if fewer than ``R`` tokens follow there.
        num_emitted: ``[B]``.
        temperature: ``[B]``, 0 for a greedy sequence.
        logits: nothing but its number of rows is read.
    """

    window: Tensor
    num_rows: Tensor
    num_forced: Tensor
    emitted: Tensor
    num_emitted: Tensor
    temperature: Tensor
    logits: Tensor


class TracedTokens(NamedTuple):
    """What :class:`TraceTokens` gives.

    Attributes:
        tokens: ``[B, R, 2]``, for every row of the logits the draft that it verifies and the token that it emitted,
            padding as 0.
        counts: ``[B, 2]``, how many of both are no padding, from the first on: none of the drafts of a sequence whose
            prompt the step runs.
        num_rows: ``[B]``, how many rows have a token that is no padding.
        temperature: ``[B]``, with 1 for a greedy sequence: its point mass would say nothing about a draft.
    """

    tokens: Tensor
    counts: Tensor
    num_rows: Tensor
    temperature: Tensor


@dataclass(slots=True)
class DrawnIds:
    """The ids in the draft's vocabulary of drawn ``tokens``, side by side, and how many of them were drawn.

    Attributes:
        tokens: ``[B, k]`` each, ids of the target; they have ``D`` columns in all.
        num_emitted: ``[B]``. For a sequence that emitted nothing, no token was drawn.
        draft_to_target: ``[Vd]``, the target's id of every id of the draft; None if they are the same.

    Returns:
        ids ``[B, D]``, of which one that the draft does not have is 0, and their numbers ``[B]``, ``D`` or 0.
    """

    tokens: list[Tensor]
    num_emitted: Tensor
    draft_to_target: Tensor | None = None


@dataclass(slots=True)
class TraceColumns:
    """What the host is told of a step, int32 ``[B, 4 * count + 2]``: numbers, and the bits of float32.

    The first ``count`` columns are the log-probabilities of the drafts that the step verified, under the target: 0
    behind the last of them, and NaN where there is no row for one. The next are the drafts of the following step, -1
    for none. Then come the log-probabilities that these were drawn with, NaN where a draft was not drawn. The next
    column is that of the last token which the step emitted, under the target, or 0 if it emitted none. The last columns
    are the ranks under the target of the drafts that the step verified, and that of the last token which it emitted, 0
    for none.

    Attributes:
        logprobs: float32 ``[B, R, 2]``, those of :attr:`TracedTokens.tokens` under the target.
        ranks: int32 ``[B, R, 2]``, those of the same tokens.
        counts: those of :class:`TracedTokens`, ``[B, 2]``.
        drawn: tokens ``[B, k]`` that were drawn, ids of the target.
        drawn_logprobs: float32 ``[B, k]``, with as many columns in all.
        drafts: ``[B, k]`` each, those of the following step.
        count: how many drafts of a sequence a step verifies and makes.
    """

    logprobs: Tensor
    ranks: Tensor
    counts: Tensor
    drawn: list[Tensor]
    drawn_logprobs: list[Tensor]
    drafts: list[Tensor]
    _: KW_ONLY
    count: int


def trace_tokens_reference(given: TraceTokens) -> TracedTokens:
    """:class:`TraceTokens` in plain PyTorch."""
    rows, forced, emitted = given.logits.shape[1], given.num_forced, given.emitted
    drafts = torch.nn.functional.pad(given.window[:, 1:rows], (0, 1))
    first = forced.clamp(max=emitted.shape[1] - rows)
    own = emitted.gather(1, first.unsqueeze(1) + torch.arange(rows, device=emitted.device))
    num_verified = torch.where(forced == 0, given.num_rows - 1, 0).clamp(0, rows - 1)
    counts = torch.stack([num_verified, (given.num_emitted - first).clamp(0, rows)], 1)
    temperature = torch.where(given.temperature > 0, given.temperature, 1.0)
    return TracedTokens(torch.stack([drafts, own], 2).clamp_min(0), counts, counts.amax(1), temperature)


def drawn_ids_reference(given: DrawnIds) -> tuple[Tensor, Tensor]:
    """:class:`DrawnIds` in plain PyTorch."""
    ids = torch.cat(given.tokens, 1)
    if given.draft_to_target is not None:
        ids = (ids.unsqueeze(2) == given.draft_to_target).int().argmax(2)
    return ids, torch.where(given.num_emitted > 0, ids.shape[1], 0)


def trace_columns_reference(given: TraceColumns) -> Tensor:
    """:class:`TraceColumns` in plain PyTorch."""
    counts, count = given.counts, given.count
    (verified, last), (ranks, last_rank) = (_of_tokens(values, counts) for values in (given.logprobs, given.ranks))
    verified, ranks = _padded(verified, count, torch.nan), _padded(ranks, count, 0)
    none = counts[:, :0]
    drafts, drawn = (torch.cat(values, 1) if values else none for values in (given.drafts, given.drawn))
    logprobs = torch.cat(given.drawn_logprobs, 1) if given.drawn_logprobs else none.to(verified.dtype)
    drafts, drawn, logprobs = _padded(drafts, count, -1), _padded(drawn, count, -2), _padded(logprobs, count, torch.nan)
    made = torch.where(drawn == drafts, logprobs, torch.nan)
    before, behind = (values.contiguous().view(torch.int32) for values in (verified, torch.cat([made, last], 1)))
    return torch.cat([before, drafts.to(torch.int32), behind, ranks, last_rank], 1)


def _of_tokens(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``values`` ``[B, R, 2]``, those of the drafts ``[B, R - 1]`` and that of the last own token ``[B, 1]``.

    Those that ``counts`` does not count are 0.
    """
    verified, own = values.unbind(2)
    known = torch.arange(verified.shape[1] - 1, device=verified.device) < counts[:, :1]
    last = own.gather(1, (counts[:, 1:] - 1).clamp_min(0))
    return torch.where(known, verified[:, :-1], 0), torch.where(counts[:, 1:] > 0, last, 0)


def _padded(values: Tensor, count: int, fill: float) -> Tensor:
    """``values`` ``[B, n]`` with ``count`` columns."""
    return torch.nn.functional.pad(values[:, :count], (0, max(0, count - values.shape[1])), value=fill)


@triton.jit
def _trace_tokens_kernel(
    tokens, counts, scored, temperatures, window, num_rows, num_forced, emitted, num_emitted, temperature,
    window_width, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One sequence per program."""
    gdc_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, BLOCK)
    forced, rows, total = tl.load(num_forced + b), tl.load(num_rows + b), tl.load(num_emitted + b)
    warmth = tl.load(temperature + b)
    # ---- of every row of logits the draft that it verifies, and the token that it emitted: [BLOCK]
    first = tl.minimum(forced, width - COUNT)
    draft = tl.load(window + b * window_width + 1 + row, mask=row < COUNT - 1, other=0)
    own = tl.load(emitted + b * width + first + row, mask=row < COUNT, other=0)
    gdc_launch_dependents(PDL)
    # ---- how many of both are no padding
    num_verified = tl.minimum(tl.maximum(tl.where(forced == 0, rows - 1, 0), 0), COUNT - 1)
    num_own = tl.minimum(tl.maximum(total - first, 0), COUNT)
    place = tokens + (b * COUNT + row) * 2
    tl.store(place, tl.maximum(draft, 0), mask=row < COUNT)
    tl.store(place + 1, tl.maximum(own, 0), mask=row < COUNT)
    tl.store(counts + b * 2, num_verified)
    tl.store(counts + b * 2 + 1, num_own)
    tl.store(scored + b, tl.maximum(num_verified, num_own))
    tl.store(temperatures + b, tl.where(warmth > 0, warmth, 1.0))


@triton.jit
def _drawn_ids_kernel(
    ids, counts, tokens, num_emitted, draft_to_target, VOCAB: tl.constexpr, COUNT: tl.constexpr,
    WIDTHS: tl.constexpr, STRIDES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One token per program; the grid is (D, B)."""
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    place, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = column_of(tokens, b, place, 0, tl.int64, WIDTHS, STRIDES)
    if draft_to_target is not None:
        # ---- id = the first entry of draft_to_target that is the token: [BLOCK] entries at a time
        nearest = tl.full((BLOCK,), _NO_ENTRY, tl.int32)
        for first in range(0, VOCAB, BLOCK):
            entry = first + tl.arange(0, BLOCK)
            target = tl.load(draft_to_target + entry, mask=entry < VOCAB, other=-1)
            nearest = tl.minimum(nearest, tl.where((target == token) & (entry < VOCAB), entry, _NO_ENTRY))
        found = tl.min(nearest, 0)
        token = tl.where(found == _NO_ENTRY, 0, found).to(tl.int64)
    tl.store(ids + b * COUNT + place, token)
    if place == 0:
        tl.store(counts + b, tl.where(tl.load(num_emitted + b) > 0, COUNT, 0))


@triton.jit
def _trace_columns_kernel(
    columns, logprobs, ranks, counts, drawn, drawn_bits, drafts, rows,
    COUNT: tl.constexpr, DRAWN: tl.constexpr, DRAWN_STRIDES: tl.constexpr, BITS: tl.constexpr,
    BITS_STRIDES: tl.constexpr, DRAFTS: tl.constexpr, DRAFTS_STRIDES: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One sequence per program. Log-probabilities are read and written as their bits."""
    gdc_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    num_verified, num_own = tl.load(counts + b * 2), tl.load(counts + b * 2 + 1)
    # ---- of the verified drafts and of the last own token: log-probabilities, as bits, and ranks: [BLOCK]
    known, place = (column < rows - 1) & (column < num_verified), b * rows * 2 + column * 2
    verified, rank = tl.load(logprobs + place, mask=known, other=0), tl.load(ranks + place, mask=known, other=0)
    verified = tl.where(column < rows - 1, verified, _NAN_BITS)
    place = b * rows * 2 + tl.maximum(num_own - 1, 0) * 2 + 1
    last = tl.load(logprobs + place, mask=num_own > 0, other=0)
    last_rank = tl.load(ranks + place, mask=num_own > 0, other=0)
    # ---- of the next drafts: the tokens, and the log-probabilities of those that were drawn, as bits: [BLOCK]
    draft = column_of(drafts, b, column, -1, tl.int64, DRAFTS, DRAFTS_STRIDES)
    token = column_of(drawn, b, column, -2, tl.int64, DRAWN, DRAWN_STRIDES)
    bits = column_of(drawn_bits, b, column, 0, tl.int32, BITS, BITS_STRIDES)
    bits = tl.where(token == draft, bits, _NAN_BITS)
    gdc_launch_dependents(PDL)
    # ---- columns = logprobs, drafts, drawn logprobs, the last token's logprob, ranks, the last token's rank
    out = columns + b * (4 * COUNT + 2)
    tl.store(out + column, verified, mask=column < COUNT)
    tl.store(out + COUNT + column, draft.to(tl.int32), mask=column < COUNT)
    tl.store(out + 2 * COUNT + column, bits, mask=column < COUNT)
    tl.store(out + 3 * COUNT, last)
    tl.store(out + 3 * COUNT + 1 + column, rank, mask=column < COUNT)
    tl.store(out + 4 * COUNT + 1, last_rank)


def trace_tokens_triton(given: TraceTokens) -> TracedTokens:
    """:class:`TraceTokens` in one kernel."""
    traced, rows = _trace_tokens_fake(given), given.logits.shape[1]
    launch(
        _trace_tokens_kernel, (len(given.window),), *traced,
        *contiguous(given, "window", "num_rows", "num_forced", "emitted", "num_emitted", "temperature"),
        given.window.shape[1], given.emitted.shape[1], COUNT=rows, BLOCK=triton.next_power_of_2(rows), num_warps=1,
    )
    return traced


def drawn_ids_triton(given: DrawnIds) -> tuple[Tensor, Tensor]:
    """:class:`DrawnIds` in one kernel."""
    ids, counts = _drawn_ids_fake(given)
    if ids.numel() == 0:
        return drawn_ids_reference(given)
    tokens, widths, strides = side_by_side(given.tokens)
    vocab = 0 if given.draft_to_target is None else len(given.draft_to_target)
    block = block_size(vocab, _MOST_AT_ONCE)
    launch(
        _drawn_ids_kernel, (ids.shape[1], len(ids)), ids, counts, tokens,
        *contiguous(given, "num_emitted", "draft_to_target"), VOCAB=vocab, COUNT=ids.shape[1], WIDTHS=widths,
        STRIDES=strides, BLOCK=block, num_warps=max(1, block // 1024),
    )
    return ids, counts


def trace_columns_triton(given: TraceColumns) -> Tensor:
    """:class:`TraceColumns` in one kernel."""
    columns, count = _trace_columns_fake(given), given.count
    drawn, drawn_widths, drawn_strides = side_by_side(given.drawn)
    bits, bits_widths, bits_strides = side_by_side([values.view(torch.int32) for values in given.drawn_logprobs])
    drafts, draft_widths, draft_strides = side_by_side(given.drafts)
    launch(
        _trace_columns_kernel, (len(columns),), columns, given.logprobs.contiguous().view(torch.int32),
        *contiguous(given, "ranks", "counts"), drawn, bits, drafts, given.logprobs.shape[1], COUNT=count,
        DRAWN=drawn_widths, DRAWN_STRIDES=drawn_strides, BITS=bits_widths, BITS_STRIDES=bits_strides,
        DRAFTS=draft_widths, DRAFTS_STRIDES=draft_strides, BLOCK=triton.next_power_of_2(max(count, 1)), num_warps=1,
    )
    return columns


def _trace_tokens_fake(given: TraceTokens) -> TracedTokens:
    window, count = given.window, given.logits.shape[1]
    vectors = dict.fromkeys(("num_rows", "num_forced", "num_emitted", "temperature"), "B")
    check_shapes(given, window="B T", emitted="B T", **vectors)
    batch, width = window.shape
    require(0 < count <= width, lambda: f"count must be from 1 to T = {width}, not {count}")
    new = window.new_empty
    return TracedTokens(new(batch, count, 2), new(batch, 2), new(batch), given.temperature.new_empty(batch))


def _drawn_ids_fake(given: DrawnIds) -> tuple[Tensor, Tensor]:
    require(len(given.tokens) > 0, lambda: "tokens must be one tensor [B, k] or more, not an empty list")
    check_shapes(given, num_emitted="B", tokens="B *")
    batch, new = given.num_emitted.shape[0], given.num_emitted.new_empty
    return new(batch, sum(tokens.shape[1] for tokens in given.tokens)), new(batch)


def _trace_columns_fake(given: TraceColumns) -> Tensor:
    logprobs, ranks, counts = given.logprobs, given.ranks, given.counts
    every = dict.fromkeys(("drawn", "drawn_logprobs", "drafts"), "B *")
    check_shapes(given, logprobs="B R 2", ranks="B R 2", counts="B 2", **every)
    require(logprobs.dtype == torch.float32, lambda: f"logprobs must be float32, not {logprobs.dtype}")
    require(ranks.dtype == torch.int32, lambda: f"ranks must be int32, not {ranks.dtype}")
    others = [values.dtype for values in given.drawn_logprobs if values.dtype != torch.float32]
    require(not others, lambda: f"drawn_logprobs must be float32, not {others[0]}")
    drawn, beside = (sum(values.shape[1] for values in own) for own in (given.drawn, given.drawn_logprobs))
    require(drawn == beside, lambda: f"drawn_logprobs must have the {drawn} columns of drawn, not {beside}")
    return counts.new_empty(counts.shape[0], 4 * given.count + 2, dtype=torch.int32)


trace_tokens = declare(
    "trace_tokens", TraceTokens, _trace_tokens_fake,
    triton_or_reference(trace_tokens_triton, trace_tokens_reference, moves_only=True),
).function
drawn_ids = declare(
    "drawn_ids", DrawnIds, _drawn_ids_fake, triton_or_reference(drawn_ids_triton, drawn_ids_reference, moves_only=True),
).function
trace_columns = declare(
    "trace_columns", TraceColumns, _trace_columns_fake,
    triton_or_reference(trace_columns_triton, trace_columns_reference, moves_only=True),
).function
