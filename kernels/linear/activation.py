"""``specgraph::gated_activation``: what a gated MLP has between its projections (Shazeer 2020, arXiv 2002.05202).

It takes gate and up side by side, as one merged projection leaves them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specgraph.kernels.launch import launch_options, supports_pdl
from specgraph.kernels.linear.norm import Rows
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require

ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
"""``x * sigmoid(x)``; ``x * (1 + erf(x / sqrt(2))) / 2``; the same with the tanh approximation of erf."""

_BLOCK = 1024

torch.library.define("specgraph::gated_activation", "(Tensor x, *, str activation) -> Tensor")


def gated_activation_reference(x: Tensor, *, activation: str) -> Tensor:
    """``act(x[..., :I]) * x[..., I:]``, in float32 (float64 stays) and rounded once, to the dtype of ``x``.

    Args:
        x: ``[..., 2 * I]``, the gate first.
        activation: one of :data:`ACTIVATIONS`.

    Returns:
        ``[..., I]``, contiguous.

    Raises:
        ValueError: the activation does not exist.
    """
    _check(x, activation)
    gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    if activation == "silu":
        gate = torch.nn.functional.silu(gate)
    else:
        gate = torch.nn.functional.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none")
    return (gate * up).to(x.dtype).contiguous()


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The activation of a float32 or float64 block."""
    if ACTIVATION == "silu":
        result = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)), u = sqrt(2 / pi) * (x + 0.044715 * x ** 3)
        result = x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    return result


@triton.jit(do_not_specialize=["group", "outer", "inner"])
def _gated_activation_kernel(
    out, x, group, outer, inner, ACTIVATION: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x += (row // group * outer + row % group * inner) * UNIT
    gate = tl.load(x + column, mask=inside, other=0.0).to(EXACT)
    up = tl.load(x + WIDTH + column, mask=inside, other=0.0).to(EXACT)
    result = activate(gate, ACTIVATION) * up
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


def gated_activation(x: Tensor, *, activation: str) -> Tensor:
    """:func:`gated_activation_reference` in one kernel."""
    _check(x, activation)
    width = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], width))
    if out.numel() == 0:
        return out
    rows = Rows.of(x)
    pdl = supports_pdl(x.device)
    block = min(triton.next_power_of_2(width), _BLOCK)
    _gated_activation_kernel[(rows.count, triton.cdiv(width, block))](
        out, rows.x, *rows.arguments(), ACTIVATION=activation, WIDTH=width, BLOCK=block, UNIT=rows.unit,
        EXACT=tl.float64 if x.dtype == torch.float64 else tl.float32, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return out


def _check(x: Tensor, activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}.")
    require(x.dim() >= 1 and x.dtype.is_floating_point, lambda: f"x must be float [..., 2 * I], not {x.dtype}")
    require(x.shape[-1] % 2 == 0, lambda: f"x must hold gate and up side by side, not {x.shape[-1]} features")


def _gated_activation_fake(x: Tensor, *, activation: str) -> Tensor:
    _check(x, activation)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


register("gated_activation", cpu=gated_activation_reference, cuda=gated_activation, fake=_gated_activation_fake)
