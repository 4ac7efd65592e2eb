"""The definition of a block drafter's attention: queries that see a cached context, and each other both ways.

A block drafter (DFlash) computes two things with the same layers. From the *context*, which are tokens that the
target has verified, it keeps keys and values. For a *block* of ``T`` queries at the positions ``P``, ``P + 1``, ...,
``P + T - 1`` it computes, for each query ``t`` and the keys ``s`` that it sees::

    out[t] = sum over s of softmax(scale * q[t] . k[s]) * v[s]

The keys are those of the context at positions below ``P`` and those of the block itself. The block's own keys and
values are arguments and are never cached. ``q`` is ``[B, Hq, T, D]``, ``k`` is ``[B, Hkv, T, D]``, ``v`` is
``[B, Hkv, T, Dv]``, and the result is ``[B, T, Hq, Dv]`` in the dtype of ``q``.

- ``specgraph::keep_context`` and ``specgraph::block_attention`` stand in a module while it is traced. The first marks
  keys and values that are to be kept, and the second attends within the block, as if there were no context.
- ``specgraph::write_context`` and ``specgraph::paged_block_attention`` are what the pass ``insert_kv_cache`` makes of
  them: the first writes to the pages of a sequence, and the second reads them. Given ``cos`` and ``sin``, they rotate
  keys (and queries) before, as ``specgraph::paged_attention`` does.

The Triton forms are in :mod:`specgraph.kernels.attention.block_paged`.

Source: DFlash (z-lab, 2026), ``dflash/model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from specgraph.kernels.attention import attention
from specgraph.kernels.attention.arguments import check_angles, check_caches, check_dense
from specgraph.kernels.attention.block_arguments import (
    BlockAttention,
    KeepContext,
    PagedBlockAttention,
    WriteContext,
)
from specgraph.kernels.attention.block_paged import paged_block_attention_triton, write_context_triton
from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.ops import Variant, declare, not_float64, triton_or_reference
from specgraph.kernels.state import STATEFUL, Stateful


class Sight(Protocol):
    """What :class:`BlockAttention` says about the keys that queries of a block see."""

    @property
    def window(self) -> int | None:
        """The sliding window; None for all keys."""

    @property
    def causal(self) -> bool:
        """Whether queries see no later keys of the block."""

    @property
    def anchored(self) -> bool:
        """Whether the window of every query is that of the block's first one, and the whole block."""


def sees(positions: Tensor, keys: Tensor, given: Sight) -> Tensor:
    """Which keys the queries of a block see: bool ``[B, T, S]``.

    ``positions`` ``[B, T]`` are those of the queries, and ``keys`` ``[B, S]`` those of context and block. All keys in
    front of the block are of the context, and all others of the block.
    """
    first = positions[:, :1, None]
    distance = positions.unsqueeze(2) - keys.unsqueeze(1)
    context = keys.unsqueeze(1) < first
    visible = context | (distance >= 0) if given.causal else torch.ones_like(distance, dtype=torch.bool)
    if given.window is None:
        return visible
    if given.anchored:
        return visible & (keys.unsqueeze(1) >= first - given.window)
    return visible & (distance.abs() < given.window)


def block_attention_reference(given: BlockAttention) -> Tensor:
    """:class:`BlockAttention` in plain PyTorch."""
    q = given.q
    rows = torch.arange(q.shape[2], device=q.device).expand(q.shape[0], -1)
    return attention.attend(q, given.k, given.v, sees(rows, rows, given), given.sinks, given.scale, None)


def write_context_reference(given: WriteContext) -> None:
    """:class:`WriteContext` in plain PyTorch."""
    k = given.k if given.cos is None or given.sin is None else attention.rotate(given.k, given.cos, given.sin)
    attention.write_cache(given.k_cache, k, given.slots)
    attention.write_cache(given.v_cache, given.v, given.slots)


def paged_block_attention_reference(given: PagedBlockAttention) -> Tensor:
    """:class:`PagedBlockAttention` in plain PyTorch; it waits for the device."""
    q, k, positions = given.q, given.k, given.positions
    if given.cos is not None and given.sin is not None:
        q, k = (attention.rotate(x, given.cos, given.sin) for x in (q, k))
    first = positions[:, :1]
    length = int(first.max().clamp_min(0))
    # Whole pages in front of all windows are not read.
    unseen = 0 if given.window is None else max(0, int(first.min()) - given.window) // given.k_cache.shape[1]
    begin = unseen * given.k_cache.shape[1]
    cached = torch.arange(begin, length, device=q.device).expand(len(positions), -1)
    keys, values = (
        # Zero times an old NaN would be NaN, so what is not read becomes zero.
        attention.read_cache(cache, given.block_table[:, unseen:], length - begin).masked_fill(
            (cached >= first)[:, None, :, None], 0
        )
        for cache in (given.k_cache, given.v_cache)
    )
    places = torch.cat([cached, positions], 1)
    visible = sees(positions, places, given)
    visible[:, :, : length - begin] &= (cached < first).unsqueeze(1)
    return attention.attend(
        q, torch.cat([keys, k], 2), torch.cat([values, given.v], 2), visible, given.sinks, given.scale, None
    )


def _write_context_fake(given: WriteContext) -> None:
    check_caches(given)
    check_angles(given.cos, given.sin, given.k)
    check_shapes(given, k="B H T D", slots="B T")


def _paged_block_attention_fake(given: PagedBlockAttention) -> Tensor:
    check_caches(given)
    check_angles(given.cos, given.sin, given.k)
    check_shapes(given, q="B Hq T D", positions="B T", block_table="B M")
    return _empty(given)


def _empty(given: BlockAttention | PagedBlockAttention) -> Tensor:
    check_dense(given)
    window = given.window
    require(window is None or window > 0, lambda: f"a window has at least one position, not {window}")
    batch, heads, rows, _ = given.q.shape
    return given.q.new_empty(batch, rows, heads, given.v.shape[3])


def _keep_context_fake(given: KeepContext) -> None:
    check_shapes(given, k="B H T D", v="B H T Dv")


declare(
    "keep_context", KeepContext, _keep_context_fake, (Variant("reference", lambda given: None, batch_invariant=True),),
)
WRITE_CONTEXT = declare(
    "write_context", WriteContext, _write_context_fake,
    triton_or_reference(write_context_triton, write_context_reference, covers=not_float64("k")),
    mutates=("k_cache", "v_cache"),
)
BLOCK_ATTENTION = declare(
    "block_attention", BlockAttention, _empty,
    (Variant("reference", block_attention_reference, batch_invariant=False),),
)
PAGED_BLOCK_ATTENTION = declare(
    "paged_block_attention", PagedBlockAttention, _paged_block_attention_fake,
    triton_or_reference(paged_block_attention_triton, paged_block_attention_reference, covers=not_float64("k")),
)
# It returns nothing and writes nothing as long as there are no pages, but it must not be removed as dead code.
fx.node.has_side_effect(torch.ops.specgraph.keep_context.default)


def _write_arguments(arguments: Sequence[Any], state: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
    """``(k, v)`` to ``(k, v, k_cache, v_cache, slots)``."""
    slots, _, _ = places
    return (*arguments, *state, slots)


def _read_arguments(arguments: Sequence[Any], state: Sequence[Any], places: Sequence[Any]) -> tuple[Any, ...]:
    """``(q, k, v, sinks)`` to ``(q, k, v, k_cache, v_cache, block_table, positions, sinks)``."""
    _, block_table, positions = places
    return (*arguments[:3], *state, block_table, positions, *arguments[3:])


STATEFUL[torch.ops.specgraph.keep_context.default] = Stateful(
    torch.ops.specgraph.write_context.default,
    ("k_cache", "v_cache"),
    attention.page_pools,
    _write_arguments,
    reads=False,
)
STATEFUL[torch.ops.specgraph.block_attention.default] = Stateful(
    torch.ops.specgraph.paged_block_attention.default,
    ("k_cache", "v_cache"),
    lambda operands, block_size: attention.page_pools(operands[1:3], block_size),
    _read_arguments,
)
