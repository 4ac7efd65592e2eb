"""An RMS norm with its gate: the bits of the norm, and what PyTorch gives for the gate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.gated_norm import GATED_RMS_NORM, GATES
from specgraph.kernels.linear.norm import RMS_NORM
from tests.kernels.linear.test_norm import BOUND, DEVICE, EPS, normal

FORMS = ["reference", "triton"]
HEADS = 3


def gate_of(width: int, dtype: torch.dtype, batch: int = 2, rows: int = 3) -> Tensor:
    """A gate as a view of a merged projection, which has values before and behind it."""
    merged = normal(batch, rows, (HEADS + 3) * width, dtype=dtype, seed=5)
    return merged.split([2 * width, HEADS * width, width], dim=-1)[1].unflatten(2, (-1, width))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("width", [5, 16, 128])
@pytest.mark.parametrize("activation", GATES)
def test_it_is_the_norm_and_then_the_gate(form: str, dtype: torch.dtype, width: int, activation: str) -> None:
    x, gate, weight = normal(6 * HEADS, width, dtype=dtype), gate_of(width, dtype), normal(width, dtype=dtype, seed=1)
    found = GATED_RMS_NORM.form(form)(x, weight, gate, eps=EPS, offset=1.0, activation=activation)
    normed = RMS_NORM.form(form)(x, weight, eps=EPS, offset=1.0)
    exact = normed.double() * GATES[activation](gate.reshape(x.shape).double())
    assert found.dtype == dtype and found.shape == x.shape and found.is_contiguous()
    # One rounding to the dtype, behind a function that is computed to a few units of the last place.
    kind, inner = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
    unit = kind.eps / 2 + 8 * inner.eps
    assert bool(((found.double() - exact).abs() <= exact.abs() * unit + kind.smallest_normal * kind.eps).all())


@pytest.mark.parametrize("form", FORMS)
def test_an_open_gate_gives_the_bits_of_the_norm(form: str) -> None:
    x, weight = normal(8, 128, dtype=torch.bfloat16), normal(128, dtype=torch.bfloat16, seed=1)
    gate = torch.full_like(x, 40.0)
    found = GATED_RMS_NORM.form(form)(x, weight, gate, eps=EPS, activation="sigmoid")
    assert torch.equal(found, RMS_NORM.form(form)(x, weight, eps=EPS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bit_for_bit_the_same_beside_any_others(dtype: torch.dtype) -> None:
    x, gate = normal(4, 3, HEADS, 128, dtype=dtype), gate_of(128, dtype, batch=4)
    gated = GATED_RMS_NORM.form("triton")
    together = gated(x, None, gate, eps=EPS)
    for rows in ((slice(1, 2), slice(2, 3)), (slice(0, 2), slice(0, 1)), (slice(3, 4), slice(0, 3))):
        assert torch.equal(gated(x[rows], None, gate[rows], eps=EPS), together[rows])


def test_what_does_not_belong_to_a_row_is_not_read() -> None:
    buffer = torch.full((2, 3, 4, 48), torch.nan, device=DEVICE)
    buffer[:, :, 1:3, :21] = normal(2, 3, 2, 21)
    part = buffer[:, :, 1:3, :21]
    assert not GATED_RMS_NORM.form("triton")(part, None, part, eps=EPS).isnan().any()
    assert GATED_RMS_NORM.form("triton")(part[:0], None, part[:0], eps=EPS).shape == (0, 3, 2, 21)


@pytest.mark.parametrize(
    ("gate", "activation", "message"),
    [
        (torch.zeros(2, 7), "silu", r"gate must be \[\.\.\., D\] = \[\.\.\., 8\], not \[2, 7\]"),
        (torch.zeros(2, 8).half(), "silu", "gate must be torch.float32"),
        (torch.zeros(2, 8), "tanh", "activation is one of silu, sigmoid, not 'tanh'"),
    ],
)
def test_wrong_arguments_are_refused(gate: Tensor, activation: str, message: str) -> None:
    with FakeTensorMode() as mode, pytest.raises(Exception, match=message):
        x = torch.zeros(2, 8)
        torch.ops.specgraph.gated_rms_norm(x, None, mode.from_tensor(gate), eps=EPS, activation=activation)
