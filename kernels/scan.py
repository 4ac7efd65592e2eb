"""The token that a row of logits gives: one pass over the logits, and exact scores only where two are close.

A row of the vocabulary is cut into splits, a program for each, and a split into turns of a tile. Exact scores
``logit / temperature - log(e)``, ``e`` exponential, cost accurate logarithms and a quarter of a block of noise per
token, several times what reading the logits allows. So a program looks at fours of neighbouring tokens, which share
one word of noise: that of the smallest of their exponentials (:mod:`specgraph.kernels.sample`). With ``u`` the uniform
of that word

    e >= -log1p(-u) / 4 >= u / 4,  so  score * log2(e) <= largest logit * log2(e) / temperature - log2(u) + 2

which costs a maximum per token and little per four. Of the fours that a column of eight neighbours meets in all turns,
the one with the largest bound draws the noise of its tokens, which gives their scores to within :func:`_doubt`.

A warp reports for its columns, a group of a split, the best of these scores, its token, and the largest score or bound
of all other tokens, as integers that order floats. :func:`row_tokens` merges the groups of a row. Where no other score
comes near the best, which is nearly always, its token is drawn; else the groups that may hold the best one are scanned
again with exact scores. The result is the first exact argmax, whatever the splits and tiles, as long as ``logit /
temperature`` is above -2.3e38: below, a token counts as -inf. Groups with a NaN, an infinity, or a bound that overflows
are scanned again as well. Without noise (at temperature 0, or without seeds) the values themselves are compared, which
leaves no doubt.
"""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels.gumbel import (
    BLOCK_TOKENS,
    GREEDY,
    INF_IMAGE,
    LARGEST,
    MINUS_INF_IMAGE,
    NO_TOKEN,
    exponent_scale,
    first_best,
    four_lane,
    four_words,
    gumbel_scores,
    image,
    image_value,
    kept_logits,
    load_floor,
    load_floors,
    noise_key,
    philox,
    pick_word,
    processed_value,
    rough_exponential,
    rough_minus_log2,
    split_size,
    token_noise,
    uniform,
    widen,
)

GROUP = tl.constexpr(256)
"""Tokens of a tile that one warp looks at: a group of a split, which reports for all turns."""
_MANY_PROGRAMS = 1024
"""More programs than a GPU runs at once, some eight on each multiprocessor."""
_BOUND_LIMIT = tl.constexpr(3.0e38)
"""A four with a larger bound is scanned again."""
_MINUS_INF, _INF = MINUS_INF_IMAGE, INF_IMAGE
_NAN = tl.constexpr(0x7FFFFFFF)
"""What stands for a NaN among images, above all numbers."""


def scan_size(vocab: int, rows: int) -> int:
    """Entries of one split of a scan: :func:`split_size`, and more where that would make many small programs.

    What a row draws does not depend on it. Sums do, so that those go by :func:`split_size`.
    """
    size = split_size(vocab)
    return 4096 if rows * triton.cdiv(vocab, size) > _MANY_PROGRAMS else size


@triton.jit
def most_of_four(x):
    """The largest of each four, ``[N, 4]`` to ``[N]``; NaN where one is."""
    halves = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    pairs = tl.split(tl.maximum(halves[0], halves[1], propagate_nan=tl.PropagateNan.ALL))
    return tl.maximum(pairs[0], pairs[1], propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _two_of_four(x):
    """The largest and the second largest of each four, and the number of the first that is the largest."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    front, back = tl.maximum(a, b), tl.maximum(c, d)
    second = tl.maximum(tl.minimum(front, back), tl.maximum(tl.minimum(a, b), tl.minimum(c, d)))
    number = tl.where(back > front, tl.where(d > c, 3, 2), tl.where(b > a, 1, 0))
    return tl.maximum(front, back), second, number


@triton.jit
def _read_split(row_ptr, begin, vocab, SPLIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """All tiles of a split as stored; a ``WHOLE`` split ends before the vocabulary does. Reads come first, 16 bytes
    each. (Volatile ones, which stay so in the assembler as well, made it no faster.)
    """
    tiles = ()
    for i in tl.static_range(SPLIT // TILE):
        place = begin + i * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + place) if WHOLE else tl.load(row_ptr + place, mask=place < vocab, other=-float("inf"))
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton unpacks no tuple)
    return tiles


@triton.jit
def _fours(x):
    """The first and the second fours of every eight neighbours, ``[len(x) // 8, 4]`` each."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 8, 2, 4)), (0, 2, 1)))


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
def _lead(score, token):
    """The largest image of every group ``[groups, columns]``, the first token that has it, and which columns lose."""
    best = tl.max(score, 1)
    loses = score != best[:, None]
    first = tl.min(tl.where(loses, NO_TOKEN, token), 1)
    return best, first, loses | (token != first[:, None])


@triton.jit
def _lead_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of the fours of every column over all turns, ``[TILE // 8]``: the largest value, NaN where one is, and the number
    of the first four that has it, ``2 * turn + 1`` for the second of a turn.
    """
    COLUMNS: tl.constexpr = TILE // 8
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE, WHOLE)
    top = tl.full((COLUMNS,), -float("inf"), tl.float32)
    number = tl.zeros((COLUMNS,), tl.int32)
    for i in tl.static_range(SPLIT // TILE):
        for h in tl.static_range(2):
            x = widen(_fours(tiles[i])[h])
            if MAPPED:
                ids = _fours(_load_ids(ids_ptr, begin + i * TILE + tl.arange(0, TILE), vocab))[h]
                x = kept_logits(x, ids, limit, 0.0, True, False)
            # Division keeps the order, so it can wait for the best of four.
            value = _plain_value(most_of_four(x), temperature, DIVIDED)
            number = tl.where(value > top, 2 * i + h, number)
            top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    return top, number


@triton.jit
def _lead_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of the fours of every column over all turns, ``[TILE // 8]``: the largest bound, NaN where one is, the number of
    the four that has it, the words of its noise, ``[TILE // 8, 1]``, or 4 if ``MAPPED``; and the largest bound of the
    other fours. Bounds are in units of log2, less 2.
    """
    COLUMNS: tl.constexpr = TILE // 8
    # Every four turns of whole tiles have blocks of their own, so a split is some of them, or a part of one.
    tl.static_assert(SPLIT <= 2 * TILE or SPLIT % (4 * TILE) == 0)
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE, WHOLE)
    top = tl.full((COLUMNS,), -float("inf"), tl.float32)
    rest = tl.full((COLUMNS,), -float("inf"), tl.float32)
    number = tl.zeros((COLUMNS,), tl.int32)
    word = tl.zeros((COLUMNS, 4 if MAPPED else 1), tl.uint32)
    for h in tl.static_range(2):
        for i in tl.static_range(SPLIT // TILE):
            first = begin + i * TILE
            x = widen(_fours(tiles[i])[h])
            if MAPPED:
                ids = _fours(_load_ids(ids_ptr, first + tl.arange(0, TILE), vocab))[h]
                w0, w1, w2, w3 = four_words(ids // 4, k0, k1, c1, c2, c3)
                own = pick_word(w0, w1, w2, w3, four_lane(ids // 4))
                x = kept_logits(x, ids, limit, floor, True, FLOORED)
                bound = most_of_four(tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(own))))
                better = bound > top
                word = tl.where(better[:, None], own, word)
            else:
                if i % 4 == 0 or TILE < BLOCK_TOKENS:  # turns of whole tiles share a block
                    four = first // 4 + tl.arange(0, COLUMNS) * 2 + h
                    w0, w1, w2, w3 = four_words(four, k0, k1, c1, c2, c3)
                own = pick_word(w0, w1, w2, w3, first >> 10 & 3)
                x = most_of_four(kept_logits(x, 0, limit, floor, False, FLOORED))
                bound = tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(own)))
                better = bound > top
                word = tl.where(better[:, None], own[:, None], word)
            rest = tl.maximum(rest, tl.minimum(bound, top))
            top = tl.maximum(top, bound, propagate_nan=tl.PropagateNan.ALL)
            number = tl.where(better, 2 * i + h, number)
    return top, number, word, rest


@triton.jit
def _first_of_four(begin, number, TILE: tl.constexpr):
    return begin + (number >> 1) * TILE + tl.arange(0, TILE // 8) * 8 + (number & 1) * 4


@triton.jit
def _load_four(row_ptr, place, vocab):
    return widen(tl.load(row_ptr + place, mask=place < vocab, other=-float("inf")))


@triton.jit
def _scan_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """What groups find without noise. The largest value is never cut, so there is no floor here."""
    if begin + SPLIT <= vocab:
        top, number = _lead_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED, True
        )
    else:
        top, number = _lead_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED, False
        )
    place = _first_of_four(begin, number, TILE)[:, None] + tl.arange(0, 4)[None, :]
    x = _load_four(row_ptr, place, vocab)
    if MAPPED:
        x = kept_logits(x, _load_ids(ids_ptr, place, vocab), limit, 0.0, True, False)
    token = tl.min(tl.where(_plain_value(x, temperature, DIVIDED) == top[:, None], place, NO_TOKEN), 1)
    nan = top != top
    # Images tell -0 from 0, which are equal; their sum with 0 is 0.
    rank = tl.where(nan, _MINUS_INF, image(top + 0.0))
    best, token, _ = _lead(_groups(rank), _groups(token))
    return best, token, tl.max(_groups(tl.where(nan, _NAN, _MINUS_INF)), 1)


@triton.jit
def _four_scores(
    row_ptr, ids_ptr, place, vocab, limit, floor, scale, word, k0, k1, c1, c2, c3,
    MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """Scores in units of log2 of the fours at ``place`` ``[N, 4]``, from the words of their fours and of each token."""
    x = _load_four(row_ptr, place, vocab)
    ids = place
    block = tl.min(place, 1)[:, None] // 4
    if MAPPED:
        ids = _load_ids(ids_ptr, place, vocab)
        block = ids // 4
    w0, w1, w2, w3 = philox(block.to(tl.uint32), c1, c2, c3, k0, k1)
    own = pick_word(w0, w1, w2, w3, ids % 4)
    smallest = rough_exponential(uniform(word)) * 0.25
    more = rough_exponential(uniform(own))
    noise = smallest + tl.where((word & 3).to(tl.int32) == ids % 4, 0.0, more)
    x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
    return tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(noise))


@triton.jit
def _scan_scores(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """What groups find with noise."""
    scale = exponent_scale(temperature)
    if begin + SPLIT <= vocab:
        top, number, word, rest = _lead_bounds(
            row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED, FLOORED, True
        )
    else:
        top, number, word, rest = _lead_bounds(
            row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED, FLOORED, False
        )
    place = _first_of_four(begin, number, TILE)[:, None] + tl.arange(0, 4)[None, :]
    score = _four_scores(row_ptr, ids_ptr, place, vocab, limit, floor, scale, word, k0, k1, c1, c2, c3, MAPPED, FLOORED)
    strange = tl.where(top < _BOUND_LIMIT, _MINUS_INF, tl.where(top == top, _INF, _NAN))
    best, others, lane = _two_of_four(score)
    mine = _groups(tl.where(strange > _MINUS_INF, _MINUS_INF, image(best)))
    lead, token, loses = _lead(mine, _groups(_first_of_four(begin, number, TILE) + lane))
    # All that is not a group's lead: what loses against it as well.
    second = tl.maximum(
        _groups(tl.maximum(image(tl.maximum(rest + 2.0, others)), strange)), tl.where(loses, mine, _MINUS_INF)
    )
    return lead, token, tl.max(second, 1)


@triton.jit
def scan_split(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, seed, place, line, found_ptr, number,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr,
):  # fmt: skip
    """Write what the groups of split ``number`` have, int32 ``[splits of all rows, groups, 4]``: the image of the best
    score, its token, and the image of the second, twice.

    The noise is that of ``seed``, ``place`` (int64) and ``line``. ``MAPPED`` entries have their target's ids, and those
    that are not below ``limit`` are never drawn.
    """
    at = (number * (TILE // GROUP) + tl.arange(0, TILE // GROUP)).to(tl.int64)
    if NOISE:
        if temperature < GREEDY:
            best, token, second = _scan_values(
                row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, False, MAPPED
            )
        else:
            k0, k1, c1, c2, c3 = noise_key(seed, STREAM, place, line)
            best, token, second = _scan_scores(
                row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED,
                FLOORED,
            )  # fmt: skip
    elif temperature < GREEDY:
        best, token, second = _scan_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, False, MAPPED
        )
    else:
        best, token, second = _scan_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, True, MAPPED
        )
    kind = tl.arange(0, 4)[None, :]
    found = tl.where(kind == 0, best[:, None], tl.where(kind == 1, token[:, None], second[:, None]))
    tl.store(found_ptr + at[:, None] * 4 + kind, found)


@triton.jit
def _exact_scores(
    row_ptr, ids_ptr, four, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    NOISE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """Of fours ``[N, 1]``, ``[N, 4]``: what a row without noise compares, and else ``gumbel_scores``."""
    place = four * 4 + tl.arange(0, 4)[None, :]
    x = _load_four(row_ptr, place, vocab)
    ids = place
    if MAPPED:
        ids = _load_ids(ids_ptr, place, vocab)
    x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
    score = processed_value(x, tl.zeros_like(x) + temperature)
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= GREEDY:
            lane = tl.arange(0, 4)[None, :]
            if MAPPED:
                four, lane = ids // 4, ids % 4
            noise = token_noise(four, lane, k0, k1, c1, c2, c3)
            score = gumbel_scores(x, tl.zeros_like(x) + temperature, noise)
    return score


@triton.jit
def _rescan(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The largest exact score of the group of a split that begins at ``begin``, and its first place."""
    four = begin // 4 + tl.arange(0, GROUP // 4)[:, None]
    best, token = tl.full((), -float("inf"), tl.float32), tl.full((), NO_TOKEN, tl.int32)
    for i in range(SPLIT // TILE):
        here = four + i * (TILE // 4)
        score = _exact_scores(
            row_ptr, ids_ptr, here, vocab, limit, floor, temperature, k0, k1, c1, c2, c3, NOISE, MAPPED, FLOORED
        )
        found, spot = first_best(score, here * 4 + tl.arange(0, 4)[None, :])
        token = tl.where(found > best, spot, tl.where(found == best, tl.minimum(token, spot), token))
        best = tl.maximum(best, found)
    return best, token


@triton.jit
def _doubt(score):
    """How far two scores in units of log2 have to be apart for their order to be known.

    The difference of two near scores is off by at most 5e-5 and 4e-7 of a score: exponentials by 1.2e-5 of them, the
    hardware's logarithm by 2**-22 of it (in (0.5, 2): of 1), beside the multiply-add and the steps of the exact score;
    the error of the scale is common to both. A logit is at most 5 above its score, a score at most 26 above its logit.
    """
    return tl.abs(score) * 4e-6 + 2e-4


@triton.jit
def _exact_leads(
    logits_ptr, ids_ptr, floors_ptr, lines, first, needed, temperature, seed, places, numbers, vocab, limit, stride,
    STREAM: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The largest exact score among the fours that tokens ``first`` ``[R]`` belong to, and its first place."""
    line = lines.to(tl.int64)[:, None]
    k0, k1, c1, c2, c3 = noise_key(seed, STREAM, places[:, None], numbers[:, None])
    floor = load_floors(floors_ptr, line, needed[:, None], FLOORED)
    four = tl.where(needed, first // 4, 0)[:, None]
    score = _exact_scores(
        logits_ptr + tl.where(needed[:, None], line, 0) * stride, ids_ptr, four, vocab, limit, floor, temperature, k0,
        k1, c1, c2, c3, NOISE, MAPPED, FLOORED,
    )  # fmt: skip
    best = tl.where(needed, tl.max(score, 1), -float("inf"))
    hit = needed[:, None] & (score == best[:, None]) & (score > -float("inf"))
    return best, tl.min(tl.where(hit, four * 4 + tl.arange(0, 4)[None, :], NO_TOKEN), 1)


@triton.jit
def _settle(
    logits_ptr, ids_ptr, floors_ptr, lines, best, token, pending, temperature, seed, places, numbers, vocab, limit,
    stride,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr,
):  # fmt: skip
    """The first exact argmax of every row over its ``pending`` groups, ``[R, groups]``, and ``token`` with ``best``."""
    ROWS: tl.constexpr = pending.shape[0]
    ALL: tl.constexpr = pending.shape[1]
    rows, ks = tl.arange(0, ROWS)[:, None], tl.arange(0, ALL)[None, :]
    left = tl.max(tl.max(pending.to(tl.int32), 1), 0)
    while left > 0:
        chosen = tl.min(tl.min(tl.where(pending, rows * ALL + ks, NO_TOKEN), 1), 0)
        group = chosen % ALL
        begin = group // (TILE // GROUP) * SPLIT + group % (TILE // GROUP) * GROUP
        here = tl.arange(0, ROWS) == chosen // ALL
        line = tl.sum(tl.where(here, lines.to(tl.int64), 0), 0)
        place, number = tl.sum(tl.where(here, places, 0), 0), tl.sum(tl.where(here, numbers, 0), 0)
        k0, k1, c1, c2, c3 = noise_key(seed, STREAM, place, number)
        found, spot = _rescan(
            logits_ptr + line * stride, ids_ptr, begin, vocab, limit, load_floor(floors_ptr, line, FLOORED),
            temperature, k0, k1, c1, c2, c3, SPLIT, TILE, NOISE, MAPPED, FLOORED,
        )  # fmt: skip
        better = here & ((found > best) | ((found == best) & (spot < token)))
        best, token = tl.where(better, found, best), tl.where(better, spot, token)
        pending = pending & (rows * ALL + ks != chosen)
        left = tl.max(tl.max(pending.to(tl.int32), 1), 0)
    return token


@triton.jit
def row_tokens(
    logits_ptr, ids_ptr, floors_ptr, lines, needed, temperature, seed, places, numbers, found_ptr, vocab, limit, stride,
    splits,
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
    at = (lines.to(tl.int64)[:, None] * groups + ks) * 4
    image_of_best = tl.load(found_ptr + at, mask=inside, other=_MINUS_INF)
    tokens = tl.load(found_ptr + at + 1, mask=inside, other=NO_TOKEN)
    second = tl.load(found_ptr + at + 2, mask=inside, other=_MINUS_INF)
    lead, first, loses = _lead(image_of_best, tokens)
    score = image_value(lead)
    drawn = tl.where(lead > _MINUS_INF, first, NO_TOKEN)
    near = second
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= GREEDY:
            near = tl.maximum(second, tl.where(loses, image_of_best, _MINUS_INF))
    worst = tl.max(near, 1)
    doubtful = (worst > _MINUS_INF) & (image_value(worst) + _doubt(score) >= score)
    doubtful = needed & (doubtful | (worst >= _INF))
    if tl.max(doubtful.to(tl.int32), 0) > 0:
        # The lead is known exactly, which is not so for the rest of its group.
        reach = image_value(near)
        close = (second >= _INF) | ((reach > -float("inf")) & (reach + _doubt(score)[:, None] >= score[:, None]))
        best, token = _exact_leads(
            logits_ptr, ids_ptr, floors_ptr, lines, first, doubtful & (lead > _MINUS_INF), temperature, seed, places,
            numbers, vocab, limit, stride, STREAM, NOISE, MAPPED, FLOORED,
        )  # fmt: skip
        exact = _settle(
            logits_ptr, ids_ptr, floors_ptr, lines, best, token, inside & doubtful[:, None] & close, temperature, seed,
            places, numbers, vocab, limit, stride, STREAM, SPLIT, TILE, NOISE, MAPPED, FLOORED,
        )  # fmt: skip
        drawn = tl.where(doubtful, exact, drawn)
    return drawn, tl.max(tl.max((second > _INF).to(tl.int32), 1), 0)
