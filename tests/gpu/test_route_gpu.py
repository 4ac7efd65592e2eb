"""The compiled choice of experts at the sizes of real models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear.route import ROUTE
from tests.gpu.capture import captured, no_synchronisation

F32, BF16 = torch.float32, torch.bfloat16
SOFTMAX = {"scoring": "softmax", "score_dtype": F32}
SIGMOID = {"scoring": "sigmoid", "score_dtype": F32, "weight_dtype": F32, "normalise": True, "epsilon": 1e-20}
MODELS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "gpt_oss": (128, False, {"top_k": 4, "scoring": "none", "softmax_chosen": True, "score_dtype": BF16,
                             "weight_dtype": BF16}),
    "granitemoehybrid": (62, False, {"top_k": 6, "scoring": "none", "softmax_chosen": True, "score_dtype": F32,
                                     "weight_dtype": BF16}),
    "mixtral": (8, False, {**SOFTMAX, "top_k": 2, "normalise": True, "weight_dtype": F32}),
    "qwen2_moe": (60, False, {**SOFTMAX, "top_k": 4, "weight_dtype": BF16}),
    "qwen3_moe": (128, False, {**SOFTMAX, "top_k": 8, "weight_dtype": BF16}),
    "qwen3_next": (512, False, {**SOFTMAX, "top_k": 10, "normalise": True, "weight_dtype": BF16}),
    "lfm2_moe": (32, True, {"top_k": 4, "scoring": "sigmoid", "score_dtype": BF16, "weight_dtype": BF16,
                            "normalise": True, "epsilon": 1e-6}),
    "deepseek_v2": (160, False, {**SOFTMAX, "top_k": 6, "groups": 8, "kept_groups": 3, "group_score": "max",
                                 "scale": 16.0, "weight_dtype": F32}),
    "deepseek_v3": (256, True, {**SIGMOID, "top_k": 8, "groups": 8, "kept_groups": 4, "scale": 2.5}),
    "glm4_moe": (160, True, {**SIGMOID, "top_k": 8, "scale": 2.5}),
    "kimi_linear": (256, True, {**SIGMOID, "top_k": 8, "scale": 2.446}),
}  # fmt: skip
"""The number of experts, whether there is a bias, and the options of the op."""
ROWS = 600
every_model = pytest.mark.parametrize("model", MODELS)
route = ROUTE.form("triton")


def arguments(model: str) -> tuple[Tensor, Tensor | None, dict[str, Any]]:
    """Logits in the dtype of the product, a bias, and options."""
    experts, biased, options = MODELS[model]
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(ROWS, experts, generator=generator, device="cuda") * 2
    bias = torch.randn(experts, generator=generator, device="cuda") * 0.1 if biased else None
    dtype = F32 if "glm" in model or "deepseek_v3" in model or "kimi" in model else BF16
    return logits.to(dtype), bias if bias is None or dtype == F32 else bias.to(dtype), options


def compared(logits: Tensor, bias: Tensor | None, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Scores, and what is compared, in float64 where the model computes them in float32, and rounded where it rounds.

    Experts outside of the best groups have -inf.
    """
    low = options["score_dtype"] == BF16
    exact = logits.double()
    scores = {"none": exact, "softmax": exact.softmax(-1), "sigmoid": exact.sigmoid()}[options["scoring"]]
    scores = scores.to(BF16).double() if low else scores
    choice = scores if bias is None else scores + bias.double()
    choice = choice.to(BF16).double() if low else choice
    if options.get("groups", 1) > 1:
        grouped = choice.view(len(choice), options["groups"], -1)
        best = grouped.topk(1 if options.get("group_score") == "max" else 2).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[:, : options["kept_groups"]]
        outside = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, value=False)
        choice = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(1)
    return scores, choice


@every_model
def test_it_is_the_choice_in_float64(model: str) -> None:
    """Equal choices are in order of their ids. Of two that are closer than float32 tells, either may come first.

    Where the model rounds to bfloat16, a sigmoid in the middle of two of its numbers may become either.
    """
    logits, bias, options = arguments(model)
    weights, ids = route(logits, bias, **options)
    scores, choice = compared(logits, bias, options)
    wanted = choice.sort(dim=-1, descending=True, stable=True)
    expected = wanted.indices[:, : options["top_k"]]
    gap = wanted.values[:, : options["top_k"]] - wanted.values[:, 1 : options["top_k"] + 1]
    close = ((gap > 0) & (gap < 1e-6)).any(-1)
    assert float(close.float().mean()) < 0.05
    same = (ids == expected).all(-1) | close
    rounds = options["score_dtype"] == BF16 and options["scoring"] == "sigmoid"
    assert float(same.float().mean()) > 0.98 if rounds else bool(same.all())
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    bound = 2**-7 if rounds else 2e-6
    torch.testing.assert_close(choice.gather(1, ids), choice.gather(1, expected), rtol=0, atol=bound)

    exact = scores.gather(1, ids)
    exact = exact.softmax(-1) if options.get("softmax_chosen") else exact
    if options.get("normalise"):
        exact = exact / (exact.sum(-1, keepdim=True) + options.get("epsilon", 0.0))
    exact = exact * options.get("scale", 1.0)
    bound = 2**-6 if BF16 in (options["score_dtype"], options["weight_dtype"]) else 1e-5
    torch.testing.assert_close(weights.double(), exact, rtol=bound, atol=0)


@every_model
def test_a_row_has_the_same_bits_beside_any_number_of_others(model: str) -> None:
    logits, bias, options = arguments(model)
    weights, ids = route(logits, bias, **options)
    every = torch.arange(ROWS, device="cuda")
    for rows in (1, 2, 3, 5, 8, 10, 16, 17, 32, 64, 65, 100, 256, 257, 576):
        for index in (every[:rows], every[-rows:], every[20 : 20 + rows].flip(0)):
            alone = route(logits[index], bias, **options)
            assert torch.equal(alone[0], weights[index]) and torch.equal(alone[1], ids[index]), rows


@every_model
def test_a_row_has_the_same_bits_wherever_it_lies(model: str) -> None:
    """Kernels are compiled anew for other strides and addresses, and must not sum in another order then."""
    logits, bias, options = arguments(model)
    expected = route(logits, bias, **options)
    wide = torch.zeros(ROWS, logits.shape[1] + 7, device="cuda", dtype=logits.dtype)
    wide[:, 3:-4] = logits
    apart = None if bias is None else torch.cat([bias[:1], bias])[1:]
    for given in (wide[:, 3:-4], wide[5:, 3:-4], logits[5:]):
        found = route(given, apart, **options)
        assert all(torch.equal(f, e[-len(given) :]) for f, e in zip(found, expected, strict=True))


@every_model
def test_it_does_not_wait_and_runs_in_a_graph_on_new_logits(model: str) -> None:
    logits, bias, options = arguments(model)
    expected = route(logits, bias, **options)
    with no_synchronisation():
        route(logits, bias, **options)
    given = torch.zeros_like(logits)
    graph, out = captured(lambda: route(given + 0, bias, **options))
    for _ in range(3):
        given.copy_(logits)
        graph.replay()
    assert all(map(torch.equal, out, expected))


def test_of_equal_choices_the_lowest_expert_comes_first() -> None:
    options = {"top_k": 8, "scoring": "sigmoid", "score_dtype": F32, "weight_dtype": F32}
    logits = torch.randint(0, 3, (ROWS, 256), device="cuda", generator=torch.Generator("cuda").manual_seed(0)).float()
    logits[:9] = torch.tensor([-0.0, 0.0], device="cuda").repeat(128)
    for form in ("triton", "reference"):
        _, ids = ROUTE.form(form)(logits, None, **options)
        assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :8])
    grouped = {**options, "groups": 32, "kept_groups": 3}
    found = [ROUTE.form(form)(logits, None, **grouped)[1] for form in ("triton", "reference")]
    assert torch.equal(*found)


def test_nan_leads_to_no_id_out_of_range() -> None:
    logits = torch.randn(3, 128, device="cuda", dtype=BF16)
    logits[0, 77], logits[1] = torch.nan, torch.nan
    for scoring in ("softmax", "sigmoid", "none"):
        options = {"top_k": 8, "scoring": scoring, "score_dtype": F32, "weight_dtype": F32}
        for grouped in ({}, {"groups": 8, "kept_groups": 2}):
            _, ids = route(logits, None, **options, **grouped)
            assert [len({*row} & {*range(128)}) for row in ids.tolist()] == [8] * 3
    assert int(route(logits, None, **{**options, "scoring": "none"})[1][0, 0]) == 77
