"""The gated delta rule of whole sequences by chunks, in products of matrices: for models that run without a state.

It computes what :mod:`specgraph.kernels.recurrent.delta_rule` defines row after row, for the teacher of a training and
for traced models in general. Rows of one chunk are computed together, so that a sequence takes a Python loop over its
chunks instead of its rows. The bits of a row depend on the shape of the batch.

Source: Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464, section 3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specgraph.kernels.recurrent.arguments import EPSILON, GatedDeltaRule

CHUNK = 64
"""Rows that are computed together; 32 and 128 took longer for 384 rows on a CPU."""


def covers_chunks(given: GatedDeltaRule) -> bool:
    """Gates per head, in anything but float64, which is for checking by the definition."""
    return given.g.dim() == 3 and given.v.dtype != torch.float64


def gated_delta_rule_chunks(given: GatedDeltaRule) -> Tensor:
    """:class:`GatedDeltaRule` in float32, ``[B, T, H, Dv]`` in the dtype of the values."""
    rows = given.v.shape[1]
    q, k = (_chunks(_heads(given, x)) for x in (given.q, given.k))
    v, g = _chunks(given.v.float()), _chunks(given.g.float())
    g_sum = g.cumsum(-1)
    # Gates of rows that are not seen would be differences above zero, whose exponential may overflow.
    seen = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    weights = (g_sum.unsqueeze(-1) - g_sum.unsqueeze(-2)).masked_fill(~seen, -torch.inf).exp()
    decay = g_sum.exp().unsqueeze(-1)
    values, reads = v, None
    if given.beta is not None:
        beta = _chunks(given.beta.float()).unsqueeze(-1)
        mixed = beta * (k @ k.mT) * weights
        right = torch.cat([beta * v, beta * decay * k], -1)
        solved = torch.linalg.solve_triangular(mixed, right, upper=False, unitriangular=True)
        values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    attended = (q * given.scale @ k.mT) * weights
    queries = q * given.scale * decay
    written = k * (g_sum[..., -1:] - g_sum).exp().unsqueeze(-1)
    state, outs = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for at in range(v.shape[2]):
        update = values[:, :, at] if reads is None else values[:, :, at] - reads[:, :, at] @ state
        outs.append(queries[:, :, at] @ state + attended[:, :, at] @ update)
        state = state * g_sum[:, :, at, -1, None, None].exp() + written[:, :, at].mT @ update
    out = torch.stack(outs, 2).flatten(2, 3)[:, :, :rows]
    return out.transpose(1, 2).contiguous().to(given.v.dtype)


def _heads(given: GatedDeltaRule, x: Tensor) -> Tensor:
    """Queries or keys in float32, of length 1 if that is asked for, and repeated for the heads that share them."""
    x = x.float()
    if given.normalise:
        x = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)
    return x.repeat_interleave(given.v.shape[2] // x.shape[2], 2)


def _chunks(x: Tensor) -> Tensor:
    """``[B, T, H, ...]`` as ``[B, H, N, CHUNK, ...]``. Rows behind the last one are zero, and change nothing."""
    x = x.transpose(1, 2)
    padded = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 3) + (0, -x.shape[2] % CHUNK))
    return padded.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])
