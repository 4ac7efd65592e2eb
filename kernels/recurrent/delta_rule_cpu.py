"""The gated delta rule on a CPU: chunk after chunk, for all sequences and heads of a call at once.

What does not depend on the state is computed for all tiles (:mod:`specgraph.kernels.recurrent.tiles_cpu`) first: the
rows of ``A``, and how much of each ``delta`` of its chunk a new row reads. Then the states are carried from stage to
stage. This is the division of :mod:`specgraph.kernels.recurrent.delta_rule_triton`.

A library's product of matrices gives a row other bits if there are other rows beside it, but the products of a batch
are independent of each other. So the products of one row, of its key and its query with the state or with the keys of
its chunk, are one product of a batch, whose shape is the same in a prompt and in a step. That also computes no row that
is not there: with 8 heads of 64 by 64, the products of 1 row with the state take 16 us, and those of a tile of 16 rows
52. Everything else are sums over a dimension of fixed size, and operations on single elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, CachedDeltaRule
from specgraph.kernels.recurrent.tiles_cpu import Stage, Tiles, tiles_of


class _Prepared(NamedTuple):
    """What does not depend on the state, of ``N`` tiles with ``R`` new rows each, all float32.

    Attributes:
        k: ``[N, Hk, CHUNK, Dk]``, of length 1 if that is asked for.
        asked: ``[R, N, H, m, Dk]``, what is multiplied with the state: the queries, and the keys if rows correct.
        values: ``[R, N, H, Dv]``.
        beta: ``[R, N, H, 1]``, or None.
        g_sum: ``[N, H, CHUNK]``, of ``g`` up to each row.
        decay: ``[R, N, H, 1]``, how much of the state is left at each new row.
        scores: ``[R, N, H, CHUNK]``, how much of each ``delta`` a new row reads.
        a: ``[N, H, CHUNK, CHUNK]``, the rows of ``A``, or None.
    """

    k: Tensor
    asked: Tensor
    values: Tensor
    beta: Tensor | None
    g_sum: Tensor
    decay: Tensor
    scores: Tensor
    a: Tensor | None


def covers_cpu(given: CachedDeltaRule) -> bool:
    """Whether gates are of heads, and nothing is in float64."""
    return given.g.dim() == 3 and given.v.dtype != torch.float64


def cached_delta_rule_cpu(given: CachedDeltaRule) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedDeltaRule` in float32 or lower precision."""
    tiles = tiles_of(given.span, given.v.shape[1], given.chunk_k.shape[1])
    if tiles is None:
        return torch.zeros(given.v.shape, dtype=given.v.dtype, device="cpu")
    parts = [*_carry(given, tiles, _prepare(given, tiles))]
    if tiles.grid is None and len(parts) == 1 and tiles.rows.grid is None:
        return parts[0].to(given.v.dtype).view(given.v.shape)
    out = torch.zeros(given.v.shape, dtype=given.v.dtype, device="cpu")
    for stage, part in zip(tiles.stages, parts, strict=True):
        out.flatten(0, 1).index_copy_(0, stage.rows.call, stage.rows.of(part).to(out.dtype))
    return out


def _prepare(given: CachedDeltaRule, tiles: Tiles) -> _Prepared:
    heads, groups = given.v.shape[2], given.k.shape[2]
    g_sum, own = _gates(given, tiles)
    beta = None if given.beta is None else tiles.new(given.beta).float().unsqueeze(-1)
    # Gates of rows that are not seen would be differences above zero, whose exponential may overflow.
    decay = (own - g_sum.unsqueeze(0)).add_(tiles.hidden).exp_()
    k, asked = _keys(given, tiles)
    found = _by_row(asked.flatten(1, 2), k.flatten(0, 1).transpose(1, 2)).view(*asked.shape[:-1], CHUNK)
    asked, grouped = _for_heads(asked, heads), decay.view(*decay.shape[:2], groups, -1, CHUNK)
    scores, a = (grouped * found[..., :1, :]).view(decay.shape), None
    if beta is not None:
        m = (grouped * found[..., 1:, :]).view(decay.shape).mul_(beta)
        a = _inverse(given, tiles, m.mul_(tiles.before).add_(tiles.unit))
        scores = _by_row(scores.flatten(1, 2).unsqueeze(2), a.flatten(0, 1)).view(decay.shape)
    return _Prepared(k, asked, tiles.new(given.v).float(), beta, g_sum, own.exp(), scores, a)


def _gates(given: CachedDeltaRule, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The sums of the gates of all tiles, ``[N, H, CHUNK]``, and those of their new rows, ``[R, N, H, 1]``."""
    lines = tiles.open(given.chunk_g)
    lines.index_copy_(0, tiles.rows.lines, tiles.rows.of(tiles.new(given.g)).float())
    g_sum = lines.index_select(0, tiles.lines).view(-1, CHUNK, lines.shape[1]).cumsum(1)
    tiles.close(given.chunk_g, lines)
    own = g_sum.gather(1, tiles.lanes.t().unsqueeze(-1).expand(-1, -1, lines.shape[1]))
    return g_sum.transpose(1, 2).contiguous(), own.transpose(0, 1).unsqueeze(-1)


def _keys(given: CachedDeltaRule, tiles: Tiles) -> tuple[Tensor, Tensor]:
    """The keys of all tiles, ``[N, Hk, CHUNK, Dk]``, and what is asked of them, ``[R, N, Hk, m, Dk]``."""
    lines, own = tiles.open(given.chunk_k), tiles.new(given.k)
    lines.index_copy_(0, tiles.rows.lines, tiles.rows.of(own))
    k = lines.index_select(0, tiles.lines).view(-1, CHUNK, *own.shape[2:]).transpose(1, 2).float().contiguous()
    tiles.close(given.chunk_k, lines)
    queries = _unit(given, tiles.new(given.q).float()) * given.scale
    parts = [queries] if given.beta is None else [queries, _unit(given, own.float())]
    return _unit(given, k), torch.stack(parts, 3)


def _unit(given: CachedDeltaRule, x: Tensor) -> Tensor:
    return x * (x * x).sum(-1, keepdim=True).add_(EPSILON).rsqrt_() if given.normalise else x


def _inverse(given: CachedDeltaRule, tiles: Tiles, factors: Tensor) -> Tensor:
    """``A`` ``[N, H, CHUNK, CHUNK]`` of all tiles, from ``1 - M`` of their new rows, ``[R, N, H, CHUNK]``.

    A row is a sum of those in front of it, so a tile's new rows are solved one after the other. Rows that are not yet
    known are unit vectors, and the row's own is one of the terms.
    """
    heads, lines = factors.shape[2], tiles.open(given.chunk_a)
    known = lines.index_select(0, tiles.lines).view(-1, CHUNK, heads, CHUNK).transpose(1, 2)
    found = torch.where(tiles.cached, known, tiles.unknown).contiguous()
    rows = factors.new_empty(factors.shape)
    for own, row, lanes in zip(factors, rows, tiles.lanes, strict=True):
        torch.bmm(own.flatten(0, 1).unsqueeze(1), found.flatten(0, 1), out=row.flatten(0, 1).unsqueeze(1))
        found.scatter_(2, lanes.view(-1, 1, 1, 1).expand(-1, heads, 1, CHUNK), row.unsqueeze(2))
    lines.index_copy_(0, tiles.rows.lines, tiles.rows.of(rows))
    tiles.close(given.chunk_a, lines)
    return found


def _carry(given: CachedDeltaRule, tiles: Tiles, ready: _Prepared) -> Iterator[Tensor]:
    """Give the result of each stage, ``[R, n, H, Dv]``, and keep ``delta`` and states."""
    lines, current = tiles.open(given.chunk_delta), tiles.current(given.state)
    for stage in tiles.stages:
        part = slice(stage.first, stage.end)
        asked, decay, values = ready.asked[:, part], ready.decay[:, part], ready.values[:, part]
        read = _by_row(asked.flatten(1, 2), current.flatten(0, 1)).view(*values.shape[:3], -1, values.shape[3])
        delta = values
        if ready.beta is not None:
            delta = (values - read[..., 1, :] * decay) * ready.beta[:, part]
        lines.index_copy_(0, stage.rows.lines, stage.rows.of(delta))
        deltas = lines.index_select(0, stage.lines).view(-1, CHUNK, *values.shape[2:]).transpose(1, 2).contiguous()
        inside = _by_row(ready.scores[:, part].flatten(1, 2).unsqueeze(2), deltas.flatten(0, 1)).view(values.shape)
        yield inside.add_(read[..., 0, :] * decay)
        if len(stage.folded):
            folded = _folded(stage, ready, current, deltas)
            given.state.index_copy_(0, stage.states, folded.index_select(0, stage.kept))
            current = folded.index_select(0, stage.going_on)
    tiles.close(given.chunk_delta, lines)


def _folded(stage: Stage, ready: _Prepared, current: Tensor, delta: Tensor) -> Tensor:
    """The states ``[f, H, Dk, Dv]`` behind the full tiles of a stage."""
    tiles, heads = stage.folded + stage.first, current.shape[1]
    g_sum, v_new = ready.g_sum.index_select(0, tiles), delta.index_select(0, stage.folded)
    last = g_sum[..., -1:]
    k = ready.k.index_select(0, tiles)
    k = k.repeat_interleave(heads // k.shape[1], 1) * (last - g_sum).exp().unsqueeze(-1)
    if ready.a is not None:
        v_new = torch.matmul(ready.a.index_select(0, tiles), v_new)
    state = current.index_select(0, stage.folded) * last.exp().unsqueeze(-1)
    return state.add_(torch.matmul(k.transpose(2, 3), v_new))


def _for_heads(asked: Tensor, heads: int) -> Tensor:
    """What is asked by each head of values, ``[R, N, H, m, Dk]``."""
    return asked.unsqueeze(3).expand(-1, -1, -1, heads // asked.shape[2], -1, -1).flatten(2, 3)


def _by_row(rows: Tensor, matrices: Tensor) -> Tensor:
    """Products ``[R, X, m, E]`` of ``[R, X, m, D]`` with ``[X, D, E]``, of the same shape whatever R and X are."""
    if len(rows) == 1:
        return torch.bmm(rows[0], matrices).unsqueeze(0)
    out = rows.new_empty(*rows.shape[:3], matrices.shape[2])
    for own, result in zip(rows, out, strict=True):
        torch.bmm(own, matrices, out=result)
    return out
