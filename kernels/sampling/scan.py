"""The search for the token that each row of logits draws, in one pass over the logits.

For a row of logits ``[V]`` (float32, bfloat16 or float16) it is the first argmax of the exact scores
``logit / temperature - log(e)``, where ``e`` is the token's exponential. Without noise (at temperature 0, or without
seeds) it is the first argmax of the values.

An exact score takes accurate logarithms and a quarter of a block of Philox per token, which costs several times as much
as reading the logits. So the scan computes upper bounds first. Eight neighbouring tokens form an *octet* and share one
word of noise, which gives the smallest of their exponentials (:mod:`specgraph.kernels.sampling.sample`). With ``u`` the
uniform of that word, every exponential ``e`` of the octet satisfies::

    e >= -log1p(-u) / 8 >= u / 8,  so  score / ln(2) <= largest logit / temperature / ln(2) - log2(u) + 3

The maximum costs half an instruction per token, and the rest of the bound costs little per octet. The bounds rule out
most octets, for whose tokens no further noise is drawn.

The vocabulary is divided into splits, one per program and row. A program walks through its split in tiles. A warp reads
a *group*: the same 256 neighbouring tokens of every tile. A thread reads one octet of every tile, always at the same
place in the tile; these octets are a *column*. It keeps the three largest bounds of its column. The warp then takes the
four octets with the largest bounds of its group and computes the scores of their 32 tokens, one token per thread, with
an error that :mod:`specgraph.kernels.sampling.merge` bounds.

A group reports three int32: the sort key of the best of these scores (the *candidate*), its token, and the sort key of
the *runner-up*, which is the largest score or bound of all other tokens of the group.
:func:`~specgraph.kernels.sampling.merge.row_tokens` merges the groups of a row. It draws the best candidate, or scans
again with exact scores where another score comes near it.

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
    INF_KEY,
    INTERPRETED,
    LARGEST,
    MINUS_INF_KEY,
    NO_TOKEN,
    exponent_scale,
    has_smallest,
    kept_logits,
    load_logits,
    noise_key,
    octet_lane,
    octet_max,
    octet_words,
    pick_word,
    processed_value,
    rough_exponential,
    rough_minus_log2,
    sort_key,
    sort_key_value,
    split_size,
    uniform,
    widen,
    word_of_octet,
    word_of_token,
)

GROUP = tl.constexpr(256)
"""The tokens of a tile that one warp reads. With those at the same place in all other tiles they form a group."""
_MANY_PROGRAMS = 1024
"""About eight programs on each multiprocessor of a large GPU, which are enough to hide each other's latency."""
_BOUND_LIMIT = tl.constexpr(0x7F61B1E6)
"""The sort key of 3e38. A group with a larger bound is scanned again."""
_NOTHING = tl.constexpr(-0x80000000)
LOWEST = tl.constexpr(MINUS_INF_KEY.value + 1)
"""The sort key of the smallest number."""
NAN = tl.constexpr(0x7FFFFFFF)
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
        entry = begin + i * TILE + tl.arange(0, TILE)
        x = tl.load(row_ptr + entry, mask=entry < vocab, other=-float("inf"))
        tiles = tiles + (x,)  # type: ignore[assignment]  # noqa: RUF005  (Triton unpacks no tuple)
    return tiles


@triton.jit
def load_ids(ids_ptr, entry, vocab):
    return tl.load(ids_ptr + entry, mask=entry < vocab, other=NO_TOKEN).to(tl.int32)


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
def best_of_rows(keys, token):
    """The largest of every row ``[R, N]`` of sort keys, and the first token that has it."""
    best = tl.max(keys, 1)
    return best, tl.min(tl.where(keys == best[:, None], token, NO_TOKEN), 1)


@triton.jit
def _column_maxima(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):
    """The largest value of every column (NaN if it has one), and the first tile whose octet has it: ``[TILE // 8]``."""
    COLUMNS: tl.constexpr = TILE // 8
    tiles = _read_split(row_ptr, begin, vocab, SPLIT, TILE)
    top = tl.full((COLUMNS,), -float("inf"), tl.float32)
    tile_index = tl.zeros((COLUMNS,), tl.int32)
    for i in tl.static_range(SPLIT // TILE):
        x = tiles[i]
        if MAPPED:
            ids = load_ids(ids_ptr, begin + i * TILE + tl.arange(0, TILE), vocab)
            x = kept_logits(widen(x), ids, limit, 0.0, True, False)
        # Division keeps the order, so it is enough to divide the largest value of each octet.
        value = _plain_value(octet_max(x), temperature, DIVIDED)
        tile_index = tl.where(value > top, i, tile_index)
        top = tl.maximum(top, value, propagate_nan=tl.PropagateNan.ALL)
    return top, tile_index


@triton.jit
def _column_bounds(
    row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, LOW: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):
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
        first_entry = (begin + i * TILE).to(tl.uint32)
        if MAPPED:
            ids = load_ids(ids_ptr, begin + i * TILE + tl.arange(0, TILE), vocab)
            octet_word = word_of_octet(ids.to(tl.uint32) // 8, k0, k1, c1, c2, c3)
            x = kept_logits(widen(tiles[i]), ids, limit, floor, True, FLOORED)
            bound = octet_max(tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(octet_word))))
        else:
            if i % 4 == 0 or TILE < BLOCK_TOKENS:  # four whole tiles share a block
                w0, w1, w2, w3 = octet_words(first_entry // 8 + tl.arange(0, COLUMNS), k0, k1, c1, c2, c3)
            octet_word = pick_word(w0, w1, w2, w3, octet_lane(first_entry // 8))
            x = kept_logits(octet_max(tiles[i]), 0, limit, floor, False, FLOORED)
            bound = tl.fma(x, tl.zeros_like(x) + scale, rough_minus_log2(uniform(octet_word)))
            words = words + (octet_word,)  # type: ignore[assignment]  # noqa: RUF005
        key = (sort_key(bound) & ~LOW) | (i * (GROUP // 8) + column)
        third = tl.maximum(third, tl.minimum(second, key))
        second = tl.maximum(second, tl.minimum(first, key))
        first = tl.maximum(first, key)
    return first, second, third, words


@triton.jit
def _scan_values(
    row_ptr, ids_ptr, begin, vocab, limit, temperature,
    SPLIT: tl.constexpr, TILE: tl.constexpr, DIVIDED: tl.constexpr, MAPPED: tl.constexpr,
):
    """The reports of groups without noise. No floor is needed, since the largest value is always kept."""
    top, tile_index = _column_maxima(row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, DIVIDED, MAPPED)
    nan = tl.max(_groups(tl.where(top == top, MINUS_INF_KEY, NAN)), 1)
    # Sort keys distinguish -0 from 0, which are equal. Adding 0 makes 0 of both.
    best, first = best_of_rows(
        _groups(sort_key(top + 0.0)), _groups(begin + tile_index * TILE + tl.arange(0, TILE // 8) * 8)
    )
    entry = first[:, None] + tl.arange(0, GROUP // 8)[None, :] % 8
    x = load_logits(row_ptr, entry, vocab)
    if MAPPED:
        x = kept_logits(x, load_ids(ids_ptr, entry, vocab), limit, 0.0, True, False)
    equal = sort_key(_plain_value(x, temperature, DIVIDED) + 0.0) == best[:, None]
    return tl.where(nan == NAN, MINUS_INF_KEY, best), tl.min(tl.where(equal, entry, NO_TOKEN), 1), nan


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
def _chosen_words(words, tile_index, column):
    """From the words ``[COLUMNS]`` of every tile, those of the octets at ``tile_index`` and ``column`` of a group."""
    word = tl.gather(_groups(words[0]), column, 1)
    for i in tl.static_range(1, len(words)):
        word = tl.where(tile_index == i, tl.gather(_groups(words[i]), column, 1), word)
    return word


@triton.jit
def _approximate_noise(octet_word, ids, k0, k1, c1, c2, c3):
    """The exponentials of tokens, with a relative error of 1.2e-5."""
    more = rough_exponential(uniform(word_of_token(ids // 4, ids % 4, k0, k1, c1, c2, c3)))
    return rough_exponential(uniform(octet_word)) * 0.125 + tl.where(has_smallest(octet_word, ids), 0.0, more)


@triton.jit
def _scan_scores(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):
    """The reports of groups with noise."""
    LOW: tl.constexpr = SPLIT // 8 * GROUP // TILE - 1
    scale = exponent_scale(temperature)
    first, second, third, words = _column_bounds(
        row_ptr, ids_ptr, begin, vocab, limit, floor, scale, k0, k1, c1, c2, c3, SPLIT, TILE, LOW, MAPPED, FLOORED
    )
    chosen, largest, others_bound = _four_largest(_groups(first), _groups(second), _groups(third), LOW)
    tile_index, column = (chosen & LOW) // (GROUP // 8), (chosen & LOW) % (GROUP // 8)
    group, lane = tl.arange(0, TILE // GROUP)[:, None], tl.arange(0, GROUP // 8)[None, :]
    entry = begin + tile_index * TILE + group * GROUP + column * 8 + lane % 8
    ids = entry
    if MAPPED:
        ids = load_ids(ids_ptr, entry, vocab)
    x = kept_logits(load_logits(row_ptr, entry, vocab), ids, limit, floor, MAPPED, FLOORED)
    ids = ids.to(tl.uint32)
    octet_word = word_of_octet(ids // 8, k0, k1, c1, c2, c3) if MAPPED else _chosen_words(words, tile_index, column)
    score = tl.fma(
        x, tl.zeros_like(x) + scale, rough_minus_log2(_approximate_noise(octet_word, ids, k0, k1, c1, c2, c3))
    )
    known = largest < _BOUND_LIMIT
    keys = tl.where(known[:, None], sort_key(score), MINUS_INF_KEY)
    candidate, token = best_of_rows(keys, entry)
    runner_up = tl.max(tl.where((keys == candidate[:, None]) & (entry == token[:, None]), MINUS_INF_KEY, keys), 1)
    runner_up = tl.maximum(runner_up, sort_key(sort_key_value(tl.maximum(others_bound, LOWEST)) + 3.0))
    return candidate, token, tl.where(known, runner_up, tl.where(largest <= INF_KEY | LOW, INF_KEY, NAN))


@triton.jit
def _store_in_place(ptr, value, mask):
    """Store int32 values from the threads that have them.

    ``tl.store`` would first collect neighbours in shared memory.
    """
    if INTERPRETED:
        tl.store(ptr, value, mask=mask)
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [ptr.to(tl.int64), value, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def scan_split(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, seed, key, noise_row, reports_ptr, split_index,
    total_splits,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr,
):
    """Write the reports of the groups of split ``split_index``, int32 ``[3, splits of all rows, groups]``.

    They are the sort key of the candidate's score, the candidate's token, and the sort key of the runner-up or of a
    bound on it. ``total_splits`` is the number of splits of all rows.

    The noise is that of ``seed``, ``key`` (int64) and ``noise_row``. If ``MAPPED``, ``ids_ptr``
    gives the target id of every entry, and entries whose id is not below ``limit`` are never drawn.
    """
    group = split_index * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    if temperature < TL_GREEDY_BELOW:
        candidate, token, runner_up = _scan_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, False, MAPPED
        )
    elif NOISE:
        k0, k1, c1, c2, c3 = noise_key(seed, STREAM, key, noise_row)
        candidate, token, runner_up = _scan_scores(
            row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, k0, k1, c1, c2, c3, SPLIT, TILE, MAPPED, FLOORED
        )
    else:
        candidate, token, runner_up = _scan_values(
            row_ptr, ids_ptr, begin, vocab, limit, temperature, SPLIT, TILE, True, MAPPED
        )
    kind = tl.arange(0, GROUP // 8)[None, :]
    report = tl.where(kind == 0, candidate[:, None], tl.where(kind == 1, token[:, None], runner_up[:, None]))
    _store_in_place(reports_ptr + kind * (total_splits * (TILE // GROUP)) + group[:, None], report, kind < 3)
