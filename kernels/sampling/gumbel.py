"""The Triton noise behind ``verify`` and draft sampling, and exact scores made of it.

Uniforms and exponentials are those of :mod:`specgraph.kernels.sampling.sample`, bit for bit, and every exact score
comes from :func:`gumbel_scores`, so that kernels agree with each other. :mod:`specgraph.kernels.sampling.scan` finds
the largest one.
"""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from specgraph.kernels.sampling.constants import (
    STRIDE,
    TL_EIGHTS,
    TL_FIRST_EIGHT,
    TL_GREEDY_BELOW,
    TL_KEY_STEP_0,
    TL_KEY_STEP_1,
    TL_MULTIPLIER_0,
    TL_MULTIPLIER_1,
    TL_PHILOX_ROUNDS,
    TL_STREAM_BITS,
    TL_STRIDE,
)

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

TILE = 1024
WARPS = 4

LARGEST = tl.constexpr(3.4028234663852886e38)
"""What +inf counts as."""
BLOCK_TOKENS = tl.constexpr(8 * STRIDE)
"""Tokens of ``STRIDE`` groups of eight: how far apart those are that share a block."""
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
MINUS_INF_IMAGE = tl.constexpr(-2139095041)
INF_IMAGE = tl.constexpr(2139095040)
"""What :func:`image` gives for infinities."""
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
    last = stream + ((place >> 32) << TL_STREAM_BITS)
    return (
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32), place.to(tl.uint32), line.to(tl.uint32), last.to(tl.uint32),
    )  # fmt: skip


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-7 of uint32 words that broadcast: see ``specgraph.kernels.sampling.sample.philox``.

    Products are 64 bits wide, one instruction each. Whatever is the same for a whole row should come as a scalar: a
    quarter of the first three rounds then is computed once.
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
    return 1.0 / tl.where(temperature < TL_GREEDY_BELOW, 1.0, temperature)


@triton.jit
def exponent_scale(temperature):
    """What logits are multiplied by for ``exp2`` to give a softmax's weights: the same bits in every kernel."""
    return LOG2E / tl.where(temperature < TL_GREEDY_BELOW, 1.0, temperature)


@triton.jit
def load_floor(floors_ptr, line, FLOORED: tl.constexpr):
    """The smallest logit that a row keeps (:mod:`specgraph.kernels.sampling.floors`): -inf if nothing is cut."""
    floor = tl.full((), -float("inf"), tl.float32)
    if FLOORED:
        floor = tl.load(floors_ptr + line)
    return floor


@triton.jit
def load_floors(floors_ptr, line, needed, FLOORED: tl.constexpr):
    """The same of several rows, -inf where not ``needed``."""
    floor = tl.full(line.shape, -float("inf"), tl.float32)
    if FLOORED:
        floor = tl.load(floors_ptr + line, mask=needed, other=-float("inf"))
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
    """``-log2(x)`` of a normal number to within 2**-22 of it, and in (0.5, 2) of 1: one instruction, and a sign that
    joins the next one.
    """
    if INTERPRETED:
        result = -tl.log2(x)
    else:
        result = tl.inline_asm_elementwise(
            "{ .reg .f32 t; lg2.approx.ftz.f32 t, $1; neg.f32 $0, t; }", "=f,f", [x], dtype=tl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return result


@triton.jit
def rough_exponential(u):
    """``-log1p(-u)`` to within ``1.2e-5`` of it: a series for the smallest, the hardware's logarithm for others."""
    small = u * tl.fma(u, tl.fma(u, tl.full(u.shape, 1.0 / 3.0, tl.float32), 0.5), 1.0)
    return tl.where(u < 1.0 / 64.0, small, rough_minus_log2(1.0 - u) * LN2)


@triton.jit
def image(x):
    """An int32 that orders float32 as their values (and -0 before +0)."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def image_value(bits):
    """The float32 of an :func:`image`."""
    bits = bits.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def clean(x):
    """Float32 logits as a softmax can take them: NaN is -inf, +inf the largest number."""
    return tl.where(x == x, tl.where(x > LARGEST, LARGEST, x), -float("inf"))


@triton.jit
def processed_value(x, temperature):
    """``x / temperature`` as ``process_logits`` rounds it, for blocks of one shape; the logit itself if greedy."""
    x = clean(x)
    greedy = temperature < TL_GREEDY_BELOW
    scaled = tl.div_rn(x, tl.where(greedy, 1.0, temperature))
    return tl.where(scaled > LARGEST, LARGEST, scaled)


@triton.jit
def has_smallest(eight_word, ids):
    """Whether tokens have the smallest exponential of their eight themselves."""
    return (eight_word & 7) == ids.to(tl.uint32) % 8


@triton.jit
def exponential(eight_word, word, ids):
    """A token's exponential, float32: the smallest of its eight, and more unless the token has that one itself."""
    smallest = -accurate_log1p(-uniform(eight_word)) * 0.125
    more = -accurate_log1p(-uniform(word))
    return smallest + tl.where(has_smallest(eight_word, ids), 0.0, more)


@triton.jit
def eight_words(eight, k0, k1, c1, c2, c3):
    """The words of the blocks that hold those of ``eight``; word ``eight_lane`` is its own."""
    eight = eight.to(tl.uint32)  # divisions of signed numbers take more instructions
    block = eight // TL_EIGHTS * TL_STRIDE + eight % TL_STRIDE
    return philox(block | TL_FIRST_EIGHT, c1, c2, c3, k0, k1)


@triton.jit
def eight_lane(eight):
    return eight.to(tl.uint32) // TL_STRIDE % 4


@triton.jit
def word_of_eight(eight, k0, k1, c1, c2, c3):
    w0, w1, w2, w3 = eight_words(eight, k0, k1, c1, c2, c3)
    return pick_word(w0, w1, w2, w3, eight_lane(eight))


@triton.jit
def word_of_token(four, lane, k0, k1, c1, c2, c3):
    """The own words of tokens ``lane`` of ``four``."""
    w0, w1, w2, w3 = philox(four.to(tl.uint32), c1, c2, c3, k0, k1)
    return pick_word(w0, w1, w2, w3, lane)


@triton.jit
def token_noise(four, lane, k0, k1, c1, c2, c3):
    """The exponentials of tokens ``lane`` of ``four``: two blocks of noise for each four, ``[N, 1]`` for whole ones."""
    word = word_of_token(four, lane, k0, k1, c1, c2, c3)
    eight_word = word_of_eight(four.to(tl.uint32) // 2, k0, k1, c1, c2, c3)
    return exponential(eight_word, word, four * 4 + lane)


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
def _larger(a, b):
    """The larger of two, the positive NaN where one is NaN; two of 16 bits in one instruction."""
    if a.dtype == tl.bfloat16:
        result = tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    elif a.dtype == tl.float16:
        result = tl.inline_asm_elementwise(
            "max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        result = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    return result


@triton.jit
def most_of_eight(x):
    """The largest of every eight neighbours, ``[N]`` to ``[N // 8]`` in float32; where one is NaN, the positive NaN."""
    if INTERPRETED:
        x = widen(x)
        x = tl.where(x == x, x, float("nan"))  # of either sign in the interpreter
    # The last step is for the two of a register, and the first ones for registers.
    halves = tl.split(tl.permute(tl.reshape(x, (x.shape[0] // 8, 2, 2, 2)), (0, 3, 2, 1)))
    pairs = tl.split(_larger(halves[0], halves[1]))
    last = tl.split(widen(_larger(pairs[0], pairs[1])))
    return tl.maximum(last[0], last[1], propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def load_logits(row_ptr, place, vocab):
    """Float32, -inf behind the last."""
    return widen(tl.load(row_ptr + place, mask=place < vocab, other=-float("inf")))


@triton.jit
def load_tile(row_ptr, first, vocab, TILE: tl.constexpr):
    """Entries ``[TILE // 4, 4]`` from ``first`` on, float32, -inf behind the last."""
    return load_logits(row_ptr, first + tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :], vocab)


@triton.jit
def kept_logits(x, ids, limit, floor, MAPPED: tl.constexpr, FLOORED: tl.constexpr):
    """``x`` with -inf where the target has no such id, and below the row's floor (see ``floors``)."""
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
