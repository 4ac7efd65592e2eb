"""How a call on a CPU is cut into tiles, one for each chunk of each sequence. Every row has its absolute place in one.

A recurrent op with a state at chunk boundaries needs, of every sequence, the cached rows since the boundary and the new
rows. Both are put in the *lines* of one tensor, from which tiles are gathered. If the cache can hold all of them, it is
that tensor, and new rows are stored before they are read. A longer call takes a tensor of its own, and stores the last
rows afterwards.

The tiles of a call are in *stages*: the first tile of every sequence, the second of those that have two, and so on. The
new rows of tiles are a grid ``[R, n]`` in which a tile with fewer than ``R`` new rows repeats one of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.recurrent.arguments import CHUNK
from specgraph.kernels.recurrent.last_rows import most_in_place
from specgraph.kernels.recurrent.span import Span, spans


class Rows(NamedTuple):
    """The new rows of some tiles, each once.

    Attributes:
        grid: int64 ``[m]``, where each is in their grid ``[R * n]``; None if the grid has these rows in this order.
        call: int64 ``[m]``, where each is in the ``[B * T]`` rows of the call.
        lines: int64 ``[m]``, which line each has.
        places: int64 ``[m]``, where each is in tiles that lie place by place, ``[CHUNK * n]``.
    """

    grid: Tensor | None
    call: Tensor
    lines: Tensor
    places: Tensor

    def of(self, grid: Tensor) -> Tensor:
        """These rows of ``grid`` ``[R, n, ...]``: ``[m, ...]``."""
        flat = grid.flatten(0, 1)
        return flat if self.grid is None else flat.index_select(0, self.grid)


class Stage(NamedTuple):
    """Tiles of different sequences.

    Attributes:
        first, end: which of the call's tiles they are.
        begin, depth: the least place of a new row, and how many places of a tile are taken at most.
        lines: int64 ``[n * CHUNK]``, the line of every row; rows that are not there have the line of one that is.
        rows: their new rows.
        folded: int64 ``[f]``, the tiles whose rows are added to the state, counted from ``first``.
        kept: int64 ``[s]``, which of the folded states are stored.
        states: int64 ``[s]``, the row of the state where each is stored.
        going_on: int64 ``[g]``, which of the folded states the next stage begins with.
    """

    first: int
    end: int
    begin: int
    depth: int
    lines: Tensor
    rows: Rows
    folded: Tensor
    kept: Tensor
    states: Tensor
    going_on: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """All tiles of a call, stage after stage.

    Attributes:
        num_lines: how many lines there are, if they are not those of the caches; else None.
        known: int64 ``[k]`` twice, of lines that are not those of the caches: the line in a cache, and the line here.
        last: int64 ``[k]`` twice, of rows that are stored behind the call: the line here, and the line in a cache.
        states: the row of the state of every tile of the first stage.
        grid: int64 ``[R * N]``, where each row of the grid of all tiles is in the call's ``[B * T]``; None if the call
            has these rows in this order.
        lanes: int64 ``[R, N]``, the place of each row of the grid in its tile.
        hidden: float32 ``[R, N, 1, CHUNK]``, -inf for the rows that a row does not see, else 0.
        before: float32 ``[R, N, 1, CHUNK]``, -1 for the rows in front of a row, else 0. Rows that are repeated have
            none in front of them.
        unit: float32 ``[R, N, 1, CHUNK]``, 1 at the row itself, else 0.
        cached: bool ``[N, 1, CHUNK, 1]``, which rows of a tile are known.
        unknown: float32 ``[CHUNK, CHUNK]``, unit vectors.
        lines, rows: those of all stages.
    """

    num_lines: int | None
    known: tuple[Tensor, Tensor]
    last: tuple[Tensor, Tensor]
    states: tuple[int, ...]
    grid: Tensor | None
    lanes: Tensor
    hidden: Tensor
    before: Tensor
    unit: Tensor
    cached: Tensor
    unknown: Tensor
    lines: Tensor
    rows: Rows
    stages: tuple[Stage, ...]

    def open(self, cache: Tensor) -> Tensor:
        """The lines of a cache ``[N, R, ...]``, with what it holds: ``[lines, ...]``."""
        flat = cache.flatten(0, 1)
        if self.num_lines is None:
            return flat
        lines = flat.new_empty(self.num_lines, *flat.shape[1:])
        return lines.index_copy_(0, self.known[1], flat.index_select(0, self.known[0]))

    def close(self, cache: Tensor, lines: Tensor) -> None:
        """Store the last rows, unless the lines are those of the cache."""
        if self.num_lines is not None:
            cache.flatten(0, 1).index_copy_(0, self.last[1], lines.index_select(0, self.last[0]))

    def new(self, x: Tensor) -> Tensor:
        """The grid ``[R, N, ...]`` of what a call has given, ``[B, T, ...]``."""
        flat = x.flatten(0, 1)
        flat = flat if self.grid is None else flat.index_select(0, self.grid)
        return flat.view(*self.lanes.shape, *flat.shape[1:])

    def current(self, state: Tensor) -> Tensor:
        """The states ``[n, ...]`` that the first stage begins with. Rows that follow each other are not copied."""
        first, count = self.states[0], len(self.states)
        if self.states == tuple(range(first, first + count)):
            return state.narrow(0, first, count)
        return state.index_select(0, torch.tensor(self.states, device="cpu"))


def tiles_of(span: Tensor, rows: int, slots: int) -> Tiles | None:
    """The tiles of a call with ``rows`` rows and this ``span``, over caches ``[N, slots, ...]``; None if all are empty.

    The layers of a step have the same tiles, which are computed once.
    """
    active = tuple(spans(span))
    return _tiles(active, span.shape[0] * rows, rows, slots) if active else None


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows of a sequence from position ``first`` on. The first of its rows has the line that ``line`` gives."""

    own: Span
    first: int
    line: Callable[[int], int]

    @property
    def old(self) -> int:
        """How many of its rows are cached."""
        return min(max(self.own.begin - self.first, 0), CHUNK)

    @property
    def end(self) -> int:
        """How many rows it has."""
        return min(self.own.end - self.first, CHUNK)

    @property
    def settles(self) -> bool:
        """Whether the state behind it is the one to be stored."""
        return self.first + CHUNK == (self.own.begin + self.own.num_settled) // CHUNK * CHUNK

    @property
    def goes_on(self) -> bool:
        """Whether the sequence has rows behind it."""
        return self.first + CHUNK < self.own.end


def _index(values: Iterable[int]) -> Tensor:
    return torch.tensor([*values], dtype=torch.int64, device="cpu")


def _index_unless(values: Sequence[int], count: int) -> Tensor | None:
    """None if the index changes nothing of ``count`` rows."""
    return None if values == [*range(count)] else _index(values)


def _anchor(own: Span) -> int:
    return own.before // CHUNK * CHUNK


def _in_cache(own: Span, slots: int) -> Callable[[int], int]:
    return lambda position: own.row * slots + position % slots


def _apart(active: tuple[Span, ...]) -> list[Callable[[int], int]]:
    """For every sequence, the line of a position, where one sequence follows the other."""
    lines, base = list[Callable[[int], int]](), 0
    for own in active:
        lines.append(functools.partial(operator.add, base - _anchor(own)))
        base += own.end - _anchor(own)
    return lines


@functools.lru_cache(maxsize=4)
def _tiles(active: tuple[Span, ...], total: int, rows: int, slots: int) -> Tiles:
    """Of the sequences that have rows, in a call of ``total`` rows."""
    in_cache = [_in_cache(own, slots) for own in active]
    in_place = max(own.num_rows for own in active) <= most_in_place(slots, CHUNK - 1)
    lines = in_cache if in_place else _apart(active)
    every = [[_Tile(own, first, line) for first in range(_anchor(own), own.end, CHUNK)]
             for own, line in zip(active, lines, strict=True)]
    stages = [[tile for tile in own if tile is not None] for own in itertools.zip_longest(*every)]
    tiles = [tile for stage in stages for tile in stage]
    width = max(1, *(tile.end - tile.old for tile in tiles))
    known, last = list[tuple[int, int]](), list[tuple[int, int]]()
    for own, here, there in zip(active, lines, in_cache, strict=True):
        known += [(there(position), here(position)) for position in range(_anchor(own), own.begin)]
        last += [(here(position), there(position)) for position in range(max(own.begin, own.end - slots), own.end)]
    lanes, call, real = _grid(tiles, width, rows)
    places = torch.arange(CHUNK, device="cpu")
    found = lanes.view(width, -1, 1, 1)
    old = _index(tile.old for tile in tiles)
    in_front = (places < found) & torch.tensor(real, device="cpu").view(found.shape)
    starts = [0, *itertools.accumulate(map(len, stages))]
    return Tiles(
        None if in_place else sum(own.end - _anchor(own) for own in active),
        (_index(pair[0] for pair in known), _index(pair[1] for pair in known)),
        (_index(pair[0] for pair in last), _index(pair[1] for pair in last)),
        tuple(own.row for own in active),
        _index_unless(call, total),
        lanes,
        torch.zeros(1, device="cpu").masked_fill(places > found, -torch.inf),
        -in_front.float(),
        (places == found).float(),
        places.view(-1, 1) < old.view(-1, 1, 1, 1),
        torch.eye(CHUNK, device="cpu"),
        _lines(tiles),
        _rows(tiles, width, rows),
        tuple(_stage(stage, first, width, rows) for stage, first in zip(stages, starts, strict=False)),
    )


def _grid(tiles: list[_Tile], width: int, rows: int) -> tuple[Tensor, list[int], list[bool]]:
    """For the grid of ``tiles``: the places in them, the places in the call, and which are not repeated."""
    lanes, call, real = list[int](), list[int](), list[bool]()
    for r in range(width):
        for tile in tiles:
            lane = max(min(tile.old + r, tile.end - 1), 0)
            lanes.append(lane)
            real.append(tile.old + r < tile.end)
            call.append(tile.own.entry * rows + max(tile.first + lane - tile.own.begin, 0))
    return _index(lanes).view(width, -1), call, real


def _lines(tiles: list[_Tile]) -> Tensor:
    return _index(tile.line(tile.first + min(lane, tile.end - 1)) for tile in tiles for lane in range(CHUNK))


def _rows(tiles: list[_Tile], width: int, rows: int) -> Rows:
    """The new rows of ``tiles``, in the order of their grid."""
    found = [(r * len(tiles) + n, tile, tile.first + tile.old + r)
             for r in range(width) for n, tile in enumerate(tiles) if tile.old + r < tile.end]
    call = _index(tile.own.entry * rows + position - tile.own.begin for _, tile, position in found)
    lines = _index(tile.line(position) for _, tile, position in found)
    places = _index((position - tile.first) * len(tiles) + place % len(tiles) for place, tile, position in found)
    return Rows(_index_unless([place for place, _, _ in found], width * len(tiles)), call, lines, places)


def _stage(tiles: list[_Tile], first: int, width: int, rows: int) -> Stage:
    """The stage of ``tiles``, of which the first is the call's tile ``first``."""
    folded = [n for n, tile in enumerate(tiles) if tile.settles or tile.goes_on]
    kept = [n for n in folded if tiles[n].settles]
    return Stage(
        first,
        first + len(tiles),
        min(tile.old for tile in tiles),
        max(tile.end for tile in tiles),
        _lines(tiles),
        _rows(tiles, width, rows),
        _index(folded),
        _index(folded.index(n) for n in kept),
        _index(tiles[n].own.row for n in kept),
        _index(folded.index(n) for n in folded if tiles[n].goes_on),
    )
