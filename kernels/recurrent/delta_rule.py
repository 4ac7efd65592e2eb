"""The gated delta rule: a state ``S`` ``[Dk, Dv]`` per head that decays, and learns to map keys to values.

For every row, with a log decay ``g <= 0``, a learning rate ``beta``, a key ``k``, a value ``v`` and a query ``q``::

    S <- e^g S;   S <- S + k (beta (v - S^T k))^T;   out = S^T q

``g`` is one number per head, or one per channel of its keys, each for a row of ``S`` (Kimi's delta attention).
Queries are multiplied by a factor, and if asked for, queries and keys are first brought to length 1. Without ``beta``,
nothing is corrected: ``S <- S + k v^T``, which is the scan of Mamba-2, with ``C``, ``B`` and ``dt x`` as queries, keys
and values. Everything is computed in float32, or in float64 if the value is float64.

- ``specgraph::gated_delta_rule`` replaces transformers' function while a model is traced. It begins with a state of
  zero, and is defined row after row.
- ``specgraph::cached_delta_rule`` is what the pass ``insert_recurrent_state`` makes of it. Its state stands at the
  last absolute chunk boundary, and the rows since then are cached. With ``G_i`` the sum of ``g`` since the boundary,
  within a chunk::

      delta_i = beta_i (v_i - e^{G_i} S^T k_i)
      v_new   = A delta,   A = (1 + M)^-1,   M_ij = beta_i e^{G_i - G_j} (k_i . k_j) for j < i
      out_i   = e^{G_i} S^T q_i + sum over j <= i of e^{G_i - G_j} (q_i . k_j) v_new_j

  The rows of ``A`` do not depend on the state. When a chunk is full and settled,
  ``S <- e^G S + sum over j of e^{G - G_j} k_j v_new_j^T``. What is cached per row are ``k`` as it was given, ``delta``,
  ``g`` and its row of ``A``. With ``g`` per channel, ``e^{G_i} k_i`` is taken element by element, and so are the
  products of which ``e^{G_i - G_j} (k_i . k_j)`` is the sum over channels. They do not factor into one of ``i`` and one
  of ``j``, because ``e^{-G_j}`` overflows where decays are strong.

Names are those of flash-linear-attention (``q k v g beta A``, ``v_new``). There, ``v_new`` is ``u - w S`` with
``u = A (beta v)`` and ``w = A (beta e^G k)``; here the same is ``A delta``, because ``delta`` of a row is final as soon
as the row is there.

Source: Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464; the form by chunks is that of Yang et al. 2024, arXiv
2406.06484, with the state kept apart from the rows. ``g`` per channel: Kimi Team 2025, arXiv 2510.26692. Mamba-2: Dao
and Gu 2024, arXiv 2405.21060.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.recurrent.arguments import CHUNK, EPSILON, CachedDeltaRule, GatedDeltaRule, exact
from specgraph.kernels.recurrent.channel_gates_triton import channel_gates_triton
from specgraph.kernels.recurrent.delta_rule_chunks import covers_chunks, gated_delta_rule_chunks
from specgraph.kernels.recurrent.delta_rule_cpu import cached_delta_rule_cpu, covers_cpu
from specgraph.kernels.recurrent.delta_rule_triton import cached_delta_rule_triton
from specgraph.kernels.recurrent.last_rows import row_buffer
from specgraph.kernels.recurrent.span import Span, keep_rows, known_rows, spans
from specgraph.kernels.state import RECURRENT, Buffer, Recurrent


class _Rows(NamedTuple):
    """Rows of one sequence in the order of heads.

    ``q`` and ``k`` are ``[H, T, Dk]``, ``v`` ``[H, T, Dv]``, ``g`` ``[H, T, 1 or Dk]`` and ``beta`` ``[H, T]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def cut(self, first: int, end: int) -> _Rows:
        """The rows from ``first`` up to ``end``."""
        return _Rows(*(None if part is None else part[:, first:end] for part in self))  # type: ignore[arg-type]


def _unit(given: GatedDeltaRule | CachedDeltaRule, x: Tensor) -> Tensor:
    """Queries or keys in the dtype of the computation, of length 1 if that is asked for."""
    x = x.to(exact(given.v.dtype))
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON) if given.normalise else x


def _prepared(given: GatedDeltaRule | CachedDeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in the dtype of the computation: ``[B, T, Hk, Dk]`` twice, and ``[B, T, H, Dv]``."""
    return _unit(given, given.q) * given.scale, _unit(given, given.k), given.v.to(exact(given.v.dtype))


def _by_channel(g: Tensor, v: Tensor) -> Tensor:
    """A view of ``g`` with a dimension of channels behind that of the heads, of size 1 if a head has one ``g``."""
    return g if g.dim() == v.dim() else g.unsqueeze(-1)


def gated_delta_rule_reference(given: GatedDeltaRule) -> Tensor:
    """:class:`GatedDeltaRule` in plain PyTorch, row after row as its definition says."""
    q, k, v = _prepared(given)
    g, beta = _by_channel(given.g, v).to(q.dtype), None if given.beta is None else given.beta.to(q.dtype)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, out = v.new_zeros(v.shape[0], v.shape[2], k.shape[3], v.shape[3]), v.new_empty(v.shape)
    for row in range(v.shape[1]):
        key, query = k[:, row].unsqueeze(-1), q[:, row].unsqueeze(-1)
        state = state * g[:, row].exp().unsqueeze(-1)
        update = v[:, row]
        if beta is not None:
            update = (update - (state * key).sum(-2)) * beta[:, row].unsqueeze(-1)
        state = state + key * update.unsqueeze(-2)
        out[:, row] = (state * query).sum(-2)
    return out.to(given.v.dtype)


def cached_delta_rule_reference(given: CachedDeltaRule) -> Tensor:
    """:class:`CachedDeltaRule` in plain PyTorch; it waits for the device."""
    q, k, v = _prepared(given)
    out = v.new_zeros(v.shape)
    for own in spans(given.span):
        e, n, groups = own.entry, own.num_rows, v.shape[2] // k.shape[2]
        query, key = (x[e, :n].transpose(0, 1).repeat_interleave(groups, 0) for x in (q, k))
        g = _by_channel(given.g, v)[e, :n].to(q.dtype).transpose(0, 1)
        beta = None if given.beta is None else given.beta[e, :n].to(q.dtype).T
        rows = _Rows(query, key, v[e, :n].transpose(0, 1), g, beta)
        out[e, :n] = _sequence(given, own, rows).transpose(0, 1)
    return out.to(given.v.dtype)


def _sequence(given: CachedDeltaRule, own: Span, rows: _Rows) -> Tensor:
    """The rows of one sequence, chunk after chunk: ``[H, T, Dv]``."""
    anchor, groups = own.before // CHUNK * CHUNK, rows.k.shape[0] // given.k.shape[2]
    caches = (given.chunk_k, given.chunk_delta, _by_channel(given.chunk_g, given.chunk_delta), given.chunk_a)
    known = [known_rows(cache, own, anchor).transpose(0, 1) for cache in caches]
    known[0] = _unit(given, known[0]).repeat_interleave(groups, 0)
    state, outs, news = given.state[own.row], list[Tensor](), list[tuple[Tensor, ...]]()
    for first in range(anchor, own.end, CHUNK):
        last = min(first + CHUNK, own.end)
        old = slice(first - anchor, max(first, min(last, own.begin)) - anchor)
        new = rows.cut(max(first, own.begin) - own.begin, max(last, own.begin) - own.begin)
        chunk = _chunk(state, _Known(*(part[:, old] for part in known)), new)
        outs, news = [*outs, chunk.out], [*news, (chunk.delta, new.g, chunk.a)]
        if last == first + CHUNK:
            state = chunk.state
            if last <= own.begin + own.num_settled:
                given.state[own.row] = state
    keep_rows(given.chunk_k, own, given.k[own.entry, : own.num_rows])
    for cache, parts in zip(caches[1:], zip(*news, strict=True), strict=True):
        keep_rows(cache, own, torch.cat(parts, 1).transpose(0, 1))
    return torch.cat(outs, 1)


class _Known(NamedTuple):
    """Cached rows of a chunk in the order of heads: ``[H, n, ...]``, see :class:`CachedDeltaRule`."""

    k: Tensor
    delta: Tensor
    g: Tensor
    a: Tensor


class _Chunk(NamedTuple):
    """Of the new rows of a chunk: the output, ``delta`` and the rows of ``A``; and the state behind all its rows."""

    out: Tensor
    delta: Tensor
    a: Tensor
    state: Tensor


def _chunk(state: Tensor, known: _Known, rows: _Rows) -> _Chunk:
    """New rows of a chunk behind those that are known."""
    count, old = rows.k.shape[1], known.k.shape[1]
    g = torch.cat([known.g, rows.g], 1)
    k = torch.cat([known.k, rows.k], 1)
    later = torch.ones(old + count, old + count, dtype=torch.bool, device=state.device).triu(1)[..., None]
    # [H, j, i, ...], the sum of the gates behind row j up to row i. It is never above zero, and unlike a difference of
    # sums since the boundary, it keeps its digits where a decay before row j was strong.
    between = g.unsqueeze(1).masked_fill(~later, 0).cumsum(2)
    weights = between[:, :, old:].transpose(1, 2).exp().masked_fill(later[old:], 0)
    decay = g.cumsum(1)[:, old:].exp()
    delta, a = rows.v, rows.v.new_zeros(*rows.v.shape[:2], CHUNK)
    a[..., old : old + count] = torch.eye(count, dtype=a.dtype, device=a.device)
    if rows.beta is not None:
        beta = rows.beta.unsqueeze(-1)
        delta = beta * (rows.v - (decay * rows.k) @ state)
        m = beta * _weighted(rows.k, k, weights)
        right = a - m[..., :old] @ known.a
        a = torch.linalg.solve_triangular(m[..., old:], right, upper=False, unitriangular=True)
    deltas = torch.cat([known.delta, delta], 1)
    v_new = deltas
    if rows.beta is not None:
        v_new = torch.cat([known.a, a], 1)[..., : old + count] @ deltas
    out = (decay * rows.q) @ state + _weighted(rows.q, k, weights) @ v_new
    kept = (k * between[:, :, -1].exp()).transpose(1, 2) @ v_new
    return _Chunk(out, delta, a, state * g.sum(1).exp().unsqueeze(-1) + kept)


def _weighted(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Products ``[H, n, m]`` of rows ``[H, n, Dk]`` and ``[H, m, Dk]``, with ``weights`` ``[H, n, m, 1 or Dk]``."""
    if weights.shape[-1] == 1:
        return (left @ right.transpose(1, 2)) * weights.squeeze(-1)
    return (left.unsqueeze(2) * right.unsqueeze(1) * weights).sum(-1)


def _check(given: GatedDeltaRule | CachedDeltaRule) -> None:
    gates = "B T H Dk" if given.g.dim() == 4 else "B T H"
    check_shapes(given, q="B T Hk Dk", k="B T Hk Dk", v="B T H Dv", g=gates, beta="B T H")
    _check_dtype("q", given.q.dtype, given.k.dtype)
    heads, groups = given.v.shape[2], given.k.shape[2]
    require(heads % groups == 0, lambda: f"{heads} heads do not group over {groups}")


def _check_dtype(name: str, given: torch.dtype, wanted: torch.dtype) -> None:
    require(given == wanted, lambda: f"{name} must be {wanted}, not {given}")


def _gated_delta_rule_fake(given: GatedDeltaRule) -> Tensor:
    _check(given)
    return given.v.new_empty(given.v.shape)


def _cached_delta_rule_fake(given: CachedDeltaRule) -> Tensor:
    _check(given)
    gates = "* * H Dk" if given.g.dim() == 4 else "* * H"
    check_shapes(
        given, k="B T Hk Dk", v="B T H Dv", span="B 5", state="N H Dk Dv", chunk_k="* * Hk Dk", chunk_delta="* * H Dv",
        chunk_g=gates, chunk_a=f"* * H {CHUNK}",
    )
    _check_dtype("chunk_k", given.chunk_k.dtype, given.k.dtype)
    for name in ("state", "chunk_delta", "chunk_g", "chunk_a"):
        _check_dtype(name, getattr(given, name).dtype, exact(given.v.dtype))
    return given.v.new_empty(given.v.shape)


def _triton(given: CachedDeltaRule) -> Tensor:
    return channel_gates_triton(given) if given.g.dim() == 4 else cached_delta_rule_triton(given)


declare(
    "gated_delta_rule", GatedDeltaRule, _gated_delta_rule_fake,
    (
        Variant("library", gated_delta_rule_chunks, batch_invariant=False, covers=covers_chunks),
        Variant("cpu", gated_delta_rule_chunks, batch_invariant=False, covers=covers_chunks),
        Variant("reference", gated_delta_rule_reference, batch_invariant=False),
    ),
)
CACHED_DELTA_RULE = declare(
    "cached_delta_rule", CachedDeltaRule, _cached_delta_rule_fake,
    triton_or_reference(
        _triton, cached_delta_rule_reference, covers=not_float64("v"), cpu=cached_delta_rule_cpu,
        cpu_covers=covers_cpu,
    ),
    mutates=("state", "chunk_k", "chunk_delta", "chunk_g", "chunk_a"),
)


def _buffers(operands: Sequence[Tensor], unsettled: int) -> tuple[Buffer, ...]:
    """A state, and the rows since its boundary: fewer than a chunk that are settled, and those that are not."""
    _, k, v, g = operands[:4]
    (heads, width), (groups, size) = (map(int, x.shape[2:]) for x in (v, k))
    dtype = exact(v.dtype)
    decays = tuple(map(int, g.shape[2:]))
    rows = (((groups, size), k.dtype), ((heads, width), dtype), (decays, dtype), ((heads, CHUNK), dtype))
    caches = (row_buffer(CHUNK - 1, unsettled, *shape, dtype=kind) for shape, kind in rows)
    return Buffer(("B", heads, size, width), dtype, indexed=True, chunk=CHUNK), *caches


def _operations(given: CachedDeltaRule) -> int:
    """A row adds one product to every state and reads one from it; a correction reads another one."""
    (_, _, heads, width), size = given.v.shape, given.k.shape[3]
    return 2 * (2 if given.beta is None else 3) * heads * size * width


RECURRENT[torch.ops.specgraph.gated_delta_rule.default] = Recurrent(
    torch.ops.specgraph.cached_delta_rule.default,
    ("state", "chunk_k", "chunk_delta", "chunk_g", "chunk_a"),
    _buffers,
    lambda arguments, state, span: (*arguments[:4], *state, span, *arguments[4:]),
    operations=_operations,
)
