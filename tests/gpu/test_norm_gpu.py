"""Compiled norms and means at the shapes of real models, in bfloat16."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear import norm
from specgraph.kernels.linear.shared_norm import MEAN_SQUARES, RMS_NORM_PART
from tests.gpu.capture import captured, no_synchronisation
from tests.kernels.linear.test_norm import EPS, assert_close

ROWS = 576


@functools.cache
def linear_weight(width: int, dtype: torch.dtype) -> Tensor:
    return torch.linspace(-1, 2, width, device="cuda").bfloat16().to(dtype)


def weight(x: Tensor) -> Tensor:
    return linear_weight(x.shape[-1], x.dtype)


def mean_squares(x: Tensor, form: str = "triton") -> Tensor:
    rows = x.reshape(1, -1, x.shape[-1])
    return MEAN_SQUARES.form(form)([rows, rows[..., : x.shape[-1] // 2]], count=2).view(*x.shape[:-1], 2)


def rms_norm_part(x: Tensor, form: str = "triton") -> Tensor:
    means = x.new_full((*x.shape[:-1], 2), 0.7, dtype=torch.promote_types(x.dtype, torch.float32))
    return RMS_NORM_PART.form(form)(x, weight(x), means, place=1, eps=EPS, offset=1.0)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: norm.RMS_NORM.form("triton")(x, weight(x), eps=EPS, offset=1.0),
    "layer_norm": lambda x: norm.LAYER_NORM.form("triton")(x, None, None, eps=EPS),
    "row_mean": norm.ROW_MEAN.form("triton"),
    "mean_squares": mean_squares,
    "rms_norm_part": rms_norm_part,
}
REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: norm.RMS_NORM.form("reference")(x, weight(x), eps=EPS, offset=1.0),
    "layer_norm": lambda x: norm.LAYER_NORM.form("reference")(x, None, None, eps=EPS),
    "row_mean": norm.ROW_MEAN.form("reference"),
    "mean_squares": functools.partial(mean_squares, form="reference"),
    "rms_norm_part": functools.partial(rms_norm_part, form="reference"),
}
# Head size, hidden sizes, gate and up of an 8B model side by side, and widths that no vector divides.
WIDTHS = (128, 2048, 4096, 16384, 28672, 72, 4102)


def normal(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CALLS)
def test_it_is_the_reference_in_float64(name: str, width: int) -> None:
    x = normal(64, width)
    assert_close(CALLS[name](x), REFERENCES[name](x.double()).cpu())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", CALLS)
def test_a_row_is_the_same_beside_any_number_of_others(name: str, width: int) -> None:
    x = normal(ROWS, width)
    together = CALLS[name](x)
    for count in (1, 2, 3, 4, 5, 8, 9, 16, 17, 64, 100, 256, 575):
        assert torch.equal(CALLS[name](x[:count]), together[:count]), count
    for first in (1, 7, 300):
        assert torch.equal(CALLS[name](x[first : first + 1]), together[first : first + 1]), first
    # Rows of a wider matrix, aligned and not, and one with the strides of a narrow one.
    for left, right in ((16, 16), (1, 2), (8, 0)):
        wide = torch.full((ROWS, left + width + right), torch.nan, device="cuda", dtype=x.dtype)
        wide[:, left : left + width] = x
        assert torch.equal(CALLS[name](wide[:, left : left + width]), together), (left, right)


@pytest.mark.parametrize("name", CALLS)
def test_the_heads_of_a_merged_projection_are_those_of_a_copy(name: str) -> None:
    merged = normal(3, 5, 48 * 128)
    heads = merged[..., : 40 * 128].unflatten(-1, (40, 128))
    assert torch.equal(CALLS[name](heads), CALLS[name](heads.contiguous()))


@pytest.mark.parametrize("name", CALLS)
def test_it_does_not_wait_and_runs_in_a_graph_behind_other_kernels(name: str) -> None:
    x = normal(20, 4096)
    expected = CALLS[name](x * 2 + 1)
    with no_synchronisation():
        CALLS[name](x)
    buffer = torch.zeros_like(x)

    def chain() -> Tensor:
        # Both sides of each launch: what was just written is read, and what is still read is written.
        out = CALLS[name](buffer * 2 + 1)
        for _ in range(20):
            out.copy_(CALLS[name](buffer * 2 + 1))
        return out

    chain()
    graph, out = captured(chain)
    buffer.copy_(x)
    graph.replay()
    assert torch.equal(out, expected)
