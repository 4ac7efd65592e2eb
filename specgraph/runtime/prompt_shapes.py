"""The shapes of prompt steps: how many sequences and rows go into one, and for which shapes it is captured.

A prompt step runs a window ``[b, W]``: ``b`` sequences with ``W`` rows each, of which some are padding. A CUDA graph is
captured for a shape, so shapes are rounded up to few. Padding costs time: with many rows a step is bound by arithmetic,
and takes time in proportion to ``b * W``. With few rows it reads weights, and takes the same time for any number.
"""

from __future__ import annotations

from collections.abc import Sequence

FEW_ROWS = 128
"""Up to this many rows in all, a step takes hardly longer than with a single row (with an 8B model on an H200, 5.3 ms
instead of 3.9). More rows are cut into tiles of this many, so a step takes as long as one whose last tile is full."""
MOST_ROWS = 8192
"""The most rows of a step of several sequences. With an 8B model, twice as many are no faster, and their graph takes
1.5 GB instead of 0.6; half as many are 1 to 2% slower (docs/experiments.md)."""
_WIDTHS_PER_OCTAVE = 8
"""Widths between one power of two and the next for which a step is captured: an eighth is padding at most."""


def padded_width(width: int, count: int) -> int:
    """The width at which a window of ``width`` rows runs for ``count`` sequences.

    It is a power of two for few rows. Above, it is a multiple of a sixteenth of the next power of two, so that few rows
    are padding, and one for which all rows together fill tiles.
    """
    octave = power_of_two(width)
    if count * octave <= FEW_ROWS:
        return octave
    grain = max(octave // (2 * _WIDTHS_PER_OCTAVE), FEW_ROWS // count, 1)
    return -(-width // grain) * grain


def entries(count: int, most: int) -> int:
    """How many entries the row index of a graph has that runs ``count`` of ``most`` sequences."""
    return min(power_of_two(count), most)


def num_together(widths: Sequence[int], most: int) -> int:
    """How many sequences share a prompt step: as many as possible, the widest first.

    At most half of the step's rows are padding, and there are at most ``MOST_ROWS``, except for a sequence by itself.

    Args:
        widths: the rows of each sequence that waits, in descending order; there is at least one.
        most: the number of sequences for which there is room.
    """
    best, total = 1, 0
    for count, width in enumerate(widths, 1):
        total += width
        among = entries(count, most)
        rows = among * padded_width(widths[0], among)
        if rows <= min(2 * total, MOST_ROWS):
            best = count
    return best


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
