"""The choice of experts: against float64 and the functions of models, ties, and rows that do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.linear.route import MAX_EXPERTS, ROUTE
from tests.kernels.linear.test_norm import DEVICE, normal

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
every_form = pytest.mark.parametrize("form", ["reference", "triton"])


def run(form: str, logits: Tensor, bias: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """The op in one form; scores and weights are float32 unless ``options`` say so."""
    result: tuple[Tensor, Tensor] = ROUTE.form(form)(
        logits, bias, **{"score_dtype": F32, "weight_dtype": F32, "scoring": "softmax", **options}
    )
    return result


def route_of_row(logits: list[float], bias: list[float], options: dict[str, Any]) -> tuple[list[float], list[int]]:
    """The definition for one row in float64, by lists."""

    def softmax(values: list[float]) -> list[float]:
        return torch.tensor(values, dtype=F64).softmax(0).tolist()  # type: ignore[no-any-return]

    def largest(values: list[float], count: int) -> list[int]:
        return sorted(range(len(values)), key=lambda place: (-values[place], place))[:count]

    scoring, places = options["scoring"], range(len(logits))
    sigmoid = torch.tensor(logits, dtype=F64).sigmoid().tolist()
    scores = softmax(logits) if scoring == "softmax" else sigmoid if scoring == "sigmoid" else logits
    choice = [score + own for score, own in zip(scores, bias, strict=True)]
    groups = options.get("groups", 1)
    size, best = len(logits) // groups, 1 if options.get("group_score") == "max" else 2
    totals = [sum(sorted(choice[group * size : (group + 1) * size])[-best:]) for group in range(groups)]
    kept = largest(totals, options.get("kept_groups", 1)) if groups > 1 else [0]
    ids = largest([choice[place] if place // size in kept else -torch.inf for place in places], options["top_k"])
    weights = [scores[place] for place in ids]
    weights = softmax(weights) if options.get("softmax_chosen") else weights
    total = sum(weights) + options.get("epsilon", 0.0) if options.get("normalise") else 1.0
    return [weight / total * options.get("scale", 1.0) for weight in weights], ids


FORMS: dict[str, dict[str, Any]] = {
    "topk then softmax": {"scoring": "none", "softmax_chosen": True},
    "softmax then topk": {"scoring": "softmax"},
    "softmax then topk, normalised": {"scoring": "softmax", "normalise": True},
    "sigmoid": {"scoring": "sigmoid", "normalise": True, "epsilon": 1e-6, "scale": 2.5},
    "best groups by two": {"scoring": "sigmoid", "groups": 4, "kept_groups": 2, "normalise": True, "epsilon": 1e-20},
    "best group by one": {"scoring": "softmax", "groups": 4, "kept_groups": 1, "group_score": "max", "scale": 16.0},
    "as many groups as are kept": {"scoring": "sigmoid", "groups": 2, "kept_groups": 2},
}


@every_form
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("what", FORMS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (MAX_EXPERTS, 10)])
def test_it_is_the_definition_in_float64(form: str, experts: int, top_k: int, what: str, biased: bool) -> None:
    logits, bias = normal(3, experts), normal(experts, seed=1) * 0.1 if biased else None
    options = {"top_k": top_k, **FORMS[what]}
    weights, ids = run(form, logits, bias, **options)
    own = [0.0] * experts if bias is None else bias.tolist()
    expected = [route_of_row(row, own, options) for row in logits.tolist()]
    assert ids.dtype == torch.int64 and ids.tolist() == [places for _, places in expected]
    exact = torch.tensor([values for values, _ in expected], dtype=F64)
    torch.testing.assert_close(weights.cpu().double(), exact, rtol=2e-6, atol=1e-30)


def softmax_of_chosen(logits: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """gpt_oss, and granitemoehybrid in float32."""
    values, ids = logits.to(dtype).topk(4, dim=-1)
    return values.softmax(1, dtype=dtype), ids


def chosen_of_softmax(logits: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """mixtral, qwen3_next and, without a division, qwen3_moe."""
    weights, ids = logits.softmax(-1, dtype=dtype).topk(4, dim=-1)
    return weights / weights.sum(-1, keepdim=True), ids


def biased_sigmoid(logits: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """lfm2_moe."""
    scores = logits.to(dtype).sigmoid()
    ids = (scores + bias.to(dtype)).topk(4, dim=-1).indices
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-6) * 1.5, ids


def best_groups(logits: Tensor, bias: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """deepseek_v3."""
    scores = logits.to(dtype).sigmoid()
    choice = scores + bias
    groups = choice.view(-1, 8, 8).topk(2, dim=-1)[0].sum(-1).topk(3, dim=-1, sorted=False)[1]
    mask = torch.zeros(len(logits), 8, device=DEVICE).scatter_(1, groups, 1)
    kept = mask.unsqueeze(-1).expand(-1, 8, 8).reshape(-1, 64).bool()
    ids = choice.masked_fill(~kept, -torch.inf).topk(4, dim=-1)[1]
    weights = scores.gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


MODELS: dict[str, tuple[Callable[[Tensor, Tensor, torch.dtype], tuple[Tensor, Tensor]], dict[str, Any]]] = {
    "gpt_oss": (softmax_of_chosen, {"scoring": "none", "softmax_chosen": True}),
    "mixtral": (chosen_of_softmax, {"scoring": "softmax", "normalise": True}),
    "lfm2_moe": (biased_sigmoid, {"scoring": "sigmoid", "normalise": True, "epsilon": 1e-6, "scale": 1.5}),
    "deepseek_v3": (best_groups, {"scoring": "sigmoid", "groups": 8, "kept_groups": 3, "normalise": True,
                                  "epsilon": 1e-20, "scale": 2.5}),
}  # fmt: skip


@every_form
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_it_is_what_the_model_computes(form: str, model: str, dtype: torch.dtype) -> None:
    """Logits whose scores stay apart in bfloat16, too; what is compared is rounded as the model rounds it."""
    function, options = MODELS[model]
    order = torch.stack([torch.randperm(64, generator=torch.Generator().manual_seed(seed)) for seed in range(5)])
    logits = ((order - 40) / 16).to(BF16).to(DEVICE)
    bias = None if model in ("gpt_oss", "mixtral") else normal(64, seed=2) * 0.1
    given = bias.to(dtype) if bias is not None and model == "lfm2_moe" else bias
    expected, chosen = function(logits, torch.zeros(64) if bias is None else bias, dtype)
    weights, ids = run(form, logits, given, top_k=4, score_dtype=dtype, weight_dtype=dtype, **options)
    choice = logits.double() if bias is None else logits.to(dtype).sigmoid() + (given if given is not None else 0)
    # torch.topk promises no order of equal choices, so these are compared and not the ids.
    assert torch.equal(choice.gather(1, ids), choice.gather(1, chosen))
    same = ids == chosen
    assert same.float().mean() > 0.8
    torch.testing.assert_close(weights[same], expected[same], rtol=2**-8 if dtype == BF16 else 1e-6, atol=0)


@every_form
def test_of_equal_choices_the_lowest_expert_comes_first(form: str) -> None:
    logits = torch.zeros(4, 300, device=DEVICE)
    logits[1, [7, 250, 100]] = 1.0
    logits[2, ::2] = -0.0
    logits[3] = -torch.inf
    logits[3, 5] = torch.inf
    options = {"top_k": 5, "scoring": "none", "softmax_chosen": True}
    assert run(form, logits, **options)[1].tolist() == [
        [0, 1, 2, 3, 4], [7, 100, 250, 0, 1], [0, 1, 2, 3, 4], [5, 0, 1, 2, 3]
    ]  # fmt: skip
    grouped = {"top_k": 5, "scoring": "sigmoid", "groups": 100, "kept_groups": 3}
    assert run(form, logits, **grouped)[1].tolist() == [
        [0, 1, 2, 3, 4], [7, 100, 250, 6, 8], [0, 1, 2, 3, 4], [5, 0, 1, 2, 3]
    ]  # fmt: skip


@every_form
def test_equal_choices_after_a_rounding_are_equal(form: str) -> None:
    """The scores of the first three round to one bfloat16, and so do their sums with a bias in bfloat16."""
    logits = torch.tensor([[2.25, 2.28125, 2.265625, -1.0]], device=DEVICE)
    assert run(form, logits, top_k=3, scoring="sigmoid")[1].tolist() == [[1, 2, 0]]
    assert run(form, logits, top_k=3, scoring="sigmoid", score_dtype=BF16)[1].tolist() == [[0, 1, 2]]
    bias = torch.tensor([0.0, 0.0, 1e-4, 0.0], device=DEVICE)
    for own, expected in ((bias, [2, 0, 1]), (bias.to(BF16), [0, 1, 2])):
        found = run(form, logits, own, top_k=3, scoring="sigmoid", score_dtype=BF16)[1]
        assert found.tolist() == [expected]


@every_form
def test_nan_is_larger_than_every_number_and_no_id_is_out_of_range(form: str) -> None:
    logits = normal(2, 6)
    logits[0, 4] = torch.nan
    logits[1] = torch.nan
    weights, ids = run(form, logits, top_k=6, scoring="none", softmax_chosen=True)
    assert int(ids[0, 0]) == 4 and [sorted(row) for row in ids.tolist()] == [[*range(6)]] * 2
    assert weights.isnan().all()
    assert run(form, logits, top_k=3)[1].tolist() == [[0, 1, 2]] * 2  # a softmax in which all is NaN


@every_form
def test_experts_of_other_groups_are_chosen_where_too_few_are_kept(form: str) -> None:
    logits = torch.tensor([[1.0, 2.0, 5.0, 4.0, 0.0, 3.0]], device=DEVICE)
    weights, ids = run(form, logits, top_k=4, scoring="sigmoid", groups=3, kept_groups=1)
    assert ids.tolist() == [[2, 3, 0, 1]]
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids), rtol=1e-6, atol=0)


@pytest.mark.parametrize("what", FORMS)
def test_a_row_has_the_same_bits_beside_any_number_of_others(what: str) -> None:
    logits, bias = normal(70, 40, dtype=BF16), normal(40, seed=1) * 0.1
    options = {"top_k": 6, **FORMS[what]}
    weights, ids = run("triton", logits, bias, **options)
    for rows in (slice(0, 1), slice(69, 70), slice(3, 20), slice(None, None, 7)):
        alone = run("triton", logits[rows].contiguous(), bias, **options)
        assert torch.equal(alone[0], weights[rows]) and torch.equal(alone[1], ids[rows])


def test_logits_lie_in_memory_as_they_like() -> None:
    wide, bias = normal(5, 100), normal(80, seed=1)[::2]
    options = {"top_k": 3, "scoring": "sigmoid"}
    expected = run("triton", wide[:, 7:47].contiguous(), bias.contiguous(), **options)
    for logits in (wide[:, 7:47], wide[:, 7:47].T.contiguous().T):
        assert all(map(torch.equal, run("triton", logits, bias, **options), expected))


@every_form
@pytest.mark.parametrize("dtype", [torch.float16, BF16, F32], ids=str)
def test_weights_have_the_dtype_that_is_asked_for(form: str, dtype: torch.dtype) -> None:
    weights, ids = run(form, normal(3, 8, dtype=BF16), top_k=2, weight_dtype=dtype)
    exact, chosen = run(form, normal(3, 8, dtype=BF16), top_k=2)
    assert torch.equal(weights, exact.to(dtype)) and torch.equal(ids, chosen)
    assert run(form, normal(0, 8), top_k=2, weight_dtype=dtype)[0].shape == (0, 2)


def test_what_the_kernel_does_not_take_is_left_to_the_reference() -> None:
    for logits, dtype in ((normal(2, 8, dtype=F64), F64), (normal(2, MAX_EXPERTS + 1), F32)):
        given = ROUTE.arguments(logits, None, top_k=2, scoring="softmax", score_dtype=dtype, weight_dtype=dtype)
        assert ROUTE.choose("cuda", given).name == "reference"
        weights, ids = torch.ops.specgraph.route(
            logits, None, top_k=2, scoring="softmax", score_dtype=dtype, weight_dtype=dtype
        )
        assert torch.equal(weights, logits.softmax(-1).topk(2).values) and weights.dtype == dtype
        assert torch.equal(ids, logits.topk(2).indices)
    given = ROUTE.arguments(normal(2, 8), None, top_k=2, scoring="softmax", score_dtype=F32, weight_dtype=BF16)
    assert ROUTE.choose("cuda", given).name == "triton"


def test_the_op_is_registered_as_it_behaves() -> None:
    options = {"top_k": 2, "scoring": "sigmoid", "score_dtype": F32, "weight_dtype": BF16, "normalise": True}
    torch.library.opcheck(
        torch.ops.specgraph.route, (normal(3, 8), normal(8)), options, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k is between 1 and the 8 experts, not 9"),
        ({"top_k": 0}, "top_k is between 1 and the 8 experts, not 0"),
        ({"scoring": "tanh"}, "scoring is one of softmax, sigmoid, none, not 'tanh'"),
        ({"group_score": "mean"}, "group_score is one of max, top2, not 'mean'"),
        ({"groups": 3}, "8 experts are not 3 groups of one size"),
        ({"groups": 2, "kept_groups": 3}, "kept_groups is between 1 and the 2 groups, not 3"),
        ({"groups": 8, "kept_groups": 2}, "groups of one expert have no best two: give group_score='max'"),
        ({"softmax_chosen": True, "normalise": True}, "has the sum 1 already: give softmax_chosen or normalise"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"top_k": 2, "scoring": "softmax", "score_dtype": F32, "weight_dtype": F32, **options}
    with FakeTensorMode(), pytest.raises(ValueError, match=message):
        torch.ops.specgraph.route(torch.empty(3, 8), None, **given)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"bias must be \[E\] = \[8\], not \[7\]"):
        torch.ops.specgraph.route(torch.empty(3, 8), torch.empty(7), **{**given, **{"top_k": 2}})
