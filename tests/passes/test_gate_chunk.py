"""Gate and up of one projection, taken apart by ``chunk`` as phi3 does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from specgraph.frontend.tracing import trace
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.lower_kernels import LowerKernels
from tests.compiler.test_pipeline import body, first, last
from tests.models import make_model
from tests.passes.test_lower_kernels import LOWERING, run_both, targets


class Gated(nn.Module):
    def __init__(self, tail: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.tail, self.linear = tail, nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.linear(x))


def gated(y: Tensor) -> Tensor:
    gate, up = y.chunk(2, dim=-1)
    return up * nn.functional.silu(gate)


def turned(y: Tensor) -> Tensor:
    up, gate = y.chunk(2, dim=-1)
    return up * nn.functional.silu(gate)


def thirds(y: Tensor) -> Tensor:
    gate, up, _ = y.chunk(3, dim=-1)
    return up * nn.functional.silu(gate)


@pytest.mark.parametrize(("tail", "fused"), [(gated, True), (turned, False), (thirds, False)])
def test_halves_are_fused_where_the_first_is_the_gate(tail: Callable[[Tensor], Tensor], fused: bool) -> None:
    program, expected, actual = run_both(Gated(tail).double(), torch.randn(5, 8).double(), [LowerKernels()])
    counts = targets(program, "toy")
    assert counts["specgraph.linear"] == 1 and (counts["aten.silu"] == 0) == fused
    torch.testing.assert_close(actual, expected)


def test_phi3_activates_inside_of_its_linears() -> None:
    program = last(first(target=trace(make_model("phi3"))), [InsertKVCache(4), *LOWERING])
    lines = [line for line in body(program, "target") if "silu_mul" in line]
    assert len(lines) == 2 and targets(program)["aten.chunk"] == 0
