"""``numerics: fast`` lowers as ``bitwise`` does, and refuses nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specgraph.compiler.numerics import observe
from specgraph.frontend.tracing import trace
from specgraph.ir.verifier import verify_program
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import first, last
from tests.models import make_model
from tests.passes.test_lower_kernels import LOWERING, targets, toy


class Scores(nn.Module):
    """A linear with its residual, a reduction, a sum, and a product that has no form of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(x) + x
        return (rows - rows.mean(-1, keepdim=True) + x.view(-1, 2, 4).sum(1).repeat(1, 2)) @ x.sin().T


def test_fast_lowers_what_it_can_and_reports_the_rest() -> None:
    x, module = torch.randn(6, 8).double(), Scores().double()
    stages, reports = run_passes(toy(module, x), [LowerKernels(numerics="fast")])
    program = stages["lower_kernels"]
    counts = targets(program, "toy")
    assert counts["specgraph.linear"] == counts["specgraph.row_mean"] == counts["aten.matmul"] == 1
    assert counts["aten.sum.dim_IntList"] == 1 and counts["aten.select.int"] == 0
    with torch.no_grad():
        torch.testing.assert_close(program.modules["toy"](x), module(x))
    assert reports[0].result.notes == (
        "1 x linear + residual",
        "1 x mean",
        "left as they are, though a row's bits may depend on the other rows: "
        "1 x aten.matmul.default, 1 x aten.sum.dim_IntList",
    )


@pytest.mark.parametrize(("architecture", "sums"), [("llama", 0), ("gpt2", 0), ("qwen3_moe", 2), ("gpt_oss", 2)])
def test_fast_fuses_what_bitwise_fuses(architecture: str, sums: int) -> None:
    traced = trace(make_model(architecture))
    passes: list[Any] = [InsertKVCache(4), *LOWERING[:-1]]
    bitwise, fast = (
        last(first(target=traced), [*passes, LowerKernels(numerics=numerics)]) for numerics in ("bitwise", "fast")
    )
    verify_program(fast)
    ours, others = (Counter({n: c for n, c in targets(p).items() if "specgraph" in n}) for p in (bitwise, fast))
    assert ours == others and targets(fast)["aten.sum.dim_IntList"] == sums


def test_fast_stays_within_rounding() -> None:
    program = last(first(), [InsertKVCache(4), *LOWERING[:-1]])
    expected, actual = observe(program), observe(last(program, [LowerKernels(numerics="fast")]))
    for name, value in expected.items():
        assert float((actual[name] - value).norm() / value.norm()) < 1e-6, name
