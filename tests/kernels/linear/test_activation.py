"""Gated activations against their formulas in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear import activation
from tests.kernels.linear.test_norm import DEVICE, assert_close, every_dtype, normal

FORMS = {"reference": activation.gated_activation_reference, "kernel": activation.gated_activation}
every_form = pytest.mark.parametrize("form", FORMS)
every_activation = pytest.mark.parametrize("name", activation.ACTIVATIONS)


def by_hand(x: Tensor, name: str) -> Tensor:
    gate, up = x.cpu().double().chunk(2, -1)
    chance = {
        "silu": lambda g: 1 / (1 + math.exp(-g)),
        "gelu": lambda g: (1 + math.erf(g / math.sqrt(2))) / 2,
        "gelu_tanh": lambda g: (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) / 2,
    }[name]
    return gate * gate.clone().apply_(chance) * up


@every_form
@every_activation
@every_dtype
@pytest.mark.parametrize("width", [1, 5, 16, 1040])
def test_the_gate_is_activated_and_multiplied(form: str, name: str, dtype: torch.dtype, width: int):
    x = normal(2, 3, 2 * width, dtype=dtype)
    out = FORMS[form](x, activation=name)
    assert out.shape == (2, 3, width) and out.dtype == dtype and out.is_contiguous()
    assert_close(out, by_hand(x, name))


@every_form
@every_activation
def test_far_from_zero_nothing_overflows(form: str, name: str):
    gate = torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4])
    x = torch.cat([gate, torch.ones(6)]).to(DEVICE)
    assert FORMS[form](x, activation=name).tolist() == [0, 0, pytest.approx(0, abs=1e-30), *gate[3:].tolist()]


@every_form
def test_rows_are_read_where_they_lie(form: str):
    x = normal(2, 3, 5 * 16)
    for view in (x[..., :32], x[:, 1:, 3:35], x[:, ::2, 32:64], x.transpose(0, 1)[..., :48], x[0, 0, :32]):
        assert_close(FORMS[form](view, activation="silu"), by_hand(view, "silu"))


@every_activation
@every_dtype
def test_a_row_is_bit_for_bit_the_same_beside_any_others(name: str, dtype: torch.dtype):
    x = normal(9, 66, dtype=dtype)
    together = activation.gated_activation(x, activation=name)
    for first, end in ((0, 1), (4, 5), (8, 9), (1, 4), (2, 9)):
        assert torch.equal(activation.gated_activation(x[first:end], activation=name), together[first:end])


def test_no_rows_give_no_rows():
    assert activation.gated_activation(normal(0, 3, 16), activation="silu").shape == (0, 3, 8)


@every_activation
def test_the_op_is_registered_as_it_behaves(name: str):
    checks, op = ("test_schema", "test_faketensor"), torch.ops.specgraph.gated_activation
    torch.library.opcheck(op, (normal(2, 3, 16).transpose(0, 1),), {"activation": name}, test_utils=checks)


def test_what_does_not_fit_is_refused():
    op = torch.ops.specgraph.gated_activation
    with pytest.raises(ValueError, match="activation must be one of silu, gelu, gelu_tanh; got 'relu'"):
        op(normal(2, 4), activation="relu")
    with FakeTensorMode(), pytest.raises(ValueError, match="x must hold gate and up side by side, not 5 features"):
        op(torch.empty(2, 5), activation="silu")
