"""The product for few rows: which layers take it, and that it computes what ``linear`` does."""

from __future__ import annotations

import pytest
import torch

from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import calls
from specgraph.kernels.linear.few_rows import FEW_ROWS, few_rows_linear
from specgraph.passes.few_rows import LINEAR, FewRows
from tests.compiler.test_pipeline import first, last
from tests.models import make_model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (1, FEW_ROWS), (2, 3), (1, FEW_ROWS + 1), (2, 0)], ids=str)
def test_it_is_a_linear_layer_for_any_number_of_rows(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias_ = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((*shape, 24), (40, 24), 40))
    given = bias_ if bias else None
    found = few_rows_linear(x, weight, given)
    assert found.shape == (*shape, 40) and found.is_contiguous()
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, given), rtol=1e-14, atol=1e-14)


def test_the_layers_of_a_target_in_float32_take_it() -> None:
    program = first(target=trace(make_model("llama")))
    linears = sum(len(list(calls(module.graph, LINEAR))) for module in program.modules.values())
    after = last(program, [FewRows()])
    found = [node for module in after.modules.values() for node in calls(module.graph, few_rows_linear)]
    assert len(found) == linears == 2 * 7 + 1
    assert not any(list(calls(module.graph, LINEAR)) for module in after.modules.values())


def test_other_dtypes_keep_their_layers() -> None:
    after = last(first(), [FewRows()])  # float64
    assert not any(list(calls(module.graph, few_rows_linear)) for module in after.modules.values())


def test_it_can_be_switched_off() -> None:
    assert FewRows(enabled=False).skipped == "passes.few_rows.enabled is off"
