"""Packed rows: the real rows of all sequences, one behind the other, without the padding between them.

This is the variable-length layout (varlen), ``cu_seqlens`` of FlashAttention (Dao 2023, arXiv 2307.08691). A row is
what a step computes for one token. A step has a padded grid of rows ``[B, W]``. Sequence ``b`` has ``num_rows[b]`` real
rows at the beginning of its line, and the rest of the line is padding. Where the numbers of rows differ much, as among
prompts, or where prompts run beside sequences that decode, most of the grid is padding. A module costs time for every
row, so it runs the packed rows ``[1, R]``. ``R`` is how many there is room for, and is known to the host; what no
sequence needs lies at the end.

``cu_seqlens`` int64 ``[B + 2]`` says where each sequence begins: those of sequence ``b`` are the packed rows from
``cu_seqlens[b]`` to ``cu_seqlens[b + 1]``. The last interval is the padding, so ``cu_seqlens[B + 1]`` is ``R``.
``source`` int64 ``[R]`` names the place of each packed row in the grid, ``b * W + t``, or -1 for padding.

The ops move rows and compute integers. The programs of a kernel copy a part of one row each, so no row depends on
others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference

_BLOCK = 1024


@dataclass(slots=True)
class PackedPlaces:
    """Where packed rows lie: ``cu_seqlens`` and ``source``, see :func:`packed_places`."""

    num_rows: Tensor
    room: int
    width: int


@dataclass(slots=True)
class PackRows:
    """The packed rows ``[1, R, ...]`` of a grid ``values`` ``[B, W, ...]``; padding is ``fill``."""

    values: Tensor
    source: Tensor
    fill: int = 0


@dataclass(slots=True)
class UnpackRows:
    """The grid ``[B, width, ...]`` of packed rows ``values`` ``[1, R, ...]``; padding is 0."""

    values: Tensor
    cu_seqlens: Tensor
    width: int


@dataclass(slots=True)
class TakePackedRows:
    """``count`` rows of every sequence from its row ``first`` ``[B]`` on: ``[B, count, ...]`` of ``[1, R, ...]``.

    This is :func:`~specgraph.kernels.step.step.take_rows` of the grid. With a ``width``, the last of them is the last
    column of a grid of that width at most. Where a sequence has no such row, it is some row.
    """

    values: Tensor
    cu_seqlens: Tensor
    first: Tensor
    count: int
    width: int | None = None


def packed_places(
    num_rows: Tensor, capacity: Tensor, grid: Tensor | int, extra: int = 0, *, limited: bool = False
) -> tuple[Tensor, Tensor]:
    """Where the real rows of a grid lie when they are packed: ``cu_seqlens`` ``[B + 2]`` and ``source`` ``[R]``.

    Args:
        num_rows: int64 ``[B]``, the real rows of each sequence.
        capacity: ``[R]``; its length is the number of packed rows that there is room for. Rows beyond it are left out.
        grid: ``[B, W, ...]``, any values of the grid, which give its width; or the width.
        extra: the room for further rows of every sequence, so that there is room for ``R + B * extra`` in all.
        limited: the further rows of all sequences are ``R`` at most, and there is no more room than for the whole grid.
    """
    batch, width, room = num_rows.shape[0], _width(grid), capacity.shape[0]
    further = batch * extra
    room = min(room + min(further, room), batch * width) if limited else room + further
    return torch.ops.specgraph.packed_places(num_rows, room, width)


def unpack_rows(values: Tensor, cu_seqlens: Tensor, grid: Tensor | int) -> Tensor:
    """The grid ``[B, W, ...]`` of packed rows ``values`` ``[1, R, ...]``, with 0 where there is padding.

    ``grid`` ``[B, W, ...]`` gives the width, or is the width.
    """
    return torch.ops.specgraph.unpack_rows(values, cu_seqlens, _width(grid))


def _width(grid: Tensor | int) -> int:
    return grid if isinstance(grid, int) else grid.shape[1]


def needed_packed_rows(values: Tensor, cu_seqlens: Tensor, grid: Tensor, num_forced: Tensor, count: int) -> Tensor:
    """:func:`~specgraph.kernels.step.step.needed_rows` of ``grid`` ``[B, T, ...]``: ``[B, min(T, count), H]``.

    Its packed rows are ``values`` ``[1, R, H]``.
    """
    width = grid.shape[1]
    return take_packed_rows(values, cu_seqlens, num_forced, min(count, width), width)


def num_needed(num_rows: Tensor, num_forced: Tensor, grid: Tensor, needed: Tensor) -> Tensor:
    """How many of the rows ``[B, C, H]`` that :func:`needed_packed_rows` gives of ``grid`` are real: int64 ``[B]``."""
    return num_rows - num_forced.clamp(max=grid.shape[1] - needed.shape[1])


def packed_places_reference(given: PackedPlaces) -> tuple[Tensor, Tensor]:
    """:class:`PackedPlaces` in plain PyTorch."""
    counts, width, capacity = given.num_rows.clamp(0, given.width), given.width, given.room
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 1)).clamp_max(capacity)
    starts[-1] = capacity
    row = torch.arange(capacity, device=starts.device)
    sequence = torch.searchsorted(starts[1:-1].contiguous(), row, right=True)
    place = sequence * width + row - starts[sequence]
    return starts, torch.where(sequence < len(counts), place, -1)


def pack_rows_reference(given: PackRows) -> Tensor:
    """:class:`PackRows` in plain PyTorch."""
    values, source = given.values.flatten(0, 1), given.source
    padding = (source < 0).view(-1, *[1] * (values.dim() - 1))
    return values[source.clamp_min(0)].masked_fill(padding, given.fill).unsqueeze(0)


def unpack_rows_reference(given: UnpackRows) -> Tensor:
    """:class:`UnpackRows` in plain PyTorch."""
    starts, values = given.cu_seqlens[:-1], given.values[0]
    row = torch.arange(given.width, device=values.device)
    place = (starts[:-1, None] + row).clamp_max(len(values) - 1)
    padding = row >= (starts[1:] - starts[:-1]).unsqueeze(1)
    return values[place].masked_fill(padding.view(*padding.shape, *[1] * (values.dim() - 1)), 0)


def take_packed_rows_reference(given: TakePackedRows) -> Tensor:
    """:class:`TakePackedRows` in plain PyTorch."""
    first = given.first if given.width is None else given.first.clamp(max=given.width - given.count)
    row = (first.unsqueeze(1) + torch.arange(given.count, device=first.device)).clamp_min(0)
    place = (given.cu_seqlens[:-2, None] + row).clamp_max(given.values.shape[1] - 1)
    return given.values[0][place]


@triton.jit(do_not_specialize=["batch", "width", "capacity"])
def _packed_places_kernel(
    cu_seqlens, source, num_rows, batch, width, capacity,
    SEQUENCES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Where up to ``BLOCK`` rows of one sequence lie, or of the padding. The grid is (B + 1, blocks of rows)."""
    gdc_wait(PDL)
    b = tl.program_id(0)
    # ---- cu_seqlens[b] = sum over sequences s < b of num_rows[s]; lanes are sequences: [SEQUENCES]
    lane = tl.arange(0, SEQUENCES)
    counts = tl.load(num_rows + lane, mask=lane < batch, other=0)
    counts = tl.minimum(tl.maximum(counts, 0), width)
    begin = tl.minimum(tl.sum(tl.where(lane < b, counts, 0), 0), capacity)
    end = tl.minimum(tl.sum(tl.where(lane <= b, counts, 0), 0), capacity)
    end = tl.where(b == batch, capacity, end)
    gdc_launch_dependents(PDL)
    if tl.program_id(1) == 0:
        tl.store(cu_seqlens + b, begin)
        tl.store(cu_seqlens + b + 1, end, mask=b == batch)
    # ---- source[cu_seqlens[b] + t] = b W + t for rows t of this sequence, and -1 for the padding: [BLOCK]
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(source + begin + row, tl.where(b == batch, -1, b * width + row), mask=row < end - begin)


@triton.jit(do_not_specialize=["size"])
def _pack_rows_kernel(packed, values, source, size, FILL: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy a part of one packed row. The grid is (R, blocks of elements)."""
    gdc_wait(PDL)
    # ---- packed[row] = values[source[row]], or FILL; columns are elements of the row: [BLOCK]
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(source + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + tl.maximum(place, 0) * size + column, mask=(column < size) & (place >= 0), other=0)
    gdc_launch_dependents(PDL)
    fill = tl.full([BLOCK], FILL, tl.int32).to(value.dtype)
    tl.store(packed + row * size + column, tl.where(place >= 0, value, fill), mask=column < size)


@triton.jit(do_not_specialize=["width", "size"])
def _unpack_rows_kernel(grid, values, cu_seqlens, width, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Copy a part of one row of the grid. The grid of programs is (B * W, blocks of elements)."""
    gdc_wait(PDL)
    # ---- grid[b, row] = values[cu_seqlens[b] + row], or 0; columns are elements of the row: [BLOCK]
    b, row = tl.program_id(0) // width, tl.program_id(0) % width
    begin = tl.load(cu_seqlens + b)
    real = row < tl.load(cu_seqlens + b + 1) - begin
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + (begin + row) * size + column, mask=(column < size) & real, other=0)
    gdc_launch_dependents(PDL)
    tl.store(grid + tl.program_id(0).to(tl.int64) * size + column, value, mask=column < size)


@triton.jit(do_not_specialize=["count", "latest", "capacity", "size"])
def _take_packed_rows_kernel(
    taken, values, cu_seqlens, first, count, latest, capacity, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Copy a part of one row. The grid is (B * count, blocks of elements)."""
    gdc_wait(PDL)
    # ---- taken[b, r] = values[cu_seqlens[b] + min(first[b], latest) + r]; columns are elements: [BLOCK]
    b, r = tl.program_id(0) // count, tl.program_id(0) % count
    row = tl.maximum(tl.minimum(tl.load(first + b), latest) + r, 0)
    place = tl.minimum(tl.load(cu_seqlens + b) + row, capacity - 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + place * size + column, mask=column < size)
    gdc_launch_dependents(PDL)
    tl.store(taken + tl.program_id(0).to(tl.int64) * size + column, value, mask=column < size)


def packed_places_triton(given: PackedPlaces) -> tuple[Tensor, Tensor]:
    """:class:`PackedPlaces` in one kernel."""
    cu_seqlens, source = _packed_places_fake(given)
    batch = len(given.num_rows)
    launch(
        _packed_places_kernel, (batch + 1, triton.cdiv(len(source), _BLOCK)), cu_seqlens, source,
        given.num_rows.contiguous(), batch, given.width, len(source), SEQUENCES=triton.next_power_of_2(batch + 1),
        BLOCK=_BLOCK, num_warps=4,
    )
    return cu_seqlens, source


def pack_rows_triton(given: PackRows) -> Tensor:
    """:class:`PackRows` in one kernel."""
    packed = _pack_rows_fake(given)
    _copy_rows(_pack_rows_kernel, packed, given.values, given.source, FILL=given.fill)
    return packed


def unpack_rows_triton(given: UnpackRows) -> Tensor:
    """:class:`UnpackRows` in one kernel."""
    unpacked = _unpack_rows_fake(given)
    _copy_rows(_unpack_rows_kernel, unpacked, given.values, given.cu_seqlens, given.width)
    return unpacked


def take_packed_rows_triton(given: TakePackedRows) -> Tensor:
    """:class:`TakePackedRows` in one kernel."""
    taken, capacity = _take_packed_rows_fake(given), given.values.shape[1]
    latest = capacity if given.width is None else given.width - given.count
    places = (given.cu_seqlens, given.first.contiguous(), given.count, latest, capacity)
    _copy_rows(_take_packed_rows_kernel, taken, given.values, *places)
    return taken


def _copy_rows(kernel: Any, result: Tensor, values: Tensor, *places: Tensor | int, **constants: int) -> None:
    """Fill ``result`` ``[B, T, ...]`` with rows of ``values``, by programs that copy a part of a row each."""
    size = result.shape[2:].numel()
    block = block_size(size, _BLOCK)
    launch(
        kernel, (result.shape[:2].numel(), triton.cdiv(size, block)), result, values.contiguous(), *places, size,
        BLOCK=block, num_warps=1 if block < 128 else 4, **constants,
    )


def _packed_places_fake(given: PackedPlaces) -> tuple[Tensor, Tensor]:
    num_rows = given.num_rows
    check_shapes(given, num_rows="B")
    return num_rows.new_empty(num_rows.shape[0] + 2), num_rows.new_empty(given.room)


def _pack_rows_fake(given: PackRows) -> Tensor:
    values, source = given.values, given.source
    require(values.dim() >= 2 and source.dim() == 1, lambda: "values must be [B, W, ...], source [R]")
    return values.new_empty(1, source.shape[0], *values.shape[2:])


def _unpack_rows_fake(given: UnpackRows) -> Tensor:
    values, starts = given.values, given.cu_seqlens
    _check_packed(values, starts)
    return values.new_empty(starts.shape[0] - 2, given.width, *values.shape[2:])


def _take_packed_rows_fake(given: TakePackedRows) -> Tensor:
    values, starts, count = given.values, given.cu_seqlens, given.count
    _check_packed(values, starts)
    batch, firsts = starts.shape[0] - 2, given.first.shape
    require(firsts == (batch,), lambda: f"first must be [B] = [{batch}], not {list(firsts)}")
    fits = given.width is None or count <= given.width
    require(fits, lambda: f"there are no {count} rows together in a line of the grid")
    return values.new_empty(starts.shape[0] - 2, count, *values.shape[2:])


def _check_packed(values: Tensor, cu_seqlens: Tensor) -> None:
    require(values.dim() >= 2 and values.shape[0] == 1, lambda: f"values must be [1, R, ...], not {list(values.shape)}")
    require(cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 2, lambda: "cu_seqlens must be [B + 2]")


declare(
    "packed_places", PackedPlaces, _packed_places_fake,
    triton_or_reference(packed_places_triton, packed_places_reference, moves_only=True),
)
pack_rows = declare(
    "pack_rows", PackRows, _pack_rows_fake, triton_or_reference(pack_rows_triton, pack_rows_reference, moves_only=True),
).function
declare(
    "unpack_rows", UnpackRows, _unpack_rows_fake,
    triton_or_reference(unpack_rows_triton, unpack_rows_reference, moves_only=True),
)
take_packed_rows = declare(
    "take_packed_rows", TakePackedRows, _take_packed_rows_fake,
    triton_or_reference(take_packed_rows_triton, take_packed_rows_reference, moves_only=True),
).function
