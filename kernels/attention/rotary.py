"""``specgraph::rotary_angles``: cosine and sine of the angles that rotary embeddings use.

For int64 positions ``[B, T]`` and inverse frequencies ``[F]`` it computes ``cos(positions * inv_freq) * scaling`` and
the same with ``sin``, ``[B, T, 2 * F]`` or ``[B, T, F]``, in float32 (or float64), rounded once to the dtype that is
asked for. Models compute this with seven to nine operations; here it is one launch.

A program computes the angles of one token. They are few (a head's width), and there are as many programs as tokens. An
entry is a function of its token's position and one frequency, so it does not depend on other tokens.

Angles reach the length of the longest context, 131,072 and more. The kernel therefore uses libdevice's cosine and sine,
which reduce their argument accurately; the hardware's approximate instructions do not.

Source: Su et al. 2021, arXiv 2104.09864.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from specgraph.kernels.checks import check_shapes, require
from specgraph.kernels.launch import contiguous, gdc_launch_dependents, gdc_wait, launch
from specgraph.kernels.ops import declare, triton_or_reference

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LAYOUTS = ("halves", "pairs", "once")
"""The columns that hold frequency ``i`` of ``F``: ``i`` and ``F + i``, ``2 * i`` and ``2 * i + 1``, or ``i`` alone."""


@dataclass(slots=True)
class RotaryAngles:
    """``cos(positions * inv_freq) * scaling`` and the same with ``sin``.

    Computed in float32 (float64 if ``inv_freq`` is) and rounded once. The results are two tensors ``[B, T, 2 * F]``;
    ``[B, T, F]`` where the layout is ``once``.

    Attributes:
        positions: int64 ``[B, T]``.
        inv_freq: ``[F]``.
        dtype: of the results.
        layout: one of :data:`LAYOUTS`; others raise ``ValueError``.
        max_position: larger positions count as this one and negative ones as 0. Without it all count as they are.
    """

    positions: Tensor
    inv_freq: Tensor
    _: KW_ONLY
    dtype: torch.dtype
    scaling: float = 1.0
    layout: str = "halves"
    max_position: int | None = None


def rotary_angles_reference(given: RotaryAngles) -> tuple[Tensor, Tensor]:
    """:class:`RotaryAngles` in plain PyTorch."""
    _check(given)
    positions, inv_freq, limit = given.positions, given.inv_freq, given.max_position
    exact = torch.promote_types(inv_freq.dtype, torch.float32)
    positions = positions if limit is None else positions.clamp(0, limit)
    angles = positions.unsqueeze(2).to(exact) * inv_freq.to(exact)
    if given.layout == "halves":
        angles = torch.cat([angles, angles], dim=-1)
    elif given.layout == "pairs":
        angles = angles.repeat_interleave(2, dim=-1)
    return (angles.cos() * given.scaling).to(given.dtype), (angles.sin() * given.scaling).to(given.dtype)


@triton.jit
def _rotary_angles_kernel(
    out_cos, out_sin, positions, inv_freq, SCALING: tl.constexpr, MAX: tl.constexpr, FREQUENCIES: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):
    """One token per program: ``cos`` and ``sin`` ``[WIDTH]``. Of ``FREQUENCIES`` each has one column, or two."""
    gdc_launch_dependents(PDL)
    gdc_wait(PDL)
    token = tl.program_id(0)
    # Columns of a line of the results: [BLOCK], a power of two that is at least WIDTH.
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    position = tl.load(positions + token)
    if MAX is not None:
        position = tl.minimum(tl.maximum(position, 0), MAX)
    # ---- angle_i = position * inv_freq[frequency of column i]: [BLOCK]
    frequency = column // 2 if PAIRS else column % FREQUENCIES
    angle = position.to(EXACT) * tl.load(inv_freq + frequency, mask=inside, other=0.0).to(EXACT)
    if INTERPRETED:
        cos, sin = tl.cos(angle), tl.sin(angle)
    else:
        cos, sin = libdevice.cos(angle), libdevice.sin(angle)
    # ---- out = scaling * (cos angle, sin angle), rounded once
    offset = token.to(tl.int64) * WIDTH + column
    tl.store(out_cos + offset, (cos * SCALING).to(out_cos.dtype.element_ty), mask=inside)
    tl.store(out_sin + offset, (sin * SCALING).to(out_sin.dtype.element_ty), mask=inside)


def rotary_angles_triton(given: RotaryAngles) -> tuple[Tensor, Tensor]:
    """:class:`RotaryAngles` in one kernel, one program per token."""
    cos, sin = _rotary_angles_fake(given)
    positions, inv_freq, width = given.positions, given.inv_freq, cos.shape[-1]
    launch(
        _rotary_angles_kernel, (positions.numel(),), cos, sin, *contiguous(given, "positions", "inv_freq"),
        SCALING=given.scaling, MAX=given.max_position, FREQUENCIES=inv_freq.shape[0], WIDTH=width,
        PAIRS=given.layout == "pairs", BLOCK=triton.next_power_of_2(width),
        EXACT=tl.float64 if inv_freq.dtype == torch.float64 else tl.float32, num_warps=4 if width > 64 else 2,
    )
    return cos, sin


def _check(given: RotaryAngles) -> None:
    inv_freq = given.inv_freq
    if given.layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}; got {given.layout!r}.")
    check_shapes(given, positions="B T", inv_freq="F")
    require(inv_freq.dtype.is_floating_point, lambda: f"inv_freq must be float, not {inv_freq.dtype}")


def _rotary_angles_fake(given: RotaryAngles) -> tuple[Tensor, Tensor]:
    _check(given)
    inv_freq, dtype = given.inv_freq, given.dtype
    shape = (*given.positions.shape, inv_freq.shape[0] * (1 if given.layout == "once" else 2))
    return inv_freq.new_empty(shape, dtype=dtype), inv_freq.new_empty(shape, dtype=dtype)


ROTARY_ANGLES = declare(
    "rotary_angles", RotaryAngles, _rotary_angles_fake,
    triton_or_reference(rotary_angles_triton, rotary_angles_reference),
)
