"""The token that each row of logits draws, found in one pass over the logits.

For a row of logits ``[V]`` (float32, bfloat16 or float16) it is the first argmax of the exact scores
``logit / temperature - log(e)``, where ``e`` is the token's exponential. Without noise (at temperature 0, or without
seeds) it is the first argmax of the values.

An exact score takes accurate logarithms and a quarter of a block of Philox per token, which costs several times as much
as reading the logits. So the scan computes upper bounds first. Eight neighbouring tokens form an *octet* (``eight`` in
names) and share one word of noise, which gives the smallest of their exponentials
(:mod:`specgraph.kernels.sampling.sample`). With ``u`` the uniform of that word, every exponential ``e`` of the octet
satisfies::

    e >= -log1p(-u) / 8 >= u / 8,  so  score / ln(2) <= largest logit / temperature / ln(2) - log2(u) + 3

The maximum costs half an instruction per token, and the rest of the bound costs little per octet. The bounds rule out
most octets, for whose tokens no further noise is drawn.

The vocabulary is divided into splits, one per program and row. A program walks through its split in tiles (``turn`` is
the index of a tile). A warp reads a *group*: the same 256 neighbouring tokens of every tile. A thread reads one octet
of every tile, always at the same place in the tile; these octets are a *column*. It keeps the three largest bounds of
its column. The warp then takes the four octets with the largest bounds of its group and computes the scores of their 32
tokens, one token per thread, with an error that :func:`_least_near` bounds.

A group reports three int32: the sort key of the best of these scores (the *candidate*, ``lead`` in names), its token,
and the sort key of the *runner-up* (``second``), which is the largest score or bound of all other tokens of the group.
:func:`row_tokens` merges the groups of a row. If no other score comes near the best candidate, which is nearly always
the case, the candidate is drawn. Otherwise the row is *in doubt*, and whatever may hold its largest score is scanned
again with exact scores. This is also done for groups with a NaN, an infinity or a bound that overflows, and for rows in
which no score is above -inf. Without noise nothing is approximate, so a near tie puts no row in doubt.

The result is the first exact argmax, so it does not depend on splits and tiles, nor on other rows.

Sources: the bound follows from Renyi's representation of order statistics (1953). A* sampling (Maddison et al. 2014,
arXiv 1411.0030) also searches for the largest Gumbel score with upper bounds. Variants that were measured are in
``docs/experiments.md``.
"""

# Triton's functions have no types.
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
"""The tokens of a tile that one warp reads. With those at the same place in all other tiles they form a group."""
_MANY_PROGRAMS = 1024
"""About eight programs on each multiprocessor of a large GPU, which are enough to hide each other's latency."""
_BOUND_LIMIT = tl.constexpr(0x7F61B1E6)
"""The sort key of 3e38. A group with a larger bound is scanned again."""
_NOTHING = tl.constexpr(-0x80000000)
_MINUS_INF, _INF = MINUS_INF_IMAGE, INF_IMAGE
_LOWEST = tl.constexpr(MINUS_INF_IMAGE.value + 1)
"""The sort key of the smallest number."""
_NAN = tl.constexpr(0x7FFFFFFF)
"""The sort key that stands for NaN, above those of all numbers."""


def scan_size(vocab: int, rows: int) -> int:
    """The number of entries of a split in a scan: :func:`split_size`, or more if that would give many small programs.

    The token that a row draws does not depend on it. The bits of sums do, so kernels that sum use :func:`split_size`.
    """
    size = split_size(vocab)
    return 4096 if rows * triton.cdiv(vocab, size) > _MANY_PROGRAMS else size


@triton.jit
def _read_split(row_ptr, begin, vocab, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """Read all tiles of a split in their own dtype, 16 bytes at a time."""
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
    """The values that are compared without noise. NaN stays NaN."""
    value = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if DIVIDED:
        value = tl.where(x == x, processed_value(x, tl.zeros_like(x) + temperature), x)
    return value


@triton.jit
def _groups(x):
    """Reshape columns ``[N]`` into groups, ``[N * 8 // GROUP, GROUP // 8]``. A group is usually in one warp."""
    return tl.reshape(x, (x.shape[0] * 8 // GROUP, GROUP // 8))


@triton.jit
def _first_best(rank, token):
    """The largest of every row ``[R, N]`` of sort keys, and the first token that has it."""
    best = tl.max(rank, 1)
    return best, tl.min(tl.where(rank == best[:, None], token, NO_TOKEN), 1)


@triton.jit
def _lead_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The largest value of every column (NaN if it has one), and the first tile whose octet has it: ``[TILE // 8]``."""
    COLUMNS: tl.constexpr = TILE // 8
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE)
    top = tl.full((COLUMNS,), -float("inf"), tl.float32)
    turn = tl.zeros((COLUMNS,), tl.int32)
    for i in tl.static_range(SPLIT // TILE):
        x = tiles[i]
        if MAPPED:
            ids = _load_ids(ids_ptr, begin + i * TILE + tl.arange(0, TILE), vocab)
            x = kept_logits(widen(x), ids, limit, 0.0, True, False)
        # Division keeps the order, so it is enough to divide the largest value of each octet.
        value = _plain_value(most_of_eight(x), temperature, DIVIDED)
        turn = tl.where(value > top, i, turn)
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    return top, turn


@triton.jit
def _column_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The sort keys of the three largest bounds of every column, ``[TILE // 8]``.

    A bound is in units of log2, less 3. The bits ``LOW`` of a key are replaced by the tile and the column. If not
    ``MAPPED``, the words of noise of every tile are returned as well.
    """
    COLUMNS: tl.constexpr = TILE // 8
    # Four consecutive whole tiles share blocks of Philox, and each tile has one word of each block. So a split is a
    # multiple of four tiles, or a part of that.
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
            if i % 4 == 0 or TILE < BLOCK_TOKENS:  # four whole tiles share a block
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
    """The reports of groups without noise. No floor is needed, since the largest value is always kept."""
    top, turn = _lead_values(row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED)
    nan = tl.max(_groups(tl.where(top == top, _MINUS_INF, _NAN)), 1)
    # Sort keys distinguish -0 from 0, which are equal. Adding 0 makes 0 of both.
    best, first = _first_best(_groups(image(top + 0.0)), _groups(begin + turn * TILE + tl.arange(0, TILE // 8) * 8))
    place = first[:, None] + tl.arange(0, GROUP // 8)[None, :] % 8
    x = load_logits(row_ptr, place, vocab)
    if MAPPED:
        x = kept_logits(x, _load_ids(ids_ptr, place, vocab), limit, 0.0, True, False)
    equal = image(_plain_value(x, temperature, DIVIDED) + 0.0) == best[:, None]
    return tl.where(nan == _NAN, _MINUS_INF, best), tl.min(tl.where(equal, place, NO_TOKEN), 1), nan


@triton.jit
def _four_largest(first, second, third, LOW: tl.constexpr):
    """Of every group's columns ``[groups, columns]``: the four largest bounds, the largest, and a bound on all others.

    Each of the four largest bounds is given to eight lanes.
    """
    lane = tl.arange(0, GROUP // 8)[None, :]
    largest, chosen = tl.max(first, 1), tl.zeros_like(first)
    for k in tl.static_range(4):
        top = tl.max(first, 1)[:, None]
        chosen = tl.where(lane // 8 == k, top, chosen)
        hit = first == top  # true for one column only, since the low bits name the column
        first, second = tl.where(hit, second, first), tl.where(hit, _NOTHING, second)
    return chosen, largest, tl.max(tl.maximum(first, third), 1) | LOW


@triton.jit
def _chosen_words(words, turn, column):
    """From the words ``[COLUMNS]`` of every tile, those of the octets at tile ``turn`` and ``column`` of a group."""
    word = tl.gather(_groups(words[0]), column, 1)
    for i in tl.static_range(1, len(words)):
        word = tl.where(turn == i, tl.gather(_groups(words[i]), column, 1), word)
    return word


@triton.jit
def _near_noise(eight_word, ids, k0, k1, c1, c2, c3):
    """The exponentials of tokens, with a relative error of 1.2e-5."""
    more = rough_exponential(uniform(word_of_token(ids // 4, ids % 4, k0, k1, c1, c2, c3)))
    return rough_exponential(uniform(eight_word)) * 0.125 + tl.where(has_smallest(eight_word, ids), 0.0, more)


@triton.jit
def _scan_scores(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The reports of groups with noise."""
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
    """Store int32 values from the threads that have them.

    ``tl.store`` would first collect neighbours in shared memory.
    """
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
    """Write the reports of the groups of split ``number``, int32 ``[3, splits of all rows, groups]``.

    They are the sort key of the candidate's score, the candidate's token, and the sort key of the runner-up or of a
    bound on it. ``area`` is the number of splits of all rows.

    The noise is that of ``seed``, the key ``place`` (int64) and the noise's row ``line``. If ``MAPPED``, ``ids_ptr``
    gives the target id of every entry, and entries whose id is not below ``limit`` are never drawn.
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
    """The largest exact score of ``GROUP`` neighbouring entries, and the first entry that has it.

    Scores are those of ``gumbel_scores``, or without noise the values that :func:`_scan_values` compares.
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
    """The smallest sort key, above that of -inf, whose exact score may be as large as that of the candidate ``lead``.

    Scores are in units of log2. The difference of two approximate scores that are close has an error of at most 5e-5
    plus 4e-7 of a score. Its sources are the exponentials (a relative error of 1.2e-5), the hardware's logarithm (a
    relative error of 2**-22, absolute in (0.5, 2)), the multiply-add, and the roundings of the exact score. The error
    of the scale is common to both scores. A logit is at most 5 above its score, and a score at most 27 above its logit.
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
    """The first exact argmax of every row, or NO_TOKEN if there is none.

    Of the groups ``[R, groups]``, those that are ``pending`` are scanned completely. Of those that are ``near``, the
    256 tokens around the candidate are scanned.
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
        # Scan the candidate's tile if nothing else is pending in this group, and every tile otherwise.
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
    """The entry that every row draws, int32 ``[R]``, and whether a needed row has a NaN (0 or 1).

    An entry is ``NO_TOKEN`` if the row has nothing but -inf. ``lines`` ``[R]`` are the indices of rows of logits, all
    of one sequence. ``places`` and ``numbers`` (int64) are the keys and rows of their noise.
    """
    ks = tl.arange(0, SPLITS * (TILE // GROUP))[None, :]
    groups = splits * (TILE // GROUP)
    inside = needed[:, None] & (ks < groups)
    # The three kinds of values are stored separately, so that a warp gets all of a row with reads of 16 bytes.
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
