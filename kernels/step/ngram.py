"""``specgraph::ngram_lookup`` and ``specgraph::record_tokens``: the two ops of prompt lookup on the token history.

``record_tokens`` writes the tokens that a step has accepted into the history. ``ngram_lookup`` then searches the
history of each sequence for the n-gram at its end, and proposes the tokens that followed it there:

    matched(j) = the largest m <= max_ngram such that history[j - i] == history[length - 1 - i] for all i < m
    at         = the j < length - 1 with the largest (matched(j), j), among those with matched(j) >= min_ngram
    drafts     = history[at + 1 : at + 1 + K], cut at length, padded with -1; all -1 if there is no such j

``history`` is int64 ``[N, S]`` with one row for each sequence of the state. ``rows`` is int64 ``[B]`` and names the row
of ``history`` that belongs to each of the B sequences of this call; -1 marks an entry that is no sequence. Without
``rows``, N is B and sequence b has row b.

Cost. A lookup reads ``8 * length`` bytes per sequence, and a launch costs 1.5 to 2 us. On an H200 (4.7 TB/s) one
sequence of 1,000 tokens is 8 KB, or 2 ns; 64 sequences of 131,072 tokens are 67 MB, or 14 us. The number of launches
therefore decides the time of nearly all lookups, so each op is a single launch. As separate ATen operations they would
be about 40 and about 10.

Programs. A sequence is read in tiles of 1,024 tokens. The tiles of a long sequence are shared out to several programs,
whose number depends on the length, so that one long sequence fills a GPU too. Each program leaves its best score in
scratch memory, and the last one to arrive takes the maximum of all scores and writes the drafts. A sequence of one tile
needs neither. A tile loads each token once, in vectors of 16 bytes; only positions whose token matches load the tokens
before it, which the first load has brought into the cache.

A score is ``matched << 32 | position``, an integer that no two positions share. Its maximum is the same in any order,
so the drafts of a sequence are a function of its own tokens alone: neither the split nor the other sequences matter.

Source: Saxena 2023, "Prompt Lookup Decoding"; Yang et al. 2023, "Inference with Reference" (arXiv 2304.04487).
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.attention.work_units import is_last
from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import (
    arrival_counters,
    block_size,
    contiguous,
    dense_rows,
    gdc_launch_dependents,
    gdc_wait,
    launch,
)
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.writes import writes

TILE = 1024
"""Tokens that a program reads at a time: 8 for each of its 128 threads, in four loads of 16 bytes."""
MOST_PARTS = 256
"""The most programs that share one sequence; the last of them loads all of their scores at once."""
_MOST_PARTS = tl.constexpr(MOST_PARTS)
_RECORD_BLOCK = 256


@dataclass(slots=True)
class NgramLookup:
    """Propose what followed the last occurrence of the longest n-gram that ends a sequence and occurs in it before.

    Args:
        history: int64 ``[N, S]``, accepted tokens. What lies at or past a sequence's ``length`` is not read.
        rows: int64 ``[B]``, the row of ``history`` of each sequence, -1 for none; None if sequence b has row b.
        length: int64 ``[B]``, the number of accepted tokens; more than ``S`` count as ``S``.
        num_speculative_tokens: ``K``, how many tokens to propose.
        max_ngram: the length of the longest n-gram that is looked up.
        min_ngram: the length of the shortest one, at least 1.

    Returns:
        int64 ``[B, K]``, -1 where there is no proposal.
    """

    history: Tensor
    rows: Tensor | None
    length: Tensor
    num_speculative_tokens: int
    max_ngram: int
    min_ngram: int


@dataclass(slots=True)
class RecordTokens:
    """Write the first ``num_rows`` ``[B]`` of ``tokens`` ``[B, T]`` at ``positions`` of ``history``.

    Args:
        history: int64 ``[N, S]``, written in place.
        rows: int64 ``[B]``, the row of ``history`` of each sequence, all different but for -1, which writes nothing.
            None if sequence b has row b.
        tokens: int64 ``[B, T]``.
        positions: int64 ``[B, T]``, ascending; what they put before 0, or at or past ``S``, is left out.
        num_rows: int64 ``[B]``.
    """

    history: Tensor
    rows: Tensor | None
    tokens: Tensor
    positions: Tensor
    num_rows: Tensor


def ngram_lookup_reference(given: NgramLookup) -> Tensor:
    """:class:`NgramLookup` in plain PyTorch. It reads the accepted tokens alone, whose number it asks the host.

    After the last token, only the few places that have matched so far are compared further.
    """
    history, length = given.history, given.length
    longest = max([1, *length.tolist()])
    tokens, end = _sequences(history[:, :longest], given.rows, length)
    last = tokens.gather(1, (end - 1).clamp(0, None))
    earlier = torch.arange(tokens.shape[1], device=tokens.device) < end - 1
    sequence, place = (earlier & (tokens == last)).nonzero(as_tuple=True)
    score = torch.full_like(length, -1)
    for matched in range(1, given.max_ngram + 1):
        if matched >= given.min_ngram:
            score.scatter_reduce_(0, sequence, matched * tokens.shape[1] + place, "amax")
        before = place >= matched
        sequence, place = sequence[before], place[before]
        equal = tokens[sequence, place - matched] == tokens[sequence, end[sequence, 0] - 1 - matched]
        sequence, place = sequence[equal], place[equal]
    return _following(tokens, end, score.unsqueeze(1), given.num_speculative_tokens)


def _sequences(history: Tensor, rows: Tensor | None, length: Tensor) -> tuple[Tensor, Tensor]:
    """The history of each sequence of a call ``[B, S]``, and where it ends ``[B, 1]``."""
    if rows is not None:
        history, length = history[rows.clamp_min(0)], torch.where(rows >= 0, length, 0)
    return history, length.clamp(max=history.shape[1]).unsqueeze(1)


def _following(tokens: Tensor, end: Tensor, score: Tensor, count: int) -> Tensor:
    """The ``count`` tokens behind the best place of each sequence; its score is ``matched * S + place`` ``[B, 1]``."""
    following = score % tokens.shape[1] + 1 + torch.arange(count, device=tokens.device)
    drafts = tokens.gather(1, torch.minimum(following, end - 1).clamp(0, None))
    return torch.where((following < end) & (score >= 0), drafts, -1)


def record_tokens_reference(given: RecordTokens) -> None:
    """:class:`RecordTokens` in plain PyTorch."""
    history, rows, tokens, positions = given.history, given.rows, given.tokens, given.positions
    sequence = torch.arange(tokens.shape[0], device=tokens.device) if rows is None else rows
    row = torch.arange(tokens.shape[1], device=tokens.device)
    real = (row < given.num_rows.unsqueeze(1)) & (positions >= 0) & (positions < history.shape[1])
    real = real & (sequence >= 0).unsqueeze(1)
    # To select the real rows by a mask, the host would have to know their number. So every row adds: a real one the
    # difference to what is there, all others zero.
    place = sequence.clamp_min(0).unsqueeze(1) * history.shape[1] + positions.clamp(0, history.shape[1] - 1)
    history.put_(place, torch.where(real, tokens - history.take(place), 0), accumulate=True)


@triton.jit
def sequence_bounds(rows, length, longest, b):
    """The row of ``history`` of sequence b, and how many tokens it has: 0 if there is no sequence."""
    row = b.to(tl.int64)
    if rows is not None:
        row = tl.load(rows + b)
    end = tl.where(row >= 0, tl.minimum(tl.load(length + b), longest), 0).to(tl.int32)
    return tl.maximum(row, 0), end


@triton.jit
def _search(history, start, odd, end, part, parts, tiles, MAX_NGRAM: tl.constexpr, MIN_NGRAM: tl.constexpr,
            TILE: tl.constexpr):
    """The best score among every ``parts``-th tile of one sequence, -1 if nothing matches.

    The sequence begins ``odd`` tokens behind ``start``, which lies at a boundary of 16 bytes if ``history`` does.
    """
    first = start + odd
    last = end - 1
    wanted = tl.load(history + first + last, mask=last >= 0, other=0)
    best = tl.zeros((TILE,), tl.int32)
    at = tl.zeros((TILE,), tl.int32)
    # A vector of two tokens is loaded whole. The second one may be the sequence's last, which is no place to propose
    # from, and the first one may be the last of the row before.
    loaded = (last + odd + 1) // 2 * 2
    for tile in range(loop_bound(part), loop_bound(tiles), loop_bound(parts)):
        index = tile * TILE + tl.arange(0, TILE)
        place = index - odd
        token = tl.load(history + start + index, mask=index < loaded, other=0)
        equal = (place >= 0) & (place < last) & (token == wanted)
        # ---- matched(j) = the tokens up to place j that equal those at the end, at most MAX_NGRAM: [TILE]
        matched = equal.to(tl.int32)
        for back in range(1, MAX_NGRAM):
            equal = equal & (place >= back)
            before = tl.load(history + first + (last - back), mask=last >= back, other=0)
            equal = equal & (tl.load(history + first + (place - back), mask=equal, other=0) == before)
            matched += equal.to(tl.int32)
        # ---- of each lane the longest match so far, and of equal ones the last
        better = (matched >= MIN_NGRAM) & (matched >= best)
        best = tl.where(better, matched, best)
        at = tl.where(better, place, at)
    return tl.max(tl.where(best > 0, (best.to(tl.int64) << 32) | at, -1), axis=0)


@triton.jit
def _lookup_kernel(
    proposals, scores, counters, history, rows, length, stride, longest, count, MAX_NGRAM: tl.constexpr,
    MIN_NGRAM: tl.constexpr, TILE: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):
    """One part of the search in one sequence; grid (parts, B). The last part to arrive writes the drafts."""
    gdc_wait(PDL)
    part, b = tl.program_id(0), tl.program_id(1)
    row, end = sequence_bounds(rows, length, longest, b)
    begin = row * stride
    start = begin // 2 * 2
    odd = (begin - start).to(tl.int32)
    tiles = (end - 1 + odd + TILE - 1) // TILE
    parts = tl.minimum(tl.maximum(tiles, 1), tl.num_programs(0))
    if part >= parts:
        return

    score = _search(history, start, odd, end, part, parts, tiles, MAX_NGRAM, MIN_NGRAM, TILE)
    gdc_launch_dependents(PDL)
    finish = parts == 1
    if parts > 1:
        own = scores + b * tl.num_programs(0)
        tl.store(own + part, score)
        finish = is_last(counters + b, parts)
        if finish:
            # Other programs have written these: they must not come from this multiprocessor's own cache.
            lane = tl.arange(0, _MOST_PARTS)
            score = tl.max(tl.load(own + lane, mask=lane < parts, other=-1, cache_modifier=".cg"), axis=0)
    # ---- drafts = what follows the best place: [DRAFTS]
    if finish:
        draft = tl.arange(0, DRAFTS)
        following = score.to(tl.int32) + 1 + draft  # the low half of a score is its position
        token = tl.load(history + begin + following, mask=(score >= 0) & (following < end), other=-1)
        tl.store(proposals + b * count + draft, token, mask=draft < count)


@triton.jit
def _record_kernel(
    history, rows, tokens, positions, num_rows, stride, inner, longest, width, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """``BLOCK`` tokens of one sequence; grid (B, blocks)."""
    gdc_wait(PDL)
    b = tl.program_id(0)
    sequence = b.to(tl.int64)
    if rows is not None:
        sequence = tl.load(rows + b)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = (row < width) & (row < tl.load(num_rows + b)) & (sequence >= 0)
    position = tl.load(positions + b * width + row, mask=real, other=-1)
    token = tl.load(tokens + b * width + row, mask=real, other=0)
    gdc_launch_dependents(PDL)
    real = real & (position >= 0) & (position < longest)
    tl.store(history + sequence * stride + position * inner, token, mask=real)


def _parts(batch: int, longest: int) -> int:
    """How many programs share a sequence; B counters serve them, which are few enough wherever there are parts."""
    return max(1, min(triton.cdiv(longest, TILE), gpus.HOPPER.search_programs // batch, MOST_PARTS))


def ngram_lookup_triton(given: NgramLookup) -> Tensor:
    """:class:`NgramLookup` in one kernel."""
    history, batch, count = dense_rows(given.history), len(given.length), given.num_speculative_tokens
    proposals = history.new_empty(batch, count)
    counters = arrival_counters(history.device)  # even if not needed now: a later call may be captured
    if proposals.numel() == 0:
        return proposals
    parts = _parts(batch, history.shape[1])
    launch(
        _lookup_kernel, (parts, batch), proposals, history.new_empty(batch, parts), counters, history,
        *contiguous(given, "rows", "length"), history.stride(0), history.shape[1], count, MAX_NGRAM=given.max_ngram,
        MIN_NGRAM=given.min_ngram, TILE=TILE, DRAFTS=triton.next_power_of_2(count), num_warps=4,
    )
    return proposals


def record_tokens_triton(given: RecordTokens) -> None:
    """:class:`RecordTokens` in one kernel."""
    history, (batch, width) = given.history, given.tokens.shape
    block = block_size(width, _RECORD_BLOCK)
    launch(
        _record_kernel, (batch, triton.cdiv(width, block)), history,
        *contiguous(given, "rows", "tokens", "positions", "num_rows"), *history.stride(), history.shape[1], width,
        BLOCK=block, num_warps=1,
    )


def check_history(given: Any, batch: int) -> None:
    """Raise ``ValueError`` unless each of ``batch`` sequences has a row of the history."""
    history = given.history
    check_shapes(given, history="N S")
    require(history.dtype == torch.int64, lambda: f"history must be int64, not {history.dtype}")
    if given.rows is None:
        advice = "name the row of each sequence in rows, or give history as many rows as there are sequences"
        require(history.shape[0] == batch, lambda: f"history has {history.shape[0]} rows, not {batch}: {advice}")


def _ngram_lookup_fake(given: NgramLookup) -> Tensor:
    length, min_ngram, max_ngram = given.length, given.min_ngram, given.max_ngram
    check_shapes(given, length="B", rows="B")
    check_history(given, length.shape[0])
    require(
        1 <= min_ngram <= max_ngram,
        lambda: f"min_ngram must be at least 1 and at most max_ngram, not {min_ngram} with max_ngram {max_ngram}",
    )
    return given.history.new_empty(length.shape[0], given.num_speculative_tokens)


def _record_tokens_fake(given: RecordTokens) -> None:
    check_shapes(given, tokens="B T", positions="B T", rows="B", num_rows="B")
    check_history(given, given.tokens.shape[0])


NGRAM_LOOKUP = declare(
    "ngram_lookup", NgramLookup, _ngram_lookup_fake,
    triton_or_reference(ngram_lookup_triton, ngram_lookup_reference, moves_only=True),
)
ngram_lookup = NGRAM_LOOKUP.function
RECORD_TOKENS = declare(
    "record_tokens", RecordTokens, _record_tokens_fake,
    triton_or_reference(record_tokens_triton, record_tokens_reference, moves_only=True), mutates=("history",),
)
record_tokens_ = writes(*RECORD_TOKENS.mutates, final=False)(RECORD_TOKENS.function)
