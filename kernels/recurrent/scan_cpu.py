"""The selective scan on a CPU: row after row from the boundary on, for all sequences and channels of a call at once.

What enters the states and how they decay is computed for a whole chunk, and only two operations follow each other from
row to row. All are operations on single elements and sums over a dimension of fixed size, so the bits of a row are a
function of the state at the boundary and of the rows since.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.recurrent.arguments import CHUNK, AnchoredScan
from specgraph.kernels.recurrent.tiles_cpu import Stage, Tiles, tiles_of


def anchored_scan_cpu(given: AnchoredScan) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.AnchoredScan` in float32."""
    batch, channels, rows = given.x.shape
    out = torch.zeros(batch, rows, channels, dtype=given.x.dtype, device="cpu")
    tiles = tiles_of(given.span, rows, given.steps.shape[1])
    if tiles is not None:
        _carry(given, tiles, out.flatten(0, 1))
    return out.transpose(1, 2)


def _carry(given: AnchoredScan, tiles: Tiles, out: Tensor) -> None:
    """Write the rows of ``out`` ``[B * T, D]``, stage after stage, and keep rows and states."""
    x, dt, b, c = (tiles.new(part.transpose(1, 2)) for part in (given.x, given.dt, given.b, given.c))
    caches = given.steps, given.entered, given.places
    lines = [tiles.open(cache) for cache in caches]
    for own, grid in zip(lines, (dt, x * dt, b), strict=True):
        own.index_copy_(0, tiles.rows.lines, tiles.rows.of(grid))
    current = tiles.current(given.state)
    for stage in tiles.stages:
        states = _states(current, given.a, *(_columns(own, stage) for own in lines))
        lanes, read = tiles.lanes[:, stage.first : stage.end], c[:, stage.first : stage.end].unsqueeze(2)
        places = lanes * lanes.shape[1] + torch.arange(lanes.shape[1], device="cpu")
        found = states.flatten(0, 1).index_select(0, places.flatten()).view(*lanes.shape, *states.shape[2:])
        out.index_copy_(0, stage.rows.call, stage.rows.of(found.mul_(read).sum(-1)))
        if len(stage.folded):
            folded = states[-1].index_select(0, stage.folded)
            given.state.index_copy_(0, stage.states, folded.index_select(0, stage.kept))
            current = folded.index_select(0, stage.going_on)
    for cache, own in zip(caches, lines, strict=True):
        tiles.close(cache, own)


def _columns(lines: Tensor, stage: Stage) -> Tensor:
    """The rows of all tiles of a stage, one after the other: ``[L, n, ...]``."""
    own = lines.index_select(0, stage.lines).view(-1, CHUNK, *lines.shape[1:])
    return own[:, : stage.depth].transpose(0, 1).contiguous()


def _states(current: Tensor, a: Tensor, dt: Tensor, entered: Tensor, b: Tensor) -> Tensor:
    """The states ``[L, n, D, N]`` behind each of ``L`` rows, from those ``[n, D, N]`` in front of them."""
    states, added = (dt.unsqueeze(-1) * a).exp_(), entered.unsqueeze(-1) * b.unsqueeze(-2)
    for state, row in zip(states, added, strict=True):
        current = state.mul_(current).add_(row)
    return states
