"""What the ops of attention take: arguments, their shapes and dtypes, and the checks of them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Protocol

from torch import Tensor

from specgraph.kernels.checks import check_shapes, require

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


class Operands(Protocol):
    """What every op of attention takes: ``q``, ``k`` and ``v`` ``[B, H, T, D]``, and ``sinks`` ``[Hq]`` or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def check_dense(given: Operands) -> None:
    """Refuse heads that do not fit each other."""
    check_shapes(given, q="B Hq T D", k="B Hkv T D", v="B Hkv T Dv", sinks="Hq")
    heads, groups = given.q.shape[1], given.k.shape[1]
    require(heads % groups == 0, lambda: f"{heads} heads do not group over {groups}")


def check_paged(given: PagedAttention) -> None:
    """Refuse heads, angles, caches and places that do not fit each other."""
    check_dense(given)
    check_angles(given.cos, given.sin, given.q)
    check_caches(given)
    starts, table = given.cu_seqlens, "B M" if given.cu_seqlens is None else "S M"
    check_shapes(given, q="B Hq T D", slots="B T", positions="B T", block_table=table)
    if starts is not None:
        rows, lines = given.slots.shape, given.block_table.shape[0] + 2
        require(rows[0] == 1, lambda: f"packed rows are [1, R], not {list(rows)}")
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


class Cached(Protocol):
    """What every op takes that reads or writes a cache: new keys and values, their angles or None, and the caches."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cos: Tensor | None
    sin: Tensor | None


def check_caches(given: Cached) -> None:
    """Refuse caches that do not fit the rows of keys and values."""
    check_shapes(given, k="B H T D", v="B H T Dv", k_cache="N S H D", v_cache="N S H Dv")
    for name, cache, new in (("k_cache", given.k_cache, given.k), ("v_cache", given.v_cache, given.v)):
        _check_dtype(name, cache, new)


def _check_dtype(name: str, cache: Tensor, new: Tensor) -> None:
    require(cache.dtype == new.dtype, lambda: f"{name} must have the dtype of the rows written to it")
