"""``specgraph::suffix_lookup``: the most frequent continuation of the end of a sequence, with adaptive length.

It reads the history that ``specgraph::record_tokens`` writes (:mod:`specgraph.kernels.step.ngram`). For each sequence:

    matched(j)  = the largest m <= max_match such that history[j - i] == history[length - 1 - i] for all i < m
    voters(p)   = the last VOTERS places j < length - 1 with matched(j) >= p
    path(p)     = d_0, d_1, ...: d_i is the most frequent token among history[j + 1 + i], over those voters j whose
                  continuation begins with d_0 ... d_(i-1) and does not end there; of equally frequent tokens the one
                  that occurs last. share_i is the share of these voters that have it.
    prob_i      = share_0 * ... * share_i
    limit(p)    = min(K, floor(p * max_spec_factor + max_spec_offset))
    made(p)     = the largest n <= limit(p) such that prob_i >= min_token_prob for all i < n
    score(p)    = prob_0 + ... + prob_(made(p) - 1), the expected number of accepted drafts
    drafts      = the first made(p) tokens of path(p), padded with -1, for that p in min_match .. max_match which has
                  the highest score; of equal scores the longest p

``history`` is int64 ``[N, S]`` with one row for each sequence of the state. ``rows`` is int64 ``[B]`` and names the row
of ``history`` that belongs to each of the B sequences of this call; -1 marks an entry that is no sequence. Without
``rows``, N is B and sequence b has row b.

Probabilities and scores are integers in units of ``1 / ONE``: ``prob_i`` is ``prob_(i-1) * count // total``. All forms
therefore give the same bits, and no order of operations can decide between two equal scores.

Difference to a suffix tree. SuffixDecoding keeps a tree on the host, with a count in every node, in which it finds
``path(p)`` without looking at the history. Every accepted token changes as many nodes of it as the tree is deep, by
dependent reads and writes. This op keeps nothing but the history, and scans it once per step, which costs next to
nothing (:mod:`specgraph.kernels.step.ngram` has the figures). The result is that of a tree over the same tokens, with
three exceptions. Only the last ``VOTERS`` occurrences of a match are counted. Shares are those among occurrences that
have a next token, so they add up to 1; Arctic Inference also counts the end of the sequence, where nothing follows yet.
A tree of bounded depth limits the sum of match and drafts, and here each has its own limit. The paper's second tree,
over the outputs of other requests, is no tree here either: their last tokens stand in front of the history, if that is
asked for (:func:`specgraph.kernels.step.lookup.behind_earlier`).

Programs. ``match_kernel`` reads a sequence in tiles of 1,024 tokens, shared out to several programs. It writes
``matched`` as int8 and the largest one of each tile. ``vote_kernel`` has one program for each ``p``, which looks at
the tiles that have a voter, last tile first, until it has found ``VOTERS`` of them, and then follows the path. The
last program of a sequence to arrive takes the best score and writes the drafts. Nearly all positions differ from the
last token at once, so the cost is that of reading the history once; a path costs K dependent loads.

A sequence's programs read its own row of ``history`` alone, and everything that they compute is an integer. So the
drafts of a sequence are a function of its own tokens: neither the split nor the other sequences matter.

Source: Oliaro et al. 2024, "SuffixDecoding" (arXiv 2411.04975). ``max_spec_offset`` and ``min_token_prob`` are those of
Snowflake's Arctic Inference, which vLLM runs as the method ``suffix``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import MAX_COUNTERS, arrival_counters, contiguous, dense_rows, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.ngram import check_history
from specgraph.kernels.step.suffix_kernels import match_kernel, vote_kernel

TILE = 1024
"""Tokens that a program reads at a time."""
VOTERS = 128
"""Occurrences of a match that are counted. All pairs of them are compared at once: 128 x 128 in 128 threads."""
MOST_MATCHED = 127
"""The largest ``max_match``: the length of a match is an int8."""
LARGEST_LIMIT = 1_000_000
"""The largest factor and offset: with them, limits in units of ``1 / ONE`` fit into 64 bits."""
ONE = 1 << 30
"""The probability 1."""
_EPSILON = ONE // 1_000_000
"""What a limit may miss of a whole number because the factor is no binary fraction."""


@dataclass(slots=True)
class SuffixLookup:
    """Propose the most frequent continuation of the end of each sequence, as long as it is probable enough.

    Args:
        history: int64 ``[N, S]``, accepted tokens. What lies at or past a sequence's ``length`` is not read.
        rows: int64 ``[B]``, the row of ``history`` of each sequence, -1 for none; None if sequence b has row b.
        length: int64 ``[B]``, the number of accepted tokens; more than ``S`` count as ``S``.
        num_speculative_tokens: ``K``, the most tokens to propose.
        max_match: the longest match that is told from longer ones, at most 127.
        min_match: the shortest match that may propose, at least 1.
        max_spec_factor: drafts per matched token, at least 0.
        max_spec_offset: drafts in addition to them; may be negative.
        min_token_prob: drafts stop where the estimated probability that all of them are right falls below this.

    Returns:
        int64 ``[B, K]``, -1 where there is no proposal.
    """

    history: Tensor
    rows: Tensor | None
    length: Tensor
    num_speculative_tokens: int
    max_match: int
    min_match: int
    max_spec_factor: float
    max_spec_offset: float
    min_token_prob: float

    @property
    def factor(self) -> int:
        """``max_spec_factor`` in units of ``1 / ONE``."""
        return round(self.max_spec_factor * ONE)

    @property
    def offset(self) -> int:
        """``max_spec_offset`` in units of ``1 / ONE``, and a little more, so that 3 * (1 / 3) counts as 1."""
        return round(self.max_spec_offset * ONE) + _EPSILON

    @property
    def threshold(self) -> int:
        """``min_token_prob`` in units of ``1 / ONE``, rounded down as the probabilities are."""
        return int(self.min_token_prob * ONE)


def suffix_lookup_reference(given: SuffixLookup) -> Tensor:
    """:class:`SuffixLookup` one sequence after the other, in Python. It reads the tokens on the host."""
    history, lengths, count = given.history, given.length.tolist(), given.num_speculative_tokens
    rows = range(len(lengths)) if given.rows is None else given.rows.tolist()
    own = [history[row, : length if row >= 0 else 0] for row, length in zip(rows, lengths, strict=True)]
    drafts = [_best_path(given, tokens) for tokens in own]
    return history.new_tensor([path + [-1] * (count - len(path)) for path in drafts]).view(len(own), count)


def _best_path(given: SuffixLookup, history: Tensor) -> list[int]:
    """The drafts of one sequence, whose accepted tokens are ``history`` ``[length]``."""
    places = (history[:-1] == history[-1:]).nonzero()[:, 0].tolist()
    tokens = history.tolist()
    matched = {place: _common_end(tokens, place, given.max_match) for place in places}
    best: list[int] = []
    best_score = 0
    for size in range(max(matched.values(), default=0), given.min_match - 1, -1):
        voters = [place for place in places if matched[place] >= size][-VOTERS:]
        limit = min(given.num_speculative_tokens, size * given.factor + given.offset >> 30)
        path, score = _path(tokens, voters, limit, given.threshold)
        if score > best_score:
            best, best_score = path, score
    return best


def _common_end(tokens: list[int], place: int, longest: int) -> int:
    """How many tokens up to ``place`` equal those at the end."""
    last = len(tokens) - 1
    for back in range(min(longest, place + 1)):
        if tokens[place - back] != tokens[last - back]:
            return back
    return min(longest, place + 1)


def _path(tokens: list[int], voters: list[int], limit: int, threshold: int) -> tuple[list[int], int]:
    """The drafts on which ``voters``, in ascending order, agree, and their score."""
    path: list[int] = []
    prob, score = ONE, 0
    for behind in range(1, limit + 1):
        voters = [place for place in voters if place + behind < len(tokens)]
        if not voters:
            break
        counts = Counter(tokens[place + behind] for place in voters)
        latest = {tokens[place + behind]: place for place in voters}
        token = max(counts, key=lambda token: (counts[token], latest[token]))
        prob = prob * counts[token] // len(voters)
        if prob < threshold:
            break
        path.append(token)
        score += prob
        voters = [place for place in voters if tokens[place + behind] == token]
    return path, score


def suffix_lookup_triton(given: SuffixLookup) -> Tensor:
    """:class:`SuffixLookup` in two kernels."""
    history, batch, count = dense_rows(given.history), len(given.length), given.num_speculative_tokens
    longest, sizes = history.shape[1], given.max_match - given.min_match + 1
    proposals = history.new_empty(batch, count)
    counters = arrival_counters(history.device)  # even if not needed now: a later call may be captured
    if proposals.numel() == 0:
        return proposals
    tiles = max(1, triton.cdiv(longest, TILE))
    matched = history.new_empty(batch, tiles * TILE, dtype=torch.int8)
    maxima = history.new_empty(batch, tiles, dtype=torch.int32)
    read = (history, *contiguous(given, "rows", "length"), history.stride(0), longest, tiles)
    parts = gpus.HOPPER.search_programs // batch
    launch(
        match_kernel, (max(1, min(tiles, parts)), batch), matched, maxima, *read, MAX_MATCH=given.max_match, TILE=TILE,
        num_warps=4,
    )
    launch(
        vote_kernel, (sizes, batch), proposals, history.new_empty(batch, sizes), history.new_empty(batch, sizes, count),
        history.new_empty(batch, sizes, VOTERS, dtype=torch.int32), counters, matched, maxima, *read, count,
        MIN_MATCH=given.min_match, SIZES=triton.next_power_of_2(sizes), FACTOR=given.factor, OFFSET=given.offset,
        THRESHOLD=given.threshold, TILE=TILE, TILES=triton.next_power_of_2(tiles), VOTERS=VOTERS,
        DRAFTS=triton.next_power_of_2(count), num_warps=4,
    )
    return proposals


def _suffix_lookup_fake(given: SuffixLookup) -> Tensor:
    length, smallest, largest = given.length, given.min_match, given.max_match
    check_shapes(given, length="B", rows="B")
    check_history(given, length.shape[0])
    require(
        1 <= smallest <= largest <= MOST_MATCHED,
        lambda: f"1 <= min_match <= max_match <= {MOST_MATCHED} must hold, not {smallest} and {largest}",
    )
    factor, offset, most = given.max_spec_factor, given.max_spec_offset, LARGEST_LIMIT
    require(0 <= factor <= most, lambda: f"max_spec_factor must be in 0 .. {most}, not {factor}")
    require(-most <= offset <= most, lambda: f"max_spec_offset must be in -{most} .. {most}, not {offset}")
    require(0 <= given.min_token_prob <= 1, lambda: f"min_token_prob must be in 0 .. 1, not {given.min_token_prob}")
    return given.history.new_empty(length.shape[0], given.num_speculative_tokens)


def _has_counters(given: SuffixLookup) -> bool:
    """Whether there is a counter for each sequence."""
    return len(given.length) <= MAX_COUNTERS


SUFFIX_LOOKUP = declare(
    "suffix_lookup", SuffixLookup, _suffix_lookup_fake,
    triton_or_reference(suffix_lookup_triton, suffix_lookup_reference, covers=_has_counters, moves_only=True),
)
suffix_lookup = SUFFIX_LOOKUP.function
