"""Causal attention: dense as traced, and paged over a KV cache.

``specgraph::attention`` is what tracing puts in place of a model's attention layers. ``insert_kv_cache`` turns it into
``specgraph::paged_attention``, which first writes the new keys and values into their slots and then attends over the
pages of each sequence; ``specgraph::rotary_attention`` rotates queries and keys before that. All share one formula,
:func:`attend`, which is the definition that faster kernels are tested against; those of the paged ops are in
``paged_attention``.

Paged storage follows vLLM (Kwon et al. 2023, arXiv 2309.06180); attention sinks are gpt-oss's: one learned logit per
head that takes part in the softmax and has no value; the soft cap is gemma2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specgraph.kernels.attention.paged import paged_attention_triton, rotary_attention_triton
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require
from specgraph.kernels.state import STATEFUL, Buffer, Stateful, page_pool

PADDING_SLOT = -1
"""The slot of a row that must not be written."""

_OPTIONS = "Tensor? sinks=None, *, float scale, int? window=None, float? softcap=None"
torch.library.define("specgraph::attention", f"(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> Tensor")
torch.library.define(
    "specgraph::paged_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, Tensor block_table, "
    f"Tensor positions, {_OPTIONS}) -> Tensor",
)
torch.library.define(
    "specgraph::rotary_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slots, "
    f"Tensor block_table, Tensor positions, {_OPTIONS}) -> Tensor",
)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Softmax attention with grouped heads; a row that sees no key gives zeros.

    Args:
        q: ``[B, Hq, T, D]``. Scores and softmax are computed in float32, or float64 if ``q`` is.
        k: ``[B, Hkv, S, D]`` with ``Hq`` a multiple of ``Hkv``.
        v: ``[B, Hkv, S, Dv]``; ``Dv`` may differ from ``D``.
        visible: bool ``[B, T, S]``, which keys each row sees.
        sinks: ``[Hq]`` or None, extra logits without a value.
        scale: factor on the scores.
        softcap: ``c`` in ``c * tanh(score / c)``, or None.

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
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(exact).reshape(1, groups, heads // groups, 1, 1)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    weights = weights / total.clamp_min(torch.finfo(exact).tiny)
    out = weights @ v.to(exact).unsqueeze(2)
    return out.reshape(batch, heads, rows, -1).transpose(1, 2).to(q.dtype).contiguous()


def sees(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys a query sees: those at or before it and, with a window ``w``, fewer than ``w`` positions back.

    Takes int64 ``[..., T]`` and ``[..., S]``; returns bool ``[..., T, S]``.
    """
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)


def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Causal attention of ``T`` rows over themselves: ``[B, H, T, D]`` inputs, ``[B, T, Hq, Dv]`` out."""
    rows = torch.arange(q.shape[2], device=q.device)
    visible = sees(rows, rows, window).expand(q.shape[0], -1, -1)
    return attend(q, k, v, visible, sinks, scale, softcap)


def write_cache(cache: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store ``values`` ``[B, H, T, D]`` at ``slots`` ``[B, T]`` of ``cache`` ``[N, block_size, H, D]``, in place.

    Rows whose slot is :data:`PADDING_SLOT` are left out.
    """
    keep = slots.reshape(-1) != PADDING_SLOT
    rows = values.transpose(1, 2).reshape(-1, *values.shape[1:2], values.shape[3])
    cache.flatten(0, 1)[slots.reshape(-1)[keep]] = rows[keep]


def read_cache(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first ``length`` rows of every sequence, ``[B, H, length, D]``; unallocated pages repeat page 0."""
    block_size = cache.shape[1]
    pages = block_table[:, : -(-length // block_size)].clamp_min(0).long()
    return cache[pages].flatten(1, 2)[:, :length].transpose(1, 2)


def paged_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_table: Tensor,
    positions: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write the new rows into the cache, then attend over everything each row may see.

    Args:
        q, k, v: the new rows, ``[B, Hq, T, D]``, ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]`` and ``[..., Dv]``, written in place.
        slots: int64 ``[B, T]``, ``block * block_size + offset`` of each row; ``PADDING_SLOT`` rows are not written and
            their output is zero.
        block_table: int64 ``[B, M]``, the blocks of each sequence in order, padded with -1.
        positions: int64 ``[B, T]``, absolute positions of the rows.

    Returns:
        ``[B, T, Hq, Dv]``.
    """
    write_cache(k_cache, k, slots)
    write_cache(v_cache, v, slots)
    real = slots != PADDING_SLOT
    ends = torch.where(real, positions + 1, 0).amax(-1)
    length = max(1, int(ends.max()))
    keys, values = read_cache(k_cache, block_table, length), read_cache(v_cache, block_table, length)
    places = torch.arange(length, device=q.device)
    # Rows past a sequence's end are stale; zero times a stale NaN would poison the sum, so they are blanked as well.
    stale = (places >= ends.unsqueeze(-1))[:, None, :, None]
    keys, values = keys.masked_fill(stale, 0), values.masked_fill(stale, 0)
    visible = sees(positions, places.expand(q.shape[0], -1), window) & real.unsqueeze(-1)
    return attend(q, keys, values, visible, sinks, scale, softcap)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves: ``x * cos + cat(-x[D/2:], x[:D/2]) * sin``, rounded once.

    Takes ``[B, H, T, D]`` and ``[B or 1, T, D]``. Source: Su et al. 2021, arXiv 2104.09864, as transformers' llama lays
    it out.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    lower, upper = x.to(exact).chunk(2, -1)
    turned = torch.cat([-upper, lower], -1)
    return (x.to(exact) * cos.to(exact).unsqueeze(1) + turned * sin.to(exact).unsqueeze(1)).to(x.dtype)


def rotary_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    block_table: Tensor,
    positions: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """:func:`paged_attention_reference` of rotated ``q`` and ``k``; ``cos`` and ``sin`` are ``[B or 1, T, D]``.

    ``D`` is even. The cache holds rotated keys.
    """
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return paged_attention_reference(
        q, k, v, k_cache, v_cache, slots, block_table, positions, sinks, scale=scale, window=window, softcap=softcap
    )


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> None:
    require(q.dim() == 4 and k.dim() == 4 and v.dim() == 4, lambda: "q, k and v must be [B, H, T, D]")
    require(k.shape[:3] == v.shape[:3], lambda: f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in B, H, T")
    require(q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2], lambda: "q and k must agree in B and T")
    require(q.shape[3] == k.shape[3], lambda: f"q and k head dims differ: {q.shape[3]} and {k.shape[3]}")
    require(q.shape[1] % k.shape[1] == 0, lambda: f"{q.shape[1]} heads do not group over {k.shape[1]}")
    if sinks is not None:
        require(sinks.shape == (q.shape[1],), lambda: f"sinks must be [{q.shape[1]}], not {tuple(sinks.shape)}")


def _check_angles(name: str, angles: Tensor, q: Tensor) -> None:
    require(angles.dim() == 3, lambda: f"{name} must be [B, T, D]")
    require(angles.shape[1:] == (q.shape[2], q.shape[3]), lambda: f"{name} must agree with q in T and D")
    require(angles.shape[0] in (1, q.shape[0]), lambda: f"{name} must be for B sequences or for one")


def _check_cache(name: str, cache: Tensor, new: Tensor) -> None:
    wanted = (new.shape[1], new.shape[3])
    require(cache.dim() == 4 and cache.shape[2:] == wanted, lambda: f"{name} must end in {wanted}")
    require(cache.dtype == new.dtype, lambda: f"{name} must have the dtype of the rows written to it")


def _attention_fake(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    _check_shapes(q, k, v, sinks)
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _paged_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, block_table: Tensor,
    positions: Tensor, sinks: Tensor | None = None, *, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    _check_shapes(q, k, v, sinks)
    rows = (q.shape[0], q.shape[2])
    _check_cache("k_cache", k_cache, k)
    _check_cache("v_cache", v_cache, v)
    require(slots.shape == rows, lambda: f"slots must be {rows}, not {tuple(slots.shape)}")
    require(positions.shape == rows, lambda: f"positions must be {rows}, not {tuple(positions.shape)}")
    require(block_table.dim() == 2 and block_table.shape[0] == rows[0], lambda: "block_table must be [B, M]")
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])


def _rotary_attention_fake(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    block_table: Tensor, positions: Tensor, sinks: Tensor | None = None, *, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    require(q.shape[3] % 2 == 0, lambda: f"a head of {q.shape[3]} has no halves to rotate")
    _check_angles("cos", cos, q)
    _check_angles("sin", sin, q)
    return _paged_attention_fake(
        q, k, v, k_cache, v_cache, slots, block_table, positions, sinks, scale=scale, window=window, softcap=softcap
    )


def _paged_attention_cuda(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """float64 is for checking: it takes the definition, which synchronises with the host."""
    implementation = paged_attention_reference if q.dtype == torch.float64 else paged_attention_triton
    return implementation(q, *arguments, **options)


def _rotary_attention_cuda(q: Tensor, *arguments: Any, **options: Any) -> Tensor:
    implementation = rotary_attention_reference if q.dtype == torch.float64 else rotary_attention_triton
    return implementation(q, *arguments, **options)


register("attention", cpu=attention_reference, cuda=attention_reference, fake=_attention_fake)
register("paged_attention", cpu=paged_attention_reference, cuda=_paged_attention_cuda, fake=_paged_attention_fake)
register("rotary_attention", cpu=rotary_attention_reference, cuda=_rotary_attention_cuda, fake=_rotary_attention_fake)


def _page_pools(operands: Sequence[Tensor], block_size: int) -> tuple[Buffer, ...]:
    """A pool of keys and one of values, ``[N, block_size, Hkv, D]``, for ``q``, ``k``, ``v`` ``[B, H, T, D]``."""
    return tuple(page_pool(block_size, int(x.shape[1]), int(x.shape[3]), dtype=x.dtype) for x in operands[1:3])


def _paged_arguments(arguments: Sequence[Any], state: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
    """``(q, k, v, sinks)`` to ``(q, k, v, k_cache, v_cache, slots, block_table, positions, sinks)``."""
    return (*arguments[:3], *state, *places, *arguments[3:])


STATEFUL[torch.ops.specgraph.attention.default] = Stateful(
    torch.ops.specgraph.paged_attention.default, ("k_cache", "v_cache"), _page_pools, _paged_arguments
)
