"""What chooses experts becomes one op in every model that chooses them in a known way, and stays in others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specgraph.compiler.numerics import observe
from specgraph.frontend.tracing import trace
from specgraph.ir.graphs import calls
from specgraph.ir.linear import linears
from specgraph.ir.program import Program
from specgraph.passes.base import NearMiss
from specgraph.passes.fuse_routing import ROUTE, FuseRouting
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import first, last
from tests.decoding import compiled
from tests.models import HYBRIDS, make_model, ragged_prompts
from tests.passes.test_lower_kernels import targets, toy

F32, BF16 = torch.float32, torch.bfloat16
SOFTMAX = {"scoring": "softmax", "score_dtype": F32}
NORMALISED = {**SOFTMAX, "normalise": True}
AFTER = {"scoring": "none", "softmax_chosen": True}
SIGMOID = {"scoring": "sigmoid", "normalise": True, "score_dtype": F32, "weight_dtype": F32}
GROUPS = {"groups": 2, "kept_groups": 1, "group_score": "top2"}
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {**AFTER, "score_dtype": BF16, "weight_dtype": BF16},
    "granitemoehybrid": {**AFTER, "score_dtype": F32, "weight_dtype": BF16},
    "mixtral": {**NORMALISED, "weight_dtype": F32},
    "qwen3_next": {**NORMALISED, "weight_dtype": BF16},
    "qwen3_5_moe_text": {**NORMALISED, "weight_dtype": BF16},
    "qwen2_moe": {**SOFTMAX, "weight_dtype": BF16},
    "qwen3_moe": {**SOFTMAX, "weight_dtype": BF16},
    "olmoe": {**SOFTMAX, "weight_dtype": BF16},
    "jamba": {**SOFTMAX, "weight_dtype": BF16},
    "lfm2_moe": {**SIGMOID, "epsilon": 1e-6, "score_dtype": BF16, "weight_dtype": BF16},
    "step_text": SIGMOID,
    "glm4_moe": {**SIGMOID, "epsilon": 1e-20},
    "mimo_v2_flash": {**SIGMOID, "epsilon": 1e-20},
    "deepseek_v3": {**SIGMOID, **GROUPS, "epsilon": 1e-20, "scale": 2.5},
    "kimi_linear": {**SIGMOID, **GROUPS, "epsilon": 1e-20, "scale": 2.446},
    "bailing_hybrid": {**SIGMOID, **GROUPS, "epsilon": 1e-20, "scale": 2.5},
}
"""The options of the op in models in bfloat16, whose mixtures choose two experts unless they say so."""
OLDER = {"bailing_hybrid"} - {*HYBRIDS}
"""Models that an older transformers does not have."""
CHOOSING = ("topk", "softmax", "_softmax", "gather", "scatter", "masked_fill", "sort", "bitwise_not")
"""ATen ops of routers. Attention that is no op of ours has none of them in these models."""


def routed(program: Program) -> tuple[Program, tuple[NearMiss, ...]]:
    """The program after the pass, and what it did not take."""
    stages, reports = run_passes(program, [FuseRouting()])
    return stages["fuse_routing"], reports[-1].result.near_misses


@pytest.mark.parametrize("architecture", [name for name in MODELS if name not in OLDER])
def test_every_mixture_of_a_model_is_routed_by_one_op(architecture: str) -> None:
    program = last(
        first(target=trace(make_model(architecture, dtype=BF16))), [InsertKVCache(4), InsertRecurrentState()]
    )
    expected = observe(program)
    after, misses = routed(program)
    graph = after.modules["target"].graph
    products = [linear for linear in linears(graph) if linear.expert_ids is not None]
    routes = list(calls(graph, ROUTE))
    assert products and len(routes) == len({linear.expert_ids for linear in products}) and not misses
    assert all(route.kwargs == {"top_k": 2, **MODELS[architecture]} for route in routes)
    assert not [name for name in targets(after) if name.removeprefix("aten.").partition(".")[0] in CHOOSING]
    biased = {route.args[1] is not None for route in routes}
    assert biased == {MODELS[architecture]["scoring"] == "sigmoid"}
    actual = observe(after)
    for name, value in expected.items():
        assert float((actual[name] - value).norm() / value.norm()) < 2e-2, name


def test_the_nodes_of_a_router_go() -> None:
    program = first(target=trace(make_model("deepseek_v3")))
    after, _ = routed(program)
    nodes = [len(p.modules["target"].graph.nodes) for p in (program, after)]
    assert nodes[0] - nodes[1] == 23 - 3  # those of ATen with their items, and the op with its two


def test_phimoe_chooses_in_another_way() -> None:
    after, misses = routed(first(target=trace(make_model("phimoe", dtype=BF16))))
    assert not list(calls(after.modules["target"].graph, ROUTE))
    assert [miss.reason for miss in misses] == ["concat_1 is no result of topk", "concat_3 is no result of topk"]
    assert all(miss.where.startswith("target.concat") for miss in misses)


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("gpt_oss", BF16), ("qwen3_moe", BF16), ("lfm2_moe", BF16), ("deepseek_v3", F32)],
)
def test_tokens_are_those_of_the_model(architecture: str, dtype: torch.dtype) -> None:
    """In the dtypes in which other tests of this folder trace these models, which takes most of the time."""
    model, prompts = make_model(architecture, dtype=dtype), ragged_prompts((3, 9))
    decoder = compiled(model, k=2, lowering={"name": "gpu"})
    plain = compiled(model, k=2, lowering={"name": "gpu"}, passes={"fuse_routing": {"enabled": False}})
    counts = [targets(d.stages["fuse_pointwise"]) for d in (decoder, plain)]
    assert counts[0]["specgraph.route"] == counts[1]["aten.topk"] / (3 if architecture == "deepseek_v3" else 1) > 0
    outs = [d.generate(prompts, max_new_tokens=10, temperature=1.0, seed=1) for d in (decoder, plain)]
    assert all(map(torch.equal, outs[0].new_tokens, outs[1].new_tokens))


EXPERTS, CHOSEN = 12, 3
Routing = Callable[["Mixture", Tensor], tuple[Tensor, Tensor]]


class Mixture(nn.Module):
    """Experts whose weights and ids a function computes from logits ``[R, E]``, as models in transformers call them."""

    def __init__(self, function: Routing, experts: int = EXPERTS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.function = function
        self.bias = nn.Parameter(torch.randn(experts, generator=generator) * 0.1)
        self.router = nn.Parameter(torch.randn(experts, 6, generator=generator))
        self.stack = nn.Parameter(torch.randn(experts, 6, 6, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.function(self, nn.functional.linear(x, self.router))
        out = torch.ops.specgraph.expert_linear(x, self.stack, None, ids.reshape(-1), top_k=ids.shape[1])
        return (out * weights.reshape(-1, 1)).view(x.shape[0], ids.shape[1], -1).sum(1)


def normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def biased(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.sigmoid()
    ids = (m.bias + scores).topk(CHOSEN, dim=1)[1]
    return normalised(scores.gather(-1, ids)) * 0.5, ids


def best_groups(
    score: Callable[[Tensor], Tensor], fill: float = -torch.inf, kept: int = 2, count: int = CHOSEN
) -> Routing:
    """Softmax scores of the experts in the best of four groups."""

    def function(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.softmax(-1)
        best = score(scores.view(-1, 4, 3)).topk(kept, dim=-1)[1]
        mask = torch.zeros_like(scores[:, :4]).scatter(1, best, 1)
        spread = mask.unsqueeze(-1).expand(-1, 4, 3).reshape(-1, EXPERTS)
        return scores.masked_fill(~spread.bool(), fill).topk(count, dim=-1)

    return function


def clamped(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = x.softmax(-1).topk(CHOSEN, dim=-1)
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-9), ids


def with_bias(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    return (x.sigmoid() + m.bias).topk(CHOSEN, dim=-1)


def of_logits(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    ids = x.sigmoid().topk(CHOSEN, dim=-1)[1]
    return x.gather(1, ids), ids


def twice(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = x.softmax(-1)
    weights, ids = scores.topk(CHOSEN, dim=-1)
    return weights + scores.gather(1, ids), ids


def converted_early(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = x.softmax(-1).topk(CHOSEN, dim=-1)
    return (weights.bfloat16() * 3.0).float(), ids


TAKEN: dict[str, tuple[Routing, dict[str, Any]]] = {
    "a softmax": (lambda m, x: x.softmax(1).topk(CHOSEN), {"scoring": "softmax"}),
    "in a lower precision": (lambda m, x: x.softmax(-1, dtype=BF16).topk(CHOSEN),
                             {"scoring": "softmax", "score_dtype": BF16, "weight_dtype": BF16}),
    "a softmax over the chosen": (
        lambda m, x: ((r := x.topk(CHOSEN))[0].softmax(1) * 2, r[1]), {**AFTER, "scale": 2.0}),
    "a bias": (biased, {"scoring": "sigmoid", "normalise": True, "scale": 0.5}),
    "the best of each group": (best_groups(lambda g: g.amax(-1)),
                               {"scoring": "softmax", "groups": 4, "kept_groups": 2, "group_score": "max"}),
    "the best of each group by max": (best_groups(lambda g: g.max(-1)[0]),
                                      {"scoring": "softmax", "groups": 4, "kept_groups": 2, "group_score": "max"}),
    "the best two of each group": (best_groups(lambda g: g.topk(2)[0].sum(-1)),
                                   {"scoring": "softmax", "groups": 4, "kept_groups": 2, "group_score": "top2"}),
    "all groups": (best_groups(lambda g: g.amax(-1), kept=4), {"scoring": "softmax"}),
    "a conversion before the factor": (converted_early, {"scoring": "softmax", "weight_dtype": BF16}),
}  # fmt: skip


def one_mixture(function: Routing, experts: int = EXPERTS) -> tuple[Program, list[str], Tensor, Tensor]:
    """The program after the pass, the reasons of near misses, what the module gives and what the program gives."""
    module, x = Mixture(function, experts).eval(), torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
    after, misses = routed(toy(module, x))
    with torch.no_grad():
        return after, [miss.reason for miss in misses], module(x), after.modules["toy"](x)


@pytest.mark.parametrize("what", TAKEN)
def test_known_forms_are_taken(what: str) -> None:
    function, options = TAKEN[what]
    after, misses, expected, actual = one_mixture(function)
    (route,) = calls(after.modules["toy"].graph, ROUTE)
    assert route.kwargs == {"top_k": CHOSEN, "score_dtype": F32, "weight_dtype": F32, **options} and not misses
    assert (route.args[1] is not None) == (what == "a bias")
    assert "aten.topk" not in targets(after, "toy")
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


LEFT: dict[str, tuple[Routing, str]] = {
    "weights with the bias": (with_bias, "getitem holds more than the scores of the chosen experts"),
    "weights of logits": (of_logits, "getitem_1 does not choose from sigmoid once"),
    "weights of two kinds": (twice, "getitem_1 does not choose from softmax once"),
    "no scores": (lambda m, x: x.topk(CHOSEN), "neither linear nor what becomes of getitem is a softmax or a sigmoid"),
    "another function behind": (lambda m, x: ((r := x.topk(CHOSEN))[0].sigmoid(), r[1]), "neither linear nor what"),
    "the smallest": (lambda m, x: x.softmax(-1).topk(CHOSEN, largest=False), "topk does not take a fixed number of"),
    "other groups by zero": (best_groups(lambda g: g.amax(-1), fill=0.0), "masked_fill excludes experts in another"),
    "the mean of each group": (best_groups(lambda g: g.mean(-1)), "mean is neither the largest score of a group nor"),
    "the best three of each group": (best_groups(lambda g: g.topk(3)[0].sum(-1)), "sum_1 is neither the largest"),
    "too few experts in the groups": (best_groups(lambda g: g.amax(-1), kept=1, count=5), "holds more than the scores"),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_other_forms_stay_and_the_report_says_why(what: str) -> None:
    function, reason = LEFT[what]
    after, misses, expected, actual = one_mixture(function)
    assert not list(calls(after.modules["toy"].graph, ROUTE)) and "aten.topk" in targets(after, "toy")
    assert len(misses) == 1 and reason in misses[0]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def test_a_sum_that_is_changed_before_the_division_stays_alone() -> None:
    after, misses, expected, actual = one_mixture(clamped)
    counts = targets(after, "toy")
    assert counts["specgraph.route"] == counts["aten.clamp"] == counts["aten.div.Tensor"] == 1
    assert misses == ["sum_1 stays: getitem is not divided by it alone, or by it and an epsilon"]
    torch.testing.assert_close(actual, expected)


def test_more_experts_than_the_kernel_takes_stay() -> None:
    after, misses, expected, actual = one_mixture(TAKEN["a softmax"][0], experts=513)
    assert misses == ["linear has no rows of at most 512 logits"] and torch.equal(actual, expected)
    assert not list(calls(after.modules["toy"].graph, ROUTE))


def test_other_choices_of_a_model_are_no_routing() -> None:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights, ids = x.softmax(-1).topk(2)
            return weights * ids

    after, misses = routed(toy(Best(), torch.randn(3, 5)))
    assert not misses and targets(after, "toy")["aten.topk"] == 1


def test_scores_that_others_read_stay_beside_the_op() -> None:
    def function(m: Mixture, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.softmax(-1)
        weights, ids = scores.topk(CHOSEN)
        return weights * scores.amax(-1, keepdim=True), ids

    after, misses, expected, actual = one_mixture(function)
    counts = targets(after, "toy")
    assert counts["specgraph.route"] == counts["aten.softmax.int"] == 1 and not misses
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
