"""The shapes of steps that run prompts: how many sequences and rows go into one, and for which shapes it is captured.

Such a step has a window ``[b, W]``: ``b`` sequences with up to ``W`` rows each. Its modules run the ``R`` real rows
alone (:mod:`specgraph.specialise.pack_rows`), so the padding of the window costs next to nothing. With many rows a step
is bound by arithmetic, and takes time in proportion to ``R``. But every step also costs what it costs with a single
row: it reads all weights, launches its kernels, and keeps the host busy. So sequences that decode join a step that runs
prompts, and prompts may wait for each other. A CUDA graph is captured for a shape ``(b, W, R)``, so shapes are rounded
up to few.

Steps that score tokens run the window as it is. There, padding costs as much as other rows, and sequences are put
together by what that costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

FEW_ROWS = 128
"""Up to this many rows in all, a step takes hardly longer than with a single row (with an 8B model on an H200, 5.3 ms
instead of 3.9). More rows are cut into tiles of this many, so a step takes as long as one whose last tile is full."""
FULL_ROWS = 256
"""Up to this many rows, the linear layers read their weights once for all of them (``kernels/linear/hopper.py``). With
an 8B model on an H200, 256 rows take 7.8 ms and 257 take 12.1."""
MANY_ROWS = 2048
"""Fewer rows take longer per row: 14.5 ms for 512 of them, and 26.8 for 1,024. Sessions of an 8B model that decode
beside prompts take 0.7% less time in all with 2,048 than with 1,024 (docs/performance.md)."""
MOST_CELLS = 16_384
"""The largest window ``b * W`` of several sequences; what a drafter keeps of each of its places takes memory."""
MOST_ROWS = 8192
"""The most rows of a step of several sequences. With an 8B model, twice as many are no faster, and their graph takes
1.5 GB instead of 0.6; half as many are 1 to 2% slower (docs/experiments.md)."""
FORESEEN = 2048
"""The most sequences that a prompt step is planned for, so that planning takes some tens of milliseconds at most."""
LEAST_WIDTH = 256
"""Narrower windows are captured as if they had this width, if so many sequences have room for that."""
LEAST_ROWS = 16
"""Steps with fewer packed rows are captured as if they had these; they take as long."""
_CPU, _GPU = (16, 2e8, 2e8), (140, 2e11, 1e12)
"""What a step takes besides its rows: the rows that are computed in the time in which the weights are read, whatever
the model, and the FLOPs of the time that launches and the host take, for a decode step and for a prompt step. Those of
the GPU were read off an H200, where these are a quarter of a millisecond and 1.3 ms."""
_WIDTHS_PER_OCTAVE = 8
"""Widths between one power of two and the next for which a step is captured: an eighth is padding at most."""


def padded_rows(rows: int, *, joint: bool = False) -> int:
    """For how many packed rows a step is captured that has ``rows``: few of them are padding, and they fill tiles.

    A session has so many steps in which sequences decode beside prompts (``joint``) that these have fewer shapes.
    """
    octave = power_of_two(rows)
    if octave <= FEW_ROWS:
        return max(octave, LEAST_ROWS)
    grain = max(octave // (2 * _WIDTHS_PER_OCTAVE), FULL_ROWS if joint else FEW_ROWS)
    return -(-rows // grain) * grain


def captured_width(width: int, count: int) -> int:
    """For which width of the window a step is captured, where ``count`` sequences have up to ``width`` columns.

    The padding costs little, so this is one of few powers of two.
    """
    return max(power_of_two(width), min(LEAST_WIDTH, MOST_CELLS // power_of_two(count)))


def rows_beside(rows: int, *, patient: bool) -> int:
    """How many rows of prompts best run beside ``rows`` of sequences that decode, so that the step is full.

    At least half of ``FULL_ROWS`` are for prompts, and half as many as those of sequences that decode, lest most of a
    large batch wait for the others. If nobody is ``patient``, the step is as small as that allows. If all are, many
    rows run, which take less time each.
    """
    least = rows + max(FULL_ROWS, rows) // 2
    full = -(-least // FULL_ROWS) * FULL_ROWS
    return min(max(full, max(MANY_ROWS, 2 * rows) if patient else 0) - rows, MOST_ROWS)


def fill(left: Sequence[int], most: int, budget: int, others: int = 0, width: int = 1) -> list[int]:
    """How many rows the next step runs of each of the first sequences that wait.

    Args:
        left: the rows that each has left to run, in the order in which they came; there is at least one.
        most: the most rows of a sequence.
        budget: the most rows of all.
        others: the number of further sequences in the step.
        width: the least number of columns of its window.

    A sequence that is not run to its end has a column more than rows, for the token behind them. Each has a row at
    least, and the window has at most ``MOST_CELLS`` places unless there is a single sequence in the step.
    """
    count = _num_within(left, most, budget)
    together = power_of_two(count + others)
    columns = most if together == 1 else min(most, max(width, 2, MOST_CELLS // together))
    counts = []
    for rows in left[:count]:
        counts.append(rows if rows <= min(columns, budget) else max(1, min(columns - 1, budget)))
        budget -= counts[-1]
    return counts


def _num_within(left: Sequence[int], most: int, budget: int) -> int:
    """How many sequences it takes to use up the budget; all of them if that is not enough."""
    for index, rows in enumerate(left):
        budget -= min(rows, most)
        if budget <= 0:
            return index + 1
    return len(left)


def padded_width(width: int, count: int) -> int:
    """The width at which a window of ``width`` rows is run as it is for ``count`` sequences.

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


def group_size(rows: int, width: int, ends: float, overhead: Overhead, *, joint: bool = True) -> int:
    """How many sequences best enter together, where ``rows`` sequences decode with ``width`` rows each.

    Every group costs the overhead of a step that runs its prompts; if sequences that decode take part in it
    (``joint``), what this is more than that of a decode step. While a group gathers, half of its rows are idle on
    average. With ``ends`` sequences that end per decode step, and an overhead of ``F`` decode steps, a group of ``g``
    costs ``ends / g * F`` of the time, and ``g / 2 / rows``: together the least for ``sqrt(2 rows ends F)``.
    """
    factor = (overhead.prompt - joint * overhead.decode) / (overhead.decode + rows * width)
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
