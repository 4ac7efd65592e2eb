"""Packed rows: what lies where, against loops over sequences, and the Triton forms against plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels import step
from tests.kernels.step.test_rows import DEVICE, REFERENCE, TRITON, ids, same, there

COUNTS = ([3], [0, 4, 1], [4, 4], [0, 0, 0], [2, 0, 9, 4, 0])
WIDTH = 4


def packed_by_hand(grid: Tensor, counts: list[int], capacity: int, fill: int) -> Tensor:
    rows = [grid[b, t] for b, count in enumerate(counts) for t in range(min(count, WIDTH))]
    return torch.stack(rows + [torch.full_like(grid[0, 0], fill)] * (capacity - len(rows))).unsqueeze(0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
@pytest.mark.parametrize("counts", COUNTS)
def test_real_rows_stand_one_behind_the_other(counts: list[int], dtype: torch.dtype) -> None:
    grid = (torch.arange(len(counts) * WIDTH * 5).view(len(counts), WIDTH, 5) + 1).to(dtype)
    capacity = sum(min(count, WIDTH) for count in counts) + 3
    starts, source = step.packed_places(ids(*counts), torch.empty(capacity), grid)
    packed = step.pack_rows(grid, source, fill=-1)
    same(packed, packed_by_hand(grid, counts, capacity, -1))
    assert starts.tolist()[-1] == capacity and starts.tolist()[0] == 0
    back = step.unpack_rows(packed, starts, grid)
    for b, count in enumerate(counts):
        assert torch.equal(back[b, :count], grid[b, :count]) and not back[b, count:].any()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_taken_as_from_the_grid(count: int, together: bool) -> None:
    counts = [4, 1, 0, 3]
    grid = torch.randn(4, WIDTH, 3)
    starts, source = step.packed_places(ids(*counts), torch.empty(20), grid)
    packed, first = step.pack_rows(grid, source), ids(1, 0, 0, 0)
    if together:
        found, wanted = (
            step.needed_packed_rows(packed, starts, grid, first, count),
            step.needed_rows(grid, first, count),
        )
    else:
        found, wanted = step.take_packed_rows(packed, starts, first, count), step.take_rows(grid, first, count)
    for b, real in enumerate(counts):
        begin = min(int(first[b]), WIDTH - count) if together else int(first[b])
        inside = [r for r in range(count) if begin + r < real]
        assert torch.equal(found[b, inside], wanted[b, inside])
    assert found.shape == wanted.shape


def test_room_for_more_rows_of_every_sequence() -> None:
    starts, source = step.packed_places(ids(2, 5, 0), torch.empty(3), torch.empty(3, 6), extra=2)
    assert starts.tolist() == [0, 2, 7, 7, 9] and source.tolist() == [0, 1, 6, 7, 8, 9, 10, -1, -1]


@pytest.mark.parametrize(("extra", "capacity", "room"), [(2, 3, 6), (2, 9, 15), (2, 20, 18), (0, 20, 18), (0, 5, 5)])
def test_room_for_further_rows_that_are_limited_in_all(extra: int, capacity: int, room: int) -> None:
    starts, source = step.packed_places(ids(1, 3, 0), torch.empty(capacity), 6, extra=extra, limited=True)
    assert len(source) == starts[-1] == room and starts.tolist()[:-1] == [0, 1, 4, 4]


def test_rows_without_room_are_left_out() -> None:
    starts, source = step.packed_places(ids(3, 3), torch.empty(4), torch.empty(2, 3))
    assert starts.tolist() == [0, 3, 4, 4] and source.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("spare", [0, 1, 1500])
def test_packing_in_triton(counts: list[int], spare: int) -> None:
    capacity = max(1, sum(min(count, WIDTH) for count in counts) + spare)
    given = ids(*counts), capacity, WIDTH
    same(TRITON["packed_places"](*there(given)), REFERENCE["packed_places"](*given))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1200,)])
@pytest.mark.parametrize("counts", COUNTS)
def test_moving_rows_in_triton(counts: list[int], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    grid = torch.randn(len(counts), WIDTH, *shape, generator=torch.Generator().manual_seed(0)).mul(50).to(dtype)
    starts, source = REFERENCE["packed_places"](ids(*counts), 23, WIDTH)
    fill = 0 if dtype.is_floating_point else -1  # the interpreter converts no number but 0 to bfloat16
    packed = REFERENCE["pack_rows"](grid, source, fill)
    same(TRITON["pack_rows"](*there((grid, source)), fill), packed)
    same(TRITON["unpack_rows"](*there((packed, starts)), WIDTH), REFERENCE["unpack_rows"](packed, starts, WIDTH))
    if shape:
        first = torch.arange(len(counts)) - 1
        for width in (None, WIDTH):
            args = (packed, starts, first if width is None else first.clamp_min(0))
            found = TRITON["take_packed_rows"](*there(args), 2, width)
            same(found, REFERENCE["take_packed_rows"](*args, 2, width))


def test_arguments_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"values must be \[1, R, ...\], not \[2, 3\]"):
        step.unpack_rows(torch.empty(2, 3, device="meta"), ids(0, 1, 3).to("meta"), torch.empty(1, 3, device="meta"))
    assert DEVICE in ("cpu", "cuda")
