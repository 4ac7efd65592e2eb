"""``specgraph::finalize_step``: all that follows from the verified tokens, for the next step and for the drafter.

As separate ATen operations these results would take about 20 launches. A program computes one sequence, so sequences do
not influence each other.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.launch import contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.host import cut_tokens, is_small
from specgraph.kernels.step.rows import positions_of
from specgraph.kernels.step.tokens import cut_at_eos, cut_row


@dataclass(slots=True)
class FinalizeStep:
    """Cut the verified ``tokens`` ``[B, T]`` behind an EOS, count them, and give what drafter and next step take.

    :class:`StepUpdate` has the results.

    Attributes:
        tokens: padded with -1.
        window: ``[B, T]``, what the target has run.
        start: ``[B]``, the position of its first row.
        num_forced: ``[B]``, how many of the tokens were given.
        eos_ids: ``[B, E]``, each sequence's own, padded with -1.
        shifted: whether the drafter's row ``t`` takes token ``t + 1``; else it takes the window's first token, too.
        vocab_size: the drafter's, into which padding is clamped.
        chain: how many positions behind the accepted tokens are wanted.
    """

    tokens: Tensor
    window: Tensor
    start: Tensor
    num_forced: Tensor
    eos_ids: Tensor
    _: KW_ONLY
    shifted: bool = True
    vocab_size: int = 1
    chain: int = 0


class StepUpdate(NamedTuple):
    """What :class:`FinalizeStep` gives.

    Attributes:
        emitted: the emitted tokens ``[B, T]``: everything after the first unforced EOS is -1.
        num_emitted: their number ``n`` ``[B]``.
        rows: the drafter's rows ``[B, T]`` if shifted, else ``[B, T + 1]``.
        positions: their positions, from ``start`` on.
        num_rows: how many of them are real ``[B]``: ``n`` if shifted, else ``n + 1``, or 0 where nothing is emitted.
        last: ``n - 1`` ``[B]``, the last row of a shifted drafter.
        length: ``start + n + 1`` ``[B]``, the number of accepted tokens.
        chain: ``start + n + i`` ``[B, 1]`` for every ``i`` below ``chain``.
    """

    emitted: Tensor
    num_emitted: Tensor
    rows: Tensor
    positions: Tensor
    num_rows: Tensor
    last: Tensor
    length: Tensor
    chain: list[Tensor]


def finalize_reference(given: FinalizeStep) -> StepUpdate:
    """:class:`FinalizeStep` in plain PyTorch."""
    start, shifted = given.start, given.shifted
    emitted = cut_at_eos(given.tokens, given.num_forced, given.eos_ids)
    count = (emitted >= 0).sum(1)
    rows = (emitted if shifted else torch.cat([given.window[:, :1], emitted], 1)).clamp(0, given.vocab_size - 1)
    places = positions_of(start, rows.shape[1], 1)[0]
    real = count.clone() if shifted else torch.where(count > 0, count + 1, 0)
    ahead = positions_of(start + count, 1, given.chain)
    return StepUpdate(emitted, count, rows, places, real, count - 1, start + count + 1, ahead)


def finalize_cpu(given: FinalizeStep) -> StepUpdate:
    """:class:`FinalizeStep` of few rows, in Python."""
    starts = given.start.tolist()
    each = zip(given.tokens.tolist(), given.num_forced.tolist(), given.eos_ids.tolist(), strict=True)
    emitted = [cut_tokens(row, forced, ends) for row, forced, ends in each]
    heads = [[]] * len(emitted) if given.shifted else given.window[:, :1].tolist()
    rows = [_clamped(head + row, given.vocab_size) for head, row in zip(heads, emitted, strict=True)]
    counts = [sum(token >= 0 for token in row) for row in emitted]
    make = given.tokens.new_tensor
    after = [start + count for start, count in zip(starts, counts, strict=True)]
    return StepUpdate(
        emitted=make(emitted),
        num_emitted=make(counts),
        rows=make(rows),
        positions=make([list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=True)]),
        num_rows=make([count + (count > 0 and not given.shifted) for count in counts]),
        last=make([count - 1 for count in counts]),
        length=make([end + 1 for end in after]),
        chain=[make([[end + index] for end in after]) for index in range(given.chain)],
    )


def _clamped(tokens: list[int], vocab_size: int) -> list[int]:
    return [min(max(token, 0), vocab_size - 1) for token in tokens]


@triton.jit
def _finalize_kernel(
    emitted, num_emitted, rows, positions, num_rows, last, accepted, ahead,
    tokens, window, start, num_forced, eos_ids, width, window_width, vocab,
    NUM_EOS: tl.constexpr, SHIFTED: tl.constexpr, BLOCK: tl.constexpr, CHAIN: tl.constexpr, PDL: tl.constexpr,
):
    """One sequence per program."""
    gdc_wait(PDL)
    b = tl.program_id(0)
    # Rows of the window are lanes: [BLOCK].
    row = tl.arange(0, BLOCK)
    inside = row < width
    # ---- emitted = tokens up to the first unforced EOS, then -1, and their number
    token = tl.load(tokens + b * width + row, mask=inside, other=-1)
    token = cut_row(token, row, tl.load(num_forced + b), eos_ids + b * NUM_EOS, NUM_EOS, BLOCK)
    count = tl.sum((token >= 0).to(tl.int64), axis=0)
    begin = tl.load(start + b)
    known = tl.minimum(tl.maximum(token, 0), vocab - 1)
    gdc_launch_dependents(PDL)
    # ---- the drafter's rows from the window's first position on: the emitted tokens, behind the window's first or not
    tl.store(emitted + b * width + row, token, mask=inside)
    tl.store(num_emitted + b, count)
    if SHIFTED:
        tl.store(rows + b * width + row, known, mask=inside)
        tl.store(positions + b * width + row, begin + row, mask=inside)
        tl.store(num_rows + b, count)
    else:
        leading = tl.load(window + b * window_width)
        tl.store(rows + b * (width + 1), tl.minimum(tl.maximum(leading, 0), vocab - 1))
        tl.store(rows + b * (width + 1) + 1 + row, known, mask=inside)
        tl.store(positions + b * (width + 1) + row, begin + row, mask=row <= width)
        tl.store(num_rows + b, tl.where(count > 0, count + 1, 0))
    # ---- last = n - 1, length = start + n + 1, chain_i = start + n + i
    tl.store(last + b, count - 1)
    tl.store(accepted + b, begin + count + 1)
    for index in tl.static_range(CHAIN):
        tl.store(ahead[index] + b, begin + count + index)


def finalize_triton(given: FinalizeStep) -> StepUpdate:
    """:class:`FinalizeStep` in one kernel."""
    tokens, window, eos_ids = given.tokens, given.window, given.eos_ids
    batch, width = tokens.shape
    if tokens.numel() == 0:
        return finalize_reference(given)
    update = _finalize_fake(given)
    *outputs, ahead = update
    read = contiguous(given, "tokens", "window", "start", "num_forced", "eos_ids")
    launch(
        _finalize_kernel, (batch,), *outputs, tuple(ahead), *read, width, window.shape[1], given.vocab_size,
        NUM_EOS=eos_ids.shape[1], SHIFTED=given.shifted, BLOCK=triton.next_power_of_2(width + 1), CHAIN=given.chain,
        num_warps=1 if width < 256 else 4,
    )
    return update


def _finalize_fake(given: FinalizeStep) -> StepUpdate:
    tokens = given.tokens
    check_shapes(given, tokens="B T", window="B *", start="B", num_forced="B", eos_ids="B E")
    batch, width = tokens.shape
    wide = (batch, width if given.shifted else width + 1)
    shapes = ((batch, width), (batch,), wide, wide, (batch,), (batch,), (batch,))
    ahead = [tokens.new_empty(batch, 1) for _ in range(given.chain)]
    return StepUpdate(*(tokens.new_empty(shape) for shape in shapes), ahead)  # type: ignore[call-arg, arg-type]


finalize_step = declare(
    "finalize_step", FinalizeStep, _finalize_fake,
    triton_or_reference(
        finalize_triton, finalize_reference, moves_only=True, cpu=finalize_cpu,
        cpu_covers=lambda given: is_small(given.tokens),
    ),
).function
