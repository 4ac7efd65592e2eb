"""The library's forms of linears on a GPU, in bfloat16 at the shapes of real models, and a decoder that runs them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear import library
from specgraph.kernels.linear.experts import EXPERT_LINEAR
from specgraph.kernels.linear.linear import LINEAR, LINEAR_NORM
from tests.decoding import compiled
from tests.gpu.capture import captured, no_synchronisation
from tests.models import make_model, ragged_prompts

linear, linear_norm, norm_parts, expert_linear = (
    getattr(torch.ops.specgraph, name) for name in ("linear", "linear_norm", "norm_parts", "expert_linear")
)
DTYPE = torch.bfloat16
SHAPES = {"qkv": (6144, 4096, "none"), "o": (4096, 4096, "none"), "gate_up": (28672, 4096, "silu_mul")}


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE) * scale


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape
    assert float((found.double() - expected.double()).norm() / expected.double().norm()) < 1e-2


@pytest.mark.parametrize("rows", [1, 17, 600])
@pytest.mark.parametrize("name", SHAPES)
def test_both_forms_agree_and_the_librarys_runs_in_a_graph(name: str, rows: int) -> None:
    outer, inner, activation = SHAPES[name]
    torch.manual_seed(0)
    weight, width = normal(outer, inner, scale=inner**-0.5), outer // 2 if activation == "silu_mul" else outer
    x, square_sums = norm_parts(normal(rows, inner), normal(inner))
    bias, residual, norm_weight = normal(outer), normal(rows, width), normal(width)
    options: dict[str, Any] = {"norm_eps": 1e-5, "activation": activation}
    ours = linear_norm(x, weight, norm_weight, bias, residual, square_sums, **options)

    def run() -> tuple[Tensor, ...]:
        return LINEAR_NORM.form("library")(x, weight, norm_weight, bias, residual, square_sums, **options)

    with no_synchronisation():
        found = run()
    graph, replayed = captured(run)
    graph.replay()
    for apart, again, expected in zip(found, replayed, ours, strict=True):
        assert_close(apart, expected)
        assert torch.equal(again, apart)


@pytest.mark.parametrize(("count", "outer", "inner", "transposed"), [(128, 1536, 2048, False), (32, 5760, 2880, True)])
@pytest.mark.parametrize("rows", [8, 1000])
def test_experts_agree_and_follow_new_ids_in_a_graph(
    count: int, outer: int, inner: int, transposed: bool, rows: int
) -> None:
    torch.manual_seed(0)
    shape = (count, inner, outer) if transposed else (count, outer, inner)
    weight, bias, x = normal(*shape, scale=inner**-0.5), normal(count, outer), normal(rows, inner)
    ids = torch.randint(count, (rows,), device="cuda")
    chosen = torch.zeros_like(ids)

    def run() -> Tensor:
        return EXPERT_LINEAR.form("library")(x, weight, bias, chosen, transposed=transposed)

    run()
    with no_synchronisation():
        run()
    graph, found = captured(run)
    chosen.copy_(ids)
    graph.replay()
    assert_close(found, expert_linear(x, weight, bias, ids, transposed=transposed))


def test_the_table_of_this_gpu_is_obeyed() -> None:
    known = library.crossovers_of(torch.device("cuda"))
    if known is None:
        pytest.skip("no table for this GPU")
    torch.manual_seed(0)
    for (outer, inner), changes in known.linear.items():
        weight = normal(outer, inner, scale=inner**-0.5)
        for rows in {rows for change in changes for rows in (change - 1, change)}:
            x = normal(rows, inner)
            faster = library.is_faster("linear", (outer, inner), rows, DTYPE, x.device)
            assert faster == library.is_faster_for(x, weight, gated=False)
            expected = LINEAR.form("library")(x, weight) if faster else linear(x, weight)
            assert torch.equal(linear(x, weight, bitwise=False), expected), (outer, inner, rows)


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_a_decoder_gives_the_tokens_of_bitwise(architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, where rounding decides nothing, with every linear by the library, in captured steps."""
    model, prompts = make_model(architecture, dtype=torch.float32).cuda(), ragged_prompts((3, 17, 8))
    draft = make_model("llama", seed=1, dtype=torch.float32).cuda() if kind == "draft_model" else None
    calls: list[int] = []
    monkeypatch.setattr(library, "is_faster", lambda *given: calls.append(1) or True)
    bitwise, fast = (
        compiled(model, kind, 3, draft, lowering={"name": "gpu"}, numerics=numerics).generate(
            prompts, max_new_tokens=12, eos_token_id=[]
        )
        for numerics in ("bitwise", "fast")
    )
    assert calls and all(map(torch.equal, bitwise.new_tokens, fast.new_tokens))
