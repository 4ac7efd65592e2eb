"""The library's forms of linears: what they compute, and when they are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear import library
from specgraph.kernels.linear.experts import EXPERT_LINEAR
from specgraph.kernels.linear.library import HOPPER, Crossovers, is_faster
from specgraph.kernels.linear.linear import LINEAR, LINEAR_NORM
from specgraph.kernels.ops import Op
from tests.kernels.linear.test_linear import (
    CASES,
    DEVICE,
    arguments,
    dtypes,
    exact,
    norm_parts,
    norm_parts_reference,
)

CPU = torch.device("cpu")
BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}
"""The relative error of a whole result. A library rounds to the dtype wherever it likes."""
linear, linear_norm, expert_linear = (op.form("library") for op in (LINEAR, LINEAR_NORM, EXPERT_LINEAR))
KNOWN = Crossovers(
    linear={(40, 96): (8, 32), (64, 96): (16,), (4096, 4096): ()},
    gated={(80, 96): (4,)},
    experts={(4, 16, 24): (12,)},
)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device has a table."""
    monkeypatch.setattr(library, "crossovers_of", lambda device: KNOWN)


def normed(
    given: tuple[Tensor | None, ...], options: dict[str, Any]
) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """The arguments of a linear whose norm is given by its two parts."""
    x, weight, bias, residual, norm_weight = given
    others, square_sums = dict(options), None
    offset = others.pop("norm_offset", 0.0)
    if norm_weight is not None:
        x, square_sums = norm_parts_reference(x, norm_weight, norm_offset=offset)
    return (x, weight, bias, residual, square_sums), others


def assert_close(out: Tensor, given: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
    expected, _ = exact(given, options)
    assert out.shape == expected.shape and out.dtype == given[0].dtype
    assert float((out.cpu().double() - expected).norm() / expected.norm()) < BOUND[out.dtype]


# What the forms compute


@dtypes
@pytest.mark.parametrize("case", [case for _, case in CASES], ids=[name for name, _ in CASES])
def test_a_linear_computes_what_the_definition_says(case: dict[str, Any], dtype: torch.dtype) -> None:
    given, options = arguments(17, 40, 200, dtype, **case)
    arguments_, others = normed(given, options)
    out = linear(*arguments_, **others)
    assert_close(out, given, options)
    assert out.is_contiguous()


@dtypes
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_parts_of_the_next_norm_are_those_of_the_result(offset: float, dtype: torch.dtype) -> None:
    given, options = arguments(5, 70, 96, dtype)
    norm_weight = torch.randn(70, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    arguments_, others = normed(given, options)
    x, weight, *rest = arguments_
    out, weighted, square_sums = linear_norm(x, weight, norm_weight, *rest, norm_offset=offset, **others)
    assert_close(out, given, options)
    wanted = norm_parts_reference(out, norm_weight, norm_offset=offset)
    assert weighted.shape == out.shape and weighted.dtype == dtype and square_sums.dtype == torch.float32
    assert float((weighted.double() - wanted[0].double()).norm() / wanted[0].double().norm()) < BOUND[dtype]
    torch.testing.assert_close(square_sums, wanted[1])


def test_rows_of_several_dimensions_are_rows() -> None:
    (x, weight, _, _, norm_weight), _ = arguments(6, 40, 96, torch.float32, extras=False)
    weighted, square_sums = norm_parts(x, norm_weight)
    flat = linear(weighted, weight, square_sums=square_sums, norm_eps=1e-5)
    shaped = linear(weighted.view(2, 3, 96), weight, square_sums=square_sums.view(2, 3, -1), norm_eps=1e-5)
    assert shaped.shape == (2, 3, 40) and torch.equal(shaped.view(6, 40), flat)


def expert_arguments(transposed: bool, dtype: torch.dtype, rows: int = 13) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows for experts 0, 1 and 3 of four; nothing may read the weight and the bias of expert 2."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((rows, 24), (4, 16, 24), (4, 16)))
    weight[2] = bias[2] = torch.nan
    ids = torch.tensor([3, 0, 1, 0])[torch.arange(rows) % 4].to(DEVICE)
    weight = weight.mT.contiguous() if transposed else weight
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype), bias.to(DEVICE, dtype), ids


@dtypes
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
def test_every_row_meets_its_own_expert(has_bias: bool, transposed: bool, dtype: torch.dtype) -> None:
    x, weight, bias, ids = expert_arguments(transposed, dtype)
    out = expert_linear(x, weight, bias if has_bias else None, ids, transposed=transposed)
    matrices = (weight.mT if transposed else weight).double()[ids]
    expected = torch.einsum("si,soi->so", x.double(), matrices)
    expected = expected + bias.double()[ids] if has_bias else expected
    assert out.dtype == dtype and out.shape == expected.shape
    assert float((out.double() - expected).norm() / expected.norm()) < BOUND[dtype]


# When they are chosen


@pytest.mark.parametrize(
    ("kind", "shape", "rows", "faster"),
    [
        *(("linear", (40, 96), rows, rows in range(8, 32)) for rows in (1, 7, 8, 31, 32, 10**6)),
        *(("linear", (64, 96), rows, rows >= 16) for rows in (1, 15, 16, 10**6)),
        ("linear", (4096, 4096), 10**6, False),
        ("gated", (80, 96), 3, False),
        ("gated", (80, 96), 4, True),
        ("linear", (80, 96), 4, False),
        ("experts", (4, 16, 24), 11, False),
        ("experts", (4, 16, 24), 12, True),
    ],
)
@pytest.mark.usefixtures("known")
def test_the_faster_form_changes_where_the_table_says(
    kind: library.Kind, shape: tuple[int, ...], rows: int, faster: bool
) -> None:
    assert is_faster(kind, shape, rows, torch.bfloat16, CPU) == faster


@pytest.mark.usefixtures("known")
def test_a_shape_takes_the_entry_of_the_nearest_and_none_that_is_far() -> None:
    def chosen(shape: tuple[int, ...], kind: library.Kind = "linear") -> list[int]:
        return [rows for rows in (8, 16, 32) if is_faster(kind, shape, rows, torch.bfloat16, CPU)]

    assert chosen((40, 96)) == chosen((48, 96)) == chosen((36, 80)) == [8, 16]
    assert chosen((52, 96)) == chosen((96, 144)) == chosen((64, 64)) == [16, 32]
    assert chosen((97, 96)) == chosen((64, 145)) == chosen((64, 63)) == chosen((26, 96)) == []
    assert chosen((4, 24, 36), "experts") == [16, 32] and chosen((8, 16, 24), "experts") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("known")
def test_only_what_was_measured_is_chosen(dtype: torch.dtype) -> None:
    assert not is_faster("linear", (64, 96), 100, dtype, CPU)
    assert is_faster("linear", (64, 96), 100, torch.float16, CPU)


def test_a_device_that_was_not_measured_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.crossovers_of(CPU) is None
    assert not is_faster("linear", (4096, 4096), 10**6, torch.bfloat16, CPU)
    monkeypatch.setattr(library, "is_hopper", lambda device: True)
    assert library.crossovers_of(CPU) is HOPPER
    assert is_faster("linear", (4096, 4096), 10**6, torch.bfloat16, CPU)


def test_the_table_of_hopper_is_well_formed() -> None:
    for table, dimensions in ((HOPPER.linear, 2), (HOPPER.gated, 2), (HOPPER.experts, 3)):
        assert table and all(len(shape) == dimensions for shape in table)
        for changes in table.values():
            assert list(changes) == sorted(set(changes)) and all(rows >= 1 for rows in changes)
    assert all(outer % 2 == 0 for outer, _ in HOPPER.gated)


def takes_library(op: Op, *given: Tensor | None, **options: Any) -> bool:
    """Whether a GPU runs the library's form if rows may depend on each other; otherwise it, and a CPU, never do."""
    bitwise, fast = (op.arguments(*given, **options, bitwise=bitwise) for bitwise in (True, False))
    assert op.choose("cuda", bitwise).name != "library" and op.choose("cpu", fast).name == "reference"
    chosen = op.choose("cuda", fast).name
    assert chosen in ("library", op.choose("cuda", bitwise).name)
    return chosen == "library"


@pytest.mark.parametrize("rows", [8, 16])
@pytest.mark.usefixtures("known")
def test_a_linear_runs_the_form_that_is_faster(rows: int) -> None:
    given, options = normed(*arguments(rows, 64, 96, torch.float16, activation="silu"))
    assert takes_library(LINEAR, *given, **options) == (rows >= 16)
    x, weight, *rest = given
    norm_weight = torch.ones(64, dtype=torch.float16, device=DEVICE)
    assert takes_library(LINEAR_NORM, x, weight, norm_weight, *rest, **options) == (rows >= 16)


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.usefixtures("known")
def test_gated_linears_have_a_table_of_their_own(rows: int) -> None:
    (x, weight, bias, residual, _), options = arguments(rows, 40, 96, torch.float16, norm=False, activation="silu_mul")
    assert takes_library(LINEAR, x, weight, bias, residual, **options) == (rows >= 4)
    norm_weight = torch.ones(40, dtype=torch.float16, device=DEVICE)
    assert takes_library(LINEAR_NORM, x, weight, norm_weight, bias, residual, **options) == (rows >= 4)


@pytest.mark.usefixtures("known")
def test_rows_of_all_dimensions_count() -> None:
    (x, weight, *_), _ = arguments(16, 64, 96, torch.float16, norm=False, extras=False)
    assert takes_library(LINEAR, x.reshape(2, 8, 96), weight)
    assert not takes_library(LINEAR, x.reshape(16, 96)[:0], weight)


@pytest.mark.parametrize("rows", [11, 12])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.usefixtures("known")
def test_experts_run_the_form_that_is_faster(transposed: bool, rows: int) -> None:
    given = expert_arguments(transposed, torch.float16, rows)
    assert takes_library(EXPERT_LINEAR, *given, transposed=transposed) == (rows >= 12)


@pytest.mark.usefixtures("known")
def test_weights_that_the_grouped_product_refuses_are_left_to_ours() -> None:
    x, weight, bias, ids = expert_arguments(False, torch.float16)
    assert takes_library(EXPERT_LINEAR, x, weight, bias, ids)
    wide = torch.zeros(4, 16, 25, dtype=torch.float16, device=DEVICE)
    assert not takes_library(EXPERT_LINEAR, x, wide[..., :24], bias, ids)
    narrow = x[:, :20].contiguous(), weight[..., :20].contiguous()
    assert not takes_library(EXPERT_LINEAR, *narrow, bias, ids)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("rows", [8, 16])
def test_the_ops_are_registered_as_they_behave(rows: int) -> None:
    (x, weight, bias, residual, _), options = arguments(rows, 64, 96, torch.float16, norm=False)
    checks = ("test_schema", "test_faketensor")
    options["bitwise"] = False
    torch.library.opcheck(torch.ops.specgraph.linear, (x, weight, bias, residual), options, test_utils=checks)
    given = (x, weight, torch.ones(64, dtype=x.dtype, device=DEVICE), bias, residual)
    torch.library.opcheck(torch.ops.specgraph.linear_norm, given, options, test_utils=checks)
    given = expert_arguments(False, torch.float16, rows)
    torch.library.opcheck(torch.ops.specgraph.expert_linear, given, {"bitwise": False}, test_utils=checks)
