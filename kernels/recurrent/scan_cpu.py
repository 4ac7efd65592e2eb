"""The selective scan on a CPU: row after row from the boundary on, for all sequences and channels of a call at once.

All are operations on single elements and sums over a dimension of fixed size, so the bits of a row are a function of
the state at the boundary and of the rows since. Tiles that end before others go on with numbers that nobody reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.recurrent.arguments import CHUNK, CachedScan
from specgraph.kernels.recurrent.tiles_cpu import Stage, Tiles, tiles_of


def cached_scan_cpu(given: CachedScan) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedScan` in float32."""
    batch, channels, rows = given.x.shape
    out = torch.zeros(batch, rows, channels, dtype=given.x.dtype, device="cpu")
    tiles = tiles_of(given.span, rows, given.steps.shape[1])
    if tiles is not None:
        _carry(given, tiles, out.flatten(0, 1))
    return out.transpose(1, 2)


def _carry(given: CachedScan, tiles: Tiles, out: Tensor) -> None:
    """Write the rows of ``out`` ``[B * T, D]``, stage after stage, and keep rows and states."""
    x, dt, b, c = (tiles.new(part.transpose(1, 2)) for part in (given.x, given.dt, given.b, given.c))
    caches = given.steps, given.entered, given.places
    lines = [tiles.open(cache) for cache in caches]
    for own, grid in zip(lines, (dt, x * dt, b), strict=True):
        own.index_copy_(0, tiles.rows.lines, tiles.rows.of(grid))
    current = tiles.current(given.state)
    for stage in tiles.stages:
        read = torch.zeros(CHUNK * (stage.end - stage.first), c.shape[2], dtype=c.dtype, device="cpu")
        read.index_copy_(0, stage.rows.places, stage.rows.of(c[:, stage.first : stage.end]))
        steps, entered, places = (_columns(own, stage) for own in lines)
        current, results = _states(current, given.a, steps, entered, places, read, stage)
        out.index_copy_(0, stage.rows.call, results.index_select(0, stage.rows.places))
        if len(stage.folded):
            folded = current.index_select(0, stage.folded)
            given.state.index_copy_(0, stage.states, folded.index_select(0, stage.kept))
            current = folded.index_select(0, stage.going_on)
    for cache, own in zip(caches, lines, strict=True):
        tiles.close(cache, own)


def _columns(lines: Tensor, stage: Stage) -> Tensor:
    """The rows of all tiles of a stage, place by place: ``[CHUNK, n, ...]``."""
    return lines.index_select(0, stage.lines).view(-1, CHUNK, *lines.shape[1:]).transpose(0, 1)


def _states(
    current: Tensor, a: Tensor, dt: Tensor, entered: Tensor, b: Tensor, read: Tensor, stage: Stage
) -> tuple[Tensor, Tensor]:
    """The states ``[n, D, N]`` behind the last place, and what is read at each, ``[CHUNK * n, D]``.

    All work is on three tensors of the size of a state, which stay in the processor's caches. The first state is a view
    of the one that is kept, and not written.
    """
    state, decay, other = torch.empty_like(current), torch.empty_like(current), torch.empty_like(current)
    results, c = dt.new_zeros(CHUNK, *current.shape[:2]), read.view(CHUNK, -1, 1, read.shape[1])
    for place in range(stage.depth):
        torch.mul(dt[place].unsqueeze(-1), a, out=decay).exp_()
        torch.mul(entered[place].unsqueeze(-1), b[place].unsqueeze(1), out=other)
        current = torch.mul(current, decay, out=state).add_(other)
        if place >= stage.begin:
            torch.sum(torch.mul(current, c[place], out=other), -1, out=results[place])
    return current, results.flatten(0, 1)
