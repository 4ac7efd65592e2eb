"""One pass over logits that draws by Gumbel-max: the Triton noise and scan behind ``verify`` and draft sampling.

A row of the vocabulary is cut into splits, and a split into turns of a tile. Exact scores ``logit / temperature -
log(e)``, ``e`` exponential, cost accurate logarithms and a quarter of a block of noise per token, several times what
reading the logits allows. So a program looks at fours of neighbouring tokens, which share one word of noise: that of
the smallest of their exponentials (:mod:`specgraph.kernels.sample`). With ``u`` the uniform of that word

    e >= -log1p(-u) / 4 >= u / 4,  so  score * log2(e) <= largest logit * log2(e) / temperature - log2(u) + 2

which costs a maximum per token and little per four. Of the eight fours that a column of eight neighbours meets in all
turns, the one with the largest bound draws the noise of its tokens, and bounds each of them as ``-log2(u / 4 + v)``,
``v`` the token's own uniform, or 0 for the token that has the smallest. The four with the largest of these bounds is
the candidate of its split. The finishing kernel evaluates the fours that may hold the best token exactly. A split can
hide a better one only if the largest bound of its other fours reaches the exact best of the row; such a split (about
one row in a hundred has one) is scanned again with exact scores. The result is the first exact argmax, whatever the
splits and tiles, as long as ``logit / temperature`` is above -2.3e38: below, a token counts as -inf.

The uniforms are those of :mod:`specgraph.kernels.sample`, bit for bit, and every exact score here comes from
:func:`exponential`, so kernels agree with each other. At temperature 0 the scan compares the logits themselves.
"""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

TILE = 1024
WARPS = 4

GREEDY = tl.constexpr(1e-30)
"""``GREEDY_BELOW`` of the reference."""
LARGEST = tl.constexpr(3.4028234663852886e38)
"""What +inf counts as."""
BOUND_LIMIT = tl.constexpr(3.0e38)
"""Bounds are cut here, so that none is infinite; whatever comes near it is scanned again."""
_STRANGE = tl.constexpr(3.3e38)
"""The bound of fours that have a NaN, an infinity or no finite bound, above all others."""
_STRANGE_ABOVE = tl.constexpr(3.2e38)
_FIRST_FOUR = tl.constexpr(0x80000000)
"""The first block of the fours' words; fours that share one are ``_STRIDE`` apart, within runs of ``_FOURS``."""
_STRIDE = tl.constexpr(256)
_FOURS = tl.constexpr(1024)
_NAMES = tl.constexpr(1023)
"""The bits of a bound that name its four: the column and, lowest, its number among those of the column."""
LOG2E = tl.constexpr(1.4426950408889634)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_ROUNDS = tl.constexpr(7)
"""``PHILOX_ROUNDS`` of the reference, which imports what imports this."""
_EVEN = tl.constexpr(0xD2511F53)
_ODD = tl.constexpr(0xCD9E8D57)
_KEY_EVEN = tl.constexpr(0x9E3779B9)
_KEY_ODD = tl.constexpr(0xBB67AE85)
_ONE = tl.constexpr(0x3F800000)
"""1.0 as bits."""
_ONE_LESS = tl.constexpr(1.0 - 2.0**-24)


def split_size(vocab: int) -> int:
    """Entries of one split: at most 128 splits for vocabularies up to half a million, and 8 or more from 8192 on."""
    return 1024 if vocab <= 65536 else 4096


def aligned(logits: Tensor) -> Tensor:
    """``logits`` contiguous at an address that all kernels may assume: layouts, and sums, depend on it."""
    logits = logits.contiguous()
    return logits if logits.data_ptr() % 16 == 0 else logits.clone()


@triton.jit
def noise_key(seed, stream, place, line):
    """The key (2 words) and the counter behind the token's block (3 words) of one row, uint32."""
    last = stream + ((place >> 32) << 8)
    return (
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32), place.to(tl.uint32), line.to(tl.uint32), last.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-7 of uint32 words that broadcast: see ``specgraph.kernels.sample.philox``.

    Products are 64 bits wide, one instruction each. Whatever is the same for a whole row should come as a scalar: a
    quarter of the first three rounds then is computed once.
    """
    for _ in tl.static_range(_ROUNDS):
        even = c0.to(tl.uint64) * _EVEN
        odd = c2.to(tl.uint64) * _ODD
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = odd.to(tl.uint32)
        c3 = even.to(tl.uint32)
        k0 = k0 + _KEY_EVEN
        k1 = k1 + _KEY_ODD
    return c0, c1, c2, c3


@triton.jit
def pick_word(c0, c1, c2, c3, lane):
    """Word ``lane`` of four; where the compiler knows the lane, this costs nothing."""
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


@triton.jit
def uniform(word):
    """``(word // 2**9 + 0.5) * 2**-23`` in (0, 1), float32.

    Made of bits: 1 and the upper 23 bits as its fraction, less ``1 - 2**-24``, which is exact. A conversion would run
    at half the rate.
    """
    return ((word >> 9) + _ONE).to(tl.float32, bitcast=True) - _ONE_LESS


@triton.jit
def inverse_temperature(temperature):
    """What logits are multiplied by in a softmax; 1 for a greedy row, whose temperature may be 0."""
    return 1.0 / tl.where(temperature < GREEDY, 1.0, temperature)


@triton.jit
def exponent_scale(temperature):
    """What logits are multiplied by for ``exp2`` to give a softmax's weights: the same bits in every kernel."""
    return LOG2E / tl.where(temperature < GREEDY, 1.0, temperature)


@triton.jit
def load_floor(floors_ptr, line, FLOORED: tl.constexpr):
    """The smallest logit that a row keeps (:mod:`specgraph.kernels.floors`): -inf if nothing is cut."""
    floor = tl.full((), -float("inf"), tl.float32)
    if FLOORED:
        floor = tl.load(floors_ptr + line)
    return floor


@triton.jit
def accurate_log(x):
    if INTERPRETED:  # noqa: SIM108  (a constexpr branch: the other side does not compile)
        result = tl.log(x.to(tl.float64)).to(tl.float32)
    else:
        result = libdevice.log(x)
    return result


@triton.jit
def accurate_log1p(x):
    if INTERPRETED:  # noqa: SIM108  (a constexpr branch: the other side does not compile)
        result = tl.log(1.0 + x.to(tl.float64)).to(tl.float32)
    else:
        result = libdevice.log1p(x)
    return result


@triton.jit
def rough_minus_log2(x):
    """``-log2(x)`` of a normal number to within 2**-20 or so: one instruction, and a sign that joins the next one."""
    if INTERPRETED:
        result = -tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.ftz.f32 t, $1; neg.f32 $0, t; }", "=f,f", [x], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return result


@triton.jit
def clean(x):
    """Float32 logits as a softmax can take them: NaN is -inf, +inf the largest number."""
    return tl.where(x == x, tl.where(x > LARGEST, LARGEST, x), -float("inf"))


@triton.jit
def processed_value(x, temperature):
    """``x / temperature`` as ``process_logits`` rounds it, for blocks of one shape; the logit itself if greedy."""
    x = clean(x)
    greedy = temperature < GREEDY
    scaled = tl.div_rn(x, tl.where(greedy, 1.0, temperature))
    return tl.where(scaled > LARGEST, LARGEST, scaled)


@triton.jit
def exponential(four_word, word, lane):
    """A token's exponential, float32: the smallest of its four, and more unless the token has that one itself."""
    smallest = -accurate_log1p(-uniform(four_word)) * 0.25
    more = -accurate_log1p(-uniform(word))
    return smallest + tl.where((four_word & 3).to(tl.int32) == lane, 0.0, more)


@triton.jit
def four_words(four, k0, k1, c1, c2, c3):
    """The words of the blocks that hold those of ``four``; word ``four_lane`` is its own."""
    block = (four // _FOURS * _STRIDE + four % _STRIDE).to(tl.uint32)
    return philox(block | _FIRST_FOUR, c1, c2, c3, k0, k1)


@triton.jit
def four_lane(four):
    return four // _STRIDE % 4


@triton.jit
def token_noise(ids, k0, k1, c1, c2, c3):
    """The exponentials of tokens, whatever their ids: two blocks of noise for each."""
    w0, w1, w2, w3 = four_words(ids // 4, k0, k1, c1, c2, c3)
    four_word = pick_word(w0, w1, w2, w3, four_lane(ids // 4))
    w0, w1, w2, w3 = philox((ids // 4).to(tl.uint32), c1, c2, c3, k0, k1)
    return exponential(four_word, pick_word(w0, w1, w2, w3, ids % 4), ids % 4)


@triton.jit
def tile_noise(first, ids_ptr, vocab, k0, k1, c1, c2, c3, TILE: tl.constexpr, MAPPED: tl.constexpr):
    """The exponential of each of ``TILE`` entries from ``first`` on, ``[TILE // 4, 4]``, and the ids they stand for.

    ``MAPPED`` entries have their target's ids, which share no block with their neighbours.
    """
    four = first // 4 + tl.arange(0, TILE // 4)
    lane = tl.arange(0, 4)[None, :]
    place = four[:, None] * 4 + lane
    if MAPPED:
        ids = tl.load(ids_ptr + place, mask=place < vocab, other=NO_TOKEN).to(tl.int32)
        noise = token_noise(ids, k0, k1, c1, c2, c3)
    else:
        ids = place
        w0, w1, w2, w3 = four_words(four, k0, k1, c1, c2, c3)
        four_word = pick_word(w0, w1, w2, w3, four_lane(four))[:, None]
        w0, w1, w2, w3 = philox(four.to(tl.uint32)[:, None], c1, c2, c3, k0, k1)
        noise = exponential(four_word, pick_word(w0, w1, w2, w3, lane), lane)
    return noise, ids


@triton.jit
def gumbel_scores(x, temperature, noise):
    """Exact scores: ``x / temperature - log(noise)``, each step rounded to float32. Blocks of one shape."""
    return processed_value(x, temperature) - accurate_log(noise)


@triton.jit
def widen(x):
    """Float32. Bfloat16 takes one instruction for each, where the compiler's own takes two for every other."""
    if (x.dtype == tl.bfloat16) and (not INTERPRETED):
        result = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def load_tile(row_ptr, first, vocab, TILE: tl.constexpr):
    """Entries ``[TILE // 4, 4]`` from ``first`` on, float32, -inf behind the last."""
    place = first + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return widen(tl.load(row_ptr + place, mask=place < vocab, other=-float("inf")))


@triton.jit
def kept_logits(x, ids, limit, floor, MAPPED: tl.constexpr, FLOORED: tl.constexpr):
    """``x`` with -inf where the target has no such id, and below the row's floor (:mod:`specgraph.kernels.floors`)."""
    if MAPPED:
        x = tl.where(ids < limit, x, -float("inf"))
    if FLOORED:
        x = tl.where(x < floor, -float("inf"), x)  # leaves NaN
    return x


@triton.jit
def first_best(score, place):
    """The largest score of a block and the first place that has it; NO_TOKEN if all are -inf."""
    best = tl.max(tl.max(score, 1), 0)
    at = tl.where((score == best) & (score > -float("inf")), place, NO_TOKEN)
    return best, tl.min(tl.min(at, 1), 0)


@triton.jit
def _first_four(score, turn, begin, TILE: tl.constexpr):
    """The largest score of fours ``[TILE // 4]`` and the first place of the first that has it."""
    best = tl.max(score, 0)
    first = begin + turn * TILE + tl.arange(0, TILE // 4) * 4
    return best, tl.min(tl.where((score == best) & (score > -float("inf")), first, NO_TOKEN), 0)


@triton.jit
def most_of_four(x):
    """The largest of each four, ``[COLUMNS, 4]`` to ``[COLUMNS]``; NaN where one is."""
    halves = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    pairs = tl.split(tl.maximum(halves[0], halves[1], propagate_nan=tl.PropagateNan.ALL))
    return tl.maximum(pairs[0], pairs[1], propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _top_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr, NANS: tl.constexpr,
):  # fmt: skip
    """The largest value of every column of a split, ``[TILE // 4]``, and the turn it is in. With ``NANS`` a value is
    NaN where a logit of the column is, else those are passed over.
    """
    top = tl.full((TILE // 4,), -float("inf"), tl.float32)
    turn = tl.zeros((TILE // 4,), tl.int32)
    for i in tl.static_range(SPLIT // TILE):
        x = load_tile(row_ptr, begin + i * TILE, vocab, TILE)
        if not NANS:
            x = tl.where(x == x, x, -float("inf"))
        if MAPPED:
            place = begin + i * TILE + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
            x = tl.where(tl.load(ids_ptr + place, mask=place < vocab, other=limit) < limit, x, -float("inf"))
        # Division keeps the order, so it can wait for the best of four.
        value = _value_of(most_of_four(x), temperature, DIVIDED)
        turn = tl.where(value > top, i, turn)
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    return top, turn


@triton.jit
def scan_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Without noise: the largest value of a split, its first place, and whether a logit is NaN.

    Values are logits, or processed ones if ``DIVIDED``. The largest is never cut, so there is no floor here.
    """
    top, turn = _top_values(row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED, True)
    bad = tl.max((top != top).to(tl.int32), 0)
    if bad > 0:
        top, turn = _top_values(row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED, False)
    best, four = _first_four(top, turn, begin, TILE)
    place = tl.where(four == NO_TOKEN, 0, four) + tl.arange(0, 4)
    there = (place < vocab) & (four != NO_TOKEN)
    if MAPPED:
        there = there & (tl.load(ids_ptr + place, mask=there, other=limit) < limit)
    x = tl.load(row_ptr + place, mask=there, other=-float("inf")).to(tl.float32)
    hit = there & (_value_of(x, temperature, DIVIDED) == best)
    return best, tl.min(tl.where(hit, place, NO_TOKEN), 0), bad


@triton.jit
def _value_of(x, temperature, DIVIDED: tl.constexpr):
    """What rows without noise compare; NaN stays."""
    value = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if DIVIDED:
        value = tl.where(x == x, processed_value(x, tl.zeros_like(x) + temperature), x)
    return value


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
def _bound_of_fours(
    x, ids, limit, floor, scale, w0, w1, w2, w3, place, k0, k1, c1, c2, c3, MAPPED: tl.constexpr, FLOORED: tl.constexpr
):  # fmt: skip
    """A bound of the scores of the fours at ``place`` ``[N]``, less 2, and the words ``[N, 1]`` of their noise, or
    ``[N, 4]`` if ``MAPPED``; ``w0`` to ``w3`` are those of their blocks.
    """
    if MAPPED:
        w0, w1, w2, w3 = four_words(ids // 4, k0, k1, c1, c2, c3)
        word = pick_word(w0, w1, w2, w3, four_lane(ids // 4))
        x = kept_logits(x, ids, limit, floor, True, FLOORED)
        bound = most_of_four(tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(word))))
    else:
        own = pick_word(w0, w1, w2, w3, place >> 10 & 3)
        word = own[:, None]
        x = most_of_four(kept_logits(x, ids, limit, floor, False, FLOORED))
        bound = tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(own)))
    return bound, word


@triton.jit
def _best_fours(
    row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Of the fours of every column of eight neighbours, over all turns of a split, ``[TILE // 8]`` each: the largest
    bound, less 2, NaN where one was NaN; the largest of the others; the number of the first, ``2 * turn + 1`` for the
    second four of a turn; and the words of its noise.
    """
    COLUMNS: tl.constexpr = TILE // 8
    tl.static_assert(TILE <= _FOURS)
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE, WHOLE)
    top = tl.full((COLUMNS,), -float("inf"), tl.float32)
    rest = tl.full((COLUMNS,), -float("inf"), tl.float32)
    number = tl.zeros((COLUMNS,), tl.int32)
    word = tl.zeros((COLUMNS, 4 if MAPPED else 1), tl.uint32)
    for h in tl.static_range(2):
        for i in tl.static_range(SPLIT // TILE):
            first = begin + i * TILE
            x = widen(_fours(tiles[i])[h])
            ids = 0
            if MAPPED:
                place = first + tl.arange(0, TILE)
                ids = _fours(tl.load(ids_ptr + place, mask=place < vocab, other=NO_TOKEN).to(tl.int32))[h]
                w0, w1, w2, w3 = 0, 0, 0, 0
            elif i % 4 == 0 or TILE < _FOURS:  # turns of whole tiles share a block
                four = first // 4 + tl.arange(0, COLUMNS) * 2 + h
                w0, w1, w2, w3 = four_words(four, k0, k1, c1, c2, c3)
            bound, own = _bound_of_fours(
                x, ids, limit, floor, scale, w0, w1, w2, w3, first, k0, k1, c1, c2, c3, MAPPED, FLOORED
            )
            better = bound > top
            rest = tl.maximum(rest, tl.minimum(bound, top))
            top = tl.maximum(top, bound, propagate_nan=tl.PropagateNan.ALL)
            number = tl.where(better, 2 * i + h, number)
            word = tl.where(better[:, None], own, word)
    return top, rest, number, word


@triton.jit
def _four_bound(
    row_ptr, ids_ptr, first, vocab, limit, floor, scale, word, k0, k1, c1, c2, c3,
    MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """A bound of the scores of the fours at ``first`` ``[N]``, less 2, from the noise of each token."""
    lane = tl.arange(0, 4)[None, :]
    place = first[:, None] + lane
    x = widen(tl.load(row_ptr + place, mask=place < vocab, other=-float("inf")))
    ids = place
    if MAPPED:
        ids = tl.load(ids_ptr + place, mask=place < vocab, other=NO_TOKEN).to(tl.int32)
        lane = ids % 4
        w0, w1, w2, w3 = philox((ids // 4).to(tl.uint32), c1, c2, c3, k0, k1)
    else:
        w0, w1, w2, w3 = philox((first // 4).to(tl.uint32)[:, None], c1, c2, c3, k0, k1)
    own = uniform(pick_word(w0, w1, w2, w3, lane))
    smallest = uniform(word) + tl.zeros_like(own)
    more = tl.fma(own, tl.full(own.shape, 4.0, tl.float32), smallest)
    noise = tl.where((word & 3).to(tl.int32) == lane, smallest, more)
    x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
    return tl.max(tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(noise)), 1)


@triton.jit
def scan_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, seed_ptr, place_ptr, shift, line,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The largest bound of a split in units of log2; the first place of its four; the largest bound of all other
    fours; and whether a logit is NaN. A split with a NaN is scanned again.

    The noise is that of ``line`` and of ``shift`` added to what is at ``place_ptr``. The low bits of a bound name its
    four, so that one maximum finds both.
    """
    tl.static_assert(SPLIT // TILE <= 4)
    scale = exponent_scale(temperature)
    seed, place = tl.load(seed_ptr), tl.load(place_ptr)
    k0, k1, c1, c2, c3 = noise_key(seed, STREAM, place + shift, line)
    if begin + SPLIT <= vocab:
        top, rest, number, word = _best_fours(
            row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED, FLOORED, True
        )
    else:
        top, rest, number, word = _best_fours(
            row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED, FLOORED, False
        )
    column = tl.arange(0, TILE // 8)
    first = begin + (number >> 1) * TILE + column * 8 + (number & 1) * 4
    bound = _four_bound(row_ptr, ids_ptr, first, vocab, limit, floor, scale, word, k0, k1, c1, c2, c3, MAPPED, FLOORED)
    bound = tl.where(top < BOUND_LIMIT, bound, _STRANGE)
    bits = (bound.to(tl.uint32, bitcast=True) & (0xFFFFFFFF - _NAMES)) | (column * 8 + number).to(tl.uint32)
    named = tl.where(bound > -float("inf"), bits.to(tl.uint32).to(tl.float32, bitcast=True), bound)
    best = tl.max(named, 0)
    second = tl.max(tl.maximum(tl.where(named == best, -float("inf"), named), rest), 0)
    name = (best.to(tl.uint32, bitcast=True) & _NAMES).to(tl.int32)
    bad = tl.full((), 0, tl.int32)
    if best > _STRANGE_ABOVE:
        second = best
        bad = tl.max((top != top).to(tl.int32), 0)
    place = begin + (name >> 1) % 4 * TILE + name // 8 * 8 + name % 2 * 4
    return best + 2.0, place, second + 2.0, bad


@triton.jit
def rescan(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The largest exact score of a split and its first place."""
    local = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    top = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    turn = tl.zeros((TILE // 4, 4), tl.int32)
    for i in range(SPLIT // TILE):
        x = load_tile(row_ptr, begin + i * TILE, vocab, TILE)
        noise, ids = tile_noise(begin + i * TILE, ids_ptr, vocab, k0, k1, c1, c2, c3, TILE, MAPPED)
        x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
        score = gumbel_scores(x, tl.zeros_like(x) + temperature, noise)
        better = score > top
        top = tl.where(better, score, top)
        turn = tl.where(better, i, turn)
    return first_best(top, begin + turn * TILE + local)


@triton.jit
def _four_score(
    logits_ptr, ids_ptr, line, first, floor, temperature, vocab, limit, stride, k0, k1, c1, c2, c3,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """The best exact score of the four from ``first`` on of every row, and its first place: ``[R]``.

    Arguments that rows differ in are ``[R, 1]``. -inf and NO_TOKEN where ``first`` is NO_TOKEN, or nothing is left.
    """
    known = first < NO_TOKEN
    place = tl.where(known, first, 0) + tl.arange(0, 4)[None, :]
    there = known & (place < vocab)
    x = tl.load(logits_ptr + line.to(tl.int64) * stride + place, mask=there, other=-float("inf")).to(tl.float32)
    ids = place
    if MAPPED:
        ids = tl.load(ids_ptr + place, mask=there, other=NO_TOKEN).to(tl.int32)
        there = there & (ids < limit)
    score = gumbel_scores(x, temperature + tl.zeros_like(x), token_noise(ids, k0, k1, c1, c2, c3))
    score = tl.where(there & (x >= floor), score, -float("inf"))
    best = tl.max(score, 1)
    hit = (score == best[:, None]) & (score > -float("inf"))
    return best, tl.min(tl.where(hit, place, NO_TOKEN), 1)


@triton.jit
def best_candidates(
    logits_ptr, ids_ptr, line, bound, first, known, floor, temperature, vocab, limit, stride, k0, k1, c1, c2, c3,
    MAPPED: tl.constexpr,
):  # fmt: skip
    """The best exact score of every row's candidates and its place: ``[R]`` each, from ``[R, splits]``.

    ``line``, ``floor``, ``temperature`` and the noise's words are ``[R, 1]``. Candidates are taken from the largest
    bound on until no bound reaches what was found: mostly one of every row.
    """
    best = tl.full((bound.shape[0],), -float("inf"), tl.float32)
    token = tl.full((bound.shape[0],), NO_TOKEN, tl.int32)
    left = known
    again = 1
    while again > 0:
        lead = tl.max(tl.where(left, bound, -float("inf")), 1)
        chosen = tl.min(tl.where(left & (bound == lead[:, None]), first, NO_TOKEN), 1)[:, None]
        score, place = _four_score(
            logits_ptr, ids_ptr, line, chosen, floor, temperature, vocab, limit, stride, k0, k1, c1, c2, c3, MAPPED
        )
        better = (score > best) | ((score == best) & (place < token))
        best, token = tl.where(better, score, best), tl.where(better, place, token)
        left = left & (first != chosen) & may_hide(bound, best[:, None])
        again = tl.max(tl.max(left.to(tl.int32), 1), 0)
    return best, token


@triton.jit
def may_hide(bound, best):
    """Whether a four bounded by ``bound`` may hold a token as good as exact ``best``.

    The bound is off by at most 1023 units in the last place (its low bits are the four's name), which is 1.22e-4 of it;
    by the rounding of the scale, the multiply-add and the exact score, some 1e-6 of it; and by the rough log2.
    """
    reach = bound + tl.abs(bound) * 1.3e-4 + 2e-3
    return (bound > -float("inf")) & (reach >= tl.minimum(best * LOG2E, 2.9e38))
