"""The token that each row of logits draws, from what :mod:`specgraph.kernels.sampling.scan` reports of its groups.

For ``R`` rows of one sequence, :func:`row_tokens` reads the reports of all groups, int32 ``[3, splits, groups]``, and
gives int32 ``[R]``: the first argmax of every row's exact scores. If no other score comes near the best candidate of a
row, which is nearly always the case, the candidate is drawn. Otherwise the row is *in doubt*, and whatever may hold its
largest score is scanned again with exact scores. This is also done for groups with a NaN, an infinity or a bound that
overflows, and for rows in which no score is above -inf. Without noise nothing is approximate, so a near tie puts no row
in doubt.

There are no kernels here. The callers have a program for each sequence or for each row, because few numbers are left to
read. An exact score depends on its own row only, and so does the token.

Sources: those of :mod:`specgraph.kernels.sampling.scan`.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.gumbel import (
    INF_KEY,
    MINUS_INF_KEY,
    NO_TOKEN,
    first_best,
    gumbel_scores,
    kept_logits,
    load_floor,
    load_logits,
    noise_key,
    processed_value,
    sort_key,
    sort_key_value,
    token_noise,
)
from specgraph.kernels.sampling.scan import GROUP, LOWEST, NAN, best_of_rows, load_ids


@triton.jit
def _exact_best(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    NOISE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):
    """The largest exact score of ``GROUP`` neighbouring entries, and the first entry that has it.

    Scores are those of ``gumbel_scores``, or without noise the values that
    :mod:`specgraph.kernels.sampling.scan` compares.
    """
    block = begin // 4 + tl.arange(0, GROUP // 4)[:, None]
    lane = tl.arange(0, 4)[None, :]
    entry = block * 4 + lane
    x = load_logits(row_ptr, entry, vocab)
    ids = entry
    if MAPPED:
        ids = load_ids(ids_ptr, entry, vocab)
        block, lane = ids // 4, ids % 4
    x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
    temperatures = tl.zeros_like(x) + temperature
    score = processed_value(x, temperatures)
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= TL_GREEDY_BELOW:
            score = gumbel_scores(x, temperatures, token_noise(block, lane, k0, k1, c1, c2, c3))
    return first_best(score, entry)


@triton.jit
def _doubt_threshold(candidate):
    """The smallest sort key, above that of -inf, whose exact score may be as large as that of the ``candidate``.

    Scores are in units of log2. The difference of two approximate scores that are close has an error of at most 5e-5
    plus 4e-7 of a score. Its sources are the exponentials (a relative error of 1.2e-5), the hardware's logarithm (a
    relative error of 2**-22, absolute in (0.5, 2)), the multiply-add, and the roundings of the exact score. The error
    of the scale is common to both scores. A logit is at most 5 above its score, and a score at most 27 above its logit.
    """
    score = sort_key_value(candidate)
    return tl.maximum(sort_key(score - (tl.abs(score) * 4e-6 + 2e-4)), LOWEST)


@triton.jit
def _exact_argmax(
    logits_ptr, ids_ptr, floors_ptr, logits_rows, tokens, near, pending, temperature, seed, keys, noise_rows, vocab,
    limit, stride,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr,
):
    """The first exact argmax of every row, or NO_TOKEN if there is none.

    Of the groups ``[R, groups]``, those that are ``pending`` are scanned completely. Of those that are ``near``, the
    256 tokens around the candidate are scanned.
    """
    ROWS: tl.constexpr = near.shape[0]
    ALL: tl.constexpr = near.shape[1]
    rows, ks = tl.arange(0, ROWS)[:, None], tl.arange(0, ALL)[None, :]
    best, token = tl.full((ROWS,), -float("inf"), tl.float32), tl.full((ROWS,), NO_TOKEN, tl.int32)
    remaining = tl.where(near | pending, rows * ALL + ks, NO_TOKEN)
    chosen = tl.min(tl.min(remaining, 1), 0)
    while chosen < NO_TOKEN:
        group = chosen % ALL
        begin = group // (TILE // GROUP) * SPLIT + group % (TILE // GROUP) * GROUP
        here = tl.arange(0, ROWS) == chosen // ALL
        logits_row = tl.sum(tl.where(here, logits_rows.to(tl.int64), 0), 0)
        key, noise_row = tl.sum(tl.where(here, keys, 0), 0), tl.sum(tl.where(here, noise_rows, 0), 0)
        k0, k1, c1, c2, c3 = noise_key(seed, STREAM, key, noise_row)
        floor = load_floor(floors_ptr, logits_row, FLOORED)
        # Scan the candidate's tile if nothing else is pending in this group, and every tile otherwise.
        tile_index = tl.max(
            tl.max(tl.where(remaining == chosen, tl.where(pending, -1, (tokens - begin) // TILE), -1), 1), 0
        )
        end = tl.where(tile_index < 0, SPLIT // TILE, tile_index + 1)
        tile_index = tl.maximum(tile_index, 0)
        while tile_index < end:
            found, entry = _exact_best(
                logits_ptr + logits_row * stride, ids_ptr, begin + tile_index * TILE, vocab, limit, floor, temperature,
                k0, k1, c1, c2, c3, NOISE, MAPPED, FLOORED,
            )
            better = here & ((found > best) | ((found == best) & (entry < token)))
            best, token = tl.where(better, found, best), tl.where(better, entry, token)
            tile_index += 1
        remaining = tl.where(remaining == chosen, NO_TOKEN, remaining)
        chosen = tl.min(tl.min(remaining, 1), 0)
    return token


@triton.jit
def row_tokens(
    logits_ptr, ids_ptr, floors_ptr, logits_rows, needed, temperature, seed, keys, noise_rows, reports_ptr, vocab,
    limit, stride, splits, total_splits,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, NOISE: tl.constexpr,
    MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):
    """The entry that every row draws, int32 ``[R]``, and whether it is needed and has a NaN, int32 ``[R]`` (0 or 1).

    An entry is ``NO_TOKEN`` if the row has nothing but -inf. ``logits_rows`` ``[R]`` are the indices of rows of logits,
    all of one sequence. ``keys`` and ``noise_rows`` (int64) are the keys and rows of their noise.
    """
    ks = tl.arange(0, SPLITS * (TILE // GROUP))[None, :]
    groups = splits * (TILE // GROUP)
    inside = needed[:, None] & (ks < groups)
    # The three kinds of values are stored separately, so that a warp gets all of a row with reads of 16 bytes.
    reports_ptr += logits_rows.to(tl.int64)[:, None] * groups + ks
    plane = total_splits * (TILE // GROUP)
    candidates = tl.load(reports_ptr, mask=inside, other=MINUS_INF_KEY)
    tokens = tl.load(reports_ptr + plane, mask=inside, other=NO_TOKEN)
    runners_up = tl.load(reports_ptr + 2 * plane, mask=inside, other=MINUS_INF_KEY)
    candidate, first = best_of_rows(candidates, tokens)
    drawn = tl.where(candidate > MINUS_INF_KEY, first, NO_TOKEN)
    others = runners_up
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= TL_GREEDY_BELOW:
            others = tl.maximum(runners_up, tl.where(tokens == first[:, None], MINUS_INF_KEY, candidates))
    runner_up = tl.max(others, 1)
    threshold = _doubt_threshold(candidate)
    doubtful = runner_up >= threshold
    if tl.max(doubtful.to(tl.int32), 0) > 0:
        thresholds = tl.where(doubtful, threshold, NAN)[:, None]
        exact = _exact_argmax(
            logits_ptr, ids_ptr, floors_ptr, logits_rows, tokens, candidates >= thresholds, runners_up >= thresholds,
            temperature, seed, keys, noise_rows, vocab, limit, stride, STREAM, SPLIT, TILE, NOISE, MAPPED, FLOORED,
        )
        drawn = tl.where(doubtful, exact, drawn)
    return drawn, (runner_up > INF_KEY).to(tl.int32)
