"""The definition of causal attention, without a cache and over a paged KV cache.

Every op computes, for each row ``t`` and the keys ``s`` that the row sees::

    out[t] = sum over s of softmax(scale * q[t] . k[s]) * v[s]

``q`` is ``[B, Hq, T, D]``, ``k`` is ``[B, Hkv, T, D]``, ``v`` is ``[B, Hkv, T, Dv]``, and the result is
``[B, T, Hq, Dv]`` in the dtype of ``q``. Scores and softmax are computed in float32, or in float64 if ``q`` is float64.
A soft cap, attention sinks and a sliding window are options.

- ``specgraph::attention`` replaces a model's attention layers while the model is traced. Rows attend to each other.
- ``specgraph::paged_attention`` is what the pass ``insert_kv_cache`` makes of it. It first writes the new keys and
  values into their cache slots and then attends over the pages of each sequence. Given ``cos`` and ``sin``, it rotates
  queries and keys (rotary embedding), or the first values of each of their heads, before.

Both share :func:`attend`, the plain-PyTorch definition that the kernels are tested against. The Triton kernels of
the paged ops are in :mod:`specgraph.kernels.attention.paged`, which also says how they divide the work and why the bits
of a row do not depend on other rows. On a CPU :mod:`specgraph.kernels.attention.cpu` runs ``paged_attention``.

Sources: paged storage follows vLLM (Kwon et al. 2023, arXiv 2309.06180). Attention sinks are those of gpt-oss: one
learned logit per head takes part in the softmax and has no value. The soft cap is that of gemma2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.attention.arguments import (
    PADDING_SLOT,
    Attention,
    PagedAttention,
    check_dense,
    check_paged,
)
from specgraph.kernels.attention.cpu import covers_cpu, paged_attention_cpu
from specgraph.kernels.attention.packed import attend_packed
from specgraph.kernels.attention.paged import paged_attention_triton
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.state import STATEFUL, Buffer, Stateful, page_pool


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention with grouped query heads. The result of a row that sees no key is zero.

    Args:
        q: ``[B, Hq, T, D]``. Scores and softmax are computed in float32, or float64 if ``q`` is.
        k: ``[B, Hkv, S, D]`` with ``Hq`` a multiple of ``Hkv``.
        v: ``[B, Hkv, S, Dv]``; ``Dv`` may differ from ``D``.
        visible: bool ``[B, T, S]``: which keys each row sees.
        sinks: ``[Hq]`` or None: one extra logit per head, without a value.
        scale: the factor on the products of queries and keys.
        softcap: ``c`` in ``c * tanh(score / c)``, or None for no cap.

    Returns:
        ``[B, T, Hq, Dv]`` in the dtype of ``q``.
    """
    batch, heads, rows, _ = q.shape
    groups = k.shape[1]
    exact = torch.promote_types(q.dtype, torch.float32)
    grouped = q.to(exact).reshape(batch, groups, heads // groups, rows, -1)
    scores = grouped @ k.to(exact).unsqueeze(2).transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    row_max = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(exact).reshape(1, groups, heads // groups, 1, 1)
        row_max = torch.maximum(row_max, sink)
    row_max = row_max.masked_fill(row_max == -torch.inf, 0.0)
    weights = torch.exp(scores - row_max)
    row_sum = weights.sum(-1, keepdim=True)
    if sinks is not None:
        row_sum = row_sum + torch.exp(sink - row_max)
    weights = weights / row_sum.clamp_min(torch.finfo(exact).tiny)
    out = weights @ v.to(exact).unsqueeze(2)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).to(q.dtype).contiguous()


def sees(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees: those at or before it and, with a window ``w``, those fewer than ``w`` positions back.

    Takes int64 positions ``[..., T]`` of queries and ``[..., S]`` of keys. Returns bool ``[..., T, S]``.
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def attention_reference(given: Attention) -> Tensor:
    """:class:`~specgraph.kernels.attention.arguments.Attention` in plain PyTorch."""
    q = given.q
    rows = torch.arange(q.shape[2], device=q.device)
    visible = sees(rows, rows, given.window).expand(q.shape[0], -1, -1)
    return attend(q, given.k, given.v, visible, given.sinks, given.scale, given.softcap)


def write_cache(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store ``values`` ``[B, H, T, D]`` at ``slots`` ``[B, T]`` of ``cache`` ``[N, block_size, H, D]``, in place.

    Rows whose slot is :data:`PADDING_SLOT` are not stored.
    """
    keep = slots.reshape(-1) != PADDING_SLOT
    rows = values.transpose(1, 2).reshape(-1, *values.shape[1:2], values.shape[3])
    cache.flatten(0, 1)[slots.reshape(-1)[keep]] = rows[keep]


def read_cache(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows of every sequence, ``[B, H, length, D]``. Page 0 stands for pages not allocated."""
    block_size = cache.shape[1]
    pages = block_table[:, : -(-length // block_size)].clamp_min(0).long()
    return cache[pages].flatten(1, 2)[:, :length].transpose(1, 2)


def paged_attention_reference(given: PagedAttention) -> Tensor:
    """:class:`~specgraph.kernels.attention.arguments.PagedAttention` in plain PyTorch; it waits for the device."""
    if given.cu_seqlens is not None:
        return attend_packed(given, _paged_attention)
    q, k, slots, positions = given.q, given.k, given.slots, given.positions
    if given.cos is not None and given.sin is not None:
        q, k = (rotate(x, given.cos, given.sin) for x in (q, k))
    write_cache(given.k_cache, k, slots)
    write_cache(given.v_cache, given.v, slots)
    real = slots != PADDING_SLOT
    ends = torch.where(real, positions + 1, 0).amax(-1)
    length = max(1, int(ends.max()))
    keys, values = (read_cache(cache, given.block_table, length) for cache in (given.k_cache, given.v_cache))
    key_positions = torch.arange(length, device=q.device)
    # Cache rows past the end of a sequence hold old values. Zero times an old NaN would be NaN, so they become zeros.
    stale = (key_positions >= ends.unsqueeze(-1))[:, None, :, None]
    keys, values = keys.masked_fill(stale, 0), values.masked_fill(stale, 0)
    visible = sees(positions, key_positions.expand(q.shape[0], -1), given.window) & real.unsqueeze(-1)
    return attend(q, keys, values, visible, given.sinks, given.scale, given.softcap)


def _paged_attention(given: PagedAttention) -> Tensor:
    """In the form for CPUs where there is one for these arguments, and else the definition."""
    on_cpu = given.q.device.type == "cpu" and covers_cpu(given)
    return paged_attention_cpu(given) if on_cpu else paged_attention_reference(given)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves: ``x * cos + cat(-x[n/2:], x[:n/2]) * sin``, in float32 or wider, rounded once.

    Takes ``x`` ``[B, H, T, D]``, and ``cos`` and ``sin`` ``[B or 1, T, n]``. Only the first ``n`` values of a head are
    rotated, and the others are taken as they are. Source: Su et al. 2021, arXiv 2104.09864, in the layout of llama in
    transformers; of a part of a head, in that of GPT-NeoX.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    part, rest = x.tensor_split([cos.shape[2]], -1)
    lower, upper = part.to(exact).chunk(2, -1)
    halves = torch.cat([-upper, lower], -1)
    turned = (part.to(exact) * cos.to(exact).unsqueeze(1) + halves * sin.to(exact).unsqueeze(1)).to(x.dtype)
    return turned if rest.shape[3] == 0 else torch.cat([turned, rest], -1)


def _empty(given: Attention | PagedAttention) -> Tensor:
    batch, heads, rows, _ = given.q.shape
    return given.q.new_empty(batch, rows, heads, given.v.shape[3])


def _attention_fake(given: Attention) -> Tensor:
    check_dense(given)
    return _empty(given)


def _paged_attention_fake(given: PagedAttention) -> Tensor:
    check_paged(given)
    return _empty(given)


ATTENTION = declare(
    "attention", Attention, _attention_fake, (Variant("reference", attention_reference, batch_invariant=False),),
)
PAGED_ATTENTION = declare(
    "paged_attention", PagedAttention, _paged_attention_fake,
    triton_or_reference(
        paged_attention_triton, paged_attention_reference, covers=not_float64("q"), cpu=paged_attention_cpu,
        cpu_covers=covers_cpu,
    ),
    mutates=("k_cache", "v_cache"),
)


def page_pools(rows: Sequence[Tensor], block_size: int) -> tuple[Buffer, ...]:
    """A pool of keys and one of values, ``[N, block_size, Hkv, D]``, for rows ``k`` and ``v`` ``[B, Hkv, T, D]``."""
    return tuple(page_pool(block_size, int(x.shape[1]), int(x.shape[3]), dtype=x.dtype) for x in rows)


def _paged_arguments(arguments: Sequence[Any], state: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
    """``(q, k, v, sinks)`` to ``(q, k, v, k_cache, v_cache, slots, block_table, positions, sinks)``."""
    return (*arguments[:3], *state, *places, *arguments[3:])


STATEFUL[torch.ops.specgraph.attention.default] = Stateful(
    torch.ops.specgraph.paged_attention.default,
    ("k_cache", "v_cache"),
    lambda operands, block_size: page_pools(operands[1:3], block_size),
    _paged_arguments,
)
