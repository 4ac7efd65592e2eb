"""The shapes of prompt steps: how far they are rounded up, and which sequences share one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
import torch

from specgraph.runtime.schedule.prefill import PendingPrompt, prompt_window
from specgraph.runtime.schedule.prompt_shapes import (
    FEW_ROWS,
    FORESEEN,
    MOST_CELLS,
    MOST_ROWS,
    Overhead,
    captured_width,
    entries,
    fill,
    group_size,
    num_together,
    padded_rows,
    padded_width,
    power_of_two,
    rows_beside,
)

LARGE, SMALL = Overhead.of(8 * 10**9, "cuda"), Overhead.of(10**7, "cuda")
COUNTS = (1, 2, 4, 8, 32, 64, 100)


@pytest.mark.parametrize("count", COUNTS)
def test_every_width_is_covered_with_little_padding(count: int) -> None:
    for width in range(1, 4100):
        padded = padded_width(width, count)
        assert padded >= width and padded_width(padded, count) == padded
        if count * padded > 2 * FEW_ROWS:  # with fewer rows than that, padding costs next to nothing
            assert padded - width < max(width / 8, FEW_ROWS / count)


@pytest.mark.parametrize("count", COUNTS)
def test_there_are_few_widths(count: int) -> None:
    assert len({padded_width(width, count) for width in range(1, 2049)}) <= 8 * 11  # octaves up to 2,048


def test_widths_of_one_sequence_and_of_eight() -> None:
    assert [padded_width(width, 1) for width in (1, 5, 128, 129, 1800, 2048)] == [1, 8, 128, 256, 1920, 2048]
    assert [padded_width(width, 8) for width in (1, 5, 128, 129, 1800, 2048)] == [1, 8, 128, 144, 1920, 2048]


def test_entries_are_a_power_of_two_or_all() -> None:
    assert [entries(count, 6) for count in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]


@pytest.mark.parametrize(
    ("widths", "most", "taken"),
    [
        ([7], 1, 1),
        ([100] * 4, 4, 4),
        ([100] * 5, 8, 4),  # a fifth would make it eight entries
        ([100] * 5, 5, 5),
        ([64, 2, 2, 2], 4, 1),
        ([300, 290, 30, 2], 4, 2),
        ([1000, 990], 2, 2),
        ([1000, 500], 2, 1),
        ([MOST_ROWS // 4] * 16, 16, 4),
        ([2 * MOST_ROWS, 1], 2, 1),
    ],
)
def test_sequences_share_a_step_of_a_large_model_unless_padding_costs_more(
    widths: list[int], most: int, taken: int
) -> None:
    assert num_together(widths, most, LARGE.prompt) == taken


def test_steps_of_a_small_model_are_shared_by_all() -> None:
    widths = [300, 200, 100, 50, 20, 10, 5, 1]
    assert num_together(widths, 8, SMALL.prompt) == 8
    assert num_together([MOST_ROWS // 2, *widths], 16, SMALL.prompt) == 1


def test_of_very_many_sequences_the_widest_are_looked_at() -> None:
    assert num_together([1] * (3 * FORESEEN), 3 * FORESEEN, 50_000) == FORESEEN


@pytest.mark.parametrize("overhead", [1, 16, 140, 50_000])
@pytest.mark.parametrize("most", [9, 16])
def test_no_way_to_cut_prompts_into_steps_costs_less(overhead: int, most: int) -> None:
    dice = random.Random(overhead)
    for _ in range(20):
        widths = sorted((dice.randint(1, dice.choice((30, 1000, 4000))) for _ in range(9)), reverse=True)
        ways = itertools.product((False, True), repeat=len(widths) - 1)
        least = min(sum(_cost(step, most, overhead) for step in _steps(widths, way)) for way in ways)
        assert _cost_as_taken(widths, most, overhead) == least


def _steps(widths: list[int], ends: Iterable[bool]) -> list[list[int]]:
    """The sequences of every step; ``ends`` says behind which of them a step ends."""
    steps: list[list[int]] = [[]]
    for width, end in zip(widths, (*ends, False), strict=True):
        steps[-1].append(width)
        if end:
            steps.append([])
    return steps


def _cost(widths: list[int], most: int, overhead: int) -> float:
    count = entries(len(widths), most)
    rows = count * padded_width(widths[0], count)
    return overhead + rows if rows <= MOST_ROWS or len(widths) == 1 else float("inf")


def _cost_as_taken(widths: list[int], most: int, overhead: int) -> float:
    total = 0.0
    while widths:
        taken = num_together(widths, most, overhead)
        total += _cost(widths[:taken], most, overhead)
        widths = widths[taken:]
    return total


def test_a_chunk_tells_the_shape_of_the_graph_that_runs_it() -> None:
    parts = [(row, PendingPrompt(torch.arange(9), 0, 9, [], 1), count) for row, count in ((0, 9), (5, 5))]
    assert prompt_window(parts).captured_shape(8) == (2, 256, 16)
    parts = [(row, PendingPrompt(torch.arange(900), 0, 900, [], 1), 300) for row in range(3)]
    beside = prompt_window(parts, decoding={3: 2, 4: 2})
    assert beside.captured_shape(8) == (8, 512, 1024) and beside.captured_shape(5) == (5, 512, 1024)


def test_groups_are_larger_where_prompt_steps_cost_more_and_more_sequences_end() -> None:
    assert group_size(64, 1, 0.25, LARGE) == group_size(64, 4, 0.6, LARGE) == 1  # reading the weights is paid anyway
    assert group_size(64, 1, 0.25, LARGE, joint=False) == 5 and group_size(64, 4, 1.4, SMALL, joint=False) == 30
    assert group_size(64, 1, 0.5, SMALL) == 16 and group_size(64, 4, 1.4, SMALL) == 26
    assert group_size(64, 1, 64.0, SMALL) == 32 and group_size(2, 1, 0.1, LARGE) == group_size(1, 1, 1.0, SMALL) == 1


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("width", "ends", "overhead"), [(1, 0.25, LARGE), (4, 0.6, LARGE), (1, 0.5, SMALL)])
def test_no_other_group_costs_less(width: int, ends: float, overhead: Overhead, joint: bool) -> None:
    def cost(group: int) -> float:
        more = overhead.prompt - (overhead.decode if joint else 0)
        return more * ends / group + (overhead.decode + 64 * width) * group / 2 / 64

    assert min(range(1, 33), key=cost) in {group_size(64, width, ends, overhead, joint=joint) + d for d in (-1, 0, 1)}


def test_packed_rows_are_rounded_up_to_whole_tiles() -> None:
    assert [padded_rows(rows) for rows in (1, 17, 128, 129, 300, 1100, 2049, 5000)] == [
        16, 32, 128, 256, 384, 1152, 2304, 5120,
    ]  # fmt: skip
    assert [padded_rows(rows, joint=True) for rows in (1, 128, 129, 300, 1100, 5000)] == [16, 128, 256, 512, 1280, 5120]
    for rows in range(1, 9000):
        padded = padded_rows(rows)
        assert padded >= rows and padded_rows(padded) == padded
        assert padded - rows < max(rows / 8, FEW_ROWS)
    assert len({padded_rows(rows) for rows in range(1, MOST_ROWS + 1)}) == 4 + 15 + 16


def test_windows_have_few_widths_and_little_room_for_many_sequences() -> None:
    assert [captured_width(width, 1) for width in (1, 200, 257, 2048)] == [256, 256, 512, 2048]
    assert [captured_width(3, count) for count in (2, 64, 65, 1024)] == [256, 256, 128, 16]


def test_steps_that_decode_beside_prompts_are_full() -> None:
    assert [rows_beside(rows, patient=False) for rows in (1, 64, 128, 129, 256, 400)] == [255, 192, 128, 383, 256, 368]
    assert [rows_beside(rows, patient=True) for rows in (1, 64, 256, 1000, 9000)] == [2047, 1984, 1792, 1048, 8192]


@pytest.mark.parametrize(
    ("left", "most", "budget", "others", "taken"),
    [
        ([7], 9, 100, 0, [7]),
        ([30], 9, 100, 0, [8]),  # the token behind them is the ninth column
        ([30, 5, 9, 10], 9, 100, 0, [8, 5, 9, 8]),
        ([30, 5, 9], 9, 12, 0, [8, 4]),
        ([30, 5, 9], 99, 33, 0, [30, 3]),
        ([5, 9], 99, 5, 3, [5]),
        ([2000, 900], 2048, 8192, 14, [1023, 900]),  # 16 sequences have 1,024 columns each
        ([2000, 900], 2048, 8192, 0, [2000, 900]),
        ([9000], 2048, 8192, 63, [255]),
        ([5, 5], 1, 100, 0, [1, 1]),
    ],
)
def test_prompts_are_run_in_their_order_as_far_as_they_have_room(
    left: list[int], most: int, budget: int, others: int, taken: list[int]
) -> None:
    assert fill(left, most, budget, others) == taken


def test_no_window_is_too_large_and_none_stands_still() -> None:
    dice = random.Random(1)
    for _ in range(500):
        left = [dice.randint(1, dice.choice((9, 300, 4000))) for _ in range(dice.randint(1, 80))]
        most, budget, others = dice.choice((2, 7, 256, 2048)), dice.choice((1, 60, 256, 8192)), dice.choice((0, 5, 63))
        counts = fill(left, most, budget, others)
        columns = [n + (n < rows) for n, rows in zip(counts, left, strict=False)]
        assert counts and min(counts) >= 1 and sum(counts) <= budget and max(columns) <= max(most, 2)
        assert len(counts) + others == 1 or power_of_two(len(counts) + others) * max(columns) <= MOST_CELLS
        assert all(n <= rows for n, rows in zip(counts, left, strict=False))
