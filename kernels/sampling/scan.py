"""The token that each row of logits draws: a scan of the splits of a row, and the merge of what they report.

For a row of logits ``[V]`` (float32, bfloat16 or float16) it is the first argmax of the scores ``logit / temperature -
log(e)``, where ``e`` is the token's exponential (Gumbel-max). Without noise (at temperature 0, or without seeds) it is
the first argmax of the values.

The vocabulary is divided into splits, one per program and row, because one program would read a row too slowly.
:func:`scan_split` reads a split at once and reports three int32: its largest score, the first token that has it, and
whether a logit is NaN. :func:`row_tokens` takes the best split of each row. Every reported score is exact, so the token
does not depend on the size of a split, nor on other rows.

An exact score takes accurate logarithms and a division, which are most of its instructions. So a program computes the
scores of its tokens with the hardware's logarithm first. Then it computes the exact scores of the tokens
whose approximate score comes within the error (:func:`_least_near`) of the largest. This is nearly always one token.

There are no kernels here. Sources: Gumbel-max (Maddison et al. 2014, arXiv 1411.0030). Variants that were measured are
in ``docs/experiments.md``.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from specgraph.kernels import gpus
from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.gumbel import (
    INF_KEY,
    LARGEST,
    LN2,
    NO_TOKEN,
    clean,
    first_best,
    gumbel_scores,
    inverse_temperature,
    kept_logits,
    load_ids,
    load_logits,
    noise_key,
    processed_value,
    rough_exponential,
    rough_minus_log2,
    split_size,
    token_exponentials,
    token_uniforms,
)

REPORT_COLUMNS = 3
_SCORE, _TOKEN, _HAS_NAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The columns of reports, int32 ``[REPORT_COLUMNS, splits of all rows]``. A score is stored as its bits."""


def scan_size(vocab: int, rows: int) -> int:
    """The number of entries of a split in a scan: :func:`split_size`, or more if that would give many small programs.

    The token that a row draws does not depend on it. The bits of sums do, so kernels that sum use :func:`split_size`.
    """
    size = split_size(vocab)
    return 4096 if rows * triton.cdiv(vocab, size) > gpus.HOPPER.scan_programs else size


@triton.jit
def _least_near(largest):
    """The smallest approximate score whose exact score may be as large as that of the approximate score ``largest``.

    The difference of two approximate scores has an error of at most 7e-5 plus 1e-6 of a score. Its sources are the
    exponentials (a relative error of 1.5e-5), the hardware's logarithm (a relative error of 2**-22, absolute in
    (0.5, 2)), the reciprocal of the temperature, and the roundings of the exact score. A logit is at most 23 above its
    score.
    """
    score = tl.minimum(tl.maximum(largest, -LARGEST), LARGEST)
    return score - (tl.abs(score) * 4e-6 + 2e-4)


@triton.jit
def _exact_best(row_ptr, ids_ptr, near, vocab, temperature, k0, k1, c1, c2, c3, MAPPED: tl.constexpr):
    """The largest exact score among the entries ``near`` (NO_TOKEN elsewhere), and the first entry that has it."""
    best, token = tl.full((1,), -float("inf"), tl.float32), tl.full((1,), NO_TOKEN, tl.int32)
    chosen = tl.min(tl.min(near, 1), 0)
    while chosen < NO_TOKEN:
        entry = chosen + tl.arange(0, 1)  # [1]
        ids = entry
        if MAPPED:
            ids = load_ids(ids_ptr, entry, vocab)
        e = token_exponentials(ids // 4, ids % 4, k0, k1, c1, c2, c3)
        x = tl.load(row_ptr + entry).to(tl.float32)
        score = gumbel_scores(x, tl.zeros_like(x) + temperature, e)
        # Entries come in rising order, so an equal score belongs to a later entry.
        token = tl.where(score > best, entry, token)
        best = tl.maximum(best, score)
        near = tl.where(near == chosen, NO_TOKEN, near)
        chosen = tl.min(tl.min(near, 1), 0)
    return tl.max(best, 0), tl.min(token, 0)


@triton.jit
def scan_split(
    row_ptr, ids_ptr, begin, vocab, limit, floor, temperature, noise, reports_ptr, split_index, total_splits,
    STREAM: tl.constexpr, SPLIT: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr,
):
    """Write the report of split ``split_index`` of all ``total_splits``, whose first entry is ``begin``.

    ``noise`` is a seed, a key and a row, all int64. If ``MAPPED``, ``ids_ptr`` gives the target id of every entry, and
    entries whose id is not below ``limit`` are never drawn.
    """
    # ---- Read the split once. A Philox block serves the four tokens of a row of the tile. ----
    block = begin // 4 + tl.arange(0, SPLIT // 4)[:, None]  # [SPLIT // 4, 1]
    lane = tl.arange(0, 4)[None, :]  # [1, 4]
    entry = block * 4 + lane  # [SPLIT // 4, 4]
    x = load_logits(row_ptr, entry, vocab)
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # the bits without the sign; those of a NaN are the largest
    has_nan = (tl.max(tl.max(magnitude, 1), 0) > INF_KEY).to(tl.int32)
    if MAPPED:
        ids = load_ids(ids_ptr, entry, vocab)
        block, lane = ids // 4, ids % 4
        x = kept_logits(x, ids, limit, floor, True, FLOORED)
    else:
        x = kept_logits(x, entry, limit, floor, False, FLOORED)

    # ---- argmax x / temperature - log(e) ----
    if temperature < TL_GREEDY_BELOW:
        score, token = first_best(clean(x), entry)
    elif NOISE:
        seed, key, noise_row = noise
        k0, k1, c1, c2, c3 = noise_key(seed, STREAM, key, noise_row)
        e = rough_exponential(token_uniforms(block, lane, k0, k1, c1, c2, c3))
        rough = tl.fma(x, tl.zeros_like(x) + inverse_temperature(temperature), rough_minus_log2(e) * LN2)
        # A NaN is not near, since no comparison with it holds, and the maximum passes it over.
        is_near = (rough >= _least_near(tl.max(tl.max(rough, 1), 0))) & (x > -float("inf"))
        near = tl.where(is_near, entry, NO_TOKEN)
        score, token = _exact_best(row_ptr, ids_ptr, near, vocab, temperature, k0, k1, c1, c2, c3, MAPPED)
    else:
        score, token = first_best(processed_value(x, tl.zeros_like(x) + temperature), entry)

    reports_ptr += split_index
    tl.store(reports_ptr + _SCORE * total_splits, score.to(tl.int32, bitcast=True))
    tl.store(reports_ptr + _TOKEN * total_splits, token)
    tl.store(reports_ptr + _HAS_NAN * total_splits, has_nan)


@triton.jit
def row_tokens(reports_ptr, rows, needed, splits, total_splits, SPLITS: tl.constexpr):
    """The entry that every row draws, int32 ``[R]``, and whether it is needed and has a NaN, int32 ``[R]`` (0 or 1).

    An entry is ``NO_TOKEN`` if the row has nothing but -inf. ``rows`` ``[R]`` are the indices of rows of logits.
    """
    split = tl.arange(0, SPLITS)[None, :]  # [1, SPLITS]
    inside = needed[:, None] & (split < splits)  # [R, SPLITS]
    reports_ptr += rows.to(tl.int64)[:, None] * splits + split
    score = tl.load(reports_ptr + _SCORE * total_splits, mask=inside, other=0).to(tl.float32, bitcast=True)
    score = tl.where(inside, score, -float("inf"))
    token = tl.load(reports_ptr + _TOKEN * total_splits, mask=inside, other=NO_TOKEN)
    has_nan = tl.load(reports_ptr + _HAS_NAN * total_splits, mask=inside, other=0)
    best = tl.max(score, 1)[:, None]
    return tl.min(tl.where(score == best, token, NO_TOKEN), 1), tl.max(has_nan, 1)
