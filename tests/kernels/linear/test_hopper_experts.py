"""What the kernel for experts on Hopper does beside its products, which only a GPU computes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from specgraph.kernels.launch import launch
from specgraph.kernels.linear.hopper_experts import _sort_rows_kernel


@pytest.mark.parametrize(("rows", "experts"), [(1, 4), (7, 3), (70, 5), (40, 64), (64, 64)])
def test_rows_lie_by_expert_and_each_expert_has_its_span(rows: int, experts: int) -> None:
    """In the order in which they came, also where there are more rows than ids are read at a time."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, experts, (rows,), generator=generator)
    x = torch.randn(rows, 40, generator=generator)
    by_row = rows < experts
    order = torch.full((rows,), -1, dtype=torch.int32)
    spans = torch.full((min(rows, experts), 3), -1, dtype=torch.int32)
    sorted_x = torch.empty_like(x)
    launch(
        _sort_rows_kernel, (rows,), order, spans, sorted_x, ids, x, rows, experts, INNER=40, TOP_K=1, BY_ROW=by_row,
        BLOCK=16, IDS=32,
    )  # fmt: skip
    expected = torch.sort(ids, stable=True).indices
    assert torch.equal(order.long(), expected) and torch.equal(sorted_x, x[expected])
    begins = [int((ids < expert).sum()) for expert in range(experts + 1)]
    every = [[expert, *begins[expert : expert + 2]] for expert in range(experts)]
    if not by_row:
        assert spans.tolist() == every
    else:
        assert [span for span in spans.tolist() if span[1] < span[2]] == [span for span in every if span[1] < span[2]]
        assert all(0 <= span[0] < experts for span in spans.tolist())
