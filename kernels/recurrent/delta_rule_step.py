"""The second kernel of the gated delta rule for a step that decodes: a few new rows behind a state.

It gives every new row the bits that ``_carry_kernel`` of :mod:`specgraph.kernels.recurrent.delta_rule_triton` gives it
in a prompt, from what the first one, ``_prepare_kernel`` there, has prepared. But nearly all of its time is that of
reading the state. So it computes less, and reads ahead of time:

- The errors (delta) of known rows are cached, so what the state holds for a key is asked for new rows alone. These are
  at most half a chunk. So one tile has room for both their keys and their queries, and one product serves both. The
  key of a row lies at the row's place in the chunk, and its query half a chunk away from there. The rows of the
  product do not move afterwards: weights, scores and results are loaded and stored in the order in which the queries
  lie. A row of a product depends on that row alone, so its bits are those that it has elsewhere in a tile.
- The state is read in parts of ``_PART`` keys, of which the next ones are copied to shared memory meanwhile. A part
  continues the sums of the parts before it, as the instructions for one product of all keys do. A program then needs
  few registers, and twice as many programs fit on a multiprocessor. A product of two tiles of float32 is six sums, and
  takes all keys at once.
- Neither keys and queries nor the state depend on the first kernel, so their product is made while that still runs.
- The rows behind the boundary at which the state stands are fewer than two chunks, so at most one chunk becomes full.
  Only then is the state read again, part by part, to store it and to multiply it with the rows behind the chunk.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import supports_pdl
from specgraph.kernels.recurrent.last_rows import near_span
from specgraph.kernels.recurrent.tiles_triton import (
    DECAY,
    W_K,
    W_Q,
    W_UPDATE,
    WEIGHTS,
    product,
    store_padding,
    thirds,
    total,
    wait_for_others,
)

STEP_COLUMNS = 32
"""Columns of a state that a program has."""
_PART, _WARPS, _STAGES, _REGISTERS = 32, 2, 3, 128


@triton.jit
def _tile(
    first, q, k, begin, count, q_row: tl.constexpr, k_row: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """Pointers to the first part of the tile of keys and queries of the chunk at ``first``, and which rows it has."""
    lane, key = tl.arange(0, CHUNK), tl.arange(0, PART)
    t, asking = first + lane - begin, first + (lane ^ (CHUNK // 2)) - begin
    asks = (asking >= 0) & (asking < count)
    tile = q + asking[:, None] * q_row + key[None, :]
    if CORRECTED:
        new = (t >= 0) & (t < count)
        tile = tl.where(new[:, None], k + t[:, None] * k_row + key[None, :], tile)
        asks = asks | new
    return tile, asks


@triton.jit
def _add(given, full, low, middle, high):
    """Add a part of a product to the sums of which :func:`_answer` makes the whole one."""
    if given.dtype == tl.bfloat16:
        first, second, third = thirds(full)
        low, middle, high = tl.dot(given, third, low), tl.dot(given, second, middle), tl.dot(given, first, high)
    else:
        high = product(given.to(tl.float32), full)  # all keys are one part
    return low, middle, high


@triton.jit
def _answer(low, middle, high, dtype: tl.constexpr):
    """The product of which :func:`_add` has summed the parts; ``dtype`` is that of keys and queries."""
    if dtype == tl.bfloat16:
        high = total(low, middle, high)
    return high


@triton.jit
def _load_rows(
    first, v, beta, chunk_delta, begin, count, column, v_row: tl.constexpr, HEADS: tl.constexpr, VALUE: tl.constexpr,
    RING: tl.constexpr, CHUNK: tl.constexpr,
):
    """Values and rates of the new rows of a chunk, and errors of the known ones."""
    lane, own = tl.arange(0, CHUNK), column < VALUE
    t, ring = first + lane - begin, (first + lane) % RING
    known, new = (t < 0) & (count > 0), (t >= 0) & (t < count)
    value = tl.load(v + t[:, None] * v_row + column[None, :], mask=new[:, None] & own[None, :], other=0,
                    cache_modifier=".cg")
    delta = tl.load(chunk_delta + ring[:, None] * (HEADS * VALUE) + column[None, :], mask=known[:, None] & own[None, :],
                    other=0, cache_modifier=".cg")
    tile_beta = tl.full([CHUNK], 1.0, tl.float32)
    if beta is not None:
        tile_beta = tl.load(beta + t * HEADS, mask=new, other=0, cache_modifier=".cg").to(tl.float32)
    return value, tile_beta, delta


@triton.jit
def _rows(
    first, answer, value, tile_beta, delta, out, chunk_delta, scores, weights, begin, count, column,
    HEADS: tl.constexpr, VALUE: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr, CHUNK: tl.constexpr,
    CORRECTED: tl.constexpr,
):
    """Store results and errors of the new rows of a chunk, for whose tile the state gives ``answer``.

    Returns the errors of all rows of the chunk.
    """
    lane, own = tl.arange(0, CHUNK), column < VALUE
    place = lane ^ (CHUNK // 2)
    t, asking = first + lane - begin, first + place - begin
    new, asks = (t >= 0) & (t < count), (asking >= 0) & (asking < count)
    line = asking + BEHIND
    tile_scores = tl.load(scores + line[:, None] * (HEADS * CHUNK) + lane[None, :],
                   mask=asks[:, None] & (lane[None, :] <= place[:, None]), other=0)
    w_q = tl.load(weights + line * (WEIGHTS * HEADS) + W_Q * HEADS, mask=asks, other=0)
    # ---- delta = beta (v - e^G S^T k): [CHUNK, BLOCK], where `answer` has S^T k at the rows of keys
    new_delta = value.to(tl.float32)
    if CORRECTED:
        w_k = tl.load(weights + (t + BEHIND) * (WEIGHTS * HEADS) + W_K * HEADS, mask=new, other=0)
        new_delta = tile_beta[:, None] * new_delta - w_k[:, None] * answer
    delta = tl.where(new[:, None], new_delta, delta)
    # ---- out = e^G S^T q + scores A delta: [CHUNK, BLOCK], where `answer` has S^T q at the rows of queries
    result = w_q[:, None] * answer + product(tile_scores, delta)
    tl.store(out + asking[:, None] * (HEADS * VALUE) + column[None, :], result.to(out.dtype.element_ty),
             mask=asks[:, None] & own[None, :])
    ring = (first + lane) % RING
    tl.store(chunk_delta + ring[:, None] * (HEADS * VALUE) + column[None, :], delta, mask=new[:, None] & own[None, :])
    return delta


@triton.jit
def _update(
    first, delta, chunk_a, weights, begin, HEADS: tl.constexpr, RING: tl.constexpr, BEHIND: tl.constexpr,
    CHUNK: tl.constexpr, CORRECTED: tl.constexpr,
):
    """What is left of the state behind the full chunk at ``first``, and what its rows add to it with their keys."""
    lane = tl.arange(0, CHUNK)
    line, ring = first + lane - begin + BEHIND, (first + lane) % RING
    w_update = tl.load(weights + line * (WEIGHTS * HEADS) + W_UPDATE * HEADS)
    decay = tl.load(weights + (first + CHUNK - 1 - begin + BEHIND) * (WEIGHTS * HEADS) + DECAY * HEADS)
    v_new = delta
    if CORRECTED:
        tile_a = tl.load(chunk_a + ring[:, None] * (HEADS * CHUNK) + lane[None, :],
                         mask=lane[None, :] <= lane[:, None], other=0)
        v_new = product(tile_a, delta)
    return decay, w_update[:, None] * v_new


@triton.jit(do_not_specialize=["rows", "q_outer", "k_outer", "v_outer"])
def step_kernel(
    out, q, k, v, beta, state, chunk_k, chunk_delta, chunk_a, scores, weights, span, rows,
    q_outer, q_strides: tl.constexpr, k_outer, k_strides: tl.constexpr, v_outer, v_strides: tl.constexpr,
    UNIT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    RING: tl.constexpr, BEHIND: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):
    """The grid is (B, H, blocks of columns). New rows are stored where they are cached."""
    entry, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, begin, before, count, settled = near_span(span, entry)
    key, column = tl.arange(0, PART), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    own, group, lines = column < VALUE, head // GROUP, entry * (rows + BEHIND)
    groups: tl.constexpr = HEADS // GROUP
    corrected: tl.constexpr = beta is not None
    q += entry * q_outer * UNIT + group * q_strides.head
    k += entry * k_outer * UNIT + group * k_strides.head
    v += entry * v_outer * UNIT + head * v_strides.head
    if beta is not None:
        beta += entry * rows * HEADS + head
    out += (entry * rows * HEADS + head) * VALUE
    chunk_k += (slot * RING * groups + group) * KEY
    chunk_delta += (slot * RING * HEADS + head) * VALUE
    chunk_a += (slot * RING * HEADS + head) * CHUNK
    scores += (lines * HEADS + head) * CHUNK
    weights += lines * (WEIGHTS * HEADS) + head
    p_state = state + (slot * HEADS + head) * (KEY * VALUE) + key[:, None] * VALUE + column[None, :]
    first, full = before // CHUNK * CHUNK, (begin + count) // CHUNK * CHUNK

    # The first kernel lets this one begin when all kernels before it are done. They have written what is read up to the
    # wait, and it is not read from the L1 cache.
    value, tile_beta, delta = _load_rows(
        first, v, beta, chunk_delta, begin, count, column, v_strides.row, HEADS, VALUE, RING, CHUNK
    )
    tile, there = _tile(first, q, k, begin, count, q_strides.row, k_strides.row, CHUNK, PART, corrected)
    # ---- S^T k and S^T q of the new rows, part by part of the keys: [CHUNK, PART] x [PART, BLOCK]
    low = tl.zeros([CHUNK, BLOCK], tl.float32)
    middle, high = low, low
    for part in tl.range(0, WIDE, PART, num_stages=STAGES):
        inside = part + key < KEY
        given = tl.load(tile + part, mask=there[:, None] & inside[None, :], other=0, cache_modifier=".cg")
        old = tl.load(p_state + part * VALUE, mask=(inside & (count > 0))[:, None] & own[None, :], other=0,
                      cache_modifier=".cg")
        low, middle, high = _add(given, old, low, middle, high)
    wait_for_others(True, PDL)
    store_padding(out, count, rows, column, own, HEADS, VALUE, BLOCK)
    if count > 0:
        answer = _answer(low, middle, high, q.dtype.element_ty)
        delta = _rows(first, answer, value, tile_beta, delta, out, chunk_delta, scores, weights, begin, count, column,
                      HEADS, VALUE, RING, BEHIND, CHUNK, corrected)
        if first < full:
            decay, v_new = _update(first, delta, chunk_a, weights, begin, HEADS, RING, BEHIND, CHUNK, corrected)
            chunk = chunk_k + (first + tl.arange(0, CHUNK))[:, None] % RING * (groups * KEY) + key[None, :]
            stored = full == (begin + settled) // CHUNK * CHUNK
            value, tile_beta, delta = _load_rows(
                full, v, beta, chunk_delta, begin, count, column, v_strides.row, HEADS, VALUE, RING, CHUNK
            )
            tile, there = _tile(full, q, k, begin, count, q_strides.row, k_strides.row, CHUNK, PART, corrected)
            # ---- S <- e^{G_last} S + sum over j of e^{G_last - G_j} k_j v_new_j^T: [PART, BLOCK], and the rows behind
            low = tl.zeros([CHUNK, BLOCK], tl.float32)
            middle, high = low, low
            for part in tl.range(0, WIDE, PART, num_stages=1):
                inside = part + key < KEY
                both = inside[:, None] & own[None, :]
                tile_k = tl.load(chunk + part, mask=inside[None, :], other=0)
                given = tl.load(tile + part, mask=there[:, None] & inside[None, :], other=0)
                old = tl.load(p_state + part * VALUE, mask=both, other=0, cache_modifier=".cg")
                new = old * decay + product(tl.trans(tile_k), v_new, CHAINED=True)
                tl.store(p_state + part * VALUE, new, mask=both & stored)
                low, middle, high = _add(given, new, low, middle, high)
            answer = _answer(low, middle, high, q.dtype.element_ty)
            _rows(full, answer, value, tile_beta, delta, out, chunk_delta, scores, weights, begin, count, column, HEADS,
                  VALUE, RING, BEHIND, CHUNK, corrected)


def _copied_whole(x: Tensor) -> bool:
    """Whether ``x`` can be read 16 bytes at a time: all its strides, and where it begins, are multiples of that."""
    places = (*x.stride()[:-1], x.shape[-1])
    return x.data_ptr() % 16 == 0 and all(place * x.element_size() % 16 == 0 for place in places)


def step_options(q: Tensor, k: Tensor, state: Tensor, wide: int) -> dict[str, Any]:
    """How :func:`step_kernel` divides its work for these arguments, of which a tile is ``wide``."""
    part = min(_PART, wide) if k.dtype == torch.bfloat16 else wide
    # Copies of fewer than 16 bytes go through the L1 cache, which must not be read before the wait.
    ahead = part == _PART and all(map(_copied_whole, (q, k, state)))
    limit = {"maxnreg": _REGISTERS} if supports_pdl(k.device) else {}
    return {"PART": part, "BLOCK": STEP_COLUMNS, "STAGES": _STAGES if ahead else 1, "num_warps": _WARPS, **limit}
