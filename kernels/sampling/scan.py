"""The token that a row of logits gives: one pass over the logits, and exact scores only where two are close.

A row of the vocabulary is cut into splits, a program for each, and a split into turns of a tile. Exact scores
``logit / temperature - log(e)``, ``e`` exponential, cost accurate logarithms and a quarter of a block of noise per
token, several times what reading the logits allows. So a program looks at eights of neighbouring tokens, which share
one word of noise: that of the smallest of their exponentials (:mod:`specgraph.kernels.sampling.sample`). With ``u``
the uniform of that word

    e >= -log1p(-u) / 8 >= u / 8,  so  score / ln(2) <= largest logit / temperature / ln(2) - log2(u) + 3

which costs half an instruction per token for the maximum, and little per eight. A warp looks at a group, 256 tokens of
every turn. A thread reads an eight of each turn, a column, and keeps its three largest bounds. Then the warp looks at
the eights of the four largest of all, a token per thread: their noise gives their scores to within :func:`_least_near`.

A group reports the best of these scores, its token, and the largest score or bound of all its other tokens, as integers
that order floats. :func:`row_tokens` merges the groups of a row. Where no other score comes near the best, which is
nearly always, its token is drawn; else whatever may hold the best one is scanned again with exact scores. The result is
the first exact argmax, whatever the splits and tiles. Groups with a NaN, an infinity, or a bound that overflows are
scanned again as well, and rows in which no score is above -inf. Without noise (at temperature 0, or without seeds) the
values themselves are compared, which leaves no doubt.
"""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.gumbel import (
    BLOCK_TOKENS,
    INF_IMAGE,
    INTERPRETED,
    LARGEST,
    MINUS_INF_IMAGE,
    NO_TOKEN,
    eight_lane,
    eight_words,
    exponent_scale,
    first_best,
    gumbel_scores,
    has_smallest,
    image,
    image_value,
    kept_logits,
    load_floor,
    load_logits,
    most_of_eight,
    noise_key,
    pick_word,
    processed_value,
    rough_exponential,
    rough_minus_log2,
    split_size,
    token_noise,
    uniform,
    widen,
    word_of_eight,
    word_of_token,
)

GROUP = tl.constexpr(256)
"""Tokens of a tile that one warp looks at: a group of a split, which reports for all turns."""
_MANY_PROGRAMS = 1024
"""Some eight on each multiprocessor of a large GPU, which are enough to hide each other's waits."""
_BOUND_LIMIT = tl.constexpr(0x7F61B1E6)
"""The image of 3e38: a group with a larger bound is scanned again."""
_NOTHING = tl.constexpr(-0x80000000)
_MINUS_INF, _INF = MINUS_INF_IMAGE, INF_IMAGE
_LOWEST = tl.constexpr(MINUS_INF_IMAGE.value + 1)
"""The image of the smallest number."""
_NAN = tl.constexpr(0x7FFFFFFF)
"""What stands for a NaN among images, above all numbers."""


def scan_size(vocab: int, rows: int) -> int:
    """Entries of one split of a scan: :func:`split_size`, and more where that would make many small programs.

    What a row draws does not depend on it. Sums do, so that those go by :func:`split_size`.
    """
    size = split_size(vocab)
    return 4096 if rows * triton.cdiv(vocab, size) > _MANY_PROGRAMS else size


@triton.jit
def _read_split(row_ptr, begin, vocab, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """All tiles of a split as stored, 16 bytes a read."""
    tiles = ()
    for i in tl.static_range(SPLIT // TILE):
        place = begin + i * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + place, mask=place < vocab, other=-float("inf"))
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton unpacks no tuple)
    return tiles


@triton.jit
def _load_ids(ids_ptr, place, vocab):
    return tl.load(ids_ptr + place, mask=place < vocab, other=NO_TOKEN).to(tl.int32)


@triton.jit
def _plain_value(x, temperature, DIVIDED: tl.constexpr):
    """What rows without noise compare; NaN stays."""
    value = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if DIVIDED:
        value = tl.where(x == x, processed_value(x, tl.zeros_like(x) + temperature), x)
    return value


@triton.jit
def _groups(x):
    """Columns ``[N]`` by groups, ``[N * 8 // GROUP, GROUP // 8]``: those of one warp, mostly."""
    return tl.reshape(x, (x.shape[0] * 8 // GROUP, GROUP // 8))


@triton.jit
def _first_best(rank, token):
    """The largest of every row ``[R, N]`` of images, and the first token that has it."""
    best = tl.max(rank, 1)
    return best, tl.min(tl.where(rank == best[:, None], token, NO_TOKEN), 1)


@triton.jit
def _lead_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Of the eights of every column over all turns, ``[TILE // 8]``: the largest value, NaN where one is, and the turn
    of the first eight that has it.
    """
    COLUMNS: tl.constexpr = TILE // 8
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE)
    top = tl.full((COLUMNS,), -float("inf"), tl.float32)
    turn = tl.zeros((COLUMNS,), tl.int32)
    for i in tl.static_range(SPLIT // TILE):
        x = tiles[i]
        if MAPPED:
            ids = _load_ids(ids_ptr, begin + i * TILE + tl.arange(0, TILE), vocab)
            x = kept_logits(widen(x), ids, limit, 0.0, True, False)
        # Division keeps the order, so it can wait for the best of eight.
        value = _plain_value(most_of_eight(x), temperature, DIVIDED)
        turn = tl.where(value > top, i, turn)
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    return top, turn


@triton.jit
def _column_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """Of the eights of every column over all turns, ``[TILE // 8]``: the images of the three largest bounds, in units
    of log2, less 3. Their bits ``LOW`` are the turn and the column. And unless ``MAPPED``, every turn's words of noise.
    """
    COLUMNS: tl.constexpr = TILE // 8
    # Every four turns of whole tiles have blocks of their own, so a split is some of them, or a part of one; a tile has
    # one word of each.
    tl.static_assert(TILE <= BLOCK_TOKENS)
    tl.static_assert(SPLIT <= 2 * TILE or SPLIT % (4 * TILE) == 0)
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE)
    column = tl.arange(0, COLUMNS) % (GROUP // 8)
    first = tl.full((COLUMNS,), _NOTHING, tl.int32)
    second, third = first, first
    words = ()
    for i in tl.static_range(SPLIT // TILE):
        place = (begin + i * TILE).to(tl.uint32)
        if MAPPED:
            ids = _load_ids(ids_ptr, begin + i * TILE + tl.arange(0, TILE), vocab)
            own = word_of_eight(ids.to(tl.uint32) // 8, k0, k1, c1, c2, c3)
            x = kept_logits(widen(tiles[i]), ids, limit, floor, True, FLOORED)
            bound = most_of_eight(tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(own))))
        else:
            if i % 4 == 0 or TILE < BLOCK_TOKENS:  # turns of whole tiles share a block
                w0, w1, w2, w3 = eight_words(place // 8 + tl.arange(0, COLUMNS), k0, k1, c1, c2, c3)
            own = pick_word(w0, w1, w2, w3, eight_lane(place // 8))
            x = kept_logits(most_of_eight(tiles[i]), 0, limit, floor, False, FLOORED)
            bound = tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(own)))
            words = words + (own,)  # type: ignore[assignment]  # noqa: RUF005
        new = (image(bound) & ~LOW) | (i * (GROUP // 8) + column)
        third = tl.maximum(third, tl.minimum(second, new))
        second = tl.maximum(second, tl.minimum(first, new))
        first = tl.maximum(first, new)
    return first, second, third, words


@triton.jit
def _scan_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """What groups find without noise. The largest value is never cut, so there is no floor here."""
    top, turn = _lead_values(row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED)
    nan = tl.max(_groups(tl.where(top == top, _MINUS_INF, _NAN)), 1)
    # Images tell -0 from 0, which are equal; their sum with 0 is 0.
    best, first = _first_best(_groups(image(top + 0.0)), _groups(begin + turn * TILE + tl.arange(0, TILE // 8) * 8))
    place = first[:, None] + tl.arange(0, GROUP // 8)[None, :] % 8
    x = load_logits(row_ptr, place, vocab)
    if MAPPED:
        x = kept_logits(x, _load_ids(ids_ptr, place, vocab), limit, 0.0, True, False)
    equal = image(_plain_value(x, temperature, DIVIDED) + 0.0) == best[:, None]
    return tl.where(nan == _NAN, _MINUS_INF, best), tl.min(tl.where(equal, place, NO_TOKEN), 1), nan


@triton.jit
def _four_largest(first, second, third, LOW: tl.constexpr):
    """Of every group's columns ``[groups, columns]``: the four largest bounds, eight lanes for each; the largest; and
    what all others are below.
    """
    lane = tl.arange(0, GROUP // 8)[None, :]
    largest, chosen = tl.max(first, 1), tl.zeros_like(first)
    for k in tl.static_range(4):
        top = tl.max(first, 1)[:, None]
        chosen = tl.where(lane // 8 == k, top, chosen)
        hit = first == top  # in one column, which all low bits name
        first, second = tl.where(hit, second, first), tl.where(hit, _NOTHING, second)
    return chosen, largest, tl.max(tl.maximum(first, third), 1) | LOW


@triton.jit
def _chosen_words(words, turn, column):
    """Of every turn's words ``[COLUMNS]``, those of the eights at ``turn`` and ``column`` of their group."""
    word = tl.gather(_groups(words[0]), column, 1)
    for i in tl.static_range(1, len(words)):
        word = tl.where(turn == i, tl.gather(_groups(words[i]), column, 1), word)
    return word


@triton.jit
def _near_noise(eight_word, ids, k0, k1, c1, c2, c3):
    """The exponentials of tokens, to within 1.2e-5 of them."""
    more = rough_exponential(uniform(word_of_token(ids // 4, ids % 4, k0, k1, c1, c2, c3)))
    return rough_exponential(uniform(eight_word)) * 0.125 + tl.where(has_smallest(eight_word, ids), 0.0, more)


@triton.jit
def _scan_scores(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """What groups find with noise."""
    LOW: tl.constexpr = SPLIT // 8 * GROUP // TILE - 1
    scale = exponent_scale(temperature)
    first, second, third, words = _column_bounds(
        row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3, SPLIT, TILE, LOW, MAPPED, FLOORED
    )
    chosen, largest, rest = _four_largest(_groups(first), _groups(second), _groups(third), LOW)
    turn, column = (chosen & LOW) // (GROUP // 8), (chosen & LOW) % (GROUP // 8)
    group, lane = tl.arange(0, TILE // GROUP)[:, None], tl.arange(0, GROUP // 8)[None, :]
    place = begin + turn * TILE + group * GROUP + column * 8 + lane % 8
    ids = place
    if MAPPED:
        ids = _load_ids(ids_ptr, place, vocab)
    x = kept_logits(load_logits(row_ptr, place, vocab), ids, limit, floor, MAPPED, FLOORED)
    ids = ids.to(tl.uint32)
    eight_word = word_of_eight(ids // 8, k0, k1, c1, c2, c3) if MAPPED else _chosen_words(words, turn, column)
    score = tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(_near_noise(eight_word, ids, k0, k1, c1, c2, c3)))
    known = largest < _BOUND_LIMIT
    rank = tl.where(known[:, None], image(score), _MINUS_INF)
    lead, token = _first_best(rank, place)
    others = tl.max(tl.where((rank == lead[:, None]) & (place == token[:, None]), _MINUS_INF, rank), 1)
    others = tl.maximum(others, image(image_value(tl.maximum(rest, _LOWEST)) + 3.0))
    return lead, token, tl.where(known, others, tl.where(largest <= _INF | LOW, _INF, _NAN))


@triton.jit
def _store_in_place(ptr, value, mask):
    """Store int32, each from the thread that has it. ``tl.store`` would collect neighbours first, by shared memory."""
    if INTERPRETED:
        tl.store(ptr, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            [ptr.to(tl.int64), value, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def scan_split(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, seed, place, line, found_ptr, number, area,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr,
):  # fmt: skip
    """Write what the groups of split ``number`` have, int32 ``[3, splits of all rows, groups]``: the image of the best
    score, its token, and the image of the second or of what it is below. ``area`` is the number of splits of all rows.

    The noise is that of ``seed``, ``place`` (int64) and ``line``. ``MAPPED`` entries have their target's ids, and those
    that are not below ``limit`` are never drawn.
    """
    at = number * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    if temperature < TL_GREEDY_BELOW:
        best, token, second = _scan_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, False, MAPPED
        )  # fmt: skip
    elif NOISE:
        k0, k1, c1, c2, c3 = noise_key(seed, STREAM, place, line)
        best, token, second = _scan_scores(
            row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED, FLOORED
        )
    else:
        best, token, second = _scan_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, True, MAPPED
        )  # fmt: skip
    kind = tl.arange(0, GROUP // 8)[None, :]
    found = tl.where(kind == 0, best[:, None], tl.where(kind == 1, token[:, None], second[:, None]))
    _store_in_place(found_ptr + kind * (area * (TILE // GROUP)) + at[:, None], found, kind < 3)


@triton.jit
def _exact_best(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    NOISE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The largest exact score of ``GROUP`` neighbours, and its first place: ``gumbel_scores``, or without noise what
    :func:`_scan_values` compares.
    """
    four = begin // 4 + tl.arange(0, GROUP // 4)[:, None]
    lane = tl.arange(0, 4)[None, :]
    place = four * 4 + lane
    x = load_logits(row_ptr, place, vocab)
    ids = place
    if MAPPED:
        ids = _load_ids(ids_ptr, place, vocab)
        four, lane = ids // 4, ids % 4
    x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
    heat = tl.zeros_like(x) + temperature
    score = processed_value(x, heat)
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= TL_GREEDY_BELOW:
            score = gumbel_scores(x, heat, token_noise(four, lane, k0, k1, c1, c2, c3))
    return first_best(score, place)


@triton.jit
def _least_near(lead):
    """The least image above that of -inf that may belong to a score as large as that of ``lead``, in units of log2.

    The difference of two near scores is off by at most 5e-5 and 4e-7 of a score: exponentials by 1.2e-5 of them, the
    hardware's logarithm by 2**-22 of it (in (0.5, 2): of 1), beside the multiply-add and the steps of the exact score;
    the error of the scale is common to both. A logit is at most 5 above its score, a score at most 27 above its logit.
    """
    score = image_value(lead)
    return tl.maximum(image(score - (tl.abs(score) * 4e-6 + 2e-4)), _LOWEST)


@triton.jit
def _settle(
    logits_ptr, ids_ptr, floors_ptr, lines, tokens, near, pending, temperature, seed, places, numbers, vocab, limit,
    stride,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr,
):  # fmt: skip
    """The first exact argmax of every row, NO_TOKEN if there is none. Of the groups ``[R, groups]``, all of the
    ``pending`` ones are scanned, and what is about the token that the ``near`` ones report.
    """
    ROWS: tl.constexpr = near.shape[0]
    ALL: tl.constexpr = near.shape[1]
    rows, ks = tl.arange(0, ROWS)[:, None], tl.arange(0, ALL)[None, :]
    best, token = tl.full((ROWS,), -float("inf"), tl.float32), tl.full((ROWS,), NO_TOKEN, tl.int32)
    left = tl.where(near | pending, rows * ALL + ks, NO_TOKEN)
    chosen = tl.min(tl.min(left, 1), 0)
    while chosen < NO_TOKEN:
        group = chosen % ALL
        begin = group // (TILE // GROUP) * SPLIT + group % (TILE // GROUP) * GROUP
        here = tl.arange(0, ROWS) == chosen // ALL
        line = tl.sum(tl.where(here, lines.to(tl.int64), 0), 0)
        place, number = tl.sum(tl.where(here, places, 0), 0), tl.sum(tl.where(here, numbers, 0), 0)
        k0, k1, c1, c2, c3 = noise_key(seed, STREAM, place, number)
        floor = load_floor(floors_ptr, line, FLOORED)
        # The turn of that token if that is all, else every turn.
        turn = tl.max(tl.max(tl.where(left == chosen, tl.where(pending, -1, (tokens - begin) // TILE), -1), 1), 0)
        end = tl.where(turn < 0, SPLIT // TILE, turn + 1)
        turn = tl.maximum(turn, 0)
        while turn < end:
            found, spot = _exact_best(
                logits_ptr + line * stride, ids_ptr, begin + turn * TILE, vocab, limit, floor, temperature, k0, k1, c1,
                c2, c3, NOISE, MAPPED, FLOORED,
            )  # fmt: skip
            better = here & ((found > best) | ((found == best) & (spot < token)))
            best, token = tl.where(better, found, best), tl.where(better, spot, token)
            turn += 1
        left = tl.where(left == chosen, NO_TOKEN, left)
        chosen = tl.min(tl.min(left, 1), 0)
    return token


@triton.jit
def row_tokens(
    logits_ptr, ids_ptr, floors_ptr, lines, needed, temperature, seed, places, numbers, found_ptr, vocab, limit, stride,
    splits, area,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, NOISE: tl.constexpr,
    MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The place every row draws, int32 ``[R]``, ``NO_TOKEN`` where nothing but -inf is left; and whether a needed row
    has a NaN (0 or 1).

    ``lines`` ``[R]`` are the rows of logits, of one sequence; ``places`` and ``numbers`` (int64) those of their noise.
    """
    ks = tl.arange(0, SPLITS * (TILE // GROUP))[None, :]
    groups = splits * (TILE // GROUP)
    inside = needed[:, None] & (ks < groups)
    # Kinds apart, so that a warp has all of a row, from reads of 16 bytes.
    found_ptr += lines.to(tl.int64)[:, None] * groups + ks
    plane = area * (TILE // GROUP)
    leads = tl.load(found_ptr, mask=inside, other=_MINUS_INF)
    tokens = tl.load(found_ptr + plane, mask=inside, other=NO_TOKEN)
    seconds = tl.load(found_ptr + 2 * plane, mask=inside, other=_MINUS_INF)
    lead, first = _first_best(leads, tokens)
    drawn = tl.where(lead > _MINUS_INF, first, NO_TOKEN)
    rivals = seconds
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= TL_GREEDY_BELOW:
            rivals = tl.maximum(seconds, tl.where(tokens == first[:, None], _MINUS_INF, leads))
    rival = tl.max(rivals, 1)
    reach = _least_near(lead)
    doubtful = rival >= reach
    if tl.max(doubtful.to(tl.int32), 0) > 0:
        least = tl.where(doubtful, reach, _NAN)[:, None]
        exact = _settle(
            logits_ptr, ids_ptr, floors_ptr, lines, tokens, leads >= least, seconds >= least, temperature, seed,
            places, numbers, vocab, limit, stride, STREAM, SPLIT, TILE, NOISE, MAPPED, FLOORED,
        )  # fmt: skip
        drawn = tl.where(doubtful, exact, drawn)
    return drawn, tl.max((rival > _INF).to(tl.int32), 0)
