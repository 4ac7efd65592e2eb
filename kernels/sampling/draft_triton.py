"""The Triton form of ``specgraph::sample_draft``, which :mod:`specgraph.kernels.sampling.draft` defines.

For logits ``[B, R, Vd]`` (float32, bfloat16 or float16) it draws a token per row, int64 ``[B, R]``, and on request
writes the processed log-weights, float32 ``[B, R, Vd]``.

The first kernel, ``_scan_drafts``, has a program per row and split of the draft's vocabulary, so that a few rows fill a
GPU. The second, ``_finish_drafts``, has a program per row, which merges the splits and draws the token. If log-weights
are asked for, ``_write_processed`` writes them in a third launch, because at temperature 0 they depend on the token
drawn. Top-k, top-p and min-p are floors that :mod:`specgraph.kernels.sampling.floors` finds first.

A program reads the logits of one row only, and noise is a function of the seed and the position. So neither the token
nor the log-weights depend on other rows. :mod:`specgraph.kernels.sampling.scan` explains the search and names the
sources.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.sampling.arguments import SampleDraft
from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.floors import find_floors
from specgraph.kernels.sampling.gumbel import (
    NO_TOKEN,
    TILE,
    WARPS,
    aligned,
    kept_logits,
    load_floor,
    load_tile,
    processed_value,
    split_size,
)
from specgraph.kernels.sampling.scan import REPORT_COLUMNS, row_tokens, scan_size, scan_split


@triton.jit
def _draft_noise(seeds_ptr, key_ptr, batch, number, SHARED: tl.constexpr, NOISE: tl.constexpr):
    """The seed, key and row of the noise of draft ``number``; zeros if there is no noise.

    Noise that is shared with the target is keyed by the draft's position. Otherwise it is keyed by the step that
    verifies the draft, and the draft's number.
    """
    number = number.to(tl.int64)
    seed, key, noise_row = number * 0, number * 0, number * 0
    if NOISE:
        seed, key = tl.load(seeds_ptr + batch), tl.load(key_ptr + batch)
        if SHARED:
            key += number
        else:
            noise_row = number
    return seed, key, noise_row


@triton.jit(do_not_specialize=["count", "first", "limit"])
def _scan_drafts(
    logits_ptr, ids_ptr, temperature_ptr, seeds_ptr, key_ptr, floors_ptr, reports_ptr,
    count, first, vocab, limit, splits,
    STREAM: tl.constexpr, SHARED: tl.constexpr, SPLIT: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    FLOORED: tl.constexpr, PDL: tl.constexpr,
):
    """Scan one split of one row. The grid is (rows * splits)."""
    gdc_wait(PDL)
    # ``_finish_drafts`` is a small kernel, so starting it early costs little.
    gdc_launch_dependents(PDL)
    program = tl.program_id(0)
    row, split = program // splits, program % splits
    batch = row // count
    temperature = tl.load(temperature_ptr + batch).to(tl.float32)
    noise = _draft_noise(seeds_ptr, key_ptr, batch, first + row % count, SHARED, NOISE)
    # Without a map, the ids beyond the limit are the last entries.
    size = vocab if MAPPED else tl.minimum(vocab, limit)
    scan_split(
        logits_ptr + row.to(tl.int64) * vocab, ids_ptr, split * SPLIT, size, limit,
        load_floor(floors_ptr, row, FLOORED), temperature, noise, reports_ptr, program,
        tl.num_programs(0), STREAM, SPLIT, NOISE, MAPPED, FLOORED,
    )


@triton.jit
def _finish_drafts(
    ids_ptr, reports_ptr, token_ptr, chosen_ptr, splits, SPLITS: tl.constexpr, MAPPED: tl.constexpr, PDL: tl.constexpr
):
    """For one row, store its token as a target id and as a draft id, which is -1 if the row has nothing but -inf."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row = tl.program_id(0)
    one = tl.arange(0, 1)  # [1]
    tokens, _ = row_tokens(reports_ptr, row + one, one == 0, splits, tl.num_programs(0) * splits, SPLITS)
    chosen = tl.min(tokens, 0)
    index = tl.where(chosen == NO_TOKEN, 0, chosen)
    token = index.to(tl.int64)
    if MAPPED:
        token = tl.load(ids_ptr + index).to(tl.int64)
    tl.store(token_ptr + row, token)
    tl.store(chosen_ptr + row, tl.where(chosen == NO_TOKEN, -1, chosen))


@triton.jit(do_not_specialize=["count", "limit"])
def _write_processed(
    logits_ptr, ids_ptr, temperature_ptr, floors_ptr, chosen_ptr, out_ptr, count, vocab, limit, splits,
    SPLIT: tl.constexpr, TILE: tl.constexpr, MAPPED: tl.constexpr, FLOORED: tl.constexpr, PDL: tl.constexpr,
):
    """Write ``process_logits`` of one split of a row, with -inf for ids that the target does not have."""
    gdc_wait(PDL)
    program = tl.program_id(0)
    row, split = program // splits, program % splits
    temperature = tl.load(temperature_ptr + row // count).to(tl.float32)
    chosen = tl.load(chosen_ptr + row)
    floor = load_floor(floors_ptr, row, FLOORED)
    local = tl.arange(0, TILE // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    one_hot = (tl.zeros_like(local) + temperature < TL_GREEDY_BELOW) | (local * 0 + chosen < 0)
    for i in tl.static_range(SPLIT // TILE):
        entry = split * SPLIT + i * TILE + local
        x = load_tile(logits_ptr + row.to(tl.int64) * vocab, split * SPLIT + i * TILE, vocab, TILE)
        ids = entry
        if MAPPED:
            ids = tl.load(ids_ptr + entry, mask=entry < vocab, other=0).to(tl.int32)
        x = kept_logits(x, ids, limit, floor, True, FLOORED)
        value = processed_value(x, tl.zeros_like(x) + temperature)
        value = tl.where(one_hot, tl.where(entry == tl.maximum(chosen, 0), 0.0, -float("inf")), value)
        tl.store(out_ptr + row.to(tl.int64) * vocab + entry, value, mask=entry < vocab)
    gdc_launch_dependents(PDL)


def sample_draft_triton(
    given: SampleDraft, *, shared: bool, stream: int, split: int | None = None, tile: int = TILE, warps: int = WARPS
) -> tuple[Tensor, Tensor]:
    """``specgraph::sample_draft`` up to float32; ``split``, ``tile`` and ``warps`` are for tests and tuning.

    ``shared`` and ``stream`` say which noise the rule takes.
    """
    logits, seeds, row, return_processed = given.logits, given.seeds, given.row, given.return_processed
    batch, count, vocab = logits.shape
    token = torch.empty(batch, count, dtype=torch.int64, device=logits.device)
    out = logits.new_empty((batch, count, vocab if return_processed else 0), dtype=torch.float32)
    if token.numel() == 0:
        return token, out
    logits, temperature, key = aligned(logits), given.temperature.contiguous(), given.key.contiguous()
    mapped = given.draft_to_target is not None
    ids = key if given.draft_to_target is None else given.draft_to_target.contiguous()
    limit = 2**31 - 1 if given.target_vocab_size is None else given.target_vocab_size
    floors = find_floors(
        logits, temperature, given.top_k, given.top_p, given.min_p, split=split or split_size(vocab),
        ids=ids if mapped else None, limit=given.target_vocab_size,
    )
    split = split or scan_size(vocab, batch * count)
    splits = triton.cdiv(vocab, split)
    total_splits = batch * count * splits
    reports = torch.empty((REPORT_COLUMNS, total_splits), dtype=torch.int32, device=logits.device)
    chosen = torch.empty(batch * count, dtype=torch.int32, device=logits.device)
    # Without contraction, the same expression gives the same bits in every kernel.
    options: dict[str, Any] = {"MAPPED": mapped, "num_warps": warps, "enable_fp_fusion": False}
    common = {"SPLIT": split, "FLOORED": floors is not None, **options}
    bounds = temperature if floors is None else floors
    launch(
        _scan_drafts, (total_splits,),
        logits, ids, temperature, key if seeds is None else seeds.contiguous(), key, bounds, reports, count, row, vocab,
        limit, splits, STREAM=stream, SHARED=shared, NOISE=seeds is not None, **common,
    )
    launch(
        _finish_drafts, (batch * count,),
        ids, reports, token, chosen, splits, SPLITS=triton.next_power_of_2(max(splits, 2)), **options
    )
    if return_processed:
        launch(
            _write_processed, (total_splits,),
            logits, ids, temperature, bounds, chosen, out, count, vocab, limit, splits, TILE=tile, **common
        )
    return token, out
