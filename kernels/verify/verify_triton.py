"""The Triton form of ``specgraph::verify``, for every rule and option, without a sort and without waiting for the host.

Where the next token is the target's own sample (strict, typical, synthetic) it takes two launches. ``scan_rows`` has a
program per row and split of the vocabulary and leaves what :mod:`specgraph.kernels.sampling.scan` finds there and, on
request, sums of exponentials. ``_finish`` has a program per sequence: it draws every row's token from that, accepts,
and lays out tokens and log-probabilities as the reference does.

``probabilistic`` and ``block`` take the sums of ``scan_rows`` and go on in
:mod:`specgraph.kernels.verify.triton_residual`. Top-k, top-p and min-p are floors that
:mod:`specgraph.kernels.sampling.floors` finds first. Rows that cannot matter (padding, forced, inactive) are not read
by the scans.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW, TL_STREAM_TARGET
from specgraph.kernels.sampling.floors import find_floors
from specgraph.kernels.sampling.gumbel import (
    LOG2E,
    NO_TOKEN,
    TILE,
    WARPS,
    aligned,
    exponent_scale,
    inverse_temperature,
    load_floor,
    load_floors,
    split_size,
)
from specgraph.kernels.sampling.sample import STEP_NOISE_RULES
from specgraph.kernels.sampling.scan import REPORT_COLUMNS, row_tokens, scan_size, scan_split
from specgraph.kernels.step.tokens import what_is_bad
from specgraph.kernels.verify.arguments import Verified, Verify, check_block
from specgraph.kernels.verify.raw_logprobs import raw_logprobs
from specgraph.kernels.verify.rows import (
    Rows,
    acceptance_uniforms,
    count_accepted,
    floored_logits,
    lay_out,
    load_drafts,
    locate_drafts,
    logprob,
    merge_sums,
    place_rows,
    split_largest,
    split_sums,
    write_logprobs,
)
from specgraph.kernels.verify.triton_residual import drawn_from, verify_residual

STRICT, TYPICAL, SYNTHETIC = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
_RULES = {"strict": 0, "typical": 1, "synthetic": 2}
_HALF_OR_SINGLE = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["count", "width"])
def scan_rows(
    given, count, width, SPLIT: tl.constexpr, TILE: tl.constexpr, NOISE: tl.constexpr, RAW: tl.constexpr,
    SCALED: tl.constexpr, PDL: tl.constexpr,
):
    """Scan one split of one row. The grid is ``(splits, R, B)``.

    ``stats`` ``[4, B * R, splits]`` receives the largest logit, the sum of exponentials of the raw logits, and the sum
    and the moment (see :func:`~specgraph.kernels.verify.rows.split_sums`) of the logits over the temperature.
    """
    gdc_wait(PDL)
    # This has to come after the wait, since ``_finish`` relies on that. ``_finish`` is small, so it may occupy its
    # place before the last split is done.
    gdc_launch_dependents(PDL)
    split, batch = tl.program_id(0), tl.program_id(2)
    line = batch * count + tl.program_id(1)
    num_rows = tl.load(given.num_rows + batch).to(tl.int32)
    num_forced = num_rows * 0
    if given.num_forced is not None:
        num_forced = tl.load(given.num_forced + batch).to(tl.int32)
    temperature = tl.load(given.temperature + batch).to(tl.float32)
    row = tl.minimum(num_forced, width - count) + tl.program_id(1)
    # No temperature has these bits. The comparison keeps the compiler from delaying the read of the temperature, and
    # with it the reads of the logits.
    known = temperature.to(tl.int32, bitcast=True) != -1
    if (row < num_rows) & (num_forced < num_rows) & (row >= num_forced) & known:
        vocab = given.vocab
        row_ptr = given.logits + line.to(tl.int64) * vocab
        begin = split * SPLIT
        at = line * given.splits + split
        FLOORED: tl.constexpr = given.floors is not None
        area = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
        floor = load_floor(given.floors, line, FLOORED)
        seed, position = num_rows.to(tl.int64), num_rows.to(tl.int64)
        if NOISE:
            seed, position = tl.load(given.seeds + batch), tl.load(given.positions + batch * width + row)
        noise = seed, position, position * 0
        scan_split(
            row_ptr, row_ptr, begin, vocab, vocab, floor, temperature, noise, given.reports, at, area, TL_STREAM_TARGET,
            SPLIT, NOISE, False, FLOORED,
        )
        if RAW or SCALED:
            largest = split_largest(row_ptr, begin, vocab, SPLIT, TILE)
            tl.store(given.stats + at, largest)
            largest = tl.where(largest > -float("inf"), largest, 0.0)
            if RAW:
                total, _ = split_sums(row_ptr, begin, vocab, largest, floor, LOG2E, SPLIT, TILE, False)
                tl.store(given.stats + area + at, total)
            if SCALED:
                scale = exponent_scale(temperature)
                total, moment = split_sums(row_ptr, begin, vocab, largest, floor, scale, SPLIT, TILE, FLOORED)
                tl.store(given.stats + 2 * area + at, total)
                tl.store(given.stats + 3 * area + at, moment)


@triton.jit(do_not_specialize=["count", "width", "drafts_stride", "area"])
def _finish(
    given, out, draft_tokens_ptr, count, width, drafts_stride, area, threshold, alpha, rate, odd_rate,
    RULE: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr, RAW: tl.constexpr,
    SCALED: tl.constexpr, PROCESSED: tl.constexpr, PDL: tl.constexpr,
):
    """For one sequence, merge the splits, accept drafts and write the results.

    Names are those of ``verify_reference``.
    """
    gdc_launch_dependents(PDL)
    batch = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    row, needed, num_rows, first, forced, more = place_rows(given, batch, count, width, ROWS)
    temperature = tl.load(given.temperature + batch, cache_modifier=".cg").to(tl.float32)
    cold = temperature + tl.zeros((ROWS,), tl.float32) < TL_GREEDY_BELOW
    draft, valid_draft, live = locate_drafts(
        draft_tokens_ptr, batch, row, num_rows, first, forced, count, width, drafts_stride, given.vocab, ROWS
    )
    drafts = load_drafts(draft_tokens_ptr, batch, 0, width, drafts_stride, COLUMNS)
    # The reads above are safe: ``scan_rows`` waited for everything written before it, and only then let this kernel
    # start.
    gdc_wait(PDL)

    # ---- The target's own token of every row: the best of its splits ----
    line, splits = (batch * count + rows).to(tl.int64), given.splits  # [ROWS]
    token, bad = row_tokens(given.reports, line, needed, splits, area, SPLITS)
    tl.store(out.bad + batch, what_is_bad(bad, row, needed & (token == NO_TOKEN)))
    token = tl.where(token == NO_TOKEN, 0, token)
    at = line[:, None] * splits + tl.arange(0, SPLITS)[None, :]  # [ROWS, SPLITS]
    known = needed[:, None] & (tl.arange(0, SPLITS)[None, :] < splits)
    floor = load_floors(given.floors, line, needed, given.floors is not None)
    one_hot = tl.where(cold, token, -1)
    if SCALED:
        largest, total, moment = merge_sums(given.stats, at, known, area, 2, exponent_scale(temperature))
        one_hot = tl.where(cold, token, tl.where(largest == -float("inf"), 0, -1))

    # ---- Accept: `strict` draft == token; `synthetic` u < rate; `typical` (Cai et al. 2024, arXiv 2401.10774)
    # ---- p(draft) > min(threshold, alpha * exp(-entropy))
    if RULE == STRICT:
        good = token == draft
    else:
        u = acceptance_uniforms(given, batch, row, forced, width)
        if RULE == SYNTHETIC:
            if given.seeds is not None:
                rate = tl.where(tl.load(given.seeds + batch) % 2 == 0, rate, odd_rate)
            good = u < rate
        else:
            x = floored_logits(given, line, draft, floor, needed & valid_draft)
            p = tl.exp(logprob(x, largest, total, inverse_temperature(temperature)))
            entropy = tl.log(total) - moment / total * 0.6931471805599453
            p = tl.where(one_hot >= 0, tl.where(draft == one_hot, 1.0, 0.0), p)
            entropy = tl.where(one_hot >= 0, 0.0, entropy)
            good = p > tl.minimum(alpha * tl.exp(-entropy), threshold)
    accepted, last = count_accepted(good, live, row, first, forced, count, ROWS)
    next_token = tl.sum(tl.where(rows == last, token, 0), 0)

    # ---- The accepted drafts, then the next token, and their log-probabilities ----
    lay_out(
        out, drafts, draft_tokens_ptr, batch, accepted, next_token, more, first, count, width, drafts_stride, COLUMNS,
        RAW or PROCESSED,
    )
    if RAW or PROCESSED:
        write_logprobs(
            given, out.logprobs, floor, batch, line, at, known, area, row, needed, first, count, width, draft,
            next_token, accepted, one_hot, temperature, RAW,
        )


def covers(given: Verify) -> bool:
    """Whether :func:`verify_triton` covers these dtypes. float64 takes the reference."""
    return all(x is None or x.dtype in _HALF_OR_SINGLE for x in (given.logits, given.draft_logits, given.raw_logits))


def verify_triton(given: Verify, *, split: int | None = None, tile: int = TILE, warps: int = WARPS) -> Verified:
    """``specgraph::verify`` for what :func:`covers` names.

    ``split``, ``tile`` and ``warps`` are for tests and tuning. Log-probabilities, and floors of top-p, depend on them
    in the last bits.
    """
    check_block(given)
    if given.raw_logits is not None and given.logprobs == "raw":
        verified = verify_triton(replace(given, raw_logits=None, logprobs="none"), split=split, tile=tile, warps=warps)
        own = raw_logprobs(given.raw_logits, verified.emitted, given.num_rows, given.num_forced)
        return verified._replace(logprobs=own)
    logits, draft_tokens, positions, rule, logprobs = (
        given.logits, given.draft_tokens, given.positions, given.rule, given.logprobs
    )
    batch, count, vocab = logits.shape
    width = positions.shape[1]
    emitted, accepted_rows = (torch.empty_like(positions, memory_format=torch.contiguous_format) for _ in range(2))
    num_emitted = given.num_rows.new_empty(batch)
    values = logits.new_empty((batch, 0 if logprobs == "none" else width), dtype=torch.float32)
    bad = torch.empty(batch, dtype=torch.int32, device=logits.device)
    out = Verified(emitted, num_emitted, accepted_rows, values, bad)
    if batch == 0:
        return out
    logits, temperature = aligned(logits), given.temperature.contiguous()
    draft_tokens = draft_tokens if draft_tokens.stride(1) == 1 else draft_tokens.contiguous()
    floors = find_floors(logits, temperature, given.top_k, given.top_p, given.min_p, split=split or split_size(vocab))
    by_step = rule in STEP_NOISE_RULES
    raw, scaled = logprobs == "raw", by_step or rule == "typical" or logprobs == "processed"
    split = split or (split_size(vocab) if raw or scaled else scan_size(vocab, batch * count))
    splits = triton.cdiv(vocab, split)
    area = batch * count * splits
    rows = Rows(
        logits, vocab, splits, logits.new_empty(4 * area if raw or scaled else 1, dtype=torch.float32),
        given.num_rows.contiguous(), given.num_forced.contiguous(), temperature,
        None if given.seeds is None else given.seeds.contiguous(), positions.contiguous(), floors,
        torch.empty((REPORT_COLUMNS, area), dtype=torch.int32, device=logits.device),
    )
    # Without contraction, the same expression gives the same bits in every kernel.
    common: dict[str, Any] = {"RAW": raw, "num_warps": warps, "enable_fp_fusion": False}
    sizes = {"SPLIT": split, "TILE": tile}
    # Rules whose noise is keyed by the step draw in a later kernel. They need only the largest values of the rows here.
    noise = given.seeds is not None and not by_step
    launch(scan_rows, (splits, count, batch), rows, count, width, SCALED=scaled, NOISE=noise, **sizes, **common)
    common |= {
        "ROWS": triton.next_power_of_2(max(count, 2)), "SPLITS": triton.next_power_of_2(max(splits, 2)),
        "COLUMNS": min(triton.next_power_of_2(width), 1024), "PROCESSED": logprobs == "processed",
    }
    if by_step:
        verify_residual(rows, drawn_from(given), draft_tokens, out, rule == "block", sizes | common)
    else:
        odd_rate = given.acceptance_rate if given.odd_acceptance_rate is None else given.odd_acceptance_rate
        launch(
            _finish, (batch,), rows, out, draft_tokens, count, width, draft_tokens.stride(0), area,
            given.posterior_threshold, given.posterior_alpha, given.acceptance_rate, odd_rate, RULE=_RULES[rule],
            SCALED=scaled, **common,
        )
    return out
