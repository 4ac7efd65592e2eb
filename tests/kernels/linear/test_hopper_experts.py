"""What the kernel for experts on Hopper does beside its products, which only a GPU computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from specgraph.kernels.launch import launch
from specgraph.kernels.linear.hopper_experts import _sort_rows_kernel


@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (7, 3), (70, 5), (40, 64)])
def test_rows_lie_by_expert_and_each_expert_has_its_place(rows: int, experts: int) -> None:
    """In the order in which they came, also where there are more rows than ids are read at a time."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, experts, (rows,), generator=generator)
    x = torch.randn(rows, 40, generator=generator)
    order, starts = torch.full((rows,), -1, dtype=torch.int32), torch.full((experts + 1,), -1, dtype=torch.int32)
    sorted_x = torch.empty_like(x)
    launch(
        _sort_rows_kernel, (max(rows, experts + 1),), order, starts, sorted_x, ids, x, rows, experts, INNER=40,
        TOP_K=1, BLOCK=16, IDS=32,
    )  # fmt: skip
    expected = torch.sort(ids, stable=True).indices
    assert torch.equal(order.long(), expected) and torch.equal(sorted_x, x[expected])
    assert starts.tolist() == [int((ids < expert).sum()) for expert in range(experts + 1)]
