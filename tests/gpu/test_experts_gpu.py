"""Compiled expert layers at the shapes of real models, in bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear import experts
from specgraph.kernels.pointwise.pointwise import POINTWISE
from tests.gpu.capture import captured, no_synchronisation

# Experts, inputs, outputs, transposed: mixtral, qwen3_moe, gpt_oss (whose 2880 are no multiple of a block), awkward.
SHAPES = [(8, 4096, 28672, False), (128, 2048, 1536, False), (32, 2880, 5760, True), (7, 100, 33, False)]
ROWS = 2 * 576
expert_linear, expert_linear_reference = (experts.EXPERT_LINEAR.form(name) for name in ("triton", "reference"))
every_shape = pytest.mark.parametrize(("count", "inner", "outer", "transposed"), SHAPES)


def arguments(count: int, inner: int, outer: int, transposed: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    weight = normal(count, inner, outer) if transposed else normal(count, outer, inner)
    ids = torch.randint(0, count, (ROWS,), generator=generator, device="cuda")
    ids[: ROWS // 4] = 1  # a crowded expert
    return normal(ROWS, inner), weight, normal(count, outer), ids


@every_shape
def test_it_is_the_product_in_float64(count: int, inner: int, outer: int, transposed: bool) -> None:
    x, weight, bias, ids = arguments(count, inner, outer, transposed)
    out = expert_linear(x, weight, bias, ids, transposed=transposed)
    for row in (0, 1, 300, 301, ROWS - 1):
        matrix = weight[ids[row]].double()
        expected = (matrix.T if transposed else matrix) @ x[row].double() + bias[ids[row]].double()
        assert float((out[row].double() - expected).norm() / expected.norm()) < 8e-3
    reference = expert_linear_reference(x, weight, bias, ids, transposed=transposed)
    assert float((out - reference).float().norm() / reference.float().norm()) < 8e-3


@every_shape
def test_a_row_is_the_same_beside_any_number_of_others(count: int, inner: int, outer: int, transposed: bool) -> None:
    x, weight, bias, ids = arguments(count, inner, outer, transposed)
    together = expert_linear(x, weight, bias, ids, transposed=transposed)
    assert experts.tiles(ROWS, count, inner, 2) != experts.tiles(1, count, inner, 2) or count > 32
    every = torch.arange(ROWS, device="cuda")
    for rows in (1, 2, 3, 5, 8, 10, 16, 17, 32, 64, 65, 100, 256, 257, 576):
        for index in (every[:rows], every[-rows:], every[200 : 200 + rows].flip(0)):
            alone = expert_linear(x[index], weight, bias, ids[index], transposed=transposed)
            assert torch.equal(alone, together[index]), rows


@every_shape
def test_it_does_not_wait_and_runs_in_a_graph_on_new_ids(count: int, inner: int, outer: int, transposed: bool) -> None:
    x, weight, bias, ids = (given[:24] if i in (0, 3) else given for i, given in
                            enumerate(arguments(count, inner, outer, transposed)))  # fmt: skip
    ids = torch.arange(24, device="cuda") * 5 % count
    expected = expert_linear(x, weight, bias, ids, transposed=transposed)
    with no_synchronisation():
        expert_linear(x, weight, bias, ids, transposed=transposed)
    chosen, rows = torch.zeros_like(ids), torch.zeros_like(x)
    graph, out = captured(lambda: expert_linear(rows + 0, weight, bias, chosen + 0, transposed=transposed))
    for _ in range(3):
        chosen.copy_(ids)
        rows.copy_(x)
        graph.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize(("count", "inner", "outer", "transposed"), SHAPES[:3])
@pytest.mark.parametrize("pairs", [False, True], ids=["halves", "pairs"])
def test_a_gate_has_the_bits_of_its_program(count: int, inner: int, outer: int, transposed: bool, pairs: bool) -> None:
    x, weight, bias, ids = arguments(count, inner, outer, transposed)
    gate = "(clamp_max(clamp_min(x1, -7.0), 7.0) + 1) * (clamp_max(x0, 7.0) * sigmoid(clamp_max(x0, 7.0) * 1.702))"
    plain = expert_linear(x, weight, bias, ids, transposed=transposed)
    halves = [plain[:, ::2], plain[:, 1::2]] if pairs else list(plain.chunk(2, -1))
    (expected,) = POINTWISE.form("triton")(halves, gate)
    for rows in (1, 8, ROWS):
        out = expert_linear(x[:rows], weight, bias, ids[:rows], transposed=transposed, gate=gate, pairs=pairs)
        assert torch.equal(out, expected[:rows]), rows


def test_float64_and_float32_are_as_exact_as_they_are() -> None:
    x, weight, bias, ids = arguments(5, 130, 70, False)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        out = expert_linear(x.to(dtype), weight.to(dtype), bias.to(dtype), ids).double()
        expected = expert_linear_reference(x.double(), weight.double(), bias.double(), ids)
        assert float((out - expected).norm() / expected.norm()) < bound
