"""The ops of packed weights against products with weights that a loop over their entries gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.linear import LINEAR, LINEAR_NORM, NormParts, norm_parts_reference
from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR
from specgraph.kernels.packed.linear import PACKED_LINEAR, PACKED_LINEAR_NORM, packed_linear
from specgraph.kernels.pointwise.pointwise import POINTWISE
from tests.kernels.packed.definition import (
    DEVICE,
    EVERY_FAULT,
    FAULTS,
    NAMES,
    SHAPES,
    matrix,
    normal,
    random_weight,
    rounded_rows,
)  # fmt: skip
from tests.kernels.rounding import assert_within

ROWS, EXPERTS = 3, 4
IDS = torch.tensor([2, 0, 2, 3, 0, 2, 3], device=DEVICE)  # expert 1 has no rows
ops = torch.ops.specgraph
every_format = pytest.mark.parametrize("name", NAMES)
every_form = pytest.mark.parametrize("form", ["reference", "triton"])


def rows(name: str, *shape: int, dtype: torch.dtype = torch.float64, seed: int = 2) -> Tensor:
    return normal(*shape, SHAPES[name][1], dtype=dtype, seed=seed)


def bias_of(name: str, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(*shape, SHAPES[name][0], dtype=dtype, seed=3)


# Linear layers


@every_format
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_a_product_takes_every_entry(name: str, has_bias: bool) -> None:
    weight, x = random_weight(name), rows(name, ROWS)
    bias = bias_of(name) if has_bias else None
    terms = rounded_rows(name, x)[:, None, :] * matrix(name, weight)  # [rows, O, I]
    expected = terms.sum(-1) + (bias if bias is not None else 0)
    torch.testing.assert_close(packed_linear(x, weight, bias, format=name), expected, rtol=1e-12, atol=1e-10)


@every_format
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("reference", torch.bfloat16), ("triton", torch.float32), ("triton", torch.bfloat16), ("triton", torch.float16)],
    ids=str,
)
def test_the_result_is_rounded_once(name: str, form: str, dtype: torch.dtype) -> None:
    """The weight is not rounded to the dtype of the input. Float32 sums of the products have an error of their own."""
    weight, x, bias = random_weight(name), rows(name, 2, ROWS, dtype=dtype), bias_of(name, dtype=dtype)
    exact, read = matrix(name, weight), rounded_rows(name, x).double()
    expected = read @ exact.T + bias.double()
    magnitude = read.abs() @ exact.abs().T + bias.double().abs()
    found = PACKED_LINEAR.form(form)(x, weight, bias, format=name)
    assert (found.dtype, found.shape) == (dtype, expected.shape)
    assert_within(found, expected, (SHAPES[name][1] + 2) * 2.0**-24 * magnitude)


EPILOGUES: dict[str, dict[str, Any]] = {
    "residual": {"residual": True}, "silu": {"activation": "silu"}, "gated": {"activation": "gelu_tanh_mul"},
    "norm": {"sum_sq": True, "norm_eps": 1e-5},
    "all": {"residual": True, "sum_sq": True, "norm_eps": 1e-2, "activation": "silu_mul"},
}  # fmt: skip
CASES = [
    (name, case) for name in NAMES for case in EPILOGUES if not name.startswith("fp8") or case not in ("norm", "all")
]


def _epilogue(name: str, case: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """The input, a weight of an even number of outputs, and the other arguments."""
    options = {"bias": bias_of(name, dtype=dtype), **EPILOGUES[case]}
    gated, x = options.get("activation", "").endswith("_mul"), rows(name, ROWS, dtype=dtype) / 64
    weight = random_weight(name)
    if not name.startswith("fp8"):
        weight, options["bias"] = [part[:4] for part in weight], options["bias"][:4]
    outputs = len(options["bias"]) // (2 if gated else 1)
    if "residual" in options:
        options["residual"] = normal(ROWS, outputs, dtype=dtype, seed=4)
    if "sum_sq" in options:
        parts = NormParts(x, normal(SHAPES[name][1], dtype=dtype, seed=5), norm_offset=0.0)
        x, options["sum_sq"] = norm_parts_reference(parts)
    return x, weight, options


@every_form
@pytest.mark.parametrize(("name", "case"), CASES)
def test_the_epilogue_is_that_of_a_dense_product(name: str, case: str, form: str) -> None:
    """In float64, and in float32 by Triton."""
    dtype = torch.float64 if form == "reference" else torch.float32
    x, weight, options = _epilogue(name, case, dtype)
    norm = normal(*(options["bias"].shape if "gated" not in case and case != "all" else (len(options["bias"]) // 2,)),
                  dtype=dtype, seed=6)  # fmt: skip
    read, dense, close = rounded_rows(name, x), matrix(name, weight, dtype), 1e-12 if form == "reference" else 1e-5
    expected = LINEAR.form("reference")(read, dense, **options)
    found = PACKED_LINEAR.form(form)(x, weight, format=name, **options)
    torch.testing.assert_close(found, expected, rtol=close, atol=close * float(expected.abs().max()))
    joined = LINEAR_NORM.form("reference")(read, dense, norm, norm_offset=1.0, **options)
    given = PACKED_LINEAR_NORM.form(form)(x, weight, norm, norm_offset=1.0, format=name, **options)
    for ours, theirs in zip(given, joined, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=close, atol=close * float(theirs.abs().max()))


@every_format
def test_the_bits_of_a_row_do_not_depend_on_other_rows(name: str) -> None:
    weight, x = random_weight(name), rows(name, 40, dtype=torch.bfloat16)
    form = PACKED_LINEAR.form("triton")
    together = form(x, weight, format=name)
    for part in (slice(0, 1), slice(3, 8), slice(17, 40)):
        assert torch.equal(form(x[part], weight, format=name), together[part])


@pytest.mark.parametrize(("name", "fault"), EVERY_FAULT)
def test_a_wrong_layout_gives_another_product(name: str, fault: str) -> None:
    weight, x = random_weight(name), rows(name, ROWS)
    wrong = packed_linear(x, [*FAULTS[name][fault](*weight)], format=name)
    off = (wrong - packed_linear(x, weight, format=name)).abs().nan_to_num(torch.inf)
    assert float(off.max()) > 0.1


# Experts


@every_format
@pytest.mark.parametrize(
    ("form", "dtype"),
    [("reference", torch.float64), ("reference", torch.bfloat16), ("triton", torch.float32),
     ("triton", torch.bfloat16)], ids=str,
)  # fmt: skip
def test_each_row_meets_its_own_expert(name: str, dtype: torch.dtype, form: str) -> None:
    weight, x = random_weight(name, EXPERTS), rows(name, len(IDS), dtype=dtype)
    bias = bias_of(name, EXPERTS, dtype=dtype)
    exact, read = matrix(name, weight), rounded_rows(name, x).double()
    for given in (None, bias):
        found = PACKED_EXPERT_LINEAR.form(form)(x, weight, given, IDS, format=name)
        assert (found.dtype, found.shape) == (dtype, (len(IDS), SHAPES[name][0]))
        added = torch.zeros_like(bias) if given is None else bias
        expected = torch.stack([exact[e] @ row + added[e].double() for row, e in zip(read, IDS.tolist(), strict=True)])
        magnitude = torch.stack([exact[e].abs() @ row.abs() for row, e in zip(read, IDS.tolist(), strict=True)])
        step = 2.0**-24 if dtype != torch.float64 else 2.0**-52
        assert_within(found, expected, (SHAPES[name][1] + 2) * step * (magnitude + added[IDS].double().abs()))


@every_form
@every_format
def test_experts_without_rows_are_not_read_and_no_rows_give_none(name: str, form: str) -> None:
    weight, x, run = random_weight(name, EXPERTS), rows(name, len(IDS), dtype=torch.float32), PACKED_EXPERT_LINEAR
    bias = bias_of(name, EXPERTS, dtype=torch.float32)
    expected = run.form(form)(x, weight, bias, IDS, format=name)
    weight[1][1], bias[1] = 255 if name.startswith("mxfp4") else torch.nan, torch.nan
    assert torch.equal(run.form(form)(x, weight, bias, IDS, format=name), expected)
    assert run.form(form)(x[:0], weight, None, IDS[:0], format=name).shape == (0, SHAPES[name][0])


@every_form
@every_format
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
def test_a_gate_has_the_bits_of_its_program_behind_the_product(name: str, pairs: bool, form: str) -> None:
    x, bias = rows(name, len(IDS), dtype=torch.bfloat16), bias_of(name, EXPERTS, dtype=torch.bfloat16)
    weight, even = random_weight(name, EXPERTS), SHAPES[name][0] // 2 * 2
    if not name.startswith("fp8"):
        weight, bias = [part[:, :even] for part in weight], bias[:, :even]
    run, program = PACKED_EXPERT_LINEAR.form(form), "clamp_max(x0, 7.0) * sigmoid(x0 * 1.702) * (x1 + 1)"
    plain = run(x, weight, bias, IDS, format=name)
    halves = [plain[:, ::2], plain[:, 1::2]] if pairs else list(plain.chunk(2, -1))
    found = run(x, weight, bias, IDS, format=name, gate=program, pairs=pairs)
    assert torch.equal(found, POINTWISE.form(form)(halves, program)[0])


# How the ops are registered, and what they refuse


@every_format
def test_the_ops_are_registered_as_they_behave(name: str) -> None:
    """The check of the schema multiplies tensors, and PyTorch has no product of numbers in fp8 on a CPU."""
    checks, dtype = ("test_faketensor", *(["test_schema"] if not name.startswith("fp8") else [])), torch.float32
    weight, norm = random_weight(name), bias_of(name, dtype=dtype)
    for bias in (None, bias_of(name, dtype=dtype)):
        given = rows(name, 2, ROWS, dtype=dtype), weight, bias
        torch.library.opcheck(ops.packed_linear, given, {"format": name}, test_utils=checks)
        joined = (*given[:2], norm, bias)
        torch.library.opcheck(ops.packed_linear_norm, joined, {"format": name}, test_utils=checks)
    experts = rows(name, len(IDS), dtype=dtype), random_weight(name, EXPERTS), None, IDS
    torch.library.opcheck(ops.packed_expert_linear, experts, {"format": name}, test_utils=checks)


GOOD: dict[str, Any] = {
    "x": torch.empty(2, 16), "weight": [torch.empty(5, 2, dtype=torch.int32), torch.empty(5, 4)], "format": "int4",
}  # fmt: skip
STACK: dict[str, Any] = {
    "x": torch.empty(3, 16), "weight": [torch.empty(2, 5, 2, dtype=torch.int32), torch.empty(2, 5, 4)],
    "bias": None, "expert_ids": torch.zeros(3, dtype=torch.int64), "format": "int4",
}  # fmt: skip
FP8 = [torch.empty(5, 16, dtype=torch.float8_e4m3fn), torch.empty(1, 1)]


@pytest.mark.parametrize(
    ("op", "wrong", "message"),
    [
        ("packed_linear", {"x": torch.empty(2, 24)}, "x has 24 inputs, and the weight 16: they must agree"),
        ("packed_linear", {"x": torch.empty(2, 16, dtype=torch.int64)}, "x is torch.int64; it must be of floating"),
        ("packed_linear", {"weight": GOOD["weight"][:1]}, "int4 weights have 2 tensors, .*, not 1"),
        ("packed_linear", {"weight": [GOOD["weight"][0], torch.empty(5, 3)]}, "scale has 3 groups for 16 inputs"),
        ("packed_linear", {"weight": STACK["weight"]}, r"numbers are \[2, 5, 2\]; they must be a matrix"),
        ("packed_linear", {"bias": torch.empty(4)}, r"bias must be \[O\] = \[5\], not \[4\]"),
        ("packed_linear", {"activation": "tanh"}, "activation must be one of none, .*, not tanh"),
        ("packed_linear", {"activation": "silu_mul"}, "takes gate rows and as many up rows, not 5 together"),
        ("packed_linear", {"residual": torch.empty(2, 4)}, r"residual must be \(2, 5\)"),
        ("packed_linear", {"format": "int3"}, "format is 'int3'; allowed is int4, mxfp4, fp8_blocks"),
        ("packed_linear", {"format": "mxfp4"}, "numbers of a weight in mxfp4 are torch.int32"),
        ("packed_linear", {"format": "fp8_blocks", "weight": FP8, "sum_sq": torch.empty(2, 1)},
         "fp8_blocks quantises rows, whose norm has to be complete: sum_sq must be None"),
        ("packed_linear_norm", {"norm_weight": torch.empty(4)}, r"norm_weight must be \[I\] = \[5\], not \[4\]"),
        ("packed_expert_linear", {"x": torch.empty(3, 24)}, "x has 24 inputs, and the weight 16: they must agree"),
        ("packed_expert_linear", {"weight": GOOD["weight"]}, r"numbers are \[5, 2\]; they must be a stack"),
        ("packed_expert_linear", {"bias": torch.empty(5)}, r"bias is \[5\]; it must be \[2, 5\]"),
        ("packed_expert_linear", {"expert_ids": torch.zeros(4, dtype=torch.int64)}, "need 3 expert_ids, not 4"),
    ],
)  # fmt: skip
def test_other_arguments_are_refused(op: str, wrong: dict[str, Any], message: str) -> None:
    good = STACK if op == "packed_expert_linear" else GOOD
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        getattr(ops, op)(**{**good, **wrong})
