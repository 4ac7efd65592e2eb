"""``specgraph::linear``: a linear layer with its neighbours: RMS norm before, bias, activation and residual after it.

A row's result is the same, bit for bit, whatever the number of rows: what cuts the summed dimension (the number of
pieces and the order of their sum) is a function of the weight's shape and dtype alone, and the weight is the left
operand of ``tl.dot``, so that rows are columns of the product and only its width follows their number. Tiles differ in
size, warps and stages; every one of them has at least 64 rows of the weight and a multiple of 4 warps, hence the same
matrix instruction (``wgmma`` on Hopper), which adds 16 products at a time to a sum whose order does not depend on its
width. Floating point contraction is off, so that no compilation fuses what another does not.

With very few tiles the summed dimension is cut into pieces ("split-K", e.g. Osama et al. 2023, arXiv 2301.03598).
Programs of the same tile leave their partial sums in scratch memory and the last to arrive adds them in the order of
the pieces. With many rows one program goes through all pieces and adds them in that order.

An RMS norm in front costs no launch and nothing in the main loop. It comes in two parts: the rows times the norm's
weight, which are multiplied, and the sums of their squares, which scale the result. The linear that wrote the rows
gives both (``specgraph::linear_norm``): its tiles hold whole groups of 64 entries of a row. ``specgraph::norm_parts``
gives them for rows from elsewhere. The squares of a group, and the sums of all groups, are added as integers, in any
order with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn import functional

from specgraph.kernels.launch import MAX_COUNTERS, arrival_counters, launch_options, runs_gluon, supports_pdl
from specgraph.kernels.linear.triton_form import NORM_GROUP, linear_kernel, norm_parts_kernel, norm_scale_kernel
from specgraph.kernels.registration import register
from specgraph.kernels.sampling.sample import require

torch.library.define(
    "specgraph::linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, Tensor? squares=None, *, "
    "float norm_eps=0.0, str activation='none', bool constant_weight=True, bool bitwise=True) -> Tensor",
)
torch.library.define(
    "specgraph::linear_norm",
    "(Tensor x, Tensor weight, Tensor norm_weight, Tensor? bias=None, Tensor? residual=None, Tensor? squares=None, *, "
    "float norm_eps=0.0, float norm_offset=0.0, str activation='none', bool constant_weight=True, "
    "bool bitwise=True) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "specgraph::norm_parts", "(Tensor x, Tensor norm_weight, *, float norm_offset=0.0) -> (Tensor, Tensor)"
)

_GELU_TANH = functools.partial(functional.gelu, approximate="tanh")
_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": _GELU_TANH,
    "relu": functional.relu,
}
_GATED: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_mul": functional.silu,
    "gelu_mul": functional.gelu,
    "gelu_tanh_mul": _GELU_TANH,
}
ACTIVATIONS = (*_PLAIN, *_GATED)
"""What may follow the product; the last three take a weight of gate rows over up rows and give ``act(gate) * up``."""


def linear_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    squares: Tensor | None = None,
    *,
    norm_eps: float = 0.0,
    activation: str = "none",
    constant_weight: bool = True,
    bitwise: bool = True,
) -> Tensor:
    """``activation(x @ weight.T * scale + bias) + residual``, in float32 (float64 for float64), rounded once.

    Args:
        x: ``[..., I]``.
        weight: ``[O, I]``; for the gated activations ``[2 * O, I]``, gate rows first.
        bias: one per row of ``weight``, or None.
        residual: ``[..., O]`` or None.
        squares: ``[..., ceil(I / 64)]`` from :func:`norm_parts_reference`, whose other result is ``x``; then
            ``scale = rsqrt(sum(squares) / I + norm_eps)``, otherwise 1.
        activation: one of :data:`ACTIVATIONS`.
        constant_weight: whether nothing in a CUDA graph that holds this call writes ``weight``, so that a GPU may read
            it before the kernels in front have finished. Outside of graphs it makes no difference.
        bitwise: whether a row's bits must not depend on the other rows. If not, a GPU runs a library's product where
            :mod:`specgraph.kernels.linear.library` knows it to be faster. On a CPU it makes no difference.

    Returns:
        ``[..., O]`` in the dtype of ``x``.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    out = functional.linear(x.to(exact), weight.to(exact))
    if squares is not None:
        out = out * torch.rsqrt(squares.to(exact).sum(-1, keepdim=True) / x.shape[-1] + norm_eps)
    out = activated(out if bias is None else out + bias.to(exact), activation)
    return (out if residual is None else out + residual.to(exact)).to(x.dtype)


def activated(y: Tensor, activation: str) -> Tensor:
    """``y`` after one of :data:`ACTIVATIONS`; the gated ones halve its last dimension."""
    if activation not in _GATED:
        return _PLAIN[activation](y)
    gate, up = y.chunk(2, -1)
    return _GATED[activation](gate) * up


def norm_parts_reference(x: Tensor, norm_weight: Tensor, *, norm_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """The two parts of ``x / sqrt(mean(x ** 2) + eps) * (norm_weight + norm_offset)`` that need no whole row.

    Args:
        x: ``[..., I]``.
        norm_weight: ``[I]``.
        norm_offset: 1.0 for gemma's norm, which stores the weight's distance from one.

    Returns:
        ``x * (norm_weight + norm_offset)`` in the dtype of ``x``, and the sums of squares of 64 entries each,
        ``[..., ceil(I / 64)]`` in float32 (float64 for float64).
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    rows = x.to(exact)
    padded = functional.pad(rows, (0, -x.shape[-1] % NORM_GROUP))
    groups = padded.reshape(*x.shape[:-1], padded.shape[-1] // NORM_GROUP, NORM_GROUP)
    squares = groups.square().sum(-1)
    return (rows * (norm_weight.to(exact) + norm_offset)).to(x.dtype), squares


def linear_norm_reference(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    squares: Tensor | None = None,
    *,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    activation: str = "none",
    constant_weight: bool = True,
    bitwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`linear_reference`, then :func:`norm_parts_reference` of its result: ``(out, gained, squares)``."""
    out = linear_reference(x, weight, bias, residual, squares, norm_eps=norm_eps, activation=activation)
    return (out, *norm_parts_reference(out, norm_weight, norm_offset=norm_offset))


class Tiles(NamedTuple):
    """How a product is cut. ``pieces`` decides the bits (``block_k`` too in float32), and never follows the rows."""

    block_o: int  # rows of the weight in a tile, gate and up rows together
    block_n: int  # rows of x in a tile
    block_k: int
    pieces: int
    serial: bool  # one program goes through all pieces
    warps: int
    stages: int


_UNIT = 128
"""Pieces begin at multiples of this, whatever the ``block_k``, which divides it."""


def num_pieces(out_features: int, in_features: int) -> int:
    """Of a weight ``[out_features, in_features]``: enough to give most of 132 multiprocessors a tile of 64 rows.

    No more: they take their time to merge, and one program of its own has all the shared memory for what is on its way.
    """
    row_tiles, pieces = triton.cdiv(out_features, 64), 1
    while row_tiles * pieces < 80 and pieces < 8 and in_features >= 16 * pieces * _UNIT:
        pieces *= 2
    return pieces


def tiles(rows: int, out_features: int, in_features: int, itemsize: int = 2) -> Tiles:
    """The tiling of ``rows`` rows and a weight ``[out_features, in_features]``: a plain table, measured on an H200 (see
    docs/performance.md); nothing is timed at run time."""
    pieces = num_pieces(out_features, in_features)
    if itemsize == 4:  # no matrix instruction for exact float32: small tiles fit the registers
        return Tiles(64, 16 if rows <= 16 else 32, 32, pieces, rows > 256, 4, 3)
    few = out_features < 8192
    if rows <= 16:
        return Tiles(64, 16, 128, pieces, False, 4, 4) if few else Tiles(128, 16, 128, pieces, False, 4, 3)
    if rows <= 32:
        return Tiles(64, 32, 64, 1, False, 4, 8) if few and pieces == 1 else Tiles(64, 32, 128, pieces, False, 4, 4)
    if rows <= 64:
        if few:
            return Tiles(64, 64, 128, pieces, False, 4, 4 if pieces == 1 else 3)
        return Tiles(128, 64, 128, pieces, False, 8, 4)
    return _wide_tiles(rows, out_features, in_features, pieces)


def _wide_tiles(rows: int, out_features: int, in_features: int, pieces: int) -> Tiles:
    """The largest tiles of which there are about as many as multiprocessors."""
    large = triton.cdiv(out_features, 128) * triton.cdiv(rows, 128)
    # Partial sums take 8 bytes for each row and piece, the weight 2 for each input.
    if large < 96 and large * pieces >= 96 and 16 * rows * pieces < in_features:
        return Tiles(128, 128, 64, pieces, False, 8, 5)
    if large >= 1024:
        return Tiles(128, 256, 64, pieces, True, 8, 3)
    if large >= 96:
        return Tiles(128, 128, 64, pieces, True, 8, 5)
    if triton.cdiv(out_features, 128) * triton.cdiv(rows, 64) >= 96:
        return Tiles(128, 64, 64, pieces, True, 8, 6)
    return Tiles(64, 64, 64, pieces, True, 4, 6)


_Following = tuple[Tensor, float, Tensor, Tensor]
"""A norm whose parts are wanted: its weight, its offset, where the two parts go."""


@dataclass(frozen=True)
class Product:
    """What a launch computes: the arguments of :func:`linear`, rows as matrices, and where its results go."""

    out: Tensor
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    squares: Tensor | None
    norm_eps: float
    activation: str
    constant_weight: bool
    following: _Following | None
    pdl: bool

    @property
    def gated(self) -> bool:
        """Whether the weight is gate rows over up rows."""
        return self.activation in _GATED


def _as_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    squares: Tensor | None = None,
    *,
    norm_eps: float = 0.0,
    activation: str = "none",
    constant_weight: bool = True,
    bitwise: bool = True,
    tiling: Tiles | None = None,
    pdl: bool | None = None,
) -> Tensor:
    """:func:`linear_reference` in one kernel of ours, or by a library; float64 takes the reference itself.

    Args:
        tiling: in place of :func:`tiles`; one with another number of pieces may give other bits.
        pdl: whether to use programmatic dependent launch; None uses it where it exists.
    """
    if x.dtype == torch.float64:
        return linear_reference(x, weight, bias, residual, squares, norm_eps=norm_eps, activation=activation)
    if not bitwise:
        from specgraph.kernels.linear import library  # which is written in terms of this module

        if library.is_faster_for(x, weight, activation):
            return library.linear(x, weight, bias, residual, squares, norm_eps=norm_eps, activation=activation)
    out = x.new_empty(_out_shape(x, weight, activation))
    if out.numel() > 0:
        product = _product(out, x, weight, bias, residual, squares, norm_eps, activation, constant_weight, None, pdl)
        _launch(product, tiling)
    return out


def linear_norm(
    x: Tensor,
    weight: Tensor,
    norm_weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    squares: Tensor | None = None,
    *,
    norm_eps: float = 0.0,
    norm_offset: float = 0.0,
    activation: str = "none",
    constant_weight: bool = True,
    bitwise: bool = True,
    tiling: Tiles | None = None,
    pdl: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`linear_norm_reference`, as :func:`linear`; large tiles leave the parts of the norm to a second launch."""
    if x.dtype == torch.float64:
        return linear_norm_reference(
            x, weight, norm_weight, bias, residual, squares, norm_eps=norm_eps, norm_offset=norm_offset,
            activation=activation,
        )  # fmt: skip
    if not bitwise:
        from specgraph.kernels.linear import library

        if library.is_faster_for(x, weight, activation):
            return library.linear_norm(
                x, weight, norm_weight, bias, residual, squares, norm_eps=norm_eps, norm_offset=norm_offset,
                activation=activation,
            )  # fmt: skip
    out = x.new_empty(_out_shape(x, weight, activation))
    parts = _empty_parts(out)
    if out.numel() > 0:
        following = (norm_weight, norm_offset, *parts)
        product = _product(
            out, x, weight, bias, residual, squares, norm_eps, activation, constant_weight, following, pdl
        )
        _launch(product, tiling)
    return (out, *parts)


def norm_parts(
    x: Tensor, norm_weight: Tensor, *, norm_offset: float = 0.0, pdl: bool | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`norm_parts_reference` in one Triton kernel, with the bits that :func:`linear_norm` gives."""
    if x.dtype == torch.float64:
        return norm_parts_reference(x, norm_weight, norm_offset=norm_offset)
    parts = _empty_parts(x)
    if x.numel() > 0:
        _launch_norm_parts(_as_rows(x), (norm_weight, norm_offset, *parts), pdl)
    return parts


def _out_shape(x: Tensor, weight: Tensor, activation: str) -> tuple[int, ...]:
    return (*x.shape[:-1], weight.shape[0] // 2 if activation in _GATED else weight.shape[0])


def _empty_parts(out: Tensor) -> tuple[Tensor, Tensor]:
    exact = torch.promote_types(out.dtype, torch.float32)
    squares = out.new_empty((*out.shape[:-1], -(-out.shape[-1] // NORM_GROUP)), dtype=exact)
    return out.new_empty(out.shape), squares


def _product(
    out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, squares: Tensor | None,
    norm_eps: float, activation: str, constant_weight: bool, following: _Following | None, pdl: bool | None,
) -> Product:  # fmt: skip
    require(weight.dtype == x.dtype, lambda: f"weight is {weight.dtype}, x is {x.dtype}: they must agree")
    rows = weight if weight.stride(1) == 1 else weight.contiguous()  # a copy is written just before
    constant = constant_weight and rows is weight
    added = None if residual is None else _as_rows(residual)
    pdl = supports_pdl(x.device) if pdl is None else pdl
    return Product(out, _as_rows(x), rows, bias, added, squares, norm_eps, activation, constant, following, pdl)


def _launch(product: Product, tiling: Tiles | None) -> None:
    """Fill the results of ``product``: few rows on Hopper by its own kernel, which gives the same bits."""
    rows, (weight_rows, in_features) = product.x.shape[0], product.weight.shape
    groups = triton.next_power_of_2(triton.cdiv(in_features, NORM_GROUP))
    if tiling is None and runs_gluon(product.x.device):
        from specgraph.kernels.linear import (
            hopper as linear_hopper,  # Gluon is experimental: other releases of Triton may lack it
        )

        pieces, blocks = _pieces(in_features, num_pieces(weight_rows, in_features), linear_hopper.BLOCK_K)
        cut = linear_hopper.ring_for(product, pieces, groups)
        if cut is not None:
            linear_hopper.launch(product, cut, pieces, blocks, groups)
            return
    _launch_tiles(product, tiling or tiles(rows, weight_rows, in_features, product.x.element_size()), groups)


def _launch_tiles(product: Product, cut: Tiles, groups: int) -> None:
    out, x, weight, added = product.out, product.x, product.weight, product.residual
    rows, (weight_rows, in_features), pdl = x.shape[0], weight.shape, product.pdl
    if product.gated and product.following:
        cut = cut._replace(block_o=128)  # whole groups of the result
    # 32 registers of a thread for each of the things that a tile is finished with.
    early = max(groups, cut.block_o) * cut.block_n <= 1024 * cut.warps
    scale, squares = None, product.squares
    if squares is not None and not early:
        scale, squares = norm_scale(squares, in_features, product.norm_eps, pdl), None
    # The groups of large tiles cross warps: a launch of its own is cheaper then.
    joined = product.following if cut.block_o * cut.block_n <= 4096 else None
    norm_weight, norm_offset, gained, out_squares = joined or (None, 0.0, None, None)
    pieces, blocks = _pieces(in_features, cut.pieces, cut.block_k)
    tiles_o = triton.cdiv(weight_rows, cut.block_o)
    num_tiles = tiles_o * triton.cdiv(rows, cut.block_n)
    serial = cut.serial or num_tiles > MAX_COUNTERS
    partial = counters = None
    if pieces > 1 and not serial:
        partial = x.new_empty(pieces, rows, tiles_o * cut.block_o, dtype=torch.float32)
        counters = arrival_counters(x.device)
    even = in_features % (cut.block_k * blocks * pieces) == 0
    linear_kernel[(num_tiles, 1 if serial else pieces)](
        out, x, weight, product.bias, added, squares, scale, norm_weight, gained, out_squares, partial, counters, rows,
        out.shape[-1], in_features, x.stride(0), weight.stride(0), 0 if added is None else added.stride(0),
        product.norm_eps, norm_offset,
        BLOCK_O=cut.block_o, BLOCK_N=cut.block_n, BLOCK_K=cut.block_k, BLOCKS=blocks, PIECES=pieces, GROUPS=groups,
        SPLIT=not serial and pieces > 1, EVEN_K=even, ACTIVATION=product.activation.removesuffix("_mul"),
        GATED=product.gated, EARLY=early, AHEAD=pdl and even and rows <= 64 and _bulk(weight), PDL=pdl,
        num_warps=cut.warps, num_stages=cut.stages, enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip
    if product.following and not joined:
        _launch_norm_parts(_as_rows(out), product.following, pdl)


def norm_scale(squares: Tensor, features: int, norm_eps: float, pdl: bool | None = None) -> Tensor:
    """``rsqrt(sum(squares) / features + norm_eps)`` ``[rows]`` of ``squares`` ``[..., groups]``, in one kernel."""
    groups = squares.shape[-1]
    rows, pdl = squares.numel() // groups, supports_pdl(squares.device) if pdl is None else pdl
    scale = squares.new_empty(rows)
    norm_scale_kernel[(triton.cdiv(rows, 4),)](
        scale, squares, rows, features, norm_eps, GROUPS=triton.next_power_of_2(groups), BLOCK_N=4, PDL=pdl,
        num_warps=1, enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip
    return scale


def _launch_norm_parts(rows: Tensor, following: _Following, pdl: bool | None) -> None:
    norm_weight, norm_offset, gained, squares = following
    count, features = rows.shape
    pdl = supports_pdl(rows.device) if pdl is None else pdl
    block_o, block_n = 2 * NORM_GROUP, 1 if count <= 16 else 16
    norm_parts_kernel[(triton.cdiv(features, block_o), triton.cdiv(count, block_n))](
        gained, squares, rows, norm_weight, count, features, rows.stride(0), norm_offset,
        BLOCK_O=block_o, BLOCK_N=block_n, PDL=pdl, num_warps=4, enable_fp_fusion=False, **launch_options(pdl),
    )  # fmt: skip


def _pieces(in_features: int, wanted: int, block_k: int) -> tuple[int, int]:
    """How many pieces there are, and how many blocks each of them has."""
    unit = max(_UNIT, block_k)
    units = triton.cdiv(in_features, unit)
    pieces = min(wanted, units)
    return pieces, triton.cdiv(units, pieces) * (unit // block_k)


def _bulk(weight: Tensor) -> bool:
    """Whether the rows of ``weight`` begin where the hardware's bulk copies may."""
    return weight.data_ptr() % 16 == 0 and weight.stride(0) * weight.element_size() % 16 == 0


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    squares: Tensor | None = None, *, norm_eps: float = 0.0, activation: str = "none", constant_weight: bool = True,
    bitwise: bool = True,
) -> Tensor:  # fmt: skip
    require(activation in ACTIVATIONS, lambda: f"activation must be one of {', '.join(ACTIVATIONS)}, not {activation}")
    require(weight.dim() == 2, lambda: f"weight must be [O, I], not {tuple(weight.shape)}")
    outer, inner = weight.shape
    require(x.shape[-1] == inner, lambda: f"x has {x.shape[-1]} features, the weight takes {inner}")
    require(weight.dtype == x.dtype, lambda: f"weight is {weight.dtype}, x is {x.dtype}: they must agree")
    if bias is not None:
        require(bias.shape == (outer,), lambda: f"bias must be [{outer}], not {tuple(bias.shape)}")
    if squares is not None:
        wanted = (*x.shape[:-1], -(-inner // NORM_GROUP))
        require(squares.shape == wanted, lambda: f"squares must be {wanted}, not {tuple(squares.shape)}")
        require(squares.is_contiguous(), lambda: "squares must be contiguous, as norm_parts and linear_norm give them")
    if activation in _GATED:
        require(outer % 2 == 0, lambda: f"{activation} takes gate rows and as many up rows, not {outer} together")
    shape = _out_shape(x, weight, activation)
    if residual is not None:
        require(residual.shape == shape, lambda: f"residual must be {shape}, not {tuple(residual.shape)}")
    return x.new_empty(shape)


def _norm_parts_fake(x: Tensor, norm_weight: Tensor, *, norm_offset: float = 0.0) -> tuple[Tensor, Tensor]:
    inner = x.shape[-1]
    require(norm_weight.shape == (inner,), lambda: f"norm_weight must be [{inner}], not {tuple(norm_weight.shape)}")
    return _empty_parts(x)


def _linear_norm_fake(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None,
    squares: Tensor | None = None, *, norm_eps: float = 0.0, norm_offset: float = 0.0, activation: str = "none",
    constant_weight: bool = True, bitwise: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    out = _linear_fake(x, weight, bias, residual, squares, norm_eps=norm_eps, activation=activation)
    return (out, *_norm_parts_fake(out, norm_weight, norm_offset=norm_offset))


register("linear", cpu=linear_reference, cuda=linear, fake=_linear_fake)
register("linear_norm", cpu=linear_norm_reference, cuda=linear_norm, fake=_linear_norm_fake)
register("norm_parts", cpu=norm_parts_reference, cuda=norm_parts, fake=_norm_parts_fake)
