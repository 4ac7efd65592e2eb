"""The convolution within a block: its sums, the Triton form, rows by themselves, its gradient, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear.block_conv import block_conv
from specgraph.kernels.ops import OPS
from tests.kernels.linear.test_norm import normal


def arguments(dtype: torch.dtype, rows: int, channels: int, taps: int, groups: int) -> tuple[Tensor, ...]:
    """Those of one side of a projection that gives the weights of two convolutions, with a residual."""
    merged = normal(2, rows, 2 * taps * groups, dtype=dtype, seed=2)
    x, residual = normal(2, rows, channels, dtype=dtype), normal(2, rows, channels, dtype=dtype, seed=3)
    return x, normal(taps, channels, dtype=dtype, seed=1), merged.chunk(2, -1)[1], residual


def summed(x: Tensor, base: Tensor, delta: Tensor, residual: Tensor) -> Tensor:
    """The definition, element by element in float64."""
    out, (taps, channels) = residual.double().clone(), base.shape
    groups = delta.shape[2] // taps
    for b, t, c, i in torch.cartesian_prod(*map(torch.arange, (*x.shape, taps))).tolist():
        if i <= t:
            weight = base[i, c].double() + delta[b, t, i * groups + c * groups // channels].double()
            out[b, t, c] += weight * x[b, t - i, c].double()
    return out


SIZES = [(1, 6, 2, 3), (4, 12, 2, 3), (3, 8, 5, 8), (5, 10, 1, 1)]


@pytest.mark.parametrize(("rows", "channels", "taps", "groups"), SIZES)
def test_it_is_the_definition(rows: int, channels: int, taps: int, groups: int) -> None:
    given = arguments(torch.float64, rows, channels, taps, groups)
    whole = summed(*(x.cpu() for x in given))
    for found, expected in ((block_conv(*given), whole), (block_conv(*given[:3]), whole - given[3].cpu())):
        torch.testing.assert_close(found.cpu(), expected, rtol=0.0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "channels", "taps", "groups"), [*SIZES, (8, 1040, 2, 65)])
def test_the_triton_form_has_the_bits_of_the_reference(
    dtype: torch.dtype, rows: int, channels: int, taps: int, groups: int
) -> None:
    given = arguments(dtype, rows, channels, taps, groups)
    for count in (3, 4):
        found, expected = (OPS["block_conv"].form(form)(*given[:count]) for form in ("triton", "reference"))
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found, expected)


def test_a_row_depends_on_no_other_block_and_no_later_row() -> None:
    x, base, delta, _ = arguments(torch.float32, 5, 12, 3, 4)
    run = OPS["block_conv"].form("triton")
    together, alone = run(x, base, delta), run(x[1:, :3], base, delta[1:, :3])
    assert torch.equal(alone, together[1:, :3])


def test_its_gradient_is_that_of_the_definition() -> None:
    given = [tensor.detach().requires_grad_() for tensor in arguments(torch.float64, 4, 6, 2, 3)]
    assert torch.autograd.gradcheck(block_conv, given) and torch.autograd.gradcheck(block_conv, given[:3])


def test_nothing_in_and_nothing_out() -> None:
    x, base, delta, _ = arguments(torch.float32, 4, 6, 2, 3)
    for form in ("triton", "reference"):
        assert OPS["block_conv"].form(form)(x[:0], base, delta[:0]).shape == (0, 4, 6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"delta": (2, 4, 5)}, "delta has 5 weights a row, which are not 2 for groups of 6 channels"),
        ({"delta": (2, 4, 8)}, "delta has 8 weights a row, which are not 2 for groups of 6 channels"),
        ({"base": (2, 7)}, r"base must be \[w, C\] = \[2, 6\], not \[2, 7\]"),
        ({"delta": (2, 3, 6)}, r"delta must be \[B, T, \*\] = \[2, 4, \*\], not \[2, 3, 6\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, tuple[int, ...]], words: str) -> None:
    shapes = {"x": (2, 4, 6), "base": (2, 6), "delta": (2, 4, 6), **change}
    with pytest.raises(ValueError, match=words):
        block_conv(**{name: torch.zeros(shape, device="meta") for name, shape in shapes.items()})
