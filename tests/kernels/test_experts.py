"""The per-row expert linear against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

expert_linear = torch.ops.specgraph.expert_linear
ROWS, INNER, OUTER, EXPERTS = 7, 5, 3, 4
IDS = torch.tensor([2, 0, 2, 3, 0, 2, 3])  # expert 1 has no rows

both_layouts = pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
with_and_without_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])


def arguments(transposed: bool, has_bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shape = (EXPERTS, INNER, OUTER) if transposed else (EXPERTS, OUTER, INNER)
    shapes = ((ROWS, INNER), shape, (EXPERTS, OUTER))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    return x, weight, bias if has_bias else None, IDS


@both_layouts
@with_and_without_bias
def test_each_row_meets_its_own_expert(transposed: bool, has_bias: bool):
    x, weight, bias, ids = arguments(transposed, has_bias)
    out = expert_linear(x, weight, bias, ids, transposed=transposed)
    for row, expert in enumerate(ids.tolist()):
        for o in range(OUTER):
            column = weight[expert, :, o] if transposed else weight[expert, o]
            expected = sum((x[row] * column).tolist()) + (float(bias[expert, o]) if has_bias else 0.0)
            assert float(out[row, o]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@both_layouts
def test_a_row_does_not_depend_on_the_others(transposed: bool):
    x, weight, bias, ids = arguments(transposed, True)
    out = expert_linear(x, weight, bias, ids, transposed=transposed)
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
    shuffled = expert_linear(x[order], weight, bias, ids[order], transposed=transposed)
    torch.testing.assert_close(shuffled, out[order], rtol=1e-12, atol=1e-12)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = expert_linear(x[one], weight, bias, ids[one], transposed=transposed)
        torch.testing.assert_close(alone, out[one], rtol=1e-12, atol=1e-12)


def test_experts_without_rows_are_not_read():
    x, weight, bias, ids = arguments(False, True)
    expected = expert_linear(x, weight, bias, ids)
    weight[1], bias[1] = torch.nan, torch.nan
    assert torch.equal(expert_linear(x, weight, bias, ids), expected)


def test_no_rows_give_no_rows_and_the_dtype_is_that_of_x():
    x, weight, _, ids = arguments(False, False, torch.bfloat16)
    assert expert_linear(x[:0], weight, None, ids[:0]).shape == (0, OUTER)
    assert expert_linear(x, weight, None, ids).dtype == torch.bfloat16


@both_layouts
@with_and_without_bias
def test_the_op_is_registered_as_it_behaves(transposed: bool, has_bias: bool):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(expert_linear, arguments(transposed, has_bias), {"transposed": transposed}, test_utils=checks)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (ROWS, 6), "x has 6 features, the experts take 5"),
        (3, (ROWS + 1,), "expert_ids must give one expert per row of x"),
        (2, (EXPERTS, OUTER + 1), r"bias must be \[E, O\]"),
        (2, (OUTER,), r"bias must be \[E, O\]"),
    ],
)
@both_layouts
def test_fake_tensors_refuse_wrong_shapes(transposed: bool, index: int, shape: tuple[int, ...], message: str):
    given = [*arguments(transposed, True)]
    given[index] = torch.zeros(shape, dtype=given[index].dtype)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        expert_linear(*map(mode.from_tensor, given), transposed=transposed)
