"""What kernels of the gated delta rule share: waits, loads, exact products, weights of rows, and padding."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from specgraph.kernels.attention.tiles import loop_bound
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait

PRECISION = tl.constexpr("tf32x3")
"""How float32 is multiplied: in three parts of TF32, which is as exact as float32."""
W_K, W_Q, W_UPDATE, DECAY, BETA = (tl.constexpr(i) for i in range(5))
WEIGHTS = tl.constexpr(5)
"""The weights of a row, in float32, with ``G`` the sum of ``g`` since the boundary of its chunk:

- ``W_K = beta e^G / |k|``: on ``S^T k``, which ``beta v`` is lessened by;
- ``W_Q = scale e^G / |q|``: on ``S^T q``;
- ``W_UPDATE = e^{G_last - G} / |k|``: on ``k v_new^T``, which the state gains at the end of the chunk;
- ``DECAY = e^G``: on the state, of which that of the last row counts;
- ``BETA``: on ``v``.

Lengths are 1 where keys and queries are not normalised."""


class Strides(NamedTuple):
    """The strides of ``[B, T, H, D]`` that are constants of a kernel, in elements.

    That of a sequence is not: it depends on the number of rows, and each number would be a kernel of its own.
    """

    row: int
    head: int


@triton.jit
def wait_for_others(STEP: tl.constexpr, PDL: tl.constexpr):
    """Wait for the kernels before this one and, in a step, let the next one start.

    It starts behind the wait, for what it reads ahead of its own. In a prompt it does not: a few programs that run for
    long are then slower, probably because they crowd on the multiprocessors that are done first, and stay there.
    """
    gdc_wait(PDL)
    if STEP:
        gdc_launch_dependents(PDL)


@triton.jit
def load_rows(pointers, mask, FULL: tl.constexpr):
    """The values at ``pointers``, and zeros where ``mask`` is false. ``FULL`` promises that it is true everywhere."""
    if FULL:
        return tl.load(pointers)
    return tl.load(pointers, mask=mask, other=0)


@triton.jit
def load_values(v, t, column, mask, stride: tl.constexpr, FULL: tl.constexpr, PAIRED: tl.constexpr):
    """The values of the rows ``t``, float32 ``[columns, rows]``, and zeros where ``mask`` is false unless ``FULL``.

    If ``PAIRED``, two neighbouring bfloat16 values are loaded as one int32: the pipeline of a loop copies nothing ahead
    that has less than four bytes. The columns are then a block of them, by the third axis of the grid.
    """
    if FULL and PAIRED:
        half: tl.constexpr = column.shape[0] // 2
        pair = tl.program_id(2) * half + tl.arange(0, half)
        pairs = tl.load(v.to(tl.pointer_type(tl.int32)) + t[:, None] * (stride // 2) + pair[None, :])
        even, odd = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
        return tl.trans(tl.reshape(tl.join(even, odd), [t.shape[0], column.shape[0]]))
    return load_rows(v + t[None, :] * stride + column[:, None], mask, FULL).to(tl.float32)


@triton.jit
def _rest(full):
    """The first eight digits of float32 as bfloat16, and what is left of it, both without an error."""
    bits = full.to(tl.uint32, bitcast=True)
    first = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return first, full - (bits & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def thirds(full):
    """The digits of float32 as three parts of bfloat16, the highest first."""
    high, rest = _rest(full)
    middle, rest = _rest(rest)
    low, _ = _rest(rest)
    return high, middle, low


@triton.jit
def total(low, middle, high):
    """The sum of three products, each of which is a sum of its own.

    Triton would turn ``low + middle + high`` into one chain of instructions, in which every one waits for the one
    before it. A multiplication by 1 has the same bits and stays as it is.
    """
    return tl.fma(tl.fma(low, 1.0, middle), 1.0, high)


@triton.jit
def product(left, right, CHAINED: tl.constexpr = False):
    """The product of two tiles, as exact as float32. One of them may be of bfloat16.

    Three parts of bfloat16 are all the digits of float32, and their products are exact. Those that are less than the
    last digit of the result are left out. The transposed product of transposed tiles has the same bits. ``CHAINED``
    sums take fewer registers and more time.
    """
    if left.dtype == tl.bfloat16:
        high, middle, low = thirds(right)
        if CHAINED:
            return tl.dot(left, high, tl.dot(left, middle, tl.dot(left, low)))
        return total(tl.dot(left, low), tl.dot(left, middle), tl.dot(left, high))
    if right.dtype == tl.bfloat16:
        high, middle, low = thirds(left)
        if CHAINED:
            return tl.dot(high, right, tl.dot(middle, right, tl.dot(low, right)))
        return total(tl.dot(low, right), tl.dot(middle, right), tl.dot(high, right))
    high, middle, low = thirds(left.to(tl.float32))
    first, second, third = thirds(right.to(tl.float32))
    least = total(tl.dot(high, third), tl.dot(low, first), tl.dot(middle, second))
    return total(least, tl.fma(tl.dot(high, second), 1.0, tl.dot(middle, first)), tl.dot(high, first))


@triton.jit
def store_padding(out, count, rows, column, own, HEADS: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr):
    """Store zeros as the result of one head for the rows of a sequence from ``count`` on, where columns are ``own``."""
    for padding in range(loop_bound(count), loop_bound(rows)):
        nothing = tl.zeros([BLOCK], out.dtype.element_ty)
        tl.store(out + padding * (HEADS * VALUE) + column, nothing, mask=own)
