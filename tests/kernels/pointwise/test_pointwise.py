"""Programs of functions of elements: every function, every layout of the inputs, and the rounding of every dtype."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.pointwise.pointwise import POINTWISE
from specgraph.kernels.pointwise.pointwise_triton import _SMALL, _Input, source
from specgraph.kernels.pointwise.program import FUNCTIONS
from tests.kernels.linear.test_norm import DEVICE, normal

FORMS = ("reference", "triton")
GATES = "sigmoid(x0), -exp(float32(x1)) * softplus(float32(x2) + x3)"
OTHERS = {"add", "sub", "mul", "div", "neg", "float64", "clamp_min", "clamp_max"}
UNARY = [name for name in FUNCTIONS if name not in OTHERS]


def run(form: str, program: str, *inputs: Tensor) -> list[Tensor]:
    results: list[Tensor] = POINTWISE.form(form)(list(inputs), program)
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_a_function_is_that_of_pytorch_within_a_rounding(name: str, dtype: torch.dtype) -> None:
    special = [0.0, -0.0, 1e-6, -1e-6, 15.0, -15.0, 30.0, -30.0, 80.0, -80.0, float("inf"), -float("inf"), float("nan")]
    x = torch.cat([torch.linspace(-25, 25, 500), torch.tensor(special)]).to(dtype).to(DEVICE)
    (actual,) = run("triton", f"{name}(x0)", x)
    expected = FUNCTIONS[name](x.double()).to(actual.dtype)
    assert actual.dtype == FUNCTIONS[name](x).dtype
    # A GPU takes powers of two: the argument 80 times log2(e) is rounded to 4e-6 before.
    limits = torch.finfo(actual.dtype)
    torch.testing.assert_close(actual, expected, rtol=max(limits.eps, 4e-6), atol=limits.tiny, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_operators_round_after_each_as_pytorch_does(dtype: torch.dtype) -> None:
    given = [normal(7, 50, dtype=dtype, seed=seed) for seed in range(3)]
    (actual,) = run("triton", "(x0 * x1 - x2 / 3) * 1.7 + -x1 / x0", *given)
    x, y, z = (value.cpu() for value in given)  # on a GPU, PyTorch multiplies by the reciprocal of a number
    assert torch.equal(actual.cpu(), (x * y - z / 3) * 1.7 + -y / x)  # none of them is more exact than its dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_limits_are_those_of_pytorch(dtype: torch.dtype) -> None:
    """1.7 is no bfloat16 and no float16; NaN stays, as it does there."""
    x = torch.tensor([-9.0, -1.7, -1.0, 0.5, 1.69, 1.7, 1.71, 3.0, float("inf"), -float("inf"), float("nan")])
    x = x.to(dtype).to(DEVICE)
    actual = run("triton", "clamp_min(x0, -1.7), clamp_max(x0, 1.7), clamp_max(clamp_min(x0, -1.7), 1.7)", x)
    for found, limits in zip(actual, ((-1.7, None), (None, 1.7), (-1.7, 1.7)), strict=True):
        expected = x.clamp(*limits)
        assert found.dtype == dtype and torch.equal(found.nan_to_num(99), expected.nan_to_num(99))


def test_results_have_the_dtypes_that_pytorch_gives() -> None:
    low, number = normal(4, 6, dtype=torch.bfloat16), normal(6, seed=1)
    scalar = torch.tensor(
        1.75, device=DEVICE
    )  # which bfloat16 has, too: whether PyTorch rounds it depends on the device
    program = "x0 * x1, x0 * x2, float16(x0), x1 + x1"
    expected = [low * scalar, low * number, low.half(), (scalar + scalar).expand(4, 6)]
    for form in FORMS:
        actual = run(form, program, low, scalar, number)
        assert [(r.dtype, r.shape) for r in actual] == [(e.dtype, e.shape) for e in expected]
        assert all(map(torch.equal, actual, expected)) and all(r.is_contiguous() for r in actual)


LAYOUTS = {
    "contiguous": lambda: normal(3, 4, 5, 8),
    "columns of a wider tensor": lambda: normal(3, 4, 100)[..., 7:47].view(3, 4, 5, 8),
    "turned": lambda: normal(8, 5, 4, 3).permute(3, 2, 1, 0),
    "heads turned": lambda: normal(3, 5, 4, 8).transpose(1, 2),
    "every second": lambda: normal(3, 8, 5, 8)[:, ::2],
    "one number per channel": lambda: normal(8),
    "one number per row": lambda: normal(3, 4, 1, 1),
    "expanded": lambda: normal(3, 1, 5, 8).expand(3, 4, 5, 8),
    "one number": lambda: normal(),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_lie_in_memory_as_they_like(layout: str) -> None:
    x, y = normal(3, 4, 5, 8, seed=3), LAYOUTS[layout]()
    for inputs in ((x, y), (y, x)):
        (actual,) = run("triton", "x0 - x1 * 0.5", *inputs)
        assert torch.equal(actual, inputs[0] - inputs[1] * 0.5)


def test_an_element_has_the_same_bits_whatever_stands_beside_it() -> None:
    rows = _SMALL * 1024 // 64 + 3  # enough for the larger tile
    a, b = normal(rows, 64, dtype=torch.bfloat16), normal(rows, 64, seed=1, dtype=torch.bfloat16)
    a_log, bias = normal(64, seed=2), normal(64, seed=3)
    whole = run("triton", GATES, b, a_log, a, bias)
    for chosen in (slice(5, 6), slice(7, 12), slice(rows - 1, rows)):
        part = run("triton", GATES, b[chosen], a_log, a[chosen], bias)
        assert all(torch.equal(p, w[chosen]) for p, w in zip(part, whole, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_no_element_is_no_work(form: str) -> None:
    assert run(form, "x0 * x1", normal(0, 3), normal(3))[0].shape == (0, 3)


def test_double_precision_is_left_to_the_reference() -> None:
    x = normal(3, 4, dtype=torch.float64)
    (actual,) = torch.ops.specgraph.pointwise([x], "exp(x0) * silu(x0)")
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, x.exp() * x * x.sigmoid(), rtol=1e-14, atol=0)


def test_the_source_is_what_one_would_write() -> None:
    text = source("x0 * sigmoid(x1)", [_Input(torch.bfloat16, 3, 2), _Input(torch.float32, 1, 1)])
    assert '"""x0 * sigmoid(x1)"""' in text
    assert "x0 = tl.load(p0 + (at % n0_1 * s0_1 + (at // n0_1) * s0_0), mask=inside).to(tl.float32)" in text
    assert "x1 = tl.load(p1 + (at * s1_0), mask=inside).to(tl.float32)" in text
    assert "tl.store(out0 + at, " in text and "bfloat16" not in text


def test_the_op_is_registered_as_it_behaves() -> None:
    given = [normal(2, 4, dtype=torch.bfloat16), normal(4), normal(2, 4, seed=1), normal(1, seed=2)]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.specgraph.pointwise, (given, GATES), test_utils=tests)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("x0 +", "a list of expressions with commas, not 'x0 \\+'"),
        ("x2 + 1", r"inputs x0 to x1, .*no 'x2' as in 'x2 \+ 1'"),
        ("cos(x0)", r"functions add, .*softplus, sub, but no 'cos\(x0\)'"),
        ("x0 ** 2", "no 'x0 \\*\\* 2'"),
        ("__import__('os')", 'no "__import__'),
    ],
)
def test_what_is_no_program_is_refused(program: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        POINTWISE.form("reference")([normal(2), normal(2)], program)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [([], "at least one input"), ([torch.zeros(2, dtype=torch.int64)], "floating-point tensors, not torch.int64")],
)
def test_other_inputs_are_refused(inputs: list[Tensor], words: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=words):
        torch.ops.specgraph.pointwise([*inputs, *inputs], "x0")
