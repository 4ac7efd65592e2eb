"""The shapes of prompt steps: how many sequences and rows go into one, and for which shapes it is captured.

A prompt step runs a window ``[b, W]``: ``b`` sequences with ``W`` rows each, of which some are padding. A CUDA graph is
captured for a shape, so shapes are rounded up to few. Padding costs time: with many rows a step is bound by arithmetic,
and takes time in proportion to ``b * W``. But every step also costs what it costs with a single row: it reads all
weights, launches its kernels, and keeps the host busy. So a step costs as if it had some rows more than it has.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FEW_ROWS = 128
"""Up to this many rows in all, a step takes hardly longer than with a single row (with an 8B model on an H200, 5.3 ms
instead of 3.9). More rows are cut into tiles of this many, so a step takes as long as one whose last tile is full."""
MOST_ROWS = 8192
"""The most rows of a step of several sequences. With an 8B model, twice as many are no faster, and their graph takes
1.5 GB instead of 0.6; half as many are 1 to 2% slower (docs/experiments.md)."""
FORESEEN = 2048
"""The most sequences that a prompt step is planned for, so that planning takes some tens of milliseconds at most."""
_CPU, _GPU = (16, 2e8, 2e8), (140, 2e11, 1e12)
"""What a step takes besides its rows: the rows that are computed in the time in which the weights are read, whatever
the model, and the FLOPs of the time that launches and the host take, for a decode step and for a prompt step. Those of
the GPU were read off an H200, where these are a quarter of a millisecond and 1.3 ms."""
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


class Overhead(NamedTuple):
    """What a step costs besides its rows, as the number of rows that are computed in this time.

    Attributes:
        decode: of a decode step.
        prompt: of a prompt step.
    """

    decode: int
    prompt: int

    @staticmethod
    def of(num_parameters: int, device_type: str) -> Overhead:
        """That of a model, estimated: its weights are read, its kernels launched, and the host has work to do."""
        reading, *launching = _CPU if device_type == "cpu" else _GPU
        return Overhead(*(max(reading, round(flops / (2 * num_parameters))) for flops in launching))


def group_size(rows: int, width: int, ends: float, overhead: Overhead) -> int:
    """How many sequences best enter together, where ``rows`` sequences decode with ``width`` rows each.

    Every group costs the overhead of a prompt step, and while a group gathers, half of its rows are idle on average.
    With ``ends`` sequences that end per decode step, and a prompt step's overhead of ``F`` decode steps, a group of
    ``g`` costs ``ends / g * F`` of the time, and ``g / 2 / rows``: together the least for ``sqrt(2 rows ends F)``.
    """
    factor = overhead.prompt / (overhead.decode + rows * width)
    return max(1, min(rows // 2, round(math.sqrt(2 * rows * ends * factor))))


def num_together(widths: Sequence[int], most: int, overhead: int, most_rows: int = MOST_ROWS) -> int:
    """How many sequences share the next prompt step, the widest first, so that all steps together cost the least.

    There are at most ``most_rows`` rows in a step, except for a sequence by itself. Of more than ``FORESEEN``
    sequences, only the widest are looked at.

    Args:
        widths: the rows of each sequence that waits, in descending order; there is at least one.
        most: the number of sequences for which there is room.
        overhead: what a prompt step costs besides its rows (:class:`Overhead`).
        most_rows: as above.
    """
    widths = widths[:FORESEEN]
    taken, cost = 0, [0] * (len(widths) + 1)  # what all steps cost for the sequences from each place on
    for begin in reversed(range(len(widths))):
        options = []
        for count in _counts(len(widths) - begin):
            among = entries(count, most)
            rows = among * padded_width(widths[begin], among)
            if rows <= most_rows or count == 1:
                options.append((overhead + rows + cost[begin + count], -count))
        cost[begin], taken = min(options)
    return -taken  # by the last, which begins with the first sequence; of equal costs, with as many as possible


def _counts(left: int) -> Iterator[int]:
    """The powers of two below ``left``, then itself: with any other number, entries of the row index are idle."""
    count = 1
    while count < left:
        yield count
        count *= 2
    yield left


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``."""
    return 1 << (number - 1).bit_length()
