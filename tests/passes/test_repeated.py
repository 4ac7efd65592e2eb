"""Writes of what is there already are left out, and values that repeat are read once; nothing else is touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from specgraph.passes.fuse_rotary_cache import FuseRotaryCache
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.pipeline import run_passes
from specgraph.passes.repeated import has_scatters, read_once
from tests.compiler.test_pipeline import body
from tests.passes.test_lower_kernels import run_both, targets, toy

POSITIONS = torch.tensor([[0, 1, 2, 3, 99], [131071, 4, 5, 4096, 7]])
Compute = Callable[[Tensor], Tensor]


class Rows(nn.Module):
    """``compute`` gets three equal rows of positions, float32 ``[3, B, T]``."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x.unsqueeze(0).expand(3, -1, -1).float())


def interleaved(rows: Tensor, one: int = 1, two: int = 2, into: slice = slice(2, 4)) -> Tensor:
    """The first of the rows, with some columns of rows ``one`` and ``two``."""
    rows = rows.clone()
    rows[0, :, 1::3] = rows[one, :, 1::3]
    rows[0, :, into] = rows[two, :, 2:4]
    return rows[0]


def after(compute: Compute) -> tuple[int, list[str]]:
    """How many scatters are left out, and the text of the graph then, whose results are the same."""
    program = toy(Rows(compute).eval(), POSITIONS)
    module = program.modules["toy"]
    assert has_scatters(module.graph)
    count = read_once(module.graph)
    module.graph.lint()
    module.recompile()
    other = POSITIONS.repeat(2, 1) + 1
    assert all(torch.equal(module(x), Rows(compute)(x)) for x in (POSITIONS, other))
    return count, body(program, "toy")


def test_rows_that_are_equal_are_computed_once() -> None:
    count, lines = after(lambda rows: interleaved((rows + 1).sin()) * 2)
    assert count == 6  # each assignment is three: to the columns, to all sequences, and to the row
    assert lines == [
        "expand_default = torch.ops.aten.expand.default(x, [-1, -1])",
        "_to_copy_default = torch.ops.aten._to_copy.default(expand_default, dtype=torch.float32)",
        "add_tensor = torch.ops.aten.add.Tensor(_to_copy_default, 1)",
        "sin_default = torch.ops.aten.sin.default(add_tensor)",
        "clone_default = torch.ops.aten.clone.default(sin_default)",
        "mul_59 = torch.ops.aten.mul.Tensor(clone_default, 2)",
        "return mul_59",
    ]


def product(rows: Tensor, size: int) -> Tensor:
    """The second of four frequencies times every position, as a product of matrices that sums ``size`` equal terms.

    With one term, this is how transformers wrote it before 5.23.
    """
    frequencies = torch.arange(4.0).view(4, 1).expand(4, size)
    return (frequencies @ rows.unsqueeze(2).expand(-1, -1, size, -1)).transpose(2, 3)[..., 1]


EQUAL: dict[str, Compute] = {
    "functions of several values": lambda rows: interleaved(rows * rows[:, :1] + torch.arange(5.0)),
    "fewer of more rows": lambda rows: interleaved(rows[:1].expand(4, -1, -1)[1:].cos()),
    "another dimension": lambda rows: interleaved(rows.unsqueeze(-1).expand(-1, -1, -1, 2).cos()[..., 1]),
    "new dimensions": lambda rows: interleaved(rows.unsqueeze(1).sin().unsqueeze(-1)[:, 0, ..., 0]),
    "selected twice": lambda rows: interleaved(rows.sin()) + interleaved(rows.sin(), 2, 1),
    "from its own row": lambda rows: interleaved(rows.cumsum(0), 0, 0),
    "products of columns with rows": lambda rows: interleaved(product(rows, 1).cos()),
    "negative dimensions": lambda rows: interleaved(rows.cos()).select(-1, 2),
}


@pytest.mark.parametrize("case", EQUAL)
def test_scatters_of_what_is_there_are_left_out(case: str) -> None:
    count, lines = after(EQUAL[case])
    assert count > 0 and not any("scatter" in line for line in lines)


def partly(rows: Tensor) -> Tensor:
    rows = rows.sin()
    rows[0, :, 1] = rows[1, :, 1]
    rows[0, :, 2] = 5.0
    return rows[0]


DIFFERENT: dict[str, Compute] = {
    "rows that differ": lambda rows: interleaved(rows + torch.arange(3.0).view(3, 1, 1)),
    "other columns": lambda rows: interleaved(rows.cos(), into=slice(1, 3)),
    "a product with sums": lambda rows: interleaved(product(rows, 2).cos()),
    "sums over rows": lambda rows: interleaved(rows.cumsum(0)),
    "another function": lambda rows: rows.sin().select_scatter(rows[0].cos(), 0, 0)[0],
    "another row of what does not repeat": lambda rows: interleaved(torch.stack([rows[0], rows[1] + 1, rows[2]])),
    "an integer factor": lambda rows: (rows.long() * 1).select_scatter((rows.long() * 1.0)[0], 0, 0)[0] / 3,
    "random values": lambda rows: (torch.rand_like(rows) + 1).select_scatter(rows[0] + 1, 0, 0)[0],
    "rounded values": lambda rows: rows.sin().select_scatter(rows.sin()[1].bfloat16().float(), 0, 0)[0],
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_scatters_of_anything_else_stay(case: str) -> None:
    count, lines = after(DIFFERENT[case])
    assert any("scatter" in line for line in lines)
    assert count == 0 or case == "other columns"


def test_what_is_written_first_is_left_out_and_what_follows_stays() -> None:
    count, lines = after(partly)
    assert count > 0 and any("scatter" in line for line in lines)


def test_values_that_something_else_reads_stay_whole() -> None:
    count, lines = after(lambda rows: interleaved(rows.sin()) + rows.sin().sum(0))
    assert count > 0 and sum("aten.sin" in line for line in lines) == 2


def test_what_is_written_in_place_is_not_taken_for_what_it_was() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4)
    ops = torch.ops.aten

    def call(target: object, *args: object, like: Tensor) -> torch.fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]
        node.meta["val"] = like
        return node

    row = call(ops.select.int, x, 0, 0, like=torch.empty(4))
    before = call(ops.sin.default, row, like=torch.empty(4))
    call(ops.add_.Tensor, row, 1, like=torch.empty(4))
    again = call(ops.select.int, x, 0, 0, like=torch.empty(4))
    sines = call(ops.sin.default, again, like=torch.empty(4))
    whole = call(ops.stack.default, [sines, sines], like=torch.empty(2, 4))
    graph.output(call(ops.select_scatter.default, whole, before, 0, 0, like=torch.empty(2, 4)))
    assert has_scatters(graph) and read_once(graph) == 0


class MultimodalAngles(nn.Module):
    """Qwen3.5's angles, for the three rows of positions that its text model makes of one."""

    def __init__(self, dtype: torch.dtype, sections: list[int]) -> None:
        super().__init__()
        rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": sections}
        config = AutoConfig.for_model("qwen3_5_text", head_dim=2 * 2 * sum(sections), rope_parameters=rope)
        self.rotary, self.dtype = Qwen3_5TextRotaryEmbedding(config), dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = x.unsqueeze(0).expand(4, x.shape[0], -1)[1:]
        return self.rotary(torch.empty(1, dtype=self.dtype), rows)


@pytest.mark.parametrize("sections", [[2, 1, 1], [11, 11, 10]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_angles_of_three_equal_rows_become_one_op_of_the_same_bits(dtype: torch.dtype, sections: list[int]) -> None:
    module = MultimodalAngles(dtype, sections)
    with torch.no_grad():
        program, expected, actual = run_both(module, POSITIONS, [FuseRotaryCache(), LowerKernels()])
    counts = targets(program, "toy")
    assert counts["specgraph.rotary_angles"] == 1
    assert not counts.keys() & {"aten.cos", "aten.select_scatter", "aten.copy", "specgraph.concat"}
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape == (2, 5, 2 * sum(sections)) and torch.equal(a, b)


class DifferentRows(MultimodalAngles):
    """Rows of positions that differ, as pictures have them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(torch.empty(1, dtype=self.dtype), torch.stack([x, x + 1, x + 2]))


def test_angles_of_rows_that_differ_stay() -> None:
    module = DifferentRows(torch.float32, [2, 1, 1]).eval()
    with torch.no_grad():
        stages, reports = run_passes(toy(module, POSITIONS), [FuseRotaryCache()])
    program, result = stages["fuse_rotary_cache"], reports[-1].result
    assert result.matches == 0 and "is not the product of positions" in result.near_misses[0].reason
    assert all(map(torch.equal, program.modules["toy"](POSITIONS), module(POSITIONS)))
