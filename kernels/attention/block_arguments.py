"""What the ops of a block drafter's attention take: arguments, their shapes and dtypes, and the checks of them."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from torch import Tensor


@dataclass(slots=True)
class KeepContext:
    """Mark keys ``[B, Hkv, T, D]`` and values ``[B, Hkv, T, Dv]`` as those that later blocks see."""

    k: Tensor
    v: Tensor


@dataclass(slots=True)
class WriteContext:
    """Write keys ``[B, Hkv, T, D]`` and values ``[B, Hkv, T, Dv]`` to their cache slots.

    Attributes:
        k, v: the keys and values of ``T`` tokens of each sequence.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]`` and ``[..., Dv]``, written in place.
        slots: int64 ``[B, T]``; tokens with ``PADDING_SLOT`` are not written.
        cos, sin: ``[B or 1, T, n]``, by which the first ``n`` values of keys are rotated first; None writes keys as
            they are.
    """

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    slots: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None


@dataclass(slots=True)
class BlockAttention:
    """Attention of the ``T`` queries of a block over the block: ``[B, H, T, D]`` inputs, ``[B, T, Hq, Dv]`` out.

    Attributes:
        q, k, v: ``[B, Hq, T, D]``, ``[B, Hkv, T, D]`` and ``[B, Hkv, T, Dv]``, with ``Hq`` a multiple of ``Hkv``.
        sinks: ``[Hq]`` or None, extra logits without a value.
        scale: factor on the scores.
        window: a sliding window ``w``; None is all. A query sees keys fewer than ``w`` positions away from it.
        causal: whether queries of the block see only keys of the block that are not after them.
        anchored: whether the window is anchored at the block, and not at each query: all queries see the ``w``
            positions in front of the block, and the whole block.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None = None
    _: KW_ONLY
    scale: float
    window: int | None = None
    causal: bool = False
    anchored: bool = False


@dataclass(slots=True)
class PagedBlockAttention:
    """:class:`BlockAttention` whose queries also see the cached positions in front of the block.

    Attributes:
        q, k, v: those of the block, which has no padding.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]`` and ``[..., Dv]``, with rotated keys.
        block_table: int64 ``[B, M]``, the blocks of each sequence in order, padded with -1.
        positions: int64 ``[B, T]``, absolute and consecutive. What lies at the first one or behind it is not read.
        sinks, scale, window, causal, anchored: as in :class:`BlockAttention`.
        cos, sin: ``[B or 1, T, n]``, by which the first ``n`` values of queries and keys of the block are rotated
            first; None leaves them.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    positions: Tensor
    sinks: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    _: KW_ONLY
    scale: float
    window: int | None = None
    causal: bool = False
    anchored: bool = False
