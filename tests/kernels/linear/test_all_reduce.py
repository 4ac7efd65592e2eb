"""Sums over devices: in the order of the devices, in float32 or wider, each row by itself."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.all_reduce import ALL_REDUCE
from tests.kernels.linear.test_norm import normal

all_reduce = torch.ops.specgraph.all_reduce


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_parts_are_added_in_order_and_rounded_once(dtype: torch.dtype, count: int) -> None:
    parts = [normal(2, 3, 16, dtype=dtype, seed=seed) for seed in range(count)]
    before = [part.clone() for part in parts]
    wide = [part.to(torch.promote_types(dtype, torch.float32)) for part in parts]
    expected = wide[0]
    for part in wide[1:]:
        expected = expected + part
    result = all_reduce(parts)
    assert torch.equal(result, expected.to(dtype)) and result.dtype == dtype
    assert all(map(torch.equal, parts, before)), "parts stay as they are"
    assert torch.equal(all_reduce([part[:1] for part in parts]), result[:1])


def test_the_order_of_devices_counts() -> None:
    large, small = torch.tensor([1e8]), torch.tensor([1.0])
    assert all_reduce([large, -large, small]).item() == 1
    assert all_reduce([small, large, -large]).item() == 0


def test_the_op_is_registered_as_it_behaves_and_promises_rows_of_their_own() -> None:
    parts = [normal(2, 4), normal(2, 4, seed=1)]
    torch.library.opcheck(all_reduce, (parts,), test_utils=("test_schema", "test_faketensor"))
    assert ALL_REDUCE.batch_invariant("cpu")


@pytest.mark.parametrize(
    ("other", "message"),
    [(torch.empty(2, 3), "must be alike"), (torch.empty(2, 4).double(), "must be alike"),
     (torch.empty(2, 4).long(), "must be alike")],
)  # fmt: skip
def test_parts_that_differ_are_refused(other: torch.Tensor, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        all_reduce([torch.empty(2, 4), other])


def test_integers_are_refused() -> None:
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        pytest.raises(ValueError, match=r"floating-point, not torch.int64"),
    ):
        all_reduce([torch.empty(2, 4).long()] * 2)
