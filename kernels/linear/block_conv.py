"""``specgraph::block_conv``: a short convolution within blocks, whose weights depend on the row.

Every row of a block sees itself and the rows before it, as far back as there are taps; in front of a block are zeros.
For channel ``c``, which is in group ``g``, and row ``t``::

    out[t, c] = sum over i of (base[i, c] + delta[t, i, g]) * x[t - i, c]  (+ residual[t, c])

Sums are in float32, or float64 for what is in it, in the order of the taps, and rounded once. So the bits of a row are
a function of the rows that it sees.

Source: DFlash 2 (z-lab and Inco AI, 2026).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import block_size, contiguous, dense_rows, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, not_float64, triton_or_reference


@dataclass(slots=True)
class BlockConv:
    """The rows ``[B, T, C]`` of blocks convolved, each block by itself.

    Attributes:
        x: ``[B, T, C]``.
        base: ``[w, C]``, the weights that all rows share, of ``w`` taps.
        delta: ``[B, T, w * G]``, what each row adds to them, for ``G`` groups of ``C / G`` channels that lie together.
        residual: ``[B, T, C]`` in the dtype of ``x``, which is added at the end.
    """

    x: Tensor
    base: Tensor
    delta: Tensor
    residual: Tensor | None = None


def block_conv_reference(given: BlockConv) -> Tensor:
    """:class:`BlockConv` in plain PyTorch."""
    exact = torch.promote_types(given.x.dtype, torch.float32)
    x, taps = given.x.to(exact), given.base.shape[0]
    grouped = torch.unflatten(given.delta.to(exact), 2, (taps, -1))
    weights = given.base.to(exact) + grouped.repeat_interleave(x.shape[2] // grouped.shape[3], dim=3)
    total = weights[:, :, 0] * x
    for i in range(1, min(taps, x.shape[1])):
        before = torch.nn.functional.pad(x[:, :-i], (0, 0, i, 0))
        total = total + weights[:, :, i] * before
    if given.residual is not None:
        total = total + given.residual.to(exact)
    return total.to(given.x.dtype)


@triton.jit
def _block_conv_kernel(
    out, x, base, delta, residual, rows, x_block, x_row, delta_block, delta_row,
    CHANNELS: tl.constexpr, GROUP: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    """Some channels of one row. The grid is (B * T, blocks of channels)."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    b, t = (tl.program_id(0) // rows).to(tl.int64), tl.program_id(0) % rows
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = channel < CHANNELS
    # ---- total = sum over i < TAPS of (base_i + delta_{t, i}) x_{t - i}: [BLOCK]
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TAPS):
        value = tl.load(x + b * x_block + (t - i) * x_row + channel, mask=own & (t >= i), other=0).to(tl.float32)
        shared = tl.load(base + i * CHANNELS + channel, mask=own, other=0).to(tl.float32)
        group = i * (CHANNELS // GROUP) + channel // GROUP
        added = tl.load(delta + b * delta_block + t * delta_row + group, mask=own, other=0).to(tl.float32)
        total += (shared + added) * value
    place = tl.program_id(0).to(tl.int64) * CHANNELS + channel
    if residual is not None:
        total += tl.load(residual + place, mask=own, other=0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=own)


def block_conv_triton(given: BlockConv) -> Tensor:
    """:class:`BlockConv` in one launch."""
    batch, rows, channels = given.x.shape
    out = torch.empty_like(given.x, memory_format=torch.contiguous_format)
    base, residual = contiguous(given, "base", "residual")
    x, delta, taps = dense_rows(given.x), dense_rows(given.delta), len(base)
    block = block_size(channels, 1024)
    launch(
        _block_conv_kernel, (batch * rows, triton.cdiv(channels, block)), out, x, base, delta, residual, rows,
        *x.stride()[:2], *delta.stride()[:2], CHANNELS=channels, GROUP=channels * taps // delta.shape[2], TAPS=taps,
        BLOCK=block, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _block_conv_fake(given: BlockConv) -> Tensor:
    check_shapes(given, x="B T C", base="w C", delta="B T *", residual="B T C")
    channels, (taps, _), width = given.x.shape[2], given.base.shape, given.delta.shape[2]
    fits = taps > 0 and width > 0 and width % taps == 0 and channels * taps % width == 0
    require(fits, lambda: f"delta has {width} weights a row, which are not {taps} for groups of {channels} channels")
    return torch.empty_like(given.x, memory_format=torch.contiguous_format)


block_conv = declare(
    "block_conv", BlockConv, _block_conv_fake,
    triton_or_reference(block_conv_triton, block_conv_reference, covers=not_float64("x")),
).function


def _keep_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.has_residual = inputs[3] is not None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Those of the reference, which is computed again."""
    inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
    with torch.enable_grad():
        out = block_conv_reference(BlockConv(*inputs))
    return *torch.autograd.grad(out, inputs, grad), grad if ctx.has_residual else None


torch.library.register_autograd("specgraph::block_conv", _gradients, setup_context=_keep_inputs)
