"""``specgraph::gated_rms_norm``: an RMS norm of heads and the gate behind it, in one kernel.

Recurrent layers norm what they read from their state, head by head, and multiply it by a function of a gate. As two
kernels, that is one launch more per layer, which writes and reads the normed heads again. The norm is the one of
:mod:`specgraph.kernels.linear.norm`, with the same bits.
"""

# Triton's functions have no types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.linear.norm import RmsNorm, rms_norm_reference, rms_norm_row
from specgraph.kernels.linear.strides import Rows, aligned, row_options
from specgraph.kernels.ops import declare, triton_or_reference

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}
"""The functions of a gate."""


@dataclass(slots=True)
class GatedRmsNorm:
    """``rms_norm(x) * activation(gate)``.

    The norm is rounded to the dtype of ``x``. The function of the gate is computed in float32 (float64 stays), and its
    product with the norm is rounded once. The result has the shape and the dtype of ``x``, and is contiguous.

    Attributes:
        x: ``[..., D]``.
        weight: ``[D]``, or None for 1, without the offset.
        gate: ``[..., D]`` of the dtype of ``x``, as many rows in the same order; its other dimensions may differ.
        activation: ``silu`` or ``sigmoid``.
        eps, offset: as in :class:`~specgraph.kernels.linear.norm.RmsNorm`.
    """

    x: Tensor
    weight: Tensor | None
    gate: Tensor
    _: KW_ONLY
    eps: float
    offset: float = 0.0
    activation: str = "silu"


def gated_rms_norm_reference(given: GatedRmsNorm) -> Tensor:
    """:class:`GatedRmsNorm` in plain PyTorch."""
    normed = rms_norm_reference(RmsNorm(given.x, given.weight, eps=given.eps, offset=given.offset))
    exact = torch.promote_types(given.x.dtype, torch.float32)
    gate = GATES[given.activation](given.gate.reshape(given.x.shape).to(exact))
    return (normed * gate).to(given.x.dtype)


@triton.jit(do_not_specialize=["group", "outer", "inner", "gate_group", "gate_outer", "gate_inner"])
def _gated_rms_norm_kernel(
    out, x, gate, weight, group, outer, inner, gate_group, gate_outer, gate_inner, EPS: tl.constexpr,
    OFFSET: tl.constexpr, SILU: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ALIGNMENT: tl.constexpr,
    EXACT: tl.constexpr, PDL: tl.constexpr,
):
    """One row per program."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < WIDTH
    x += (row // group * outer + row % group * inner) * ALIGNMENT
    gate += (row // gate_group * gate_outer + row % gate_group * gate_inner) * ALIGNMENT
    # ---- out = norm(x), rounded, times gate / (1 + e^-gate), or 1 / (1 + e^-gate): [BLOCK]
    closed = tl.load(gate + column, mask=inside, other=0.0).to(EXACT)
    normed = rms_norm_row(x, weight, EPS, OFFSET, WIDTH, BLOCK, EXACT).to(out.dtype.element_ty).to(EXACT)
    opened = (closed if SILU else 1.0) / (1.0 + tl.exp(-closed))
    tl.store(out + row * WIDTH + column, (normed * opened).to(out.dtype.element_ty), mask=inside)


def gated_rms_norm_triton(given: GatedRmsNorm) -> Tensor:
    """:class:`GatedRmsNorm` in one kernel, one program per row."""
    out, x, gate = given.x.new_empty(given.x.shape), Rows.of(given.x), Rows.of(given.gate)
    launch(
        _gated_rms_norm_kernel, (x.count,), out, x.x, gate.x, aligned(given.weight), *x.arguments(), *gate.arguments(),
        EPS=given.eps, OFFSET=given.offset, SILU=given.activation == "silu",
        **row_options(out.shape[-1], out.dtype),
    )
    return out


def _gated_rms_norm_fake(given: GatedRmsNorm) -> Tensor:
    x, gate = given.x, given.gate
    require(x.dim() >= 1 and x.dtype.is_floating_point, lambda: f"x must be float [..., D], not {x.dtype} {x.dim()}-d")
    check_shapes(given, x="... D", gate="... D", weight="D")
    require(gate.dtype == x.dtype, lambda: f"gate must be {x.dtype}, not {gate.dtype}")
    require(given.activation in GATES, lambda: f"activation is one of {', '.join(GATES)}, not {given.activation!r}")
    return x.new_empty(x.shape)


GATED_RMS_NORM = declare(
    "gated_rms_norm", GatedRmsNorm, _gated_rms_norm_fake,
    triton_or_reference(gated_rms_norm_triton, gated_rms_norm_reference),
)
