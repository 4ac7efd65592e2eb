"""The Triton form of ``specgraph::verify`` for temperature-only sampling under strict, typical and synthetic.

Two launches. ``_scan_rows`` has a program per row and split of the vocabulary (:mod:`specgraph.kernels.gumbel`) and
leaves the split's candidate, the bound of what else it may hold and, on request, sums of exponentials. ``_finish`` has
a program per sequence: it merges the splits, accepts, and lays out tokens and log-probabilities as the reference does.

Sums over one split have a fixed order. Across splits they are taken in 64-bit fixed point, which has no order.
Rows that cannot matter (padding, forced, inactive) are not read.
"""

# Triton functions carry no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.gumbel import (
    GREEDY,
    LOG2E,
    NO_TOKEN,
    TILE,
    WARPS,
    aligned,
    candidate_scores,
    clean,
    load_tile,
    may_hide,
    noise_key,
    philox,
    rescan,
    scaled_uniform,
    scan_bounds,
    scan_values,
    split_size,
)
from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.sample import STREAM_ACCEPT, STREAM_TARGET

STRICT, TYPICAL, SYNTHETIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
COVERED_RULES = {"strict": 0, "typical": 1, "synthetic": 2}

_TARGET = tl.constexpr(STREAM_TARGET)
_ACCEPT = tl.constexpr(STREAM_ACCEPT)
_UNIT = tl.constexpr(2.0**-32)
_FIXED = tl.constexpr(2.0**40)
"""Fixed point of sums over splits: a row's sum of exponentials is below 2**22, so 64 bits hold it."""


@triton.jit
def _sums(row_ptr, begin, vocab, largest, scale, SPLIT: tl.constexpr, TILE: tl.constexpr):
    """Over one split: the sum of ``e = exp2((x - largest) * scale)`` and that of ``e * log2(e)``."""
    total = tl.zeros((TILE // 4, 4), tl.float32)
    moment = tl.zeros((TILE // 4, 4), tl.float32)
    for i in tl.static_range(SPLIT // TILE):
        away = (clean(load_tile(row_ptr, begin + i * TILE, vocab, TILE)) - largest) * scale
        part = tl.exp2(away)
        total += part
        moment += part * tl.where(part > 0, away, 0.0)
    return tl.sum(tl.sum(total, 1), 0), tl.sum(tl.sum(moment, 1), 0)


@triton.jit
def _largest(row_ptr, begin, vocab, SPLIT: tl.constexpr, TILE: tl.constexpr):
    top = tl.full((TILE // 4, 4), -float("inf"), tl.float32)
    for i in tl.static_range(SPLIT // TILE):
        top = tl.maximum(top, clean(load_tile(row_ptr, begin + i * TILE, vocab, TILE)))
    return tl.max(tl.max(top, 1), 0)


@triton.jit(do_not_specialize=["count", "width"])
def _scan_rows(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, num_rows_ptr, num_forced_ptr,
    best_ptr, place_ptr, second_ptr, stats_ptr, count, width, vocab, splits,
    SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One split of one row. ``stats`` ``[4, B * R, splits]``: largest logit, sum, then sum and moment as scaled."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    program = tl.program_id(0)
    line, split = program // splits, program % splits
    batch = line // count
    num_rows, num_forced = tl.load(num_rows_ptr + batch), tl.load(num_forced_ptr + batch)
    row = tl.minimum(num_forced, width - count) + line % count
    if (row < num_rows) & (num_forced < num_rows) & (row >= num_forced):
        temperature = tl.load(temperature_ptr + batch).to(tl.float32)
        row_ptr = logits_ptr + line.to(tl.int64) * vocab
        begin = split * SPLIT
        at = line * splits + split
        if NOISE:
            if temperature < GREEDY:
                best, place = scan_values(row_ptr, row_ptr, begin, vocab, vocab, temperature, SPLIT, TILE, False)
                second = tl.full((), -float("inf"), tl.float32)
            else:
                place64 = tl.load(positions_ptr + batch * width + row)
                k0, k1, c1, c2, c3 = noise_key(tl.load(seeds_ptr + batch), _TARGET, place64, place64 * 0)
                best, place, second = scan_bounds(
                    row_ptr, row_ptr, begin, vocab, vocab, temperature, k0, k1, c1, c2, c3, SPLIT, TILE, False
                )
            tl.store(second_ptr + at, second)
        else:
            best, place = scan_values(row_ptr, row_ptr, begin, vocab, vocab, temperature, SPLIT, TILE, False)
        tl.store(best_ptr + at, best)
        tl.store(place_ptr + at, place)
        if RAW or SCALED:
            area = tl.num_programs(0)
            largest = _largest(row_ptr, begin, vocab, SPLIT, TILE)
            tl.store(stats_ptr + at, largest)
            largest = tl.where(largest > -float("inf"), largest, 0.0)
            if RAW:
                total, _ = _sums(row_ptr, begin, vocab, largest, LOG2E, SPLIT, TILE)
                tl.store(stats_ptr + area + at, total)
            if SCALED:
                scale = LOG2E / tl.where(temperature < GREEDY, 1.0, temperature)
                total, moment = _sums(row_ptr, begin, vocab, largest, scale, SPLIT, TILE)
                tl.store(stats_ptr + 2 * area + at, total)
                tl.store(stats_ptr + 3 * area + at, moment)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _fixed_sum(values):
    """Sum over the splits of a row, the same in any order."""
    return tl.sum((values * _FIXED).to(tl.int64), 1).to(tl.float32) * (1.0 / _FIXED)


@triton.jit
def _merge_sums(stats_ptr, at, known, area, index: tl.constexpr, scale):
    """Largest logit, sum of exponentials ``exp2((x - largest) * scale)`` and their ``e * log2(e)`` of every row."""
    part = tl.load(stats_ptr + at, mask=known, other=-float("inf"))
    largest = tl.max(part, 1)
    pivot = tl.where(largest > -float("inf"), largest, 0.0)
    away = (part - pivot[:, None]) * scale
    factor = tl.exp2(away)
    total = tl.load(stats_ptr + index * area + at, mask=known, other=0.0) * factor
    moment = total * 0.0
    if index == 2:
        moment = tl.load(stats_ptr + 3 * area + at, mask=known, other=0.0) * factor
        moment += total * tl.where(total > 0, away, 0.0)
    return largest, _fixed_sum(total), _fixed_sum(moment)


@triton.jit
def _row_tokens(
    logits_ptr, temperature, seeds_ptr, positions_ptr, batch, rows, row, needed, best_ptr, place_ptr, second_ptr,
    count, width, vocab, splits, SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    NOISE: tl.constexpr,
):  # fmt: skip
    """The token every row draws: int32 ``[ROWS]``, and 0 where nothing but -inf is left."""
    ks = tl.arange(0, SPLITS)
    line = batch * count + rows
    at = line[:, None] * splits + ks[None, :]
    inside = needed[:, None] & (ks[None, :] < splits)
    bound = tl.load(best_ptr + at, mask=inside, other=-float("inf"))
    place = tl.load(place_ptr + at, mask=inside, other=0)
    known = inside & (bound > -float("inf"))
    score = bound
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= GREEDY:
            seed = tl.load(seeds_ptr + batch)
            place64 = tl.load(positions_ptr + batch * width + row, mask=needed, other=0)
            k0, k1, c1, c2, c3 = noise_key(seed, _TARGET, place64[:, None], place64[:, None] * 0)
            score = candidate_scores(
                logits_ptr, logits_ptr, line[:, None], place, known, tl.zeros_like(bound) + temperature, vocab,
                k0, k1, c1, c2, c3, False,
            )  # fmt: skip
    best = tl.max(score, 1)
    token = tl.min(tl.where(known & (score == best[:, None]) & (score > -float("inf")), place, NO_TOKEN), 1)
    if NOISE:  # noqa: SIM102  (a constexpr branch around a runtime one)
        if temperature >= GREEDY:
            second = tl.load(second_ptr + at, mask=inside, other=-float("inf"))
            number = rows[:, None] * SPLITS + ks[None, :]
            pending = inside & may_hide(second, best[:, None])
            left = tl.sum(tl.sum(pending.to(tl.int32), 1), 0)
            while left > 0:
                chosen = tl.min(tl.min(tl.where(pending, number, NO_TOKEN), 1), 0)
                chosen_row = chosen // SPLITS
                place64 = tl.load(positions_ptr + batch * width + tl.sum(tl.where(rows == chosen_row, row, 0), 0))
                k0, k1, c1, c2, c3 = noise_key(tl.load(seeds_ptr + batch), _TARGET, place64, place64 * 0)
                row_ptr = logits_ptr + (batch * count + chosen_row).to(tl.int64) * vocab
                found, spot = rescan(
                    row_ptr, row_ptr, (chosen % SPLITS) * SPLIT, vocab, vocab, temperature, k0, k1, c1, c2, c3,
                    SPLIT, TILE, False,
                )  # fmt: skip
                better = (rows == chosen_row) & ((found > best) | ((found == best) & (spot < token)))
                best = tl.where(better, found, best)
                token = tl.where(better, spot, token)
                pending = pending & (number != chosen)
                left -= 1
    return tl.where(token == NO_TOKEN, 0, token)


@triton.jit
def _first_false(holds, rows, ROWS: tl.constexpr):
    return tl.min(tl.where(holds, ROWS, rows), 0)


@triton.jit
def _logprob(x, largest, total, inverse):
    """``log(exp(x * inverse) / sum)`` of values whose largest is ``largest``; a row of -inf has all mass on token 0."""
    return (clean(x) - largest) * inverse - tl.log(total)


@triton.jit(do_not_specialize=["count", "width", "drafts_stride", "area"])
def _finish(
    logits_ptr, draft_tokens_ptr, temperature_ptr, seeds_ptr, positions_ptr, num_rows_ptr, num_forced_ptr,
    best_ptr, place_ptr, second_ptr, stats_ptr, emitted_ptr, num_emitted_ptr, logprobs_ptr,
    count, width, drafts_stride, vocab, splits, area, threshold, alpha, rate,
    RULE: tl.constexpr, SPLIT: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, NOISE: tl.constexpr, SEEDED: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr,
    PROCESSED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One sequence: merge, accept, lay out. Names are those of ``verify_reference``."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    batch = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    num_rows = tl.load(num_rows_ptr + batch).to(tl.int32)
    num_forced = tl.load(num_forced_ptr + batch).to(tl.int32)
    temperature = tl.load(temperature_ptr + batch).to(tl.float32)
    cold = temperature + tl.zeros((ROWS,), tl.float32) < GREEDY
    first = tl.minimum(num_forced, width - count)
    row = first + rows
    more = num_forced < num_rows
    forced = tl.minimum(tl.minimum(num_forced, num_rows), width - 1)
    real = rows < count
    needed = real & (row < num_rows) & (row >= num_forced) & more
    token = _row_tokens(
        logits_ptr, temperature, seeds_ptr, positions_ptr, batch, rows, row, needed, best_ptr, place_ptr, second_ptr,
        count, width, vocab, splits, SPLIT, TILE, ROWS, SPLITS, NOISE,
    )  # fmt: skip

    drafted = real & (row < width - 1)
    draft64 = tl.load(draft_tokens_ptr + batch.to(tl.int64) * drafts_stride + row, mask=drafted, other=-1).to(tl.int64)
    judged = drafted & (row < num_rows - 1) & (rows < count - 1) & (draft64 >= 0) & (draft64 < vocab)
    draft = tl.where(judged, draft64, 0).to(tl.int32)
    live = (rows < _first_false(judged | (real & (row < forced)), rows, ROWS)) & (row >= forced)
    line = (batch * count + rows).to(tl.int64)
    at = line[:, None] * splits + tl.arange(0, SPLITS)[None, :]
    known = needed[:, None] & (tl.arange(0, SPLITS)[None, :] < splits)
    inverse = 1.0 / tl.where(temperature < GREEDY, 1.0, temperature)
    if SCALED:
        largest, total, moment = _merge_sums(stats_ptr, at, known, area, 2, LOG2E * inverse)
    if RULE == 0:
        good = token == draft
    else:
        if SEEDED:
            start = tl.load(positions_ptr + batch * width)
            k0, k1, c1, c2, c3 = noise_key(tl.load(seeds_ptr + batch), _ACCEPT, start, row)
            word, _, _, _ = philox((rows * 0).to(tl.uint32), c1, c2, c3, k0, k1)
            u = scaled_uniform(word) * _UNIT
        else:
            u = tl.full((ROWS,), 0.5, tl.float32)
        if RULE == 2:
            good = u < rate
        else:
            x = tl.load(logits_ptr + line * vocab + draft, mask=needed & judged, other=-float("inf")).to(tl.float32)
            p = tl.exp(_logprob(x, largest, total, inverse))
            entropy = tl.log(total) - moment / total * 0.6931471805599453
            point = cold | (largest == -float("inf"))
            best_token = tl.where(cold, token, 0)
            p = tl.where(point, tl.where(draft == best_token, 1.0, 0.0), p)
            entropy = tl.where(point, 0.0, entropy)
            good = p > tl.minimum(alpha * tl.exp(-entropy), threshold)
    prefix = rows < _first_false((good & live) | (real & (row < forced)), rows, ROWS)
    accepted = forced + tl.sum((prefix & live).to(tl.int32), 0)
    last = tl.minimum(tl.maximum(accepted - first, 0), count - 1)
    next_token = tl.sum(tl.where(rows == last, token, 0), 0)

    begin = width * 0
    while begin < width:
        column = begin + tl.arange(0, COLUMNS)
        known_token = tl.load(
            draft_tokens_ptr + batch.to(tl.int64) * drafts_stride + column, mask=column < width - 1, other=-1
        ).to(tl.int64)
        out = tl.where(column < accepted, known_token, -1)
        out = tl.where((column == accepted) & more, next_token.to(tl.int64), out)
        tl.store(emitted_ptr + batch * width + column, out, mask=column < width)
        if RAW or PROCESSED:
            # The rows that have logits are written below.
            outside = (column < first) | (column >= first + count)
            tl.store(logprobs_ptr + batch * width + column, 0.0, mask=(column < width) & outside)
        begin += COLUMNS
    tl.store(num_emitted_ptr + batch, (accepted + more.to(tl.int32)).to(tl.int64))

    if RAW or PROCESSED:
        final = tl.where(row < accepted, draft, next_token)
        wanted = needed & (row <= accepted)
        x = tl.load(logits_ptr + line * vocab + final, mask=wanted, other=-float("inf")).to(tl.float32)
        if RAW:
            largest, total, _ = _merge_sums(stats_ptr, at, known, area, 1, LOG2E)
            value = _logprob(x, largest, total, 1.0)
            value = tl.where(largest == -float("inf"), tl.where(final == 0, 0.0, -float("inf")), value)
        else:
            value = _logprob(x, largest, total, inverse)
            point = cold | (largest == -float("inf"))
            value = tl.where(point, tl.where(final == token, 0.0, -float("inf")), value)
        tl.store(logprobs_ptr + batch * width + row, tl.where(wanted, value, 0.0), mask=real)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def covers(logits: Tensor, rule: str, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> bool:
    """Whether :func:`verify_triton` computes this; it is known before anything runs."""
    half = logits.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return half and rule in COVERED_RULES and top_k is None and top_p is None and min_p is None


def verify_triton(
    logits: Tensor, draft_tokens: Tensor, temperature: Tensor, seeds: Tensor | None, positions: Tensor,
    num_rows: Tensor, num_forced: Tensor, *, rule: str, logprobs: str, posterior_threshold: float,
    posterior_alpha: float, acceptance_rate: float, split: int | None = None, tile: int = TILE, warps: int = WARPS,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``specgraph::verify`` for what :func:`covers` names; shapes are checked by the caller.

    ``split``, ``tile`` and ``warps`` are for tests and tuning. Log-probabilities depend on them in the last bits.
    """
    batch, count, vocab = logits.shape
    width = positions.shape[1]
    emitted, num_emitted = torch.empty_like(positions, memory_format=torch.contiguous_format), num_rows.new_empty(batch)
    values = logits.new_empty((batch, 0 if logprobs == "none" else width), dtype=torch.float32)
    if batch == 0:
        return emitted, num_emitted, values
    logits, positions, temperature = aligned(logits), positions.contiguous(), temperature.contiguous()
    num_rows, num_forced = num_rows.contiguous(), num_forced.contiguous()
    draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    split = split_size(vocab) if split is None else split
    splits = triton.cdiv(vocab, split)
    raw, scaled = logprobs == "raw", rule == "typical" or logprobs == "processed"
    area = batch * count * splits
    best, second = (logits.new_empty(area, dtype=torch.float32) for _ in range(2))
    place = torch.empty(area, dtype=torch.int32, device=logits.device)
    stats = logits.new_empty(4 * area if raw or scaled else 1, dtype=torch.float32)
    noise = num_rows if seeds is None else seeds.contiguous()
    pdl = supports_pdl(logits.device)
    # Without contraction the same expression gives the same bits in every kernel.
    common: dict[str, Any] = {
        "SPLIT": split, "TILE": tile, "NOISE": seeds is not None, "RAW": raw, "SCALED": scaled, "PDL": pdl,
        "num_warps": warps, "enable_fp_fusion": False, **launch_options(pdl),
    }  # fmt: skip
    _scan_rows[(area,)](
        logits, temperature, noise, positions, num_rows, num_forced, best, place, second, stats, count, width, vocab,
        splits, **common,
    )  # fmt: skip
    _finish[(batch,)](
        logits, draft_tokens, temperature, noise, positions, num_rows, num_forced, best, place, second, stats, emitted,
        num_emitted, values, count, width, draft_tokens.stride(0), vocab, splits, area, posterior_threshold,
        posterior_alpha, acceptance_rate, RULE=COVERED_RULES[rule], ROWS=triton.next_power_of_2(max(count, 2)),
        SPLITS=triton.next_power_of_2(max(splits, 2)), COLUMNS=min(triton.next_power_of_2(width), 1024),
        SEEDED=seeds is not None, PROCESSED=logprobs == "processed", **common,
    )  # fmt: skip
    return emitted, num_emitted, values
