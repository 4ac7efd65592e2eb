"""Triton functions for noise and for exact scores, which the kernels of ``verify`` and of draft sampling share.

The exact score of a token is ``logit / temperature - log(e)``, where ``e`` is the token's exponential and each step is
rounded to float32. The token with the largest score is drawn; :mod:`specgraph.kernels.sampling.scan` finds it.
Functions take logits of float32, bfloat16 or float16, in blocks whose shape their docstrings give. There are no kernels
here, so the division into programs is that of the callers.

Uniforms and exponentials have the bits of :mod:`specgraph.kernels.sampling.sample`, which defines them and names the
sources. Every exact score comes from :func:`gumbel_scores`, so that all kernels agree. A score is a function of the
logit, the temperature, the seed, the position and the token id, and so does not depend on other rows.

A *sort key* (:func:`sort_key`) is an int32 that is ordered like the float32 it is made of.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from specgraph.kernels.sampling.constants import (
    TL_GREEDY_BELOW,
    TL_KEY_STEP_0,
    TL_KEY_STEP_1,
    TL_MULTIPLIER_0,
    TL_MULTIPLIER_1,
    TL_PHILOX_ROUNDS,
    TL_STREAM_BITS,
)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

TILE = 1024
WARPS = 4

LARGEST = tl.constexpr(3.4028234663852886e38)
"""The value that replaces +inf."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MINUS_INF_KEY = tl.constexpr(-2139095041)
INF_KEY = tl.constexpr(2139095040)
"""The sort keys (:func:`sort_key`) of the infinities."""
_ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0."""
_ONE_LESS = tl.constexpr(1.0 - 2.0**-24)


def split_size(vocab: int) -> int:
    """The number of entries of a split.

    Vocabularies up to half a million have at most 128 splits, and vocabularies of 8192 or more have at least 8.
    """
    return 1024 if vocab <= 65536 else 4096


def aligned(logits: Tensor) -> Tensor:
    """``logits``, contiguous and aligned to 16 bytes, so that layouts, and hence sums, do not depend on the address."""
    logits = logits.contiguous()
    return logits if logits.data_ptr() % 16 == 0 else logits.clone()


@triton.jit
def noise_key(seed, stream, key, row):
    """The Philox key (2 words) and the last three words of the counter of one row, uint32.

    The first word is the block.
    """
    last = stream + ((key >> 32) << TL_STREAM_BITS)
    return (seed.to(tl.uint32), (seed >> 32).to(tl.uint32), key.to(tl.uint32), row.to(tl.uint32), last.to(tl.uint32))


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-7 of uint32 words that broadcast; see ``specgraph.kernels.sampling.sample.philox``.

    Products are 64 bits wide and take one instruction each. Arguments that are the same for a whole row should be
    scalars, because a quarter of the first three rounds is then computed only once.
    """
    for _ in tl.static_range(TL_PHILOX_ROUNDS):
        even = c0.to(tl.uint64) * TL_MULTIPLIER_0
        odd = c2.to(tl.uint64) * TL_MULTIPLIER_1
        c0 = (odd >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (even >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = odd.to(tl.uint32)
        c3 = even.to(tl.uint32)
        k0 = k0 + TL_KEY_STEP_0
        k1 = k1 + TL_KEY_STEP_1
    return c0, c1, c2, c3


@triton.jit
def pick_word(c0, c1, c2, c3, lane):
    """Word ``lane`` of four. If the compiler knows the lane, this costs nothing."""
    return tl.where(lane == 0, c0, tl.where(lane == 1, c1, tl.where(lane == 2, c2, c3)))


@triton.jit
def uniform(word):
    """``(word // 2**9 + 0.5) * 2**-23`` in (0, 1), float32.

    The upper 23 bits become the fraction of a number in [1, 2), from which ``1 - 2**-24`` is subtracted. This is exact.
    A conversion from integer to float would run at half the rate.
    """
    return ((word >> 9) + _ONE).to(tl.float32, bitcast=True) - _ONE_LESS


@triton.jit
def inverse_temperature(temperature):
    """The factor on the logits in a softmax. It is 1 for a greedy row, whose temperature may be 0."""
    return 1.0 / tl.where(temperature < TL_GREEDY_BELOW, 1.0, temperature)


@triton.jit
def exponent_scale(temperature):
    """The factor with which ``exp2`` of the logits gives the weights of a softmax.

    It has the same bits in every kernel.
    """
    return LOG2E / tl.where(temperature < TL_GREEDY_BELOW, 1.0, temperature)


@triton.jit
def load_floor(floors_ptr, row, FLOORED: tl.constexpr):
    """The smallest logit that a row keeps (:mod:`specgraph.kernels.sampling.floors`), or -inf if all are kept."""
    floor = tl.full((), -float("inf"), tl.float32)
    if FLOORED:
        floor = tl.load(floors_ptr + row)
    return floor


@triton.jit
def load_floors(floors_ptr, row, needed, FLOORED: tl.constexpr):
    """:func:`load_floor` of several rows; -inf where not ``needed``."""
    floor = tl.full(row.shape, -float("inf"), tl.float32)
    if FLOORED:
        floor = tl.load(floors_ptr + row, mask=needed, other=-float("inf"))
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
    """``-log2(x)`` of a normal number, with a relative error of 2**-22 (in (0.5, 2): an absolute error of 2**-22).

    It takes one instruction. The sign becomes part of the next one.
    """
    if INTERPRETED:
        result = -tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.ftz.f32 t, $1; neg.f32 $0, t; }",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def rough_exponential(u):
    """``-log1p(-u)`` with a relative error of ``1.5e-5``.

    Small ``u`` take a series, and others the hardware's logarithm.
    """
    small = u * tl.fma(u, tl.fma(u, tl.full(u.shape, 1.0 / 3.0, tl.float32), 0.5), 1.0)
    return tl.where(u < 1.0 / 64.0, small, rough_minus_log2(1.0 - u) * LN2)


@triton.jit
def sort_key(x):
    """The sort key of a float32: an int32 with the order of the values (and -0 before +0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def sort_key_value(key):
    """The float32 whose sort key (:func:`sort_key`) is ``key``."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def clean(x):
    """Float32 logits that a softmax can take: NaN becomes -inf, and +inf the largest number."""
    return tl.where(x == x, tl.where(x > LARGEST, LARGEST, x), -float("inf"))


@triton.jit
def processed_value(x, temperature):
    """``x / temperature`` as ``process_logits`` rounds it, for blocks of one shape. A greedy row keeps its logits."""
    x = clean(x)
    greedy = temperature < TL_GREEDY_BELOW
    scaled = tl.div_rn(x, tl.where(greedy, 1.0, temperature))
    return tl.where(scaled > LARGEST, LARGEST, scaled)


@triton.jit
def token_words(block, lane, k0, k1, c1, c2, c3):
    """The words of tokens: word ``lane`` of every ``block``, which holds those of four neighbouring token ids."""
    w0, w1, w2, w3 = philox(block.to(tl.uint32), c1, c2, c3, k0, k1)
    return pick_word(w0, w1, w2, w3, lane)


@triton.jit
def token_uniforms(block, lane, k0, k1, c1, c2, c3):
    """The uniforms of tokens in (0, 1), ``min(word * 2**-32 + 2**-33, 1 - 2**-24)``, with the block's shape by lane's.

    The multiplication is exact, so a fused multiply-add gives the bits of a multiplication and an addition.
    """
    word = token_words(block, lane, k0, k1, c1, c2, c3).to(tl.float32)
    return tl.minimum(tl.fma(word, tl.full(word.shape, 2.0**-32, tl.float32), 2.0**-33), _ONE_LESS)


@triton.jit
def token_exponentials(block, lane, k0, k1, c1, c2, c3):
    """The exponentials ``-log1p(-u)`` of the tokens ``lane`` of every ``block`` of four tokens."""
    return -accurate_log1p(-token_uniforms(block, lane, k0, k1, c1, c2, c3))


@triton.jit
def gumbel_scores(x, temperature, noise):
    """Exact scores ``x / temperature - log(noise)``, each step rounded to float32, for blocks of one shape."""
    return processed_value(x, temperature) - accurate_log(noise)


@triton.jit
def widen(x):
    """Convert to float32.

    For bfloat16 this takes one instruction per value; the compiler takes two for every second.
    """
    if (x.dtype == tl.bfloat16) and (not INTERPRETED):
        result = tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2
        )
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def load_logits(row_ptr, entry, vocab):
    """Load logits as float32, with -inf beyond the vocabulary."""
    return widen(tl.load(row_ptr + entry, mask=entry < vocab, other=-float("inf")))


@triton.jit
def load_ids(ids_ptr, entry, vocab):
    """Load the target ids of entries, with NO_TOKEN beyond the vocabulary."""
    return tl.load(ids_ptr + entry, mask=entry < vocab, other=NO_TOKEN).to(tl.int32)


@triton.jit
def load_tile(row_ptr, first, vocab, TILE: tl.constexpr):
    """Load the entries from ``first`` on as float32 ``[TILE // 4, 4]``, with -inf beyond the vocabulary."""
    return load_logits(row_ptr, first + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :], vocab)


@triton.jit
def kept_logits(x, ids, limit, floor, MAPPED: tl.constexpr, FLOORED: tl.constexpr):
    """``x`` with -inf where the target does not have the id, and where the logit is below the row's floor."""
    if MAPPED:
        x = tl.where(ids < limit, x, -float("inf"))
    if FLOORED:
        x = tl.where(x < floor, -float("inf"), x)  # NaN stays
    return x


@triton.jit
def first_best(score, entry):
    """The largest score of a block and the first place that has it, or NO_TOKEN if all scores are -inf."""
    best = tl.max(tl.max(score, 1), 0)
    at = tl.where((score == best) & (score > -float("inf")), entry, NO_TOKEN)
    return best, tl.min(tl.min(at, 1), 0)
