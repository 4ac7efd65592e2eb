"""The Triton form of the short convolution: a program computes some channels of some rows of one sequence.

The sum over the weights is written out in their order, in float32, and rounded to the dtype of the weights as PyTorch's
convolution is. So the bits of a row are a function of the inputs that it sees, wherever these come from.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import contiguous, dense_rows, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.recurrent.arguments import CHUNK, CachedConv
from specgraph.kernels.recurrent.last_rows import common_stride, most_in_place, near_span, store_last_rows

_ROWS, _TILE = 16, {True: 512, False: 2048}
"""The most rows of a program, and its rows times its channels, in a step (True) or in a prompt."""


@triton.jit(do_not_specialize=["rows", "outer"])
def _cached_conv_kernel(
    out, x, weight, bias, inputs, span, rows, outer, inner: tl.constexpr, UNIT: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, SILU: tl.constexpr, STORE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """The grid is (B, blocks of rows, blocks of channels)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    b = tl.program_id(0).to(tl.int64)
    row, begin, _, count, _ = near_span(span, b)
    x, inputs, out = x + b * outer * UNIT, inputs + row * (SLOTS * CHANNELS), out + b * rows * CHANNELS
    # Rows of the call are lines: [ROWS]. Channels are columns: [BLOCK].
    t = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    own, real = channel < CHANNELS, t < count
    # ---- total = bias + sum over i < WIDTH of weight_i x_{t - WIDTH + 1 + i}: [ROWS, BLOCK]
    # Inputs of earlier calls come from the cache, and those in front of the sequence are zeros.
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=own, other=0).to(tl.float32)[None, :]
    for i in tl.static_range(WIDTH):
        place = t - (WIDTH - 1) + i
        position = begin + place
        new = ((place >= 0) & real)[:, None] & own[None, :]
        old = ((place < 0) & (position >= 0) & real)[:, None] & own[None, :]
        value = tl.load(x + place[:, None] * inner + channel[None, :], mask=new, other=0)
        slot = tl.maximum(position, 0) % SLOTS
        known = tl.load(inputs + slot[:, None] * CHANNELS + channel[None, :], mask=old, other=0)
        factor = tl.load(weight + channel * WIDTH + i, mask=own, other=0).to(tl.float32)
        total += tl.where(new, value, known).to(tl.float32) * factor[None, :]
    # ---- inputs[position % SLOTS] = x of the last SLOTS rows
    if STORE:
        kept = real & (t >= count - SLOTS)
        value = tl.load(x + t[:, None] * inner + channel[None, :], mask=kept[:, None] & own[None, :])
        slot = (begin + t) % SLOTS
        tl.store(inputs + slot[:, None] * CHANNELS + channel[None, :], value, mask=kept[:, None] & own[None, :])
    # ---- out = activation(total), rounded to the dtype of the weights before and after; 0 for rows that are not real
    total = total.to(weight.dtype.element_ty).to(tl.float32)
    if SILU:
        total = (total * (1 / (1 + tl.exp(-total)))).to(weight.dtype.element_ty)
    total = tl.where(real[:, None], total.to(out.dtype.element_ty), 0)
    tl.store(out + t[:, None] * CHANNELS + channel[None, :], total, mask=(t < rows)[:, None] & own[None, :])


def cached_conv_triton(given: CachedConv) -> Tensor:
    """:class:`~specgraph.kernels.recurrent.arguments.CachedConv` in one kernel, or two for prompts."""
    batch, channels, rows = given.x.shape
    x, width, slots = dense_rows(given.x.transpose(1, 2)), given.weight.shape[1], given.inputs.shape[1]
    out = torch.empty(batch, rows, channels, dtype=x.dtype, device=x.device)
    in_place = rows <= most_in_place(slots, width - 1 + CHUNK - 1)
    together = min(_ROWS, triton.next_power_of_2(rows))
    block = min(_TILE[in_place] // together, triton.next_power_of_2(channels))
    unit = common_stride(x)
    launch(
        _cached_conv_kernel, (batch, triton.cdiv(rows, together), triton.cdiv(channels, block)), out, x,
        *contiguous(given, "weight", "bias"), given.inputs, given.span, rows, x.stride(0) // unit, x.stride(1),
        UNIT=unit, CHANNELS=channels, WIDTH=width, SLOTS=slots, SILU=bool(given.activation), STORE=in_place,
        ROWS=together, BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )
    if not in_place:
        store_last_rows(given.inputs, x, given.span)
    return out.transpose(1, 2)
