"""``specgraph::score``: how probable given tokens are, with the bits that ``specgraph::verify`` reports for them.

Row ``r`` of the logits ``[B, R, V]`` is the distribution of ``tokens[:, r]``, which is one token of each sequence or
several *candidates*. The op gives the log-softmax of the raw or of the processed logits at that token, and whether the
token is the one that the logits prefer.

On a GPU it takes two launches. The first is the scan that verification runs, with a program per row and split of the
vocabulary. It leaves the largest logits and the sums of exponentials of every split, whose bits depend on the row and
on the size of the vocabulary alone. In the second, each program merges the splits of a few rows with the functions that
verification uses. All candidates of a row share the scan, and each of them merges the splits for itself. So a token has
the same log-probability whether it was drawn or given, and whatever other rows and candidates there are. float64 takes
the reference.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.sampling.constants import TL_GREEDY_BELOW
from specgraph.kernels.sampling.floors import find_floors
from specgraph.kernels.sampling.gumbel import NO_TOKEN, TILE, WARPS, aligned, exponent_scale, load_floors, split_size
from specgraph.kernels.sampling.sample import clean_logits, process_logits
from specgraph.kernels.sampling.scan import REPORT_COLUMNS, row_tokens
from specgraph.kernels.verify.rows import Rows, merge_sums, write_logprobs
from specgraph.kernels.verify.verify_triton import scan_rows

KINDS = ("raw", "processed")
ROWS = 2
"""Tokens whose rows a program merges; the fewest, since there are many of them."""


@dataclass(slots=True)
class Score:
    """Logits of ``B`` sequences, and the tokens whose log-probabilities are wanted.

    Attributes:
        logits: ``[B, R, V]`` raw logits of any float dtype.
        tokens: int64 ``[B, K]`` or, with ``C`` candidates for each row, ``[B, K, C]``, where ``R - 1 <= K <= R``. They
            are ids from 0 to ``V - 1``. A row without a token is not read.
        num_scored: int64 ``[B]``, how many rows have tokens that are wanted, from the first on; at most K.
        temperature, top_k, top_p, min_p: ``[B]`` as for :func:`~specgraph.kernels.sampling.sample.process_logits`, for
            ``processed``, which needs at least the temperature.
        logprobs: one of :data:`KINDS`, those of the raw or of the processed logits.
    """

    logits: Tensor
    tokens: Tensor
    num_scored: Tensor
    temperature: Tensor | None = None
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    logprobs: str = "raw"


class Scored(NamedTuple):
    """What scoring gives, all in the shape of the tokens.

    Attributes:
        logprobs: float32, 0 behind the wanted tokens.
        is_greedy: bool, whether a token is the first with the largest of those logits; False behind them.
        bad: bool, whether a token is wanted and has a NaN among the logits of its row.
    """

    logprobs: Tensor
    is_greedy: Tensor
    bad: Tensor


def check(given: Score) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: names the argument, what it is and what it must be.
    """
    logits, tokens = given.logits, given.tokens
    check_shapes(given, logits="B R V", **dict.fromkeys(("num_scored", "temperature", "top_k", "top_p", "min_p"), "B"))
    require(logits.dtype.is_floating_point, lambda: f"logits must be floating point, got {logits.dtype}.")
    batch, rows, _ = logits.shape
    require(
        tokens.dim() in (2, 3) and tokens.shape[0] == batch and rows - 1 <= tokens.shape[1] <= rows,
        lambda: (
            f"tokens must be [B, R] or [B, R - 1] for B = {batch} and R = {rows}, with or without a last dimension "
            f"for candidates, got {list(tokens.shape)}."
        ),
    )
    require(tokens.dtype == torch.int64, lambda: f"tokens must be int64, got {tokens.dtype}.")
    kinds = ", ".join(KINDS)
    require(given.logprobs in KINDS, lambda: f"logprobs must be one of {kinds}; got {given.logprobs!r}.")
    missing = given.logprobs == "processed" and given.temperature is None
    require(not missing, lambda: "logprobs='processed' needs a temperature for every sequence.")


def score_reference(given: Score) -> Scored:
    """The definition of ``specgraph::score``."""
    check(given)
    count = given.tokens.shape[1]
    logits = given.logits[:, :count]
    if given.logprobs == "raw":
        source = clean_logits(logits)
    else:
        assert given.temperature is not None  # ``check`` says so
        source = process_logits(logits, given.temperature, given.top_k, given.top_p, given.min_p)
    wanted = (torch.arange(count, device=logits.device) < given.num_scored.unsqueeze(1)).unsqueeze(2)
    token = (given.tokens if given.tokens.dim() == 3 else given.tokens.unsqueeze(2)).masked_fill(~wanted, 0)
    values = source.log_softmax(-1).gather(-1, token).masked_fill(~wanted, 0.0).to(torch.float32)
    is_greedy = (source.argmax(-1, keepdim=True) == token) & wanted
    bad = (logits.isnan().any(-1, keepdim=True) & wanted).expand_as(token).contiguous()
    return Scored(*(result.reshape(given.tokens.shape) for result in (values, is_greedy, bad)))


@triton.jit(do_not_specialize=["count", "width", "candidates", "tokens_stride", "area"])
def _score_rows(
    given, out, tokens_ptr, count, width, candidates, tokens_stride, area,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, RAW: tl.constexpr, PDL: tl.constexpr,
):
    """Merge the splits of the rows of ``ROWS`` tokens of one sequence, and write what they say of these tokens.

    A sequence has ``width`` tokens: for each row, one after the other, the ``candidates``.
    """
    gdc_wait(PDL)
    gdc_launch_dependents(PDL)
    batch, splits = tl.program_id(1), given.splits
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = place // candidates
    needed = (place < width) & (row < tl.load(given.num_rows + batch))
    temperature = tl.load(given.temperature + batch).to(tl.float32)
    token = tl.load(tokens_ptr + batch.to(tl.int64) * tokens_stride + place, mask=needed, other=0).to(tl.int32)
    line = batch.to(tl.int64) * count + row
    best, bad = row_tokens(given.reports, line, needed, splits, area, SPLITS)
    best = tl.where(best == NO_TOKEN, 0, best)
    tl.store(out.bad + batch * width + place, bad.to(tl.uint8), mask=place < width)
    tl.store(out.is_greedy + batch * width + place, ((best == token) & needed).to(tl.uint8), mask=place < width)
    at = line[:, None] * splits + tl.arange(0, SPLITS)[None, :]
    known = needed[:, None] & (tl.arange(0, SPLITS)[None, :] < splits)
    floor = load_floors(given.floors, line, needed, given.floors is not None)
    cold = temperature + tl.zeros((ROWS,), tl.float32) < TL_GREEDY_BELOW
    one_hot = tl.where(cold, best, -1)
    if not RAW:
        largest, _, _ = merge_sums(given.stats, at, known, area, 2, exponent_scale(temperature))
        one_hot = tl.where(cold, best, tl.where(largest == -float("inf"), 0, -1))
    write_logprobs(
        given, out.logprobs, floor, batch, line, at, known, area, place, needed, 0, width, width, token, token, width,
        one_hot, temperature, RAW,
    )


def covers(given: Score) -> bool:
    """Whether :func:`score_triton` covers this dtype. float64 takes the reference."""
    return given.logits.dtype in (torch.float32, torch.bfloat16, torch.float16)


def score_triton(given: Score) -> Scored:
    """``specgraph::score`` for what :func:`covers` names."""
    batch, count, vocab = given.logits.shape
    results = _score_fake(given)
    if given.tokens.numel() == 0:
        return results
    logits, raw = aligned(given.logits), given.logprobs == "raw"
    tokens = given.tokens.flatten(1)
    tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
    width = tokens.shape[1]
    chosen = None if raw else given.temperature
    temperature = results.logprobs.new_zeros(batch) if chosen is None else chosen.contiguous()
    options = (None, None, None) if raw else (given.top_k, given.top_p, given.min_p)
    split = split_size(vocab)
    floors = find_floors(logits, temperature, *options, split=split)
    splits = triton.cdiv(vocab, split)
    area = batch * count * splits
    rows = Rows(
        logits, vocab, splits, logits.new_empty(4 * area, dtype=torch.float32), given.num_scored.contiguous(), None,
        temperature, floors=floors,
        reports=torch.empty((REPORT_COLUMNS, area), dtype=torch.int32, device=logits.device),
    )
    # The same options as for verification, so that the same expression gives the same bits.
    common = {"RAW": raw, "num_warps": WARPS, "enable_fp_fusion": False}
    launch(
        scan_rows, (splits, count, batch), rows, count, count, SPLIT=split, TILE=TILE, SCALED=not raw, NOISE=False,
        **common,
    )
    out = Scored(results.logprobs, results.is_greedy.view(torch.uint8), results.bad.view(torch.uint8))
    launch(
        _score_rows, (triton.cdiv(width, ROWS), batch), rows, out, tokens, count, width,
        width // given.tokens.shape[1], tokens.stride(0), area, ROWS=ROWS,
        SPLITS=triton.next_power_of_2(max(splits, 2)), **common,
    )
    return results


def _score_fake(given: Score) -> Scored:
    check(given)
    shape, kinds = given.tokens.shape, (torch.float32, torch.bool, torch.bool)
    return Scored(*(given.logits.new_empty(shape, dtype=kind) for kind in kinds))


SCORE = declare("score", Score, _score_fake, triton_or_reference(score_triton, score_reference, covers=covers))
