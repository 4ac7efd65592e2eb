"""One pass over logits that draws by Gumbel-max: the Triton noise and scan behind ``verify`` and draft sampling.

A row of the vocabulary is cut into splits. A program scans one split in turns of a tile and names one candidate; a
finishing kernel merges the splits of a row. A candidate is a column: the four neighbouring tokens, which share one
block of noise, that one place of the tile holds in every turn. Keeping the best column costs one maximum per token.
Exact scores ``logit / temperature + gumbel`` cost two accurate logarithms per token, three times what reading the
logits allows, so the scan takes an upper bound instead:

    -log(-log1p(-u)) <= -log(u),  so  score * log2(e) <= logit * log2(e) / temperature - log2(u)

which is one multiply-add and the hardware's log2. The finishing kernel evaluates the columns that may hold the best
token exactly. A split can hide a better one only if the bound of its second-best column reaches the exact best of the
row; such a split (about one row in a hundred has one) is scanned again with exact scores. The result is the first exact
argmax, whatever the splits and tiles, as long as ``logit / temperature`` is above -2.3e38: below, a token counts as
-inf.

The uniforms are those of :mod:`specgraph.kernels.sample`, bit for bit, and every exact score here comes from
:func:`gumbel_scores`, so kernels agree with each other. At temperature 0 the scan compares the logits themselves.
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
_NAN_BOUND = tl.constexpr(3.3e38)
"""The bound of a column that has a NaN, above all others."""
_NAN_ABOVE = tl.constexpr(3.2e38)
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
def gumbel_scores(x, temperature, word):
    """Exact scores: ``x / temperature - log(-log1p(-u))``, each step rounded to float32. Blocks of one shape."""
    return processed_value(x, temperature) - accurate_log(-accurate_log1p(-uniform(word)))


@triton.jit
def noise_words(first, ids_ptr, vocab, k0, k1, c1, c2, c3, TILE: tl.constexpr, MAPPED: tl.constexpr):
    """The word of each of ``TILE`` entries from ``first`` on, ``[TILE // 4, 4]``, and the ids they stand for.

    ``MAPPED`` entries have their target's ids, which share no block with their neighbours.
    """
    block = tl.arange(0, TILE // 4)
    lane = tl.arange(0, 4)
    place = first + block[:, None] * 4 + lane[None, :]
    if MAPPED:
        ids = tl.load(ids_ptr + place, mask=place < vocab, other=NO_TOKEN).to(tl.int32)
        w0, w1, w2, w3 = philox((ids // 4).to(tl.uint32), c1, c2, c3, k0, k1)
        word = pick_word(w0, w1, w2, w3, ids % 4)
    else:
        ids = place
        w0, w1, w2, w3 = philox((first // 4 + block).to(tl.uint32)[:, None], c1, c2, c3, k0, k1)
        word = pick_word(w0, w1, w2, w3, lane[None, :])
    return word, ids


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
def _read_tile(row_ptr, first, vocab, TILE: tl.constexpr, FLAT: tl.constexpr, WHOLE: tl.constexpr):
    """The same as stored; ``WHOLE`` tiles end before the vocabulary does.

    ``FLAT`` addresses make reads of 16 bytes, but a layout that reads of ids do not have.
    """
    place = tl.arange(0, TILE)
    if not FLAT:
        place = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    if WHOLE:
        x = tl.load(row_ptr + first + place)
    else:
        x = tl.load(row_ptr + first + place, mask=first + place < vocab, other=-float("inf"))
    return tl.reshape(x, (TILE // 4, 4))


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
def add_strange(strange, x):
    """Make ``strange`` NaN where ``x`` is NaN or infinite: a multiply-add, which costs half of a comparison."""
    return tl.fma(x, tl.zeros_like(x), strange)


@triton.jit
def any_nan(strange, row_ptr, begin, vocab, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """1 if a logit of the split is NaN. Splits with infinities, and the last of a row, are read again to tell."""
    found = tl.max(tl.max((strange != strange).to(tl.int32), 1), 0)
    if found > 0:
        nans = tl.zeros((TILE // 4, 4), tl.int32)
        first, end = begin, tl.minimum(begin + SPLIT, vocab)
        while first < end:
            x = load_tile(row_ptr, first, vocab, TILE)
            nans = tl.maximum(nans, (x != x).to(tl.int32))
            first += TILE
        found = tl.max(tl.max(nans, 1), 0)
    return found


@triton.jit
def _first_four(score, turn, begin, TILE: tl.constexpr):
    """The largest score of fours ``[TILE // 4]`` and the first place of the first that has it."""
    best = tl.max(score, 0)
    first = begin + turn * TILE + tl.arange(0, TILE // 4) * 4
    return best, tl.min(tl.where((score == best) & (score > -float("inf")), first, NO_TOKEN), 0)


@triton.jit
def scan_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """Without noise: the largest value of a split, its first place, and whether a logit is NaN.

    Values are logits, or processed ones if ``DIVIDED``. The largest is never cut, so there is no floor here.
    """
    top = tl.full((TILE // 4,), -float("inf"), tl.float32)
    turn = tl.zeros((TILE // 4,), tl.int32)
    strange = tl.zeros((TILE // 4, 4), tl.float32)
    for i in tl.static_range(SPLIT // TILE):
        x = load_tile(row_ptr, begin + i * TILE, vocab, TILE)
        strange = add_strange(strange, x)
        if MAPPED:
            place = begin + i * TILE + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
            x = tl.where(tl.load(ids_ptr + place, mask=place < vocab, other=limit) < limit, x, -float("inf"))
        # Division keeps the order, so it can wait for the best of four.
        value = _value_of(tl.max(x, 1), temperature, DIVIDED)
        better = value > top
        top = tl.where(better, value, top)
        turn = tl.where(better, i, turn)
    best, four = _first_four(top, turn, begin, TILE)
    place = tl.where(four == NO_TOKEN, 0, four) + tl.arange(0, 4)
    there = (place < vocab) & (four != NO_TOKEN)
    if MAPPED:
        there = there & (tl.load(ids_ptr + place, mask=there, other=limit) < limit)
    x = tl.load(row_ptr + place, mask=there, other=-float("inf")).to(tl.float32)
    hit = there & (_value_of(x, temperature, DIVIDED) == best)
    return best, tl.min(tl.where(hit, place, NO_TOKEN), 0), any_nan(strange, row_ptr, begin, vocab, SPLIT, TILE)


@triton.jit
def _value_of(x, temperature, DIVIDED: tl.constexpr):
    if DIVIDED:
        x = processed_value(x, tl.zeros_like(x) + temperature)
    else:
        x = tl.minimum(x, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _best_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, scale, seed_ptr, place_ptr, shift, line,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """The largest bound over the turns of a split, ``[TILE // 4, 4]``; NaN where one was NaN.

    All reads come first. (Volatile ones, which stay so in the assembler as well, made it no faster.)
    """
    tiles = ()
    for i in tl.static_range(SPLIT // TILE):
        x = _read_tile(row_ptr + begin, i * TILE, vocab - begin, TILE, not MAPPED, WHOLE)
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton unpacks no tuple)
    seed, place = tl.load(seed_ptr), tl.load(place_ptr)
    k0, k1, c1, c2, c3 = noise_key(seed, STREAM, place + shift, line)
    top = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    for i in tl.static_range(SPLIT // TILE):
        word, ids = noise_words(begin + i * TILE, ids_ptr, vocab, k0, k1, c1, c2, c3, TILE, MAPPED)
        x = kept_logits(widen(tiles[i]), ids, limit, floor, MAPPED, FLOORED)
        bound = tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(word)))
        top = tl.maximum(top, bound, propagate_nan=tl.PropagateNan.ALL)
    return top


@triton.jit
def scan_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, seed_ptr, place_ptr, shift, line,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):  # fmt: skip
    """The largest bound of a split in units of log2; the first place of its column; the largest bound of all other
    columns; and whether a logit is NaN. A split with a NaN is scanned again.

    The noise is that of ``line`` and of ``shift`` added to what is at ``place_ptr``. The low eight bits of a bound name
    its column, so that one maximum finds both.
    """
    tl.static_assert(TILE <= 1024)
    scale = LOG2E / temperature
    if begin + SPLIT <= vocab:
        top = _best_bounds(
            row_ptr, ids_ptr, begin, vocab, limit, floor, scale, seed_ptr, place_ptr, shift, line, STREAM, SPLIT, TILE,
            MAPPED, FLOORED, True,
        )  # fmt: skip
    else:
        top = _best_bounds(
            row_ptr, ids_ptr, begin, vocab, limit, floor, scale, seed_ptr, place_ptr, shift, line, STREAM, SPLIT, TILE,
            MAPPED, FLOORED, False,
        )  # fmt: skip
    halves = tl.split(tl.reshape(top, (TILE // 4, 2, 2)))
    pairs = tl.split(tl.maximum(halves[0], halves[1], propagate_nan=tl.PropagateNan.ALL))
    bound = tl.maximum(pairs[0], pairs[1], propagate_nan=tl.PropagateNan.ALL)
    bound = tl.where(bound == bound, tl.minimum(bound, BOUND_LIMIT), _NAN_BOUND)
    bits = (bound.to(tl.uint32, bitcast=True) & 0xFFFFFF00) | tl.arange(0, TILE // 4)
    named = tl.where(bound > -float("inf"), bits.to(tl.uint32).to(tl.float32, bitcast=True), bound)
    best = tl.max(named, 0)
    second = tl.max(tl.where(named == best, -float("inf"), named), 0)
    bad = (best > _NAN_ABOVE).to(tl.int32)
    column = (best.to(tl.uint32, bitcast=True) & 0xFF).to(tl.int32)
    return best, begin + column * 4, tl.where(bad > 0, best, second), bad


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
        word, ids = noise_words(begin + i * TILE, ids_ptr, vocab, k0, k1, c1, c2, c3, TILE, MAPPED)
        x = kept_logits(x, ids, limit, floor, MAPPED, FLOORED)
        score = gumbel_scores(x, tl.zeros_like(x) + temperature, word)
        better = score > top
        top = tl.where(better, score, top)
        turn = tl.where(better, i, turn)
    return first_best(top, begin + turn * TILE + local)


@triton.jit
def _column_score(
    logits_ptr, ids_ptr, line, first, floor, temperature, vocab, limit, stride, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr,
):  # fmt: skip
    """The best exact score of the column from ``first`` on of every row, and its first place: ``[R]``.

    Arguments that rows differ in are ``[R, 1]``. -inf and NO_TOKEN where ``first`` is NO_TOKEN, or nothing is left.
    """
    number = tl.arange(0, SPLIT // TILE * 4)[None, :]
    known = first < NO_TOKEN
    place = tl.where(known, first, 0) + number // 4 * TILE + number % 4
    there = known & (place < vocab)
    x = tl.load(logits_ptr + line.to(tl.int64) * stride + place, mask=there, other=-float("inf")).to(tl.float32)
    ids = place
    if MAPPED:
        ids = tl.load(ids_ptr + place, mask=there, other=NO_TOKEN).to(tl.int32)
        there = there & (ids < limit)
    w0, w1, w2, w3 = philox((ids // 4).to(tl.uint32), c1, c2, c3, k0, k1)
    score = gumbel_scores(x, temperature + tl.zeros_like(x), pick_word(w0, w1, w2, w3, ids % 4))
    score = tl.where(there & (x >= floor), score, -float("inf"))
    best = tl.max(score, 1)
    hit = (score == best[:, None]) & (score > -float("inf"))
    return best, tl.min(tl.where(hit, place, NO_TOKEN), 1)


@triton.jit
def best_candidates(
    logits_ptr, ids_ptr, line, bound, first, known, floor, temperature, vocab, limit, stride, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr,
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
        score, place = _column_score(
            logits_ptr, ids_ptr, line, chosen, floor, temperature, vocab, limit, stride, k0, k1, c1, c2, c3, SPLIT,
            TILE, MAPPED,
        )  # fmt: skip
        better = (score > best) | ((score == best) & (place < token))
        best, token = tl.where(better, score, best), tl.where(better, place, token)
        left = left & (first != chosen) & may_hide(bound, best[:, None])
        again = tl.max(tl.max(left.to(tl.int32), 1), 0)
    return best, token


@triton.jit
def may_hide(bound, best):
    """Whether a column bounded by ``bound`` may hold a token as good as exact ``best``.

    The bound is off by at most 255 units in the last place (its low bits are the column's name), which is 3.05e-5 of
    it; by the rounding of the scale, the multiply-add and the exact score, some 1e-6 of it; and by the rough log2.
    """
    reach = bound + tl.abs(bound) * 3.3e-5 + 1e-3
    return (bound > -float("inf")) & (reach >= tl.minimum(best * LOG2E, 2.9e38))
