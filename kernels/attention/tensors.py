"""The tensors of attention as its kernels take them: each is one argument, with the strides by which it is read.

Triton specialises every element of a tuple, as it does with every argument, and ``do_not_specialize`` names no
element, so a stride that changes from call to call does not belong here. Strides are counted in elements, and a field
is named after the index by which it is multiplied. In a kernel, ``x`` is a pointer.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specgraph.kernels.attention.arguments import Cached
from specgraph.kernels.launch import dense_rows


class Heads(NamedTuple):
    """Queries, keys or values ``[B, H, T, D]``, whose last dimension lies together."""

    x: Tensor
    batch: int
    head: int
    token: int

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        """``x``, or a copy of it."""
        x = dense_rows(x)
        return cls(x, *x.stride()[:3])


class Angles(NamedTuple):
    """``cos`` and ``sin`` ``[B or 1, T, n]``, whose last dimension lies together, or None."""

    cos: Tensor | None
    sin: Tensor | None
    batch: int
    token: int

    @classmethod
    def of(cls, cos: Tensor | None, sin: Tensor | None) -> Angles:
        """``cos`` and ``sin``, or copies of them. If they are for one sequence, all sequences read that."""
        if cos is None or sin is None:
            return cls(None, None, 0, 0)
        if cos.stride() != sin.stride() or cos.stride(2) != 1:
            cos, sin = cos.contiguous(), sin.contiguous()
        return cls(cos, sin, cos.stride(0) if cos.shape[0] > 1 else 0, cos.stride(1))


class Cache(NamedTuple):
    """Cached keys or values ``[num_blocks, block_size, H, D]``, as a pool of pages has them: slots at one stride, also
    across pages, and the last dimension together. Of one head, ``x`` points at that head.
    """

    x: Tensor
    slot: int
    head: int


def new_and_cached(given: Cached) -> tuple[Heads, Heads, Angles, Cache, Cache]:
    """The keys and values of new tokens, their angles, and the caches of keys and of values."""
    k_cache, v_cache = (Cache(x, *x.stride()[1:3]) for x in (given.k_cache, given.v_cache))
    return Heads.of(given.k), Heads.of(given.v), Angles.of(given.cos, given.sin), k_cache, v_cache
