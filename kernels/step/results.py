"""``specgraph::pack_results``: everything that the host reads of a step, in one small tensor that one copy transfers.

For ``B`` sequences, ``T`` rows of the call and ``W`` rows of a decode step, the packed tensor is int32
``[B, 2 W + 3 + C + X]``. A row of it holds

- the last ``min(num_emitted, W)`` tokens that the sequence emitted, and padding after them (``W`` columns),
- the bits of their float32 log-probabilities (``W`` columns),
- the number of tokens emitted, what is wrong with the logits (:func:`~specgraph.kernels.step.tokens.bad_rows`), and the
  number of rows of the next step,
- the bits of what the drafter thinks of the drafts of the next step, float32 (``C`` columns: ``W - 1``, or 0 for a
  drafter that does not say),
- what a traced step says of its drafts, see :func:`specgraph.kernels.step.trace_columns` (``X`` columns, 0 for others).

Only a step that reads a prompt emits more than ``W`` tokens. Those before the last ``W`` then belong to the prompt,
which the host knows.

A program packs one sequence, which is only a few dozen numbers. Values are copied, so no sequence influences another.
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
from specgraph.kernels.launch import contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.host import is_small
from specgraph.kernels.step.index import select_state

NUM_COUNTS = 3


@dataclass(slots=True)
class PackResults:
    """Pack what a step returns, int32 ``[B, 2 W + 3 + C + X]``, as the module says.

    Attributes:
        emitted: int64 ``[B, T]``, each row's first ``num_emitted`` ``[B]`` are tokens.
        logprobs: float ``[B, T]`` beside them, or ``[B, 0]`` for none, which come out as 0.
        bad: int32 ``[B]``.
        num_rows: int64 ``[N]``, the state as the step leaves it.
        width: ``W``, at most ``T``.
        rows: int64 ``[B]``, the row of ``num_rows`` of each sequence, -1 for none, which has no next rows.
        confidence: float32 ``[N, at least W - 1]``, the state of that name; None for a drafter without one.
        traced: int32 ``[B, X]``; None for a step without a trace.
    """

    emitted: Tensor
    num_emitted: Tensor
    logprobs: Tensor
    bad: Tensor
    num_rows: Tensor
    width: int
    rows: Tensor
    confidence: Tensor | None = None
    traced: Tensor | None = None


class Unpacked(NamedTuple):
    """A packed tensor as lists: for each sequence its last tokens, their log-probabilities, the three counts, and the
    confidence in its next drafts, which is empty for a drafter that gives none.
    """

    tokens: list[list[int]]
    logprobs: list[list[float]]
    num_emitted: list[int]
    bad: list[int]
    num_rows: list[int]
    confidence: list[list[float]]


def num_columns(width: int, confidence: Tensor | None) -> int:
    """The columns of a packed tensor without a trace, ``2 W + 3 + C``."""
    return 2 * width + NUM_COUNTS + (0 if confidence is None else width - 1)


def unpack_results(packed: Tensor, width: int, *, logprobs: bool = True) -> Unpacked:
    """The lists in a packed tensor ``[B, 2 W + 3 + C]`` on the host, without the padding and without a trace.

    ``width`` is ``W``. Without ``logprobs`` there are none, which saves the host most of the reading.
    """
    begin = 2 * width
    rows = packed.tolist()
    ends = [row[begin] if row[begin] < width else width for row in rows]
    nothing: list[list[float]] = [[] for _ in rows]
    has_floats = logprobs or packed.shape[1] > begin + NUM_COUNTS
    values = packed.view(torch.float32).tolist() if has_floats else nothing
    return Unpacked(
        [row[:end] for row, end in zip(rows, ends, strict=True)],
        [row[width : width + end] for row, end in zip(values, ends, strict=True)] if logprobs else nothing,
        [row[begin] for row in rows],
        [row[begin + 1] for row in rows],
        [row[begin + 2] for row in rows],
        [row[begin + NUM_COUNTS :] for row in values] if has_floats else nothing,
    )


def pack_results_reference(given: PackResults) -> Tensor:
    """:class:`PackResults` in plain PyTorch."""
    emitted, num_emitted, width = given.emitted, given.num_emitted, given.width
    row = torch.arange(width, device=emitted.device) + (num_emitted - width).clamp_min(0).unsqueeze(1)
    real = row < num_emitted.unsqueeze(1)
    row = row.clamp(max=emitted.shape[1] - 1)
    tokens = torch.where(real, emitted.gather(1, row), -1).int()
    values = torch.zeros(tokens.shape, dtype=torch.float32, device=emitted.device)
    if given.logprobs.shape[1]:
        values = torch.where(real, given.logprobs.gather(1, row).float(), values)
    left = select_state(given.num_rows, given.rows).masked_fill(given.rows < 0, 0)
    counts = torch.stack([num_emitted, given.bad.long(), left], dim=1).int()
    parts = [tokens, values.view(torch.int32), counts]
    if given.confidence is not None:
        own = select_state(given.confidence, given.rows).masked_fill(given.rows.unsqueeze(1) < 0, 0)[:, : width - 1]
        parts.append(own.contiguous().view(torch.int32))
    if given.traced is not None:
        parts.append(given.traced)
    return torch.cat(parts, dim=1)


def pack_results_cpu(given: PackResults) -> Tensor:
    """:class:`PackResults` of few tokens, with nothing beside them and the counts, in Python."""
    width, left = given.width, given.num_rows.tolist()
    columns = given.emitted.tolist(), given.num_emitted.tolist(), given.bad.tolist(), given.rows.tolist()
    packed = [
        [*_last(emitted, count, width), *[0] * width, count, int(bad), left[row] if row >= 0 else 0]
        for emitted, count, bad, row in zip(*columns, strict=True)
    ]
    return given.emitted.new_tensor(packed, dtype=torch.int32)


def _last(emitted: list[int], count: int, width: int) -> list[int]:
    """The last ``width`` of the first ``count`` tokens, and -1 behind them."""
    kept = emitted[max(0, count - width) : count]
    return kept + [-1] * (width - len(kept))


@triton.jit(do_not_specialize=["rows"])
def _pack_results_kernel(
    packed, emitted, num_emitted, logprobs, bad, num_rows, index, confidence, traced, rows, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CONFIDENCE: tl.constexpr, LOGPROBS: tl.constexpr,
    TRACED: tl.constexpr, TRACED_BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """One sequence per program."""
    gdc_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    count = tl.load(num_emitted + b)
    # ---- the last WIDTH tokens and their log-probabilities, as bits: [BLOCK]
    column = tl.arange(0, BLOCK)
    row = tl.maximum(count - WIDTH, 0) + column
    real = (column < WIDTH) & (row < count)
    token = tl.load(emitted + b * rows + row, mask=real, other=-1).to(tl.int32)
    value = tl.zeros([BLOCK], tl.int32)
    if LOGPROBS:
        value = tl.load(logprobs + b * rows + row, mask=real, other=0)
    # ---- what is wrong, the rows of the next step, the confidence in its drafts, and the trace
    own = tl.load(index + b)
    broken, left = tl.load(bad + b), tl.load(num_rows + own, mask=own >= 0, other=0)
    thought = tl.zeros([BLOCK], tl.int32)
    if CONFIDENCE:
        thought = tl.load(confidence + own * stride + column, mask=(own >= 0) & (column < CONFIDENCE), other=0)
    told = tl.arange(0, TRACED_BLOCK)
    if TRACED:
        why = tl.load(traced + b * TRACED + told, mask=told < TRACED, other=0)
    gdc_launch_dependents(PDL)
    # ---- packed = tokens, log-probabilities, three counts, confidence, trace
    out = packed + b * (2 * WIDTH + 3 + CONFIDENCE + TRACED)
    tl.store(out + column, token, mask=column < WIDTH)
    tl.store(out + WIDTH + column, value, mask=column < WIDTH)
    tl.store(out + 2 * WIDTH, count.to(tl.int32))
    tl.store(out + 2 * WIDTH + 1, broken.to(tl.int32))
    tl.store(out + 2 * WIDTH + 2, left.to(tl.int32))
    if CONFIDENCE:
        tl.store(out + 2 * WIDTH + 3 + column, thought, mask=column < CONFIDENCE)
    if TRACED:
        tl.store(out + 2 * WIDTH + 3 + CONFIDENCE + told, why, mask=told < TRACED)


def pack_results_triton(given: PackResults) -> Tensor:
    """:class:`PackResults` in one kernel."""
    packed, traced = _pack_results_fake(given), given.traced
    batch, rows = given.emitted.shape
    bits, thought = given.logprobs.float().contiguous().view(torch.int32), given.confidence
    more = 0 if traced is None else traced.shape[1]
    launch(
        _pack_results_kernel, (batch,), packed, *contiguous(given, "emitted", "num_emitted"), bits,
        given.bad.int().contiguous(), *contiguous(given, "num_rows", "rows"),
        bits if thought is None else thought.contiguous().view(torch.int32), *contiguous(given, "traced"), rows,
        0 if thought is None else thought.shape[1], WIDTH=given.width, BLOCK=triton.next_power_of_2(given.width),
        LOGPROBS=bits.shape[1] > 0, CONFIDENCE=0 if thought is None else given.width - 1, TRACED=more,
        TRACED_BLOCK=triton.next_power_of_2(max(more, 1)), num_warps=1,
    )
    return packed


def _pack_results_fake(given: PackResults) -> Tensor:
    columns, known = num_columns(given.width, given.confidence), given.confidence
    if known is not None:
        require(known.shape[1] >= given.width - 1, lambda: f"confidence must be [N, {given.width - 1}] or wider")
    traced = given.traced
    if traced is not None:
        require(traced.dtype == torch.int32, lambda: f"traced must be int32, not {traced.dtype}")
        check_shapes(given, emitted="B T", traced="B X")
        columns += traced.shape[1]
    return given.emitted.new_empty(given.emitted.shape[0], columns, dtype=torch.int32)


def _tokens_alone(given: PackResults) -> bool:
    """Whether there are few sequences, and only tokens and counts of them."""
    beside = given.confidence is not None or given.traced is not None
    return is_small(given.emitted) and not given.logprobs.shape[1] and not beside


pack_results = declare(
    "pack_results", PackResults, _pack_results_fake,
    triton_or_reference(
        pack_results_triton, pack_results_reference, moves_only=True, cpu=pack_results_cpu, cpu_covers=_tokens_alone,
    ),
).function
