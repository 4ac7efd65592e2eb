"""The product for few rows: which layers take it, and that it computes what ``linear`` does."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import calls
from specgraph.ir.linear import DENSE
from specgraph.kernels.cpu_info import is_intel
from specgraph.kernels.linear import few_rows
from specgraph.kernels.linear.few_rows import (
    BY_ONEDNN,
    FEW_ROWS,
    MOST_INPUTS,
    MOST_TRANSPOSED,
    TRANSPOSED,
    TRANSPOSED_BY_MKL,
    few_rows_linear,
)
from specgraph.passes.few_rows import FewRows
from tests.compiler.test_pipeline import first, last
from tests.models import make_model

ROWS = sorted({1, 2, FEW_ROWS, FEW_ROWS + 1, *(count for of in (TRANSPOSED, TRANSPOSED_BY_MKL, BY_ONEDNN) for count in (
    of[0] - 1, of[0], of[-1], of[-1] + 1))})  # fmt: skip
"""Numbers of rows at which another form may begin."""


@pytest.fixture(params=[False, True], ids=["library without kernels", "library with kernels"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the library has kernels for the CPU, which this makes believe."""
    monkeypatch.setattr(few_rows, "MKL_IS_FAST", request.param)
    return bool(request.param)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*((1, rows) for rows in ROWS), (2, 3), (3, 4), (2, 0)], ids=str)
def test_it_is_a_linear_layer_for_any_number_of_rows(shape: tuple[int, int], bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias_ = (torch.randn(s, generator=generator, dtype=torch.float64) for s in ((*shape, 24), (40, 24), 40))
    given = bias_ if bias else None
    found = few_rows_linear(x, weight, given)
    assert found.shape == (*shape, 40) and found.is_contiguous()
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, given), rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("torch_compile")
@pytest.mark.parametrize(("bias", "fast"), [(False, True), (True, False)], indirect=["fast"])
def test_compiled_it_is_a_linear_layer_for_any_number_of_rows(bias: bool, fast: bool) -> None:
    """Behind an activation, which must not be computed again for every output."""
    generator = torch.Generator().manual_seed(0)
    weight, bias_ = (torch.randn(s, generator=generator) for s in ((40, 24), 40))

    def layer(x: Tensor) -> Tensor:
        return few_rows_linear(torch.nn.functional.silu(x), weight, bias_ if bias else None)

    compiled = torch.compile(layer, dynamic=True)
    for shape in ((1, 1), (1, 2), (3, 2), (2, 5), (1, FEW_ROWS), (1, FEW_ROWS + 1), (2, 0)):
        x = torch.randn(*shape, 24, generator=generator)
        expected = torch.nn.functional.linear(
            torch.nn.functional.silu(x.double()), weight.double(), bias_.double() if bias else None
        )
        found, sources = run_and_get_code(compiled, x)
        assert found.shape == expected.shape and found.is_contiguous()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
        code = "".join(sources)  # of a sum, if it is one
        summed = code.find("tmp_acc")
        rows = x.shape[0] * x.shape[1]
        assert (summed >= 0) == (0 < rows <= FEW_ROWS and not (fast and rows in TRANSPOSED_BY_MKL))
        assert summed < 0 or code.rfind(".exp()") < summed


@pytest.mark.usefixtures("torch_compile")
def test_compiled_it_is_left_to_a_library_for_many_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "MKL_IS_FAST", False)
    x, weight = torch.randn(1, 2, MOST_INPUTS + 1), torch.randn(3, MOST_INPUTS + 1)
    found, sources = run_and_get_code(torch.compile(few_rows_linear, dynamic=True), x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-3)
    assert "tmp_acc" not in "".join(sources)


@pytest.mark.parametrize("inputs", [24, MOST_TRANSPOSED, MOST_TRANSPOSED + 1])
@pytest.mark.parametrize("rows", [*ROWS, 0])
def test_each_library_is_asked_for_what_it_does_fast(rows: int, inputs: int, fast: bool) -> None:
    """The numbers of rows and inputs and the CPU choose the form; PyTorch's dispatcher sees what is asked for."""
    x, weight, asked = torch.randn(1, rows, inputs), torch.randn(40, inputs), list[str]()

    class ModelGuard(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.mkldnn._linear_pointwise.default:
                asked.append("oneDNN")
            elif func is torch.ops.aten.mm.default and args[0] is weight:
                asked.append("transposed")
            return func(*args, **(kwargs or {}))

    with ModelGuard():
        found = few_rows_linear(x, weight)
    torch.testing.assert_close(found, torch.nn.functional.linear(x, weight), rtol=1e-4, atol=1e-4)
    small = inputs <= MOST_TRANSPOSED
    transposed = rows in TRANSPOSED_BY_MKL if fast else (rows in TRANSPOSED and small)
    by_onednn = few_rows.HAS_ONEDNN and not fast and rows in BY_ONEDNN and not transposed
    assert asked == (["transposed"] if transposed else ["oneDNN"] if by_onednn else [])


def test_without_onednn_the_product_is_a_linear_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "MKL_IS_FAST", False)
    monkeypatch.setattr(few_rows, "HAS_ONEDNN", False)
    x, weight = torch.randn(1, BY_ONEDNN[-1], 24), torch.randn(40, 24)
    assert torch.equal(few_rows_linear(x, weight), torch.nn.functional.linear(x, weight))


@pytest.mark.parametrize(
    ("text", "processor", "intel"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R): 1\n", "", True),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: AMD EPYC\n", "x86_64", False),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nCPU implementer\t: 0x41\n", "arm", False),
        (None, "Intel64 Family 6 Model 143 Stepping 8, GenuineIntel", True),
        (None, "AMD64 Family 25 Model 17 Stepping 1, AuthenticAMD", False),
    ],
)
def test_the_vendor_of_a_cpu(
    text: str | None, processor: str, intel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: processor)
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert is_intel(file) is intel


def test_the_layers_of_a_target_in_float32_take_it() -> None:
    program = first(target=trace(make_model("llama")))
    linears = sum(len(list(calls(module.graph, DENSE.traced))) for module in program.modules.values())
    after = last(program, [FewRows()])
    found = [node for module in after.modules.values() for node in calls(module.graph, few_rows_linear)]
    assert len(found) == linears == 2 * 7 + 1
    assert not any(list(calls(module.graph, DENSE.traced)) for module in after.modules.values())


def test_other_dtypes_keep_their_layers() -> None:
    after = last(first(), [FewRows()])  # float64
    assert not any(list(calls(module.graph, few_rows_linear)) for module in after.modules.values())
