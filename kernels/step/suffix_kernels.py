"""The Triton kernels of ``specgraph::suffix_lookup``. :mod:`specgraph.kernels.step.suffix` says what they compute and
why they are cut into programs as they are.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.attention.work_units import is_last
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait
from specgraph.kernels.step.ngram import sequence_bounds


@triton.jit
def match_kernel(
    matched, maxima, history, rows, length, stride, longest, tiles, MAX_MATCH: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """``matched`` of every ``num_programs(0)``-th tile of one sequence, and the maximum of each; grid (parts, B)."""
    gdc_wait(PDL)
    b = tl.program_id(1)
    row, end = sequence_bounds(rows, length, longest, b)
    gdc_launch_dependents(PDL)
    first = history + row * stride
    last = end - 1
    used = (last + TILE - 1) // TILE
    for tile in range(loop_bound(tl.program_id(0)), loop_bound(used), loop_bound(tl.num_programs(0))):
        # ---- matched(j) = the tokens up to place j that equal those at the end: [TILE], and its maximum
        place = tile * TILE + tl.arange(0, TILE)
        equal = place < last
        count = tl.zeros((TILE,), tl.int32)
        back = 0
        # Most tiles stop after the first comparison.
        while (back < MAX_MATCH) & (tl.max(equal.to(tl.int32), axis=0) > 0):
            wanted = tl.load(first + (last - back))  # some place before the last one matches up to here
            token = tl.load(first + (place - back), mask=equal & (place >= back), other=0)
            equal = equal & (place >= back) & (token == wanted)
            count += equal.to(tl.int32)
            back += 1
        own = b.to(tl.int64) * tiles + tile
        tl.store(matched + own * TILE + tl.arange(0, TILE), count.to(tl.int8))
        tl.store(maxima + own, tl.max(count, axis=0))


@triton.jit
def _find_voters(places, matched, maxima, used, size, TILE: tl.constexpr, TILES: tl.constexpr, VOTERS: tl.constexpr):
    """Store the last ``VOTERS`` places of one sequence that match ``size`` tokens, last first; returns their number."""
    lane = tl.arange(0, TILES)
    largest = tl.load(maxima + lane, mask=lane < used, other=0)
    tile = tl.max(tl.where(largest >= size, lane, -1), axis=0)
    found = 0
    while (tile >= 0) & (found < VOTERS):
        index = tile * TILE + tl.arange(0, TILE)
        hit = (tl.load(matched + index) >= size).to(tl.int32)
        here = tl.sum(hit, axis=0)
        rank = found + here - tl.cumsum(hit, axis=0)
        tl.store(places + rank, index, mask=(hit > 0) & (rank < VOTERS))
        found += here
        tile = tl.max(tl.where((largest >= size) & (lane < tile), lane, -1), axis=0)
    return tl.minimum(found, VOTERS)


@triton.jit
def _follow(history, place, voting, end, limit, THRESHOLD: tl.constexpr, DRAFTS: tl.constexpr):
    """The drafts ``[DRAFTS]`` of the path that the ``voting`` places agree on, padded with -1, and their score."""
    lane = tl.arange(0, DRAFTS)
    drafts = tl.full((DRAFTS,), -1, tl.int64)
    prob = tl.full((), 1 << 30, tl.int64)
    score = tl.zeros((), tl.int64)
    index = 0
    while index < limit:
        following = place + 1 + index
        voting = voting & (following < end)
        token = tl.load(history + following, mask=voting, other=-1)
        # ---- the votes for each voter's next token, [VOTERS, VOTERS] compared; of equal ones the latest place wins
        agree = (token[:, None] == token[None, :]) & voting[None, :]
        rank = tl.where(voting, (tl.sum(agree.to(tl.int32), axis=1).to(tl.int64) << 32) | place, -1)
        best = tl.max(rank, axis=0)
        total = tl.sum(voting.to(tl.int64), axis=0)
        # ---- prob_i = prob_{i - 1} * votes of the winner / votes
        prob = prob * tl.maximum(best >> 32, 0) // tl.maximum(total, 1)
        if (total > 0) & (prob >= THRESHOLD):
            winner = tl.sum(tl.where(rank == best, token, 0), axis=0)  # no two places have the same rank
            drafts = tl.where(lane == index, winner, drafts)
            score += prob
            voting = voting & (token == winner)
            index += 1
        else:
            limit = index
    return drafts, score


@triton.jit
def vote_kernel(
    proposals, scores, drafted, places, counters, matched, maxima, history, rows, length, stride, longest, tiles, count,
    MIN_MATCH: tl.constexpr, SIZES: tl.constexpr, FACTOR: tl.constexpr, OFFSET: tl.constexpr, THRESHOLD: tl.constexpr,
    TILE: tl.constexpr, TILES: tl.constexpr, VOTERS: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):
    """The path of one length of match in one sequence; grid (lengths, B). The last to arrive writes the best drafts."""
    gdc_wait(PDL)
    b, index = tl.program_id(1), tl.program_id(0)
    size = MIN_MATCH + index
    row, end = sequence_bounds(rows, length, longest, b)
    gdc_launch_dependents(PDL)
    used = (end - 1 + TILE - 1) // TILE
    first, here = history + row * stride, b.to(tl.int64) * tiles
    own = b.to(tl.int64) * tl.num_programs(0) + index

    found = _find_voters(places + own * VOTERS, matched + here * TILE, maxima + here, used, size, TILE, TILES, VOTERS)
    tl.debug_barrier()  # the places were stored by other threads of this program
    # ---- path(p), and the expected number of accepted drafts: [DRAFTS]
    voter = tl.arange(0, VOTERS)
    place = tl.load(places + own * VOTERS + voter, mask=voter < found, other=0)
    limit = tl.minimum((size.to(tl.int64) * FACTOR + OFFSET) >> 30, count).to(tl.int32)
    drafts, score = _follow(first, place, voter < found, end, limit, THRESHOLD, DRAFTS)
    lane = tl.arange(0, DRAFTS)
    tl.store(drafted + own * count + lane, drafts, mask=lane < count)
    tl.store(scores + own, (score << 7) | index)
    if is_last(counters + b, tl.num_programs(0)):
        # Other programs have written these: they must not come from this multiprocessor's own cache.
        sizes = tl.arange(0, SIZES)
        every = tl.load(scores + b.to(tl.int64) * tl.num_programs(0) + sizes, mask=sizes < tl.num_programs(0), other=-1,
                        cache_modifier=".cg")
        best = b.to(tl.int64) * tl.num_programs(0) + (tl.max(every, axis=0) & 127)
        chosen = tl.load(drafted + best * count + lane, mask=lane < count, other=-1, cache_modifier=".cg")
        tl.store(proposals + b.to(tl.int64) * count + lane, chosen, mask=lane < count)
