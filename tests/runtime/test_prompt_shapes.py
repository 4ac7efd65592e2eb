"""The shapes of prompt steps: how far they are rounded up, and which sequences share one."""

from __future__ import annotations

import pytest

from specgraph.runtime.prompt_shapes import FEW_ROWS, MOST_ROWS, entries, num_together, padded_width

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
        ([100] * 5, 8, 5),  # eight entries, of which five are real
        ([100] * 5, 5, 5),
        ([64, 2, 2, 2], 4, 2),  # 66 of 128 rows are real, and with four entries it would be 70 of 256
        ([64, 60, 2, 2], 4, 4),
        ([64, 50, 2, 2], 4, 2),
        ([MOST_ROWS // 4] * 16, 16, 4),
        ([2 * MOST_ROWS, 1], 2, 1),
    ],
)
def test_sequences_share_a_step_unless_most_of_it_would_be_padding(widths: list[int], most: int, taken: int) -> None:
    assert num_together(widths, most) == taken
