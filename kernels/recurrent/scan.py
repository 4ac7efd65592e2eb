"""The selective scan of Mamba: every channel has a state of ``N`` numbers, each of which decays at a rate of its own.

For every row and channel ``d``, with a step ``dt > 0``, decay rates ``a`` ``[D, N]`` below zero, an input ``x`` and the
vectors ``b`` and ``c`` ``[N]`` that all channels share::

    S[d] <- e^(a[d] dt[d]) S[d] + dt[d] x[d] b;   out[d] = S[d] . c

Everything is computed in float32, or in float64 if the input is float64.

- ``specgraph::selective_scan`` replaces transformers' function while a model is traced. It begins with a state of zero.
- ``specgraph::cached_scan`` is what the pass ``insert_recurrent_state`` makes of it. Its state stands at the last
  absolute chunk boundary. Since every number decays by itself, there is no form by chunks: ``dt``, ``dt x`` and ``b``
  of the rows since then are cached, and a call runs them again.

Source: Gu and Dao 2023, arXiv 2312.00752.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph.kernels.checks import check_shapes
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.recurrent.arguments import CHUNK, CachedScan, SelectiveScan
from specgraph.kernels.recurrent.last_rows import row_buffer
from specgraph.kernels.recurrent.scan_cpu import cached_scan_cpu
from specgraph.kernels.recurrent.scan_triton import cached_scan_triton
from specgraph.kernels.recurrent.span import Span, keep_rows, known_rows, spans
from specgraph.kernels.state import RECURRENT, Buffer, Recurrent


def _advance(state: Tensor, a: Tensor, dt: Tensor, entered: Tensor, b: Tensor) -> Tensor:
    """States ``[..., D, N]`` one row further; ``dt`` and ``entered`` are ``[..., D]``, and ``b`` is ``[..., N]``."""
    return state * (a * dt.unsqueeze(-1)).exp() + entered.unsqueeze(-1) * b.unsqueeze(-2)


def selective_scan_reference(given: SelectiveScan) -> Tensor:
    """:class:`SelectiveScan` in plain PyTorch."""
    x, entered = given.x, given.x * given.dt
    state, out = x.new_zeros(x.shape[0], *given.a.shape), x.new_empty(x.shape)
    for row in range(x.shape[2]):
        state = _advance(state, given.a, given.dt[..., row], entered[..., row], given.b[..., row])
        out[..., row] = (state * given.c[..., row].unsqueeze(1)).sum(-1)
    return out


def cached_scan_reference(given: CachedScan) -> Tensor:
    """:class:`CachedScan` in plain PyTorch; it waits for the device."""
    out = _cached_scan_fake(given).zero_()
    for own in spans(given.span):
        out[own.entry, :, : own.num_rows] = _sequence(given, own)
    return out


def _sequence(given: CachedScan, own: Span) -> Tensor:
    """The rows of one sequence: ``[D, n]``."""
    n, anchor, settled = own.num_rows, own.before // CHUNK * CHUNK, own.begin + own.num_settled
    dt, b = given.dt[own.entry, :, :n].T, given.b[own.entry, :, :n].T
    new = (dt, given.x[own.entry, :, :n].T * dt, b)
    caches = (given.steps, given.entered, given.places)
    rows = [torch.cat([known_rows(cache, own, anchor), part]) for cache, part in zip(caches, new, strict=True)]
    state, outs = given.state[own.row].clone(), []
    for position, *row in zip(range(anchor, own.end), *rows, strict=True):
        state = _advance(state, given.a, *row)
        if position >= own.begin:
            outs.append(state @ given.c[own.entry, :, position - own.begin])
        if (position + 1) % CHUNK == 0 and position < settled:
            given.state[own.row] = state
    for cache, part in zip(caches, new, strict=True):
        keep_rows(cache, own, part)
    return torch.stack(outs, 1)


_SHAPES = {"a": "D N", "x": "B D T", "dt": "B D T", "b": "B N T", "c": "B N T"}


def _selective_scan_fake(given: SelectiveScan) -> Tensor:
    check_shapes(given, **_SHAPES)
    return given.x.new_empty(given.x.shape)


def _cached_scan_fake(given: CachedScan) -> Tensor:
    check_shapes(given, **_SHAPES, state="M D N", steps="M R D", entered="M R D", places="M R N", span="B 5")
    return given.x.new_empty(given.x.transpose(1, 2).shape).transpose(1, 2)


declare(
    "selective_scan", SelectiveScan, _selective_scan_fake,
    (Variant("reference", selective_scan_reference, batch_invariant=False),),
)
CACHED_SCAN = declare(
    "cached_scan", CachedScan, _cached_scan_fake,
    triton_or_reference(
        cached_scan_triton, cached_scan_reference, covers=not_float64("x"), cpu=cached_scan_cpu,
        cpu_covers=not_float64("x"),
    ),
    mutates=("state", "steps", "entered", "places"),
)


def _buffers(operands: Sequence[Tensor], unsettled: int) -> tuple[Buffer, ...]:
    """A state, and the rows since its boundary: fewer than a chunk that are settled, and those that are not."""
    x, _, a = operands[:3]
    channels, size = int(a.shape[0]), int(a.shape[1])
    rows = (row_buffer(CHUNK - 1, unsettled, width, dtype=x.dtype) for width in (channels, channels, size))
    return Buffer(("B", channels, size), x.dtype, indexed=True, chunk=CHUNK), *rows


def _operations(given: CachedScan) -> int:
    """A row adds one product to every state and reads one from it."""
    return 4 * given.a.numel()


RECURRENT[torch.ops.specgraph.selective_scan.default] = Recurrent(
    torch.ops.specgraph.cached_scan.default,
    ("state", "steps", "entered", "places"),
    _buffers,
    lambda arguments, state, span: (*arguments[:5], *state, span),
    operations=_operations,
)
