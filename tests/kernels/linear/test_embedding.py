"""Rows of a table by token ids: copies of its rows, whatever their number and the layout of the ids."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.embedding import EMBEDDING
from tests.kernels.linear.test_norm import BOUND, DEVICE, normal


@pytest.mark.parametrize("form", ["reference", "triton"])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("width", [1, 5, 128, 1030, 2048])
def test_rows_are_copied(form: str, dtype: torch.dtype, width: int) -> None:
    table = normal(7, width, dtype=dtype)
    tokens = torch.tensor([[6, 0, 3], [3, 3, 1]], device=DEVICE)
    for ids in (tokens, tokens.T, tokens[0], tokens[1, 2], tokens[:, 1:], tokens[:0]):
        found = EMBEDDING.form(form)(table, ids)
        assert torch.equal(found, table[ids]) and found.shape == (*ids.shape, width)


def test_a_table_is_read_where_it_lies() -> None:
    apart = torch.full((5, 24), torch.nan, device=DEVICE)
    apart[:, 8:20] = normal(5, 12)
    tokens = torch.tensor([4, 0], device=DEVICE)
    assert torch.equal(EMBEDDING.form("triton")(apart[:, 8:20], tokens), apart[tokens, 8:20])


def test_the_op_is_registered_as_it_behaves() -> None:
    tokens = torch.tensor([[1, 0]], device=DEVICE)
    torch.library.opcheck(
        torch.ops.specgraph.embedding, (normal(3, 8), tokens), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("table", "tokens", "message"),
    [
        (torch.empty(3), torch.zeros(2, dtype=torch.int64), r"weight must be \[V, H\], not \[3\]"),
        (torch.empty(3, 2), torch.zeros(2, dtype=torch.int32), "tokens must be int64, not torch.int32"),
    ],
)
def test_other_arguments_are_refused(table: torch.Tensor, tokens: torch.Tensor, message: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ValueError, match=message):
        torch.ops.specgraph.embedding(table, tokens)
