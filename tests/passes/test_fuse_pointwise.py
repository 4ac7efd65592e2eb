"""Chains of functions of elements become one op each, wherever their shapes and those who read them allow it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import calls
from specgraph.passes.fuse_pointwise import POINTWISE, FusePointwise
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.lower_kernels import LowerKernels
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import first, last
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts
from tests.passes.test_lower_kernels import LOWERING, run_both, targets, toy
from tests.schemes.models import quantised

X = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))


class Written(nn.Module):
    """A function of a tensor ``[3, 4, 6]``, with a few weights."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.linspace(-1, 1, 6))
        self.low = nn.Parameter(torch.linspace(-2, 2, 6).bfloat16())
        self.matrix = nn.Parameter(torch.linspace(-1, 1, 36).view(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self, x)
        return out


def fused(function: Any, x: Tensor = X) -> list[str]:
    """The programs after the pass, in order; what is computed stays the same bit for bit."""
    program, expected, actual = run_both(Written(function), x, [FusePointwise()])
    assert torch.equal(actual, expected) and actual.stride() == expected.stride()
    ops = [n for n in program.modules["toy"].graph.nodes if str(n.target) == "specgraph.pointwise.default"]
    return [str(n.args[1]) for n in ops]


CHAINS = {
    "gates": (lambda m, x: -m.scale.float().exp() * nn.functional.softplus(x.bfloat16().float() + m.scale),
              ["-exp(x0) * softplus(float32(bfloat16(x1)) + x0)"]),
    "rounding stays": (lambda m, x: ((x.bfloat16() * m.low).float() * 1.5).sigmoid(),
                       ["sigmoid(float32(bfloat16(x0) * x1) * 1.5)"]),
    "what two read is computed once": (lambda m, x: (y := x.exp()) * torch.cumsum(y, 1), ["exp(x0)", "x0 * x1"]),
    "what only the end reads is computed twice": (
        lambda m, x: (y := x.clamp(max=0.5)) * (y * 1.5).sigmoid(),
        ["clamp_max(x0, 0.5) * sigmoid(clamp_max(x0, 0.5) * 1.5)"]),
    "but no more than one function": (lambda m, x: (y := x.exp().neg()) * y.sigmoid(),
                                      ["-exp(x0)", "x0 * sigmoid(x0)"]),
    "limits": (lambda m, x: x.clamp(-0.5, 0.5) + x.clamp(min=0),
               ["clamp_max(clamp_min(x0, -0.5), 0.5) + clamp_min(x0, 0)"]),
    "a number per row": (lambda m, x: x * x[..., :1].sigmoid(), ["x0 * sigmoid(x1)"]),
    "a larger shape than its reader's": (lambda m, x: x.exp()[..., :1] * m.scale[:1], ["exp(x0)", "x0 * x1"]),
    "a product of matrices between": (lambda m, x: (x.relu() @ m.matrix).neg(), ["relu(x0)", "-x0"]),
    "two of one shape": (lambda m, x: torch.cat([x.sigmoid(), x * m.scale], 1), ["sigmoid(x0), x0 * x1"]),
    "two, one behind the other": (lambda m, x: torch.cat([y := x.sigmoid(), y.cumsum(1) * m.scale], 1),
                                  ["sigmoid(x0)", "x0 * x1"]),
    "two, one behind a view of the other": (lambda m, x: torch.cat([y := x.sigmoid(), y.mT.mT * m.scale], 1),
                                            ["sigmoid(x0)", "x0 * x1"]),
    "two of other shapes": (lambda m, x: torch.cat([x.sigmoid(), x[:, :2] * m.scale], 1), ["sigmoid(x0)", "x0 * x1"]),
}  # fmt: skip


@pytest.mark.parametrize("what", CHAINS)
def test_chains(what: str) -> None:
    function, programs = CHAINS[what]
    assert fused(function) == programs


COPIES = {
    "a copy of columns": (lambda m, x: x[..., :4].reshape(-1, 4) * x[..., 2:].contiguous().view(-1, 4).exp(), 1),
    "with a number per channel": (lambda m, x: x[..., :4].reshape(-1, 4) * m.scale[:4], 1),
    "other channels": (lambda m, x: x[..., :4].reshape(-1, 8) * m.matrix.view(-1)[:8], 0),
    "read twice": (lambda m, x: (y := x[..., :4].reshape(-1, 4)) * y.cumsum(0), 0),
    "a view": (lambda m, x: x.view(-1, 6) * m.scale, 0),
}  # fmt: skip


@pytest.mark.parametrize("what", COPIES)
def test_copies_that_only_reshape_are_left_out(what: str) -> None:
    function, left_out = COPIES[what]
    program, expected, actual = run_both(Written(function), X, [FusePointwise()])
    assert torch.equal(actual, expected)
    (op,) = [n for n in program.modules["toy"].graph.nodes if str(n.target) == "specgraph.pointwise.default"]
    assert (op.meta.get("val") is None) and len(op.args[0]) in (1, 2)
    inputs = [n.meta["val"].shape for n in op.args[0] if "val" in n.meta]
    assert any(len(shape) == 3 for shape in inputs) == bool(left_out)


def weighted(x: Tensor) -> Tensor:
    """A number per row times that row, as of tokens ``[R]`` times four experts: ``[4 R, 6]``."""
    rows = x.bfloat16().view(-1, 6)
    return rows * rows[:, :1].relu()


def split(x: Tensor, y: Tensor) -> Tensor:
    return y.view(x.shape[0], 4, -1)


def terms(form: str, count: int = 4, first: int = 0, each: int = 1) -> str:
    return " + ".join(form.format(*range(first + i * each, first + (i + 1) * each)) for i in range(count))


SUMS = {
    "of experts": (lambda m, x: split(x, weighted(x)).sum(1),
                   ["bfloat16(x0)", f"bfloat16({terms('float32(x{} * relu(x{}))', each=2)})"], None),
    "behind a split": (lambda m, x: split(x, x.view(-1, 6).exp() * m.scale).sum(1).view(x.shape[0], 1, 6).neg(),
                       ["-(exp(x0) * x1 + exp(x2) * x1 + exp(x3) * x1 + exp(x4) * x1)"], None),
    "of terms that broadcast": (lambda m, x: (x * x[:, :1].exp() - m.scale).sum(1),
                                ["exp(x0)", "x0 * x1 - x2 + (x3 * x4 - x2) + (x5 * x6 - x2) + (x7 * x8 - x2)"],
                                "several views may read the same elements"),
    "kept as a dimension": (lambda m, x: x / (x.exp().sum(1, keepdim=True) + 1),
                            [f"x0 / ({terms('exp(x{})', first=1)} + 1)"], None),
    "of what others read": (lambda m, x: (y := x.exp()).sum(1) + y.flip(1).select(1, 0),
                            ["exp(x0)", terms("x{}", 5)], "flip reads it beside the views that additions read"),
    "of equal terms": (lambda m, x: (y := x.exp()).select(1, 0) - y.select(-2, 0).neg(), ["exp(x0)", "x0 - -x1"],
                       "several views may read the same elements"),
    "of terms of two dimensions": (lambda m, x: (y := x.exp()).select(1, 0)[:, :4] - y.select(2, 1),
                                   ["exp(x0)", "x0 - x1"], "select reads it beside the views"),
}  # fmt: skip


@pytest.mark.parametrize("what", SUMS)
def test_a_sum_that_is_written_out_is_one_chain_with_its_terms(what: str) -> None:
    function, programs, reason = SUMS[what]
    stages, reports = run_passes(toy(Written(function).eval(), X), [LowerKernels(), FusePointwise()])
    module, plain = (stages[name].modules["toy"] for name in ("fuse_pointwise", "lower_kernels"))
    assert torch.equal(module(X), plain(X))
    found = [n.args[1] for n in module.graph.nodes if str(n.target) == "specgraph.pointwise.default"]
    assert found == programs
    misses = [miss.reason for miss in reports[-1].result.near_misses]
    assert len(misses) == (reason is not None) and all(reason in miss for miss in misses)


def test_what_is_no_function_of_floating_point_elements_stays() -> None:
    def counted(m: Written, x: Tensor) -> Tensor:
        return (x > 0).long() * 3 + torch.arange(6) - 1

    assert fused(counted) == []
    assert fused(lambda m, x: torch.add(x, m.scale, alpha=2)) == []
    assert fused(lambda m, x: nn.functional.softplus(x, beta=2.0)) == []
    assert fused(lambda m, x: x * float("inf")) == []


def test_what_nobody_reads_is_no_obstacle() -> None:
    program = toy(Written(lambda m, x: x.sigmoid()).eval(), X)
    graph = program.modules["toy"].graph
    (x,), (sigmoid,) = graph.find_nodes(op="placeholder"), calls(graph, torch.ops.aten.sigmoid.default)
    with graph.inserting_before(sigmoid):
        graph.call_function(torch.ops.aten.exp.default, (x,)).meta["val"] = x.meta["val"]
    module = last(program, [FusePointwise()]).modules["toy"]
    assert torch.equal(module(X), X.sigmoid())


def experts(m: Written, x: Tensor) -> Tensor:
    rows = x.reshape(-1, 6)
    ids = torch.zeros(rows.shape[0], dtype=torch.int64)
    out: Tensor = torch.ops.specgraph.expert_linear(rows, m.matrix.view(1, 6, 6), None, ids)
    return out


def halves(y: Tensor) -> tuple[Tensor, ...]:
    return y.chunk(2, -1)


def pairs(y: Tensor) -> tuple[Tensor, Tensor]:
    return y[..., ::2], y[..., 1::2]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return up * nn.functional.silu(gate)


GATES = {
    "halves": (lambda y: swiglu(*halves(y)), "x1 * silu(x0)", False),
    "pairs": (lambda y: swiglu(*pairs(y)), "x1 * silu(x0)", True),
    "exchanged": (lambda y: swiglu(*reversed(halves(y))), "x0 * silu(x1)", False),
    "clamped": (lambda y: swiglu((g := pairs(y))[0].clamp(max=1.0), g[1].clamp(-1.0, 1.0) + 1),
                "(clamp_max(clamp_min(x1, -1.0), 1.0) + 1) * silu(clamp_max(x0, 1.0))", True),
    "split": (lambda y: swiglu(*y.split(3, -1)), "x1 * silu(x0)", False),
    "split into sizes": (lambda y: swiglu(*y.split([3, 3], 1)), "x1 * silu(x0)", False),
    "clamped to nothing": (lambda y: swiglu(halves(y)[0], halves(y)[1].clamp(-math.inf, math.inf)), "x1 * silu(x0)",
                           False),
    "unequal parts": (lambda y: swiglu(y.split([2, 4], 1)[0], y.split([2, 4], 1)[1][:, :2]), None, False),
    "two of three parts": (lambda y: swiglu(*y.split(2, -1)[:2]), None, False),
    "read elsewhere": (lambda y: torch.cat([swiglu(*halves(y)), y], 1), None, False),
    "a half read elsewhere": (lambda y: torch.cat([swiglu(*halves(y)), halves(y)[0].cumsum(1)], 1), None, False),
    "one half": (lambda y: halves(y)[0] * nn.functional.silu(halves(y)[0]), None, False),
    "the first and the last": (lambda y: swiglu(y[..., ::2], y[..., 3:]), None, False),
    "every third": (lambda y: swiglu(y[..., ::3], y[..., 1::3]), None, False),
    "wider": (lambda y: swiglu(*halves(y)).double(), None, False),
}  # fmt: skip


@pytest.mark.parametrize("what", GATES)
def test_experts_take_the_gate_behind_them(what: str) -> None:
    function, gate, in_pairs = GATES[what]
    module = Written(lambda m, x: function(experts(m, x)))
    program, expected, actual = run_both(module, X, [FusePointwise()])
    assert torch.equal(actual, expected)
    counts = targets(program, "toy")
    (op,) = calls(program.modules["toy"].graph, torch.ops.specgraph.expert_linear.default)
    assert (op.kwargs.get("gate"), op.kwargs.get("pairs", False)) == (gate, in_pairs)
    assert (counts["specgraph.pointwise"] > 0) == (gate is None)


@pytest.mark.parametrize(("architecture", "scheme"), [("gpt_oss", ""), ("gpt_oss", "mxfp4"), ("qwen3_moe", "int4")])
def test_gated_experts_compute_the_same_tokens(architecture: str, scheme: str) -> None:
    make: Any = partial(quantised, scheme=scheme) if scheme else make_model
    model, prompts = make(architecture, dtype=torch.bfloat16), ragged_prompts((3, 9))
    decoder = compiled(model, k=2, lowering={"name": "gpu"})
    nodes = decoder.stages["fuse_pointwise"].modules["target"].graph.nodes
    assert len([node for node in nodes if node.kwargs.get("gate")]) == 2
    combined = "x0 + bfloat16(float32(x1 * x2) + float32(x3 * x4))"  # of two experts and the residual
    assert [node.args[1] for node in nodes if node.target is POINTWISE].count(combined) == 2
    plain = compiled(model, k=2, lowering={"name": "gpu"}, passes={"fuse_pointwise": {"enabled": False}})
    outs = [d.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1) for d in (decoder, plain)]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))


@pytest.mark.parametrize("architecture", ["deepseek_v3", "kimi_linear", "step_text"])
def test_gates_that_are_split_or_clamped_to_nothing_are_taken(architecture: str) -> None:
    """In the dtype in which ``test_fuse_routing.py`` traces these models, which takes most of the time."""
    model, prompts = make_model(architecture, dtype=torch.bfloat16), ragged_prompts((3, 9))
    decoder = compiled(model, k=2, lowering={"name": "gpu"})
    graph = decoder.stages["fuse_pointwise"].modules["target"].graph
    up, _ = calls(graph, torch.ops.specgraph.expert_linear.default)  # of the one layer that has experts
    assert up.kwargs["gate"] == "silu(x0) * x1"
    plain = compiled(model, k=2, lowering={"name": "gpu"}, passes={"fuse_pointwise": {"enabled": False}})
    outs = [d.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1) for d in (decoder, plain)]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "falcon_h1", "granite", "gemma2"])
def test_a_model_computes_the_same_bits(architecture: str) -> None:
    model, prompts = make_model(architecture), ragged_prompts((3, 9))
    decoder = compiled(model, k=2, lowering={"name": "gpu"})
    assert targets(decoder.stages["fuse_pointwise"])["specgraph.pointwise"] > 0
    plain = compiled(model, k=2, lowering={"name": "gpu"}, passes={"fuse_pointwise": {"enabled": False}})
    outs = [d.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1) for d in (decoder, plain)]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))


def test_a_gated_delta_layer_keeps_one_op_beside_its_norm() -> None:
    model = make_model("qwen3_5_text", dtype=torch.bfloat16)
    passes = [InsertKVCache(4), InsertRecurrentState(), *LOWERING, FusePointwise()]
    program = last(first(target=trace(model)), passes)
    counts = targets(program)
    layers = counts["specgraph.cached_delta_rule"]
    programs = [n.args[1] for n in program.modules["target"].graph.nodes if "pointwise" in str(n.target)]
    gates = "sigmoid(x0), -exp(float32(x1)) * softplus(float32(x2) + x3)"
    assert layers > 0 and programs.count(gates) == layers
    assert counts["specgraph.gated_rms_norm"] == layers
    assert not {"aten.softplus", "aten.silu", "aten.exp", "aten.sigmoid", "aten.mul.Tensor"} & set(counts)
