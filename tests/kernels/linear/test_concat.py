"""Rows side by side: copies of all parts, whatever their number and widths."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.concat import CONCAT
from tests.kernels.linear.test_norm import BOUND, normal


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("widths", [(5,), (16, 16), (3, 1, 1030), (64, 0, 7)])
def test_parts_stand_side_by_side(form: str, dtype: torch.dtype, widths: tuple[int, ...]) -> None:
    parts = [normal(2, 3, width, dtype=dtype, seed=s) for s, width in enumerate(widths)]
    concat = CONCAT.form(form)
    assert torch.equal(concat(parts), torch.cat(parts, -1))
    views = [part.transpose(0, 1)[1:] for part in parts]
    assert torch.equal(concat(views), torch.cat(views, -1)) and concat(views).is_contiguous()
    assert concat([part[:0] for part in parts]).shape == (0, 3, sum(widths))


def test_the_op_is_registered_as_it_behaves() -> None:
    parts = [normal(2, 4), normal(2, 3, seed=1)]
    torch.library.opcheck(torch.ops.specgraph.concat, (parts,), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("other", [torch.empty(3, 4), torch.empty(2, 4, 1), torch.empty(2, 4).double()])
def test_other_parts_are_refused(other: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match="differ in their last dimension"):
        torch.ops.specgraph.concat([torch.empty(2, 4), other])
