"""Log-probabilities of emitted tokens under other logits than those that were verified, in Triton.

Where a request changes the logits (:mod:`specgraph.kernels.processors`), verification draws from the changed ones, and
its ``raw`` log-probabilities are those of the logits ``[B, R, V]`` before that. Two launches compute them. The first
has a program per row and split of the vocabulary, and leaves the largest logit and the sum of exponentials there. The
second has a program per sequence and writes the log-probabilities ``[B, T]``.

The splits, the tiles and the functions are those of :mod:`specgraph.kernels.verify.verify_triton`. So a row gets the
same bits here as it gets there where no request changes logits, and they do not depend on other rows.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.sampling.gumbel import LOG2E, TILE, WARPS, aligned, split_size
from specgraph.kernels.verify.rows import Rows, logprob, merge_sums, place_rows, split_largest, split_sums


@triton.jit(do_not_specialize=["count", "width"])
def _sum_rows(given, count, width, SPLIT: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """The largest logit and the sum of exponentials of one split of one row. The grid is (splits, R, B)."""
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    split, batch = tl.program_id(0), tl.program_id(2)
    line = batch * count + tl.program_id(1)
    num_rows = tl.load(given.num_rows + batch).to(tl.int32)
    num_forced = tl.load(given.num_forced + batch).to(tl.int32)
    row = tl.minimum(num_forced, width - count) + tl.program_id(1)
    if (row < num_rows) & (num_forced < num_rows) & (row >= num_forced):
        row_ptr = given.logits + line.to(tl.int64) * given.vocab
        at = line * given.splits + split
        largest = split_largest(row_ptr, split * SPLIT, given.vocab, SPLIT, TILE)
        tl.store(given.stats + at, largest)
        largest = tl.where(largest > -float("inf"), largest, 0.0)
        total, _ = split_sums(row_ptr, split * SPLIT, given.vocab, largest, 0.0, LOG2E, SPLIT, TILE, False)
        tl.store(given.stats + tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2) + at, total)


@triton.jit(do_not_specialize=["count", "width", "area"])
def _write(
    given, emitted_ptr, logprobs_ptr, count, width, area, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):
    """Merge the splits of every row of one sequence, and write its log-probabilities. The grid is (B,)."""
    gdc_wait(PDL)
    batch, rows, ks = tl.program_id(0), tl.arange(0, ROWS), tl.arange(0, SPLITS)
    row, needed, _, first, _, _ = place_rows(given, batch, count, width, ROWS)
    token = tl.load(emitted_ptr + batch * width + row, mask=needed, other=-1)
    wanted = needed & (token >= 0)
    begin = width * 0
    while begin < width:
        column = begin + tl.arange(0, COLUMNS)
        outside = (column < first) | (column >= first + count)
        tl.store(logprobs_ptr + batch * width + column, 0.0, mask=(column < width) & outside)
        begin += COLUMNS
    line = (batch * count + rows).to(tl.int64)
    at = line[:, None] * given.splits + ks[None, :]
    known = wanted[:, None] & (ks[None, :] < given.splits)
    x = tl.load(given.logits + line * given.vocab + token, mask=wanted, other=-float("inf")).to(tl.float32)
    largest, total, _ = merge_sums(given.stats, at, known, area, 1, LOG2E)
    value = logprob(x, largest, total, 1.0)
    value = tl.where(largest == -float("inf"), tl.where(token == 0, 0.0, -float("inf")), value)
    tl.store(logprobs_ptr + batch * width + row, tl.where(wanted, value, 0.0), mask=rows < count)
    gdc_launch_dependents(PDL)


def raw_logprobs(logits: Tensor, emitted: Tensor, num_rows: Tensor, num_forced: Tensor) -> Tensor:
    """The log-softmax of ``logits`` ``[B, R, V]`` at the tokens ``emitted`` int64 ``[B, T]``, float32 ``[B, T]``.

    ``num_rows`` and ``num_forced`` int64 ``[B]`` are those of the verification that emitted them. Forced tokens and
    padding (-1) get 0.
    """
    batch, count, vocab = logits.shape
    width = emitted.shape[1]
    values = logits.new_empty((batch, width), dtype=torch.float32)
    split = split_size(vocab)
    splits = triton.cdiv(vocab, split)
    area = batch * count * splits
    stats = logits.new_empty(2 * area, dtype=torch.float32)
    rows = Rows(aligned(logits), vocab, splits, stats, num_rows.contiguous(), num_forced.contiguous())
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    launch(_sum_rows, (splits, count, batch), rows, count, width, SPLIT=split, TILE=TILE, **options)
    launch(
        _write, (batch,), rows, emitted, values, count, width, area, ROWS=triton.next_power_of_2(max(count, 2)),
        SPLITS=triton.next_power_of_2(max(splits, 2)), COLUMNS=min(triton.next_power_of_2(width), 1024), **options,
    )
    return values
