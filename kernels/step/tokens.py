"""From the logits and tokens of a step: what is wrong with the logits, the end at an EOS, the next window."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.host import is_small
from specgraph.kernels.step.side_by_side import column_of, side_by_side
from specgraph.kernels.step.writes import writes

NAN_FOUND = -1
"""Says of a sequence that its logits have a NaN."""
_NOTHING = tl.constexpr(0x7FFFFFFF)
_NO_LIMIT = 0x7FFFFFF0  # a multiple of 16, as most limits are: a kernel is compiled for these, and another for others


@dataclass(slots=True)
class Advance:
    """Move every active sequence to its new last token and write the next window.

    ``next_window`` ``[B, K + 1]`` becomes the last accepted token followed by the drafts (tensors ``[B, k]`` with at
    most ``K`` columns in all, and -1 where there is no draft; there is none in columns that are not given).
    ``num_rows`` becomes the number of its real rows. It is limited such that no token gets a position at ``max_length``
    or beyond, and is 0 for a sequence that met an EOS. Sequences that emitted nothing keep their window and position.
    A sequence of more than ``max_context`` tokens has no drafts, and others have ``max_drafts`` ``[B]`` at most.
    """

    next_window: Tensor
    start: Tensor
    num_rows: Tensor
    num_forced: Tensor
    emitted: Tensor
    num_emitted: Tensor
    drafts: list[Tensor]
    max_length: Tensor
    eos_ids: Tensor
    max_drafts: Tensor | None = None
    max_context: int | None = None


def bad_rows(logits: Tensor, window: Tensor, num_rows: Tensor, num_forced: Tensor) -> Tensor:
    """What is wrong with the logits ``[B, R, V]`` of the real, unforced rows of each sequence: int32 ``[B]``.

    It is ``NAN_FOUND`` if there is a NaN among them. Otherwise it is 1 + the row of the block that is the first to have
    nothing but -inf, and therefore no token; 0 if there is no such row. A sequence draws from that row if it emits more
    tokens than there are rows in front of it. ``window`` ``[B, T]`` gives the number of rows of the whole block, from
    which follows where the ``R`` rows lie in it.
    """
    rows = logits.shape[1]
    first = num_forced.clamp(max=window.shape[1] - rows)
    row = first.unsqueeze(1) + torch.arange(rows, device=logits.device)
    real = (row < num_rows.unsqueeze(1)) & (row >= num_forced.unsqueeze(1))
    largest = logits.amax(-1)  # a NaN, if there is one
    empty = (largest == -torch.inf) & real
    first_empty = torch.where(empty.any(-1), first + empty.int().argmax(-1) + 1, 0)
    return torch.where((largest.isnan() & real).any(-1), NAN_FOUND, first_empty).int()


def cut_at_eos(emitted: Tensor, num_forced: Tensor, eos_ids: Tensor) -> Tensor:
    """``emitted`` ``[B, T]`` with everything after the first unforced EOS replaced by -1.

    ``eos_ids`` ``[B, E]`` are each sequence's own, padded with -1. Forced tokens belong to the prompt, and an EOS among
    them does not end the sequence.
    """
    row = torch.arange(emitted.shape[1], device=emitted.device)
    ends = _among(emitted, eos_ids) & (emitted >= 0) & (row >= num_forced.unsqueeze(1))
    after = ends.long().cumsum(1) - ends.long()
    return emitted.masked_fill(after > 0, -1)


def advance_reference(given: Advance) -> None:
    """:class:`Advance` in plain PyTorch."""
    emitted, num_emitted, start = given.emitted, given.num_emitted, given.start
    active = num_emitted > 0
    last = emitted.gather(1, (num_emitted - 1).clamp_min(0).unsqueeze(1))
    end = start + num_emitted
    ended = (num_emitted > given.num_forced) & _among(last, given.eos_ids)[:, 0]
    window = torch.cat([last, *given.drafts], dim=1)
    window = torch.nn.functional.pad(window, (0, given.next_window.shape[1] - window.shape[1]), value=-1)
    proposed = (window[:, 1:] >= 0).long().cumprod(1).sum(1)
    if given.max_context is not None:
        proposed = torch.where(end < given.max_context, proposed, 0)
    if given.max_drafts is not None:
        proposed = torch.minimum(proposed, given.max_drafts)
    rows = torch.minimum(proposed + 1, given.max_length - 1 - end).clamp_min(0)
    given.next_window.copy_(torch.where(active.unsqueeze(1), window.clamp_min(0), given.next_window))
    given.num_rows.copy_(torch.where(active & ~ended, rows, 0))
    start.copy_(torch.where(active, end, start))
    given.num_forced.zero_()


def advance_cpu(given: Advance) -> None:
    """:class:`Advance` of few tokens, in Python."""
    ends = given.eos_ids.tolist()
    windows, starts, rows = given.next_window.tolist(), given.start.tolist(), [0] * len(given.start)
    drafts = [part.tolist() for part in given.drafts]
    missing = [-1] * (given.next_window.shape[1] - 1 - sum(part.shape[1] for part in given.drafts))
    columns = given.emitted.tolist(), given.num_emitted.tolist(), given.num_forced.tolist(), given.max_length.tolist()
    limits = None if given.max_drafts is None else given.max_drafts.tolist()
    for b, (emitted, count, forced, longest) in enumerate(zip(*columns, strict=True)):
        if count <= 0:
            continue
        last, proposed = emitted[count - 1], [*(token for part in drafts for token in part[b]), *missing]
        windows[b] = [max(token, 0) for token in (last, *proposed)]
        starts[b] += count
        if not (count > forced and last in ends[b]):
            until_none = next((index for index, token in enumerate(proposed) if token < 0), len(proposed))
            if given.max_context is not None and starts[b] >= given.max_context:
                until_none = 0
            if limits is not None:
                until_none = min(until_none, limits[b])
            rows[b] = max(0, min(until_none + 1, longest - 1 - starts[b]))
    for buffer, values in ((given.next_window, windows), (given.start, starts), (given.num_rows, rows)):
        buffer.copy_(buffer.new_tensor(values))
    given.num_forced.zero_()


def _among(tokens: Tensor, ids: Tensor) -> Tensor:
    """Which ``tokens`` ``[B, T]`` are among the ``ids`` ``[B, E]`` of their sequence.

    ``torch.isin`` is not used because it sorts from ten ids on, and then waits for the device.
    """
    return (tokens.unsqueeze(-1) == ids.unsqueeze(1)).any(-1)


@triton.jit
def what_is_bad(broken, row, empty):
    """:func:`bad_rows` of one sequence: its rows ``[R]`` that have a NaN, their places, and which are ``empty``."""
    first = tl.min(tl.where(empty, row.to(tl.int32) + 1, _NOTHING), 0)
    return tl.where(tl.max(broken, 0) > 0, -1, tl.where(first == _NOTHING, 0, first))


@triton.jit
def cut_row(token, row, num_forced, eos_ids, NUM_EOS: tl.constexpr, BLOCK: tl.constexpr):
    """The tokens ``[BLOCK]`` of one sequence, where those after the first unforced EOS are replaced by -1.

    ``eos_ids`` points to the sequence's own.
    """
    first = tl.full((BLOCK,), BLOCK, tl.int32)
    for index in range(NUM_EOS):
        first = tl.where(token == tl.load(eos_ids + index), row, first)
    unforced = (token >= 0) & (row >= num_forced)
    end = tl.min(tl.where(unforced, first, BLOCK), axis=0)
    return tl.where(row > end, -1, token)


@triton.jit
def _advance_kernel(
    next_window, start, num_rows, num_forced, emitted, num_emitted, drafts, max_length, eos_ids, max_drafts, width,
    count, max_context,
    NUM_EOS: tl.constexpr, WIDTHS: tl.constexpr, STRIDES: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One sequence per program."""
    gdc_wait(PDL)
    b = tl.program_id(0)
    k = tl.arange(0, BLOCK)  # there are more lanes than drafts; lanes after the last draft have none
    draft = column_of(drafts, b, k, -1, tl.int64, WIDTHS, STRIDES)
    # ---- the last token, the position behind it, and whether it is an EOS that was not given
    accepted = tl.load(num_emitted + b)
    begin = tl.load(start + b)
    last = tl.load(emitted + b * width + tl.maximum(accepted - 1, 0))
    end = begin + accepted
    ended = accepted < 0
    for index in range(NUM_EOS):
        ended = ended | (last == tl.load(eos_ids + b * NUM_EOS + index))
    ended = ended & (accepted > tl.load(num_forced + b))
    # ---- num_rows = 1 + the drafts up to the first -1, as far as max_length leaves room; none behind max_context
    proposed = tl.min(tl.where(draft < 0, k, BLOCK), axis=0)
    proposed = tl.where(end < max_context, proposed, 0)
    if LIMITED:
        proposed = tl.minimum(proposed, tl.load(max_drafts + b))
    rows = tl.maximum(tl.minimum(proposed + 1, tl.load(max_length + b) - 1 - end), 0)
    active = accepted > 0
    gdc_launch_dependents(PDL)
    # ---- next_window = last, draft_1, ..., draft_K
    window = next_window + b * (count + 1)
    tl.store(window, tl.maximum(last, 0), mask=active)
    tl.store(window + 1 + k, tl.maximum(draft, 0), mask=active & (k < count))
    tl.store(num_rows + b, tl.where(active & (ended == 0), rows, 0))
    tl.store(start + b, end, mask=active)
    tl.store(num_forced + b, 0)


def advance_triton(given: Advance) -> None:
    """:class:`Advance` in one kernel."""
    state = (given.next_window, given.start, given.num_rows, given.num_forced)
    batch, count = given.next_window.shape[0], given.next_window.shape[1] - 1
    drafts, widths, strides = side_by_side(given.drafts)
    # There is one warp, since a second one could read values that the first one has already replaced.
    launch(
        _advance_kernel, (batch,), *state, *contiguous(given, "emitted", "num_emitted"), drafts,
        *contiguous(given, "max_length", "eos_ids"),
        given.max_length if given.max_drafts is None else given.max_drafts.contiguous(), given.emitted.shape[1], count,
        _NO_LIMIT if given.max_context is None else given.max_context,
        NUM_EOS=given.eos_ids.shape[1], WIDTHS=widths, STRIDES=strides, LIMITED=given.max_drafts is not None,
        BLOCK=triton.next_power_of_2(count + 1), num_warps=1,
    )


def _advance_covers(given: Advance) -> bool:
    """The kernel writes where the state lies; other strides are the reference's."""
    state = (given.next_window, given.start, given.num_rows, given.num_forced)
    return all(tensor.is_contiguous() for tensor in state)


def _advance_fake(given: Advance) -> None:
    batch, count = given.emitted.shape[0], sum(tensor.shape[1] for tensor in given.drafts)
    window = given.next_window
    require(
        window.dim() == 2 and len(window) == batch and window.shape[1] > count,
        lambda: f"next_window must be [B, K + 1] with B = {batch} and K of at least {count}, not {list(window.shape)}",
    )
    vectors = ("start", "num_rows", "num_forced", "num_emitted", "max_length", "max_drafts")
    check_shapes(given, emitted="B T", eos_ids="B E", drafts="B *", **dict.fromkeys(vectors, "B"))


ADVANCE = declare(
    "advance", Advance, _advance_fake,
    triton_or_reference(
        advance_triton, advance_reference, covers=_advance_covers, moves_only=True, cpu=advance_cpu,
        cpu_covers=lambda given: is_small(given.emitted),
    ),
    mutates=("next_window", "start", "num_rows", "num_forced"),
)
advance_ = writes(*ADVANCE.mutates)(ADVANCE.function)
