"""Functions that the Triton kernels of ``specgraph::verify`` share.

They compute sums of exponentials over a split of a row of logits ``[V]`` and merge them over splits, find the rows of a
sequence whose drafts are to be verified, and write the emitted tokens ``[B, K + 1]`` and their log-probabilities. There
are no kernels here, so the division into programs is that of the callers: a program per row and split for sums, and a
program per sequence for the rest. In the latter, ``ROWS`` lanes stand for the rows of logits of the sequence.

The sums of a row do not depend on other rows. Over one split they have a fixed order, and over splits they are taken in
64-bit fixed point, in which every order gives the same sum. For the sources of the rules see
:mod:`specgraph.kernels.verify.verify`.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.sampling.constants import TL_STREAM_ACCEPT
from specgraph.kernels.sampling.gumbel import (
    LOG2E,
    clean,
    exponent_scale,
    inverse_temperature,
    load_tile,
    noise_key,
    philox,
    uniform,
)


class Rows(NamedTuple):
    """The rows of logits of a call, which its kernels take as the one argument ``given``. All tensors are contiguous.

    Sizes that Triton must not specialise (``do_not_specialize``) are arguments of their own, since it specialises every
    element of a tuple.

    Attributes:
        logits: ``[B, R, V]``.
        vocab: V.
        splits: how many splits of the vocabulary there are.
        stats: the sums of every split; see ``scan_rows`` of :mod:`specgraph.kernels.verify.verify_triton`.
        num_rows, num_forced: int64 ``[B]``. Without ``num_forced`` no row is forced.
        temperature, seeds, positions: as for :class:`~specgraph.kernels.verify.arguments.Verify`.
        floors: float32 ``[B * R]``, the smallest logit that a row keeps; None: all are kept.
        reports: the reports of every split (:mod:`specgraph.kernels.sampling.scan`).
    """

    logits: Tensor
    vocab: int
    splits: int
    stats: Tensor
    num_rows: Tensor
    num_forced: Tensor | None
    temperature: Tensor | None = None
    seeds: Tensor | None = None
    positions: Tensor | None = None
    floors: Tensor | None = None
    reports: Tensor | None = None


_FIXED = tl.constexpr(2.0**40)
"""The fixed-point scale of sums over splits. A row's sum of exponentials is below 2**22, so 64 bits can hold it."""


@triton.jit
def split_largest(row_ptr, begin, vocab, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """The largest logit of a split."""
    top = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    for i in tl.static_range(SPLIT // TILE):
        top = tl.maximum(top, clean(load_tile(row_ptr, begin + i * TILE, vocab, TILE)))
    return tl.max(tl.max(top, 1), 0)


@triton.jit
def split_sums(
    row_ptr, begin, vocab, largest, floor, scale, SPLIT: tl.constexpr, TILE: tl.constexpr, FLOORED: tl.constexpr
):
    """Over one split, the sum of ``e = exp2((x - largest) * scale)`` and its moment, the sum of ``e * log2(e)``."""
    total = tl.zeros((TILE // 4, 4), tl.float32)  # [TILE // 4, 4]
    moment = tl.zeros((TILE // 4, 4), tl.float32)  # [TILE // 4, 4]
    for i in tl.static_range(SPLIT // TILE):
        x = load_tile(row_ptr, begin + i * TILE, vocab, TILE)
        if FLOORED:
            x = tl.where(x >= floor, x, -float("inf"))
        away = (clean(x) - largest) * scale
        part = tl.exp2(away)
        total += part
        moment += part * tl.where(part > 0, away, 0.0)
    return tl.sum(tl.sum(total, 1), 0), tl.sum(tl.sum(moment, 1), 0)


@triton.jit
def fixed_sum(values):
    """The sum over the splits of a row, whose bits do not depend on the order."""
    return tl.sum((values * _FIXED).to(tl.int64), 1).to(tl.float32) * (1.0 / _FIXED)


@triton.jit
def merge_sums(stats_ptr, at, known, area, index: tl.constexpr, scale):
    """Merge the splits of every row: the largest logit, the sum of ``e = exp2((x - largest) * scale)``, and its moment.

    ``stats`` ``[4, area]`` holds the largest logit of each split, the sum for raw logits, and the sum and the moment
    for logits over the temperature. ``index`` selects the sum: 1 for raw logits, 2 for those over the temperature.
    """
    part = tl.load(stats_ptr + at, mask=known, other=-float("inf"))  # [ROWS, SPLITS]
    largest = tl.max(part, 1)  # [ROWS]
    pivot = tl.where(largest > -float("inf"), largest, 0.0)
    away = (part - pivot[:, None]) * scale
    factor = tl.exp2(away)
    total = tl.load(stats_ptr + index * area + at, mask=known, other=0.0) * factor
    moment = total * 0.0
    if index == 2:
        moment = tl.load(stats_ptr + 3 * area + at, mask=known, other=0.0) * factor
        moment += total * tl.where(total > 0, away, 0.0)
    return largest, fixed_sum(total), fixed_sum(moment)


@triton.jit
def logprob(x, largest, total, inverse):
    """The log-softmax of ``x * inverse`` in a row whose largest value is ``largest`` and whose sum is ``total``."""
    return (clean(x) - largest) * inverse - tl.log(total)


@triton.jit
def floored_logits(given, line, token, floor, mask):
    """Load one logit per row, with -inf for a logit below the row's floor."""
    x = tl.load(given.logits + line * given.vocab + token, mask=mask, other=-float("inf")).to(tl.float32)
    return tl.where(x < floor, -float("inf"), x)


@triton.jit
def first_false(holds, rows, ROWS: tl.constexpr):
    return tl.min(tl.where(holds, ROWS, rows), 0)


@triton.jit
def place_rows(given, batch, count, width, ROWS: tl.constexpr):
    """Locate the rows of logits of one sequence in the block.

    Returns the index of each row in the block, which rows are needed, the number of real rows, the block row of the
    first row of logits, the number of tokens that are accepted because they are forced, and whether a token follows
    them.
    """
    rows = tl.arange(0, ROWS)
    # These reads bypass the L1 cache, because ``_finish`` performs them before its wait.
    num_rows = tl.load(given.num_rows + batch, cache_modifier=".cg").to(tl.int32)
    num_forced = tl.load(given.num_forced + batch, cache_modifier=".cg").to(tl.int32)
    first = tl.minimum(num_forced, width - count)
    row = first + rows
    more = num_forced < num_rows
    forced = tl.minimum(tl.minimum(num_forced, num_rows), width - 1)
    needed = (rows < count) & (row < num_rows) & (row >= num_forced) & more
    return row, needed, num_rows, first, forced, more


@triton.jit
def locate_drafts(
    draft_tokens_ptr, batch, row, num_rows, first, forced, count, width, drafts_stride, vocab, ROWS: tl.constexpr
):
    """The draft that each row verifies, whether it is valid, and whether the row is live (as in the reference)."""
    rows = row - first
    real = rows < count
    drafted = real & (row < width - 1)
    draft_ptr = draft_tokens_ptr + batch.to(tl.int64) * drafts_stride + row
    draft64 = tl.load(draft_ptr, mask=drafted, other=-1, cache_modifier=".cg").to(tl.int64)
    valid_draft = drafted & (row < num_rows - 1) & (rows < count - 1) & (draft64 >= 0) & (draft64 < vocab)
    live = (rows < first_false(valid_draft | (real & (row < forced)), rows, ROWS)) & (row >= forced)
    return tl.where(valid_draft, draft64, 0).to(tl.int32), valid_draft, live


@triton.jit
def step_noise_key(given, batch, row, forced, width, stream):
    """The words of :func:`noise_key` for ``row`` of the block, keyed by its first row that is not forced.

    See :func:`specgraph.kernels.verify.pieces.step_noise`.
    """
    key = tl.load(given.positions + batch * width + forced)
    return noise_key(tl.load(given.seeds + batch), stream, key, row - forced)


@triton.jit
def acceptance_uniforms(given, batch, row, forced, width):
    """The uniforms that decide on the draft of every row, from the step's own noise; 0.5 if there is no noise."""
    u = tl.full(row.shape, 0.5, tl.float32)
    if given.seeds is not None:
        k0, k1, c1, c2, c3 = step_noise_key(given, batch, row, forced, width, TL_STREAM_ACCEPT)
        word, _, _, _ = philox((row * 0).to(tl.uint32), c1, c2, c3, k0, k1)
        u = uniform(word)
    return u


@triton.jit
def count_accepted(good, live, row, first, forced, count, ROWS: tl.constexpr):
    """The length of the accepted prefix, forced tokens included, and the row of logits that gives the next token."""
    rows = row - first
    prefix = rows < first_false((good & live) | ((rows < count) & (row < forced)), rows, ROWS)
    accepted = forced + tl.sum((prefix & live).to(tl.int32), 0)
    return accepted, last_row(accepted, first, count)


@triton.jit
def last_row(accepted, first, count):
    return tl.minimum(tl.maximum(accepted - first, 0), count - 1)


@triton.jit
def load_drafts(draft_tokens_ptr, batch, begin, width, drafts_stride, COLUMNS: tl.constexpr):
    """Load the draft tokens ``begin`` to ``begin + COLUMNS``, int64, with -1 after the last one."""
    column = begin + tl.arange(0, COLUMNS)
    # These reads bypass the L1 cache, because ``_finish`` performs them before its wait.
    ptr = draft_tokens_ptr + batch.to(tl.int64) * drafts_stride + column
    return tl.load(ptr, mask=column < width - 1, other=-1, cache_modifier=".cg").to(tl.int64)


@triton.jit
def lay_out(
    out, drafts, draft_tokens_ptr, batch, accepted, next_token, more, first, count, width, drafts_stride,
    COLUMNS: tl.constexpr, LOGPROBS: tl.constexpr,
):
    """Write a :class:`~specgraph.kernels.verify.arguments.Verified`, but for the log-probabilities of rows with logits.

    ``drafts`` are the first ``COLUMNS`` of :func:`load_drafts`.
    """
    emitted = accepted + more.to(tl.int32)
    begin = width * 0
    while begin < width:
        column = begin + tl.arange(0, COLUMNS)
        token = tl.where(column < accepted, drafts, -1)
        token = tl.where((column == accepted) & more, next_token.to(tl.int64), token)
        tl.store(out.emitted + batch * width + column, token, mask=column < width)
        row = tl.where(column < emitted, column, -1).to(tl.int64)
        tl.store(out.accepted_rows + batch * width + column, row, mask=column < width)
        if LOGPROBS:
            outside = (column < first) | (column >= first + count)
            tl.store(out.logprobs + batch * width + column, 0.0, mask=(column < width) & outside)
        begin += COLUMNS
        drafts = load_drafts(draft_tokens_ptr, batch, begin, width, drafts_stride, COLUMNS)
    tl.store(out.num_emitted + batch, emitted.to(tl.int64))


@triton.jit
def write_logprobs(
    given, logprobs_ptr, floor, batch, line, at, known, area, row, needed, first, count, width, draft, next_token,
    accepted, one_hot, temperature, RAW: tl.constexpr,
):
    """Write the log-probabilities of the emitted tokens. ``one_hot`` ``[ROWS]`` is the token of a point mass, or -1."""
    final = tl.where(row < accepted, draft, next_token)
    wanted = needed & (row <= accepted)
    if RAW:
        x = tl.load(given.logits + line * given.vocab + final, mask=wanted, other=-float("inf")).to(tl.float32)
        largest, total, _ = merge_sums(given.stats, at, known, area, 1, LOG2E)
        value = logprob(x, largest, total, 1.0)
        value = tl.where(largest == -float("inf"), tl.where(final == 0, 0.0, -float("inf")), value)
    else:
        x = floored_logits(given, line, final, floor, wanted)
        largest, total, _ = merge_sums(given.stats, at, known, area, 2, exponent_scale(temperature))
        value = logprob(x, largest, total, inverse_temperature(temperature))
        value = tl.where(one_hot >= 0, tl.where(final == one_hot, 0.0, -float("inf")), value)
    tl.store(logprobs_ptr + batch * width + row, tl.where(wanted, value, 0.0), mask=row - first < count)
