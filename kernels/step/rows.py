"""Rows of a step as ops of one launch each: their positions, their slots, their selection, and mask rows behind them.

As separate ATen operations each of them
would take 3 to 18 launches of 1.5 to 2 us, one after the other. Shapes and dtypes are those of that module: ``B``
sequences, ``T`` rows per sequence, ids and counts int64. Nothing is computed but integers, and floating-point rows are
copied.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.attention.arguments import PADDING_SLOT
from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, contiguous, dense_rows, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference
from specgraph.kernels.step.host import is_small

_BLOCK = 1024


@dataclass(slots=True)
class ConsecutivePositions:
    """For ``start`` ``[B]``, the positions ``start + row + i`` ``[B, width]`` for every ``i`` below ``count``."""

    start: Tensor
    width: int
    count: int


@dataclass(slots=True)
class RowSlots:
    """Cache slots ``[B, T]`` of rows at ``positions`` ``[B, T]``.

    Only the first ``num_rows`` ``[B]`` rows are real. They get ``block * block_size + offset`` through ``block_table``
    ``[B, M]``; other rows, and rows before position 0 or at or past ``max_length`` ``[B]``, get ``PADDING_SLOT``.
    """

    positions: Tensor
    num_rows: Tensor
    block_table: Tensor
    max_length: Tensor
    _: KW_ONLY
    block_size: int


@dataclass(slots=True)
class ConsecutiveRows:
    """``count`` consecutive rows of ``values`` ``[B, T, H]`` from row ``first`` ``[B]`` on: ``[B, count, H]``.

    A row outside of the block is replaced by the block's first or last row. With ``together``, which needs
    ``count <= T``, all rows are moved back until the last one is inside.
    """

    values: Tensor
    first: Tensor
    count: int
    together: bool


@dataclass(slots=True)
class ExpandDraftInputs:
    """Put ``count`` mask rows behind the real rows of every sequence, so that one call drafts ``count + 1`` tokens.

    Attributes:
        tokens: int64 ``[B, T]``, of which the first ``num_rows`` ``[B]`` are real.
        num_rows: int64 ``[B]``.
        hidden: ``[B, T, H]``: the hidden states of these rows, or None.
        mask_hidden: ``[H]``: the hidden state of a mask row, or None.
        max_drafts: int64 ``[B]``: how many drafts each sequence is to have at most, of which a mask row gives one and
            its last real row another; None: all.
        mask_token_id: the token of a mask row.
        count: the most mask rows of a sequence.

    Returns:
        tokens ``[B, T + count]``, the number of rows that are now real ``[B]`` (an inactive sequence still has none),
        hidden states ``[B, T + count, H]``, which are empty where there are none, and the number of drafts ``[B]``. The
        mask rows directly follow the real ones, so that their positions are also counted from the first row.
    """

    tokens: Tensor
    num_rows: Tensor
    hidden: Tensor | None
    mask_hidden: Tensor | None
    max_drafts: Tensor | None = None
    _: KW_ONLY
    mask_token_id: int
    count: int


def positions_of(start: Tensor, width: int, count: int) -> list[Tensor]:
    """:class:`ConsecutivePositions` in plain PyTorch."""
    positions = start.unsqueeze(1) + torch.arange(width, device=start.device)
    return [positions + i if i else positions for i in range(count)]


def consecutive_positions_reference(given: ConsecutivePositions) -> list[Tensor]:
    """:class:`ConsecutivePositions` in plain PyTorch."""
    return positions_of(given.start, given.width, given.count)


def row_slots_reference(given: RowSlots) -> Tensor:
    """:class:`RowSlots` in plain PyTorch."""
    positions, table, size = given.positions, given.block_table, given.block_size
    page = (positions // size).clamp(0, table.shape[1] - 1)
    block = table.gather(1, page)
    row = torch.arange(positions.shape[1], device=positions.device)
    inside = (row < given.num_rows.unsqueeze(1)) & (positions >= 0) & (positions < given.max_length.unsqueeze(1))
    return torch.where(inside & (block >= 0), block * size + positions % size, PADDING_SLOT)


def row_slots_cpu(given: RowSlots) -> Tensor:
    """:class:`RowSlots` of few rows, in Python."""
    columns = given.positions.tolist(), given.num_rows.tolist(), given.block_table.tolist(), given.max_length.tolist()
    slots = [
        [
            _slot(position, table, given.block_size) if row < count and 0 <= position < longest else PADDING_SLOT
            for row, position in enumerate(positions)
        ]
        for positions, count, table, longest in zip(*columns, strict=True)
    ]
    return given.positions.new_tensor(slots)


def _slot(position: int, table: list[int], size: int) -> int:
    block = table[min(position // size, len(table) - 1)]
    return block * size + position % size if block >= 0 else PADDING_SLOT


def consecutive_rows_reference(given: ConsecutiveRows) -> Tensor:
    """:class:`ConsecutiveRows` in plain PyTorch."""
    values, count, length = given.values, given.count, given.values.shape[1]
    first = given.first.clamp(max=length - count) if given.together else given.first
    index = (first.unsqueeze(1) + torch.arange(count, device=values.device)).clamp(0, length - 1)
    return values.gather(1, index.unsqueeze(2).expand(-1, -1, values.shape[2]))


def expand_draft_inputs_reference(given: ExpandDraftInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:class:`ExpandDraftInputs` in plain PyTorch."""
    count, hidden = given.count, given.hidden
    row = torch.arange(given.tokens.shape[1] + count, device=given.tokens.device)
    end = given.num_rows.unsqueeze(1)
    drafts = torch.where(given.num_rows > 0, count + 1, 0)
    if given.max_drafts is not None:
        drafts = torch.minimum(drafts, given.max_drafts).clamp_min(0)
    masks = (drafts - 1).clamp_min(0)
    masked = (row >= end) & (row < end + masks.unsqueeze(1))
    tokens = torch.where(masked, given.mask_token_id, torch.nn.functional.pad(given.tokens, (0, count)))
    rows = given.num_rows + masks
    if hidden is None or given.mask_hidden is None:
        return tokens, rows, torch.empty(0, device=tokens.device), drafts
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, count))
    return tokens, rows, torch.where(masked.unsqueeze(2), given.mask_hidden.to(hidden.dtype), padded), drafts


@triton.jit
def _consecutive_positions_kernel(positions, start, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The positions of up to ``BLOCK`` rows of one sequence. The grid is (B, blocks of rows)."""
    gdc_wait(PDL)
    b = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(start + b) + row
    gdc_launch_dependents(PDL)
    for index in tl.static_range(COUNT):
        tl.store(positions[index] + b * width + row, position + index, mask=row < width)


@triton.jit
def _consecutive_rows_kernel(
    taken, values, first, count, length, width, outer, inner, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy a part of one row. The grid is (B * count, blocks of features)."""
    gdc_wait(PDL)
    b, r = (tl.program_id(0) // count).to(tl.int64), tl.program_id(0) % count
    begin = tl.load(first + b)
    # ---- taken[b, r] = values[b, clamp(first + r)]; columns are features: [BLOCK]
    if TOGETHER:
        begin = tl.minimum(begin, length - count)
    row = tl.minimum(tl.maximum(begin + r, 0), length - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + b * outer + row * inner + column, mask=column < width)
    gdc_launch_dependents(PDL)
    tl.store(taken + tl.program_id(0).to(tl.int64) * width + column, value, mask=column < width)


@triton.jit
def _expand_draft_inputs_kernel(
    out_tokens, out_rows, out_hidden, out_drafts, tokens, num_rows, hidden, mask_hidden, max_drafts, length, width,
    outer, inner, mask_token,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Write a part of one row of the expanded input. The grid is (B * (T + count), blocks of features)."""
    gdc_wait(PDL)
    total = length + COUNT
    b, row = (tl.program_id(0) // total).to(tl.int64), tl.program_id(0) % total
    # ---- a mask row in the rows num_rows .. num_rows + masks - 1, and what is there in all others: [BLOCK]
    end = tl.load(num_rows + b)
    drafts = tl.where(end > 0, COUNT + 1, 0)
    if LIMITED:
        drafts = tl.maximum(tl.minimum(tl.load(max_drafts + b), drafts), 0)
    masks = tl.maximum(drafts - 1, 0)
    masked = (row >= end) & (row < end + masks)
    token = tl.load(tokens + b * length + row, mask=row < length, other=0)
    place = tl.program_id(0).to(tl.int64)
    if HIDDEN:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        own = tl.load(hidden + b * outer + row * inner + column, mask=inside & (row < length), other=0.0)
        mask = tl.load(mask_hidden + column, mask=inside, other=0.0).to(own.dtype)
        tl.store(out_hidden + place * width + column, tl.where(masked, mask, own), mask=inside)
    if tl.program_id(1) == 0:
        tl.store(out_tokens + place, tl.where(masked, mask_token, token))
        tl.store(out_rows + b, end + masks, mask=row == 0)
        tl.store(out_drafts + b, drafts, mask=row == 0)


@triton.jit
def _row_slots_kernel(
    slots, positions, num_rows, block_table, max_length, width, pages, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """The slots of up to ``BLOCK`` rows of one sequence. The grid is (B, blocks of rows)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    b = tl.program_id(0)
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < width
    # ---- slot = block_table[position / BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE, or -1: [BLOCK]
    position = tl.load(positions + b * width + row, mask=inside, other=0)
    page = tl.minimum(tl.maximum(position // BLOCK_SIZE, 0), pages - 1)
    block = tl.load(block_table + b * pages + page, mask=inside, other=-1)
    real = (row < tl.load(num_rows + b)) & (position >= 0) & (position < tl.load(max_length + b)) & (block >= 0)
    slot = tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
    tl.store(slots + b * width + row, slot, mask=inside)


def consecutive_positions_triton(given: ConsecutivePositions) -> list[Tensor]:
    """:class:`ConsecutivePositions` in one kernel."""
    start, width, positions = given.start, given.width, _consecutive_positions_fake(given)
    block = block_size(width, 256)
    if positions:
        launch(
            _consecutive_positions_kernel, (len(start), triton.cdiv(width, block)), tuple(positions),
            start.contiguous(), width, COUNT=given.count, BLOCK=block, num_warps=1,
        )
    return positions


def row_slots_triton(given: RowSlots) -> Tensor:
    """:class:`RowSlots` in one kernel."""
    slots = given.positions.new_empty(given.positions.shape)
    batch, width = slots.shape
    block = block_size(width, 256)
    launch(
        _row_slots_kernel, (batch, triton.cdiv(width, block)), slots,
        *contiguous(given, "positions", "num_rows", "block_table", "max_length"), width, given.block_table.shape[1],
        BLOCK_SIZE=given.block_size, BLOCK=block, num_warps=1,
    )
    return slots


def consecutive_rows_triton(given: ConsecutiveRows) -> Tensor:
    """:class:`ConsecutiveRows` in one kernel."""
    values, count = dense_rows(given.values), given.count
    batch, length, width = values.shape
    taken = values.new_empty(batch, count, width)
    block = block_size(width, _BLOCK)
    launch(
        _consecutive_rows_kernel, (batch * count, triton.cdiv(width, block)), taken, values, given.first.contiguous(),
        count, length, width, values.stride(0), values.stride(1), TOGETHER=given.together, BLOCK=block, num_warps=4,
    )
    return taken


def expand_draft_inputs_triton(given: ExpandDraftInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:class:`ExpandDraftInputs` in one kernel."""
    outputs = _expand_draft_inputs_fake(given)
    tokens, hidden, mask_hidden, count = given.tokens, given.hidden, given.mask_hidden, given.count
    batch, length = tokens.shape
    limit = given.num_rows if given.max_drafts is None else given.max_drafts
    if outputs[0].numel() == 0:
        outputs[1].zero_()
        outputs[3].zero_()
        return outputs
    both = hidden is not None and mask_hidden is not None
    if hidden is None or mask_hidden is None:
        hidden = mask_hidden = outputs[2]
        width, outer, inner = 1, 0, 0
    else:
        hidden = dense_rows(hidden)
        width, outer, inner = hidden.shape[2], hidden.stride(0), hidden.stride(1)
    block = block_size(width, _BLOCK)
    launch(
        _expand_draft_inputs_kernel, (batch * (length + count), triton.cdiv(width, block)), *outputs,
        *contiguous(given, "tokens", "num_rows"), hidden, mask_hidden.contiguous(), limit.contiguous(), length, width,
        outer, inner, given.mask_token_id, COUNT=count, HIDDEN=both, LIMITED=given.max_drafts is not None, BLOCK=block,
        num_warps=4,
    )
    return outputs


def _consecutive_positions_fake(given: ConsecutivePositions) -> list[Tensor]:
    check_shapes(given, start="B")
    start = given.start
    return [start.new_empty(start.shape[0], given.width) for _ in range(given.count)]


def _row_slots_fake(given: RowSlots) -> Tensor:
    check_shapes(given, positions="B T", num_rows="B", block_table="B M", max_length="B")
    return given.positions.new_empty(given.positions.shape)


def _consecutive_rows_fake(given: ConsecutiveRows) -> Tensor:
    check_shapes(given, values="B T H", first="B")
    values, count = given.values, given.count
    fits = not given.together or count <= values.shape[1]
    require(fits, lambda: f"there are no {count} rows together in the block")
    return values.new_empty(values.shape[0], count, values.shape[2])


def _expand_draft_inputs_fake(given: ExpandDraftInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, hidden, mask_hidden = given.tokens, given.hidden, given.mask_hidden
    check_shapes(given, tokens="B T", num_rows="B", hidden="B T H", mask_hidden="H", max_drafts="B")
    batch, length = tokens.shape[0], tokens.shape[1] + given.count
    out, rows, drafts = tokens.new_empty(batch, length), tokens.new_empty(batch), tokens.new_empty(batch)
    if hidden is None or mask_hidden is None:
        return out, rows, torch.empty(0, device=tokens.device), drafts
    return out, rows, hidden.new_empty(batch, length, hidden.shape[2]), drafts


consecutive_positions = declare(
    "consecutive_positions", ConsecutivePositions, _consecutive_positions_fake,
    triton_or_reference(consecutive_positions_triton, consecutive_positions_reference, moves_only=True),
).function
row_slots = declare(
    "row_slots", RowSlots, _row_slots_fake,
    triton_or_reference(
        row_slots_triton, row_slots_reference, moves_only=True, cpu=row_slots_cpu,
        cpu_covers=lambda given: is_small(given.positions),
    ),
).function
consecutive_rows = declare(
    "consecutive_rows", ConsecutiveRows, _consecutive_rows_fake,
    triton_or_reference(consecutive_rows_triton, consecutive_rows_reference, moves_only=True),
).function
expand_draft_inputs = declare(
    "expand_draft_inputs", ExpandDraftInputs, _expand_draft_inputs_fake,
    triton_or_reference(expand_draft_inputs_triton, expand_draft_inputs_reference, moves_only=True),
).function
