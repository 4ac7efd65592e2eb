"""What the ops of attention take: arguments, their shapes and dtypes, and the checks of them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from torch import Tensor

from specgraph.kernels.checks import require

PADDING_SLOT = -1
"""The slot of a token that must not be written to the cache."""


@dataclass(slots=True)
class Attention:
    """Causal attention of ``T`` tokens over themselves: ``[B, H, T, D]`` inputs, ``[B, T, Hq, Dv]`` out.

    Attributes:
        q, k, v: ``[B, Hq, T, D]``, ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``, with ``Hq`` a multiple of ``Hkv``.
        sinks: ``[Hq]`` or None, extra logits without a value.
        scale: factor on the scores.
        window: how many positions back a query sees, its own included; None is all.
        softcap: ``c`` in ``c * tanh(score / c)``, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    _: KW_ONLY
    scale: float
    window: int | None = None
    softcap: float | None = None


@dataclass(slots=True)
class PagedAttention:
    """Write new keys and values into the cache, then attend to all that each query may see: ``[B, T, Hq, Dv]``.

    Attributes:
        q, k, v: those of the new tokens, ``[B, Hq, T, D]``, ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]`` and ``[..., Dv]``, written in place.
        slots: int64 ``[B, T]``, ``block * block_size + offset`` of each token; with ``PADDING_SLOT`` a token is not
            written and its output is zero.
        block_table: int64 ``[B, M]``, the blocks of each sequence in order, padded with -1.
        positions: int64 ``[B, T]``, absolute positions of the tokens.
        sinks, scale, window, softcap: as in :class:`Attention`.
        cos, sin: ``[B or 1, T, n]``, by which the first ``n`` values of queries and keys are rotated first; the cache
            holds rotated keys, and ``n`` is even and at most ``D``. None leaves them.
        cu_seqlens: int64 ``[B + 2]``, if the call is of variable length, with all sequences packed
            (:mod:`specgraph.kernels.attention.packing`). Then ``[B, T]`` is ``[1, R]`` everywhere but in
            ``block_table``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    block_table: Tensor
    positions: Tensor
    sinks: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    _: KW_ONLY
    scale: float
    window: int | None = None
    softcap: float | None = None
    cu_seqlens: Tensor | None = None


class Heads(Protocol):
    """What every op of attention takes: ``q``, ``k`` and ``v`` ``[B, H, T, D]``, and ``sinks`` ``[Hq]`` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def check_dense(given: Heads) -> None:
    """Refuse heads that do not fit each other."""
    q, k, v, sinks = given.q, given.k, given.v, given.sinks
    require(q.dim() == 4 and k.dim() == 4 and v.dim() == 4, lambda: "q, k and v must be [B, H, T, D]")
    require(k.shape[:3] == v.shape[:3], lambda: f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in B, H, T")
    require(q.shape[0] == k.shape[0] and q.shape[2] == k.shape[2], lambda: "q and k must agree in B and T")
    require(q.shape[3] == k.shape[3], lambda: f"q and k head dims differ: {q.shape[3]} and {k.shape[3]}")
    require(q.shape[1] % k.shape[1] == 0, lambda: f"{q.shape[1]} heads do not group over {k.shape[1]}")
    if sinks is not None:
        require(sinks.shape == (q.shape[1],), lambda: f"sinks must be [{q.shape[1]}], not {tuple(sinks.shape)}")


def check_paged(given: PagedAttention) -> None:
    """Refuse heads, angles, caches and places that do not fit each other."""
    check_dense(given)
    check_angles(given.cos, given.sin, given.q)
    rows = (given.q.shape[0], given.q.shape[2])
    check_cache("k_cache", given.k_cache, given.k)
    check_cache("v_cache", given.v_cache, given.v)
    slots, positions, table = given.slots, given.positions, given.block_table
    require(slots.shape == rows, lambda: f"slots must be {rows}, not {tuple(slots.shape)}")
    require(positions.shape == rows, lambda: f"positions must be {rows}, not {tuple(positions.shape)}")
    starts = given.cu_seqlens
    require(table.dim() == 2, lambda: "block_table must be [B, M]")
    if starts is None:
        require(table.shape[0] == rows[0], lambda: "block_table must be [B, M]")
        return
    require(rows[0] == 1, lambda: f"packed rows are [1, R], not {list(rows)}")
    lines = table.shape[0] + 2
    require(starts.shape == (lines,), lambda: f"cu_seqlens must be [B + 2] = [{lines}], not {list(starts.shape)}")


def check_angles(cos: Tensor | None, sin: Tensor | None, q: Tensor) -> None:
    """Refuse angles that do not fit rows ``q`` ``[B, H, T, D]`` or each other."""
    require((cos is None) == (sin is None), lambda: "cos and sin must both be given, or neither of them")
    if cos is None or sin is None:
        return
    _check_angles("cos", cos, q)
    _check_angles("sin", sin, q)
    widths = (cos.shape[2], sin.shape[2])
    require(widths[0] == widths[1], lambda: f"cos and sin must be for the same values of a head, not for {widths}")


def _check_angles(name: str, angles: Tensor, q: Tensor) -> None:
    require(angles.dim() == 3, lambda: f"{name} must be [B, T, n]")
    width, dim = angles.shape[2], q.shape[3]
    fits = width % 2 == 0 and 0 < width <= dim
    require(fits, lambda: f"{name} must be for an even number of values of a head of {dim}, not for {width}")
    require(angles.shape[1] == q.shape[2], lambda: f"{name} must agree with q in T")
    require(angles.shape[0] in (1, q.shape[0]), lambda: f"{name} must be for B sequences or for one")


def check_cache(name: str, cache: Tensor, new: Tensor) -> None:
    """Refuse a cache that does not fit the rows ``new`` ``[B, H, T, D]`` of it."""
    wanted = (new.shape[1], new.shape[3])
    require(cache.dim() == 4 and cache.shape[2:] == wanted, lambda: f"{name} must end in {wanted}")
    require(cache.dtype == new.dtype, lambda: f"{name} must have the dtype of the rows written to it")
