"""The per-row expert linear against a loop over rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear import experts
from specgraph.kernels.pointwise.pointwise import POINTWISE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, INNER, OUTER, EXPERTS = 7, 5, 3, 4
IDS = torch.tensor([2, 0, 2, 3, 0, 2, 3], device=DEVICE)  # expert 1 has no rows

expert_linear = torch.ops.specgraph.expert_linear
FORMS = {name: experts.EXPERT_LINEAR.form(name) for name in ("reference", "triton")}
every_form = pytest.mark.parametrize("form", FORMS)
both_layouts = pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
with_and_without_bias = pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def arguments(transposed: bool, has_bias: bool, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    shape = (EXPERTS, INNER, OUTER) if transposed else (EXPERTS, OUTER, INNER)
    shapes = ((ROWS, INNER), shape, (EXPERTS, OUTER))
    x, weight, bias = (normal(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes))
    return x, weight, bias if has_bias else None, IDS


@every_form
@both_layouts
@with_and_without_bias
def test_each_row_meets_its_own_expert(form: str, transposed: bool, has_bias: bool):
    x, weight, bias, ids = arguments(transposed, has_bias)
    out = FORMS[form](x, weight, bias, ids, transposed=transposed)
    for row, expert in enumerate(ids.tolist()):
        for o in range(OUTER):
            column = weight[expert, :, o] if transposed else weight[expert, o]
            expected = sum((x[row] * column).tolist()) + (float(bias[expert, o]) if has_bias else 0.0)
            assert float(out[row, o]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


@every_form
@both_layouts
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 2e-3)], ids=str
)
@pytest.mark.parametrize(
    ("rows", "inner", "outer", "count"),
    [(1, 64, 64, 3), (40, 33, 130, 2), (100, 130, 33, 3), (600, 17, 20, 5)],  # the last two with wide tiles in float16
)
def test_products_equal_those_of_float64(
    form: str, transposed: bool, dtype: torch.dtype, bound: float, rows: int, inner: int, outer: int, count: int
):
    x, weight = normal(rows, inner, dtype=dtype, seed=1), normal(count, outer, inner, dtype=dtype, seed=2)
    bias, ids = normal(count, outer, dtype=dtype, seed=3), torch.arange(rows, device=DEVICE) * 7 // 3 % count
    given = weight.transpose(1, 2).contiguous() if transposed else weight
    out = FORMS[form](x, given, bias, ids, transposed=transposed)
    expected = (weight.double()[ids] @ x.double().unsqueeze(-1)).squeeze(-1) + bias.double()[ids]
    assert out.dtype == dtype and out.shape == expected.shape
    assert float((out.double() - expected).norm() / expected.norm()) < bound


@both_layouts
def test_a_row_of_the_reference_does_not_depend_on_the_others(transposed: bool):
    x, weight, bias, ids = arguments(transposed, True)
    out = FORMS["reference"](x, weight, bias, ids, transposed=transposed)
    for row in range(ROWS):
        one = slice(row, row + 1)
        alone = FORMS["reference"](x[one], weight, bias, ids[one], transposed=transposed)
        torch.testing.assert_close(alone, out[one], rtol=1e-12, atol=1e-12)


@both_layouts
@pytest.mark.parametrize("count", [3, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_a_row_is_bit_for_bit_the_same_beside_any_others(transposed: bool, dtype: torch.dtype, count: int):
    """In lists that a launch makes, and if there are far fewer rows than experts, without one."""
    rows, inner, outer = 110, 75, 70
    shape = (count, inner, outer) if transposed else (count, outer, inner)
    weight, bias = normal(*shape, dtype=dtype, seed=1), normal(count, outer, dtype=dtype, seed=2)
    x, ids = normal(rows, inner, dtype=dtype, seed=3), torch.arange(rows, device=DEVICE) * 5 // 3 % count

    if dtype == torch.float16 and DEVICE == "cpu":
        # The interpreter multiplies by a library that sums tiles of another width in another order: exact sums only.
        weight, x = (weight * 4).round(), (x * 4).round()

    def run(index: Tensor) -> Tensor:
        return FORMS["triton"](x[index], weight, bias, ids[index], transposed=transposed)

    every = torch.arange(rows, device=DEVICE)
    together = run(every)
    if dtype == torch.float16 and count == 3:
        assert experts.tiles(rows, count, inner, 2) != experts.tiles(17, count, inner, 2)
    for index in (every[:1], every[64:65], every[-1:], every[:17], every[40:], every.flip(0), every[::3]):
        assert torch.equal(run(index), together[index])
    crowd = torch.zeros_like(every)  # all other rows with one expert
    assert torch.equal(run(torch.cat([crowd, every[5:6]]))[-1:], together[5:6])


GATES = {
    "gpt_oss": (
        "(clamp_max(clamp_min(x1, -7.0), 7.0) + 1) * (clamp_max(x0, 7.0) * sigmoid(clamp_max(x0, 7.0) * 1.702))", True,
    ),
    "halves": ("silu(x0) * x1", False),
}  # fmt: skip
"""Programs of gates, and whether a gate and its input are neighbours."""


def gates_and_inputs(y: Tensor, pairs: bool) -> list[Tensor]:
    return [y[:, ::2], y[:, 1::2]] if pairs else list(y.chunk(2, -1))


@every_form
@both_layouts
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    ("dtype", "rows", "outer"), [(torch.float32, 7, 140), (torch.bfloat16, 3, 66), (torch.float16, 110, 130)], ids=str
)
def test_a_gate_has_the_bits_of_its_program_behind_the_product(
    form: str, transposed: bool, gate: str, dtype: torch.dtype, rows: int, outer: int
):
    count, inner = 3, 40
    shape = (count, inner, outer) if transposed else (count, outer, inner)
    # Sums are exact, since the interpreter's library may take another order in another tile. Some are clamped.
    weight, x = (normal(*s, dtype=dtype, seed=i).mul(2).round() for i, s in enumerate((shape, (rows, inner))))
    bias, ids = normal(count, outer, dtype=dtype, seed=2), torch.arange(rows, device=DEVICE) * 5 // 3 % count
    program, pairs = GATES[gate]

    def run(index: Tensor, **options: Any) -> Tensor:
        return FORMS[form](x[index], weight, bias, ids[index], transposed=transposed, **options)

    every = torch.arange(rows, device=DEVICE)
    plain, together = run(every), run(every, gate=program, pairs=pairs)
    (expected,) = POINTWISE.form(form)(gates_and_inputs(plain, pairs), program)
    assert together.shape == (rows, outer // 2) and together.dtype == dtype
    assert torch.equal(together, expected) and float(plain.abs().max()) > 7
    for index in (every[:1], every[1:3], every.flip(0)) if form == "triton" else ():
        assert torch.equal(run(index, gate=program, pairs=pairs), together[index])


@every_form
def test_a_row_meets_all_of_its_experts(form: str):
    x, weight, bias, _ = arguments(False, True, torch.float32)
    ids = torch.arange(2 * ROWS, device=DEVICE) * 3 % EXPERTS
    found = FORMS[form](x, weight, bias, ids, top_k=2)
    assert torch.equal(found, FORMS[form](x.repeat_interleave(2, 0), weight, bias, ids))


def test_rows_and_weights_are_read_where_they_lie():
    x, weight, bias, ids = arguments(False, True, torch.float32)
    expected = FORMS["triton"](x, weight, bias, ids)
    apart = torch.full((ROWS, 2, INNER), torch.nan, device=DEVICE)
    apart[:, 0] = x
    merged = torch.full((EXPERTS, OUTER + 2, INNER + 1), torch.nan, device=DEVICE)
    merged[:, 1 : OUTER + 1, :INNER] = weight
    spaced = torch.full((ROWS, 2), 99, device=DEVICE)
    spaced[:, 1] = ids
    found = FORMS["triton"](apart[:, 0], merged[:, 1 : OUTER + 1, :INNER], bias, spaced[:, 1])
    assert torch.equal(found, expected)


@every_form
def test_experts_without_rows_are_not_read(form: str):
    x, weight, bias, ids = arguments(False, True)
    expected = FORMS[form](x, weight, bias, ids)
    weight[1], bias[1] = torch.nan, torch.nan
    assert torch.equal(FORMS[form](x, weight, bias, ids), expected)


def test_a_nan_stays_in_its_row():
    x, weight, bias, ids = arguments(False, True)
    x[2, 1] = torch.nan
    found = FORMS["triton"](x, weight, bias, ids).isnan().any(-1)
    assert found.tolist() == [row == 2 for row in range(ROWS)]


@every_form
def test_no_rows_give_no_rows_and_the_dtype_is_that_of_x(form: str):
    x, weight, _, ids = arguments(False, False, torch.bfloat16)
    assert FORMS[form](x[:0], weight, None, ids[:0]).shape == (0, OUTER)
    assert FORMS[form](x, weight, None, ids).dtype == torch.bfloat16


@both_layouts
@with_and_without_bias
def test_the_op_is_registered_as_it_behaves(transposed: bool, has_bias: bool):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(expert_linear, arguments(transposed, has_bias), {"transposed": transposed}, test_utils=checks)


@pytest.mark.parametrize(
    ("outer", "gate", "message"),
    [
        (3, "x0 * x1", "a gate takes pairs of outputs, not 3"),
        (4, "x0, x1", "gate must give one result in torch.float32"),
        (4, "float16(x0) * float16(x1)", "gate must give one result in torch.float32"),
        (4, "x0 * x2", "has the inputs x0 to x1"),
    ],
)
def test_gates_that_do_not_fit_are_refused(outer: int, gate: str, message: str):
    x, weight, ids = torch.zeros(2, 5), torch.zeros(2, outer, 5), torch.zeros(2, dtype=torch.int64)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        expert_linear(*map(mode.from_tensor, (x, weight)), None, mode.from_tensor(ids), gate=gate)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (ROWS, 6), r"x must be \[N, I\] = \[.*5\], not \[.*6\]"),
        (3, (ROWS + 1,), r"rows with top_k = 1 need .* expert_ids, not "),
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
