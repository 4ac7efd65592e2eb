"""The product for few rows: which layers take it, and that it computes what ``linear`` does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import calls
from specgraph.kernels.linear.few_rows import FEW_ROWS, MOST_INPUTS, TRANSPOSED, few_rows_linear
from specgraph.passes.few_rows import LINEAR, FewRows
from tests.compiler.test_pipeline import first, last
from tests.models import make_model


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 2), (1, TRANSPOSED[-1]), (2, 3), (1, TRANSPOSED[-1] + 1), (1, FEW_ROWS), (2, 0)], ids=str
)
def test_it_is_a_linear_layer_for_any_number_of_rows(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias_ = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((*shape, 24), (40, 24), 40))
    given = bias_ if bias else None
    found = few_rows_linear(x, weight, given)
    assert found.shape == (*shape, 40) and found.is_contiguous()
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, given), rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("torch_compile")
@pytest.mark.parametrize("bias", [False, True])
def test_compiled_it_is_a_linear_layer_for_any_number_of_rows(bias: bool) -> None:
    """Behind an activation, which must not be computed again for every output."""
    generator = torch.Generator().manual_seed(0)
    weight, bias_ = (torch.randn(s, generator=generator) for s in ((40, 24), 40))

    def layer(x: Tensor) -> Tensor:
        return few_rows_linear(torch.nn.functional.silu(x), weight, bias_ if bias else None)

    compiled = torch.compile(layer, dynamic=True)
    for shape in ((1, 1), (1, 2), (3, 2), (1, FEW_ROWS), (1, FEW_ROWS + 1), (2, 0)):
        x = torch.randn(*shape, 24, generator=generator)
        expected = torch.nn.functional.linear(
            torch.nn.functional.silu(x.double()), weight.double(), bias_.double() if bias else None
        )
        found, sources = run_and_get_code(compiled, x)
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        code = "".join(sources)  # of a sum, if it is one
        summed = code.find("tmp_acc")
        assert (summed >= 0) == (0 < x.shape[0] * x.shape[1] <= FEW_ROWS)
        assert summed < 0 or code.rfind(".exp()") < summed


@pytest.mark.usefixtures("torch_compile")
def test_compiled_it_is_left_to_a_library_for_many_inputs() -> None:
    x, weight = torch.randn(1, 2, MOST_INPUTS + 1), torch.randn(3, MOST_INPUTS + 1)
    found, sources = run_and_get_code(torch.compile(few_rows_linear, dynamic=True), x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-3)
    assert "tmp_acc" not in "".join(sources)


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
