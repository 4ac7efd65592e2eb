"""Verification at temperature 0 on a CPU is the definition, and is taken only where it may be."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from specgraph.kernels.verify.arguments import LOSSLESS_RULES, Verify
from specgraph.kernels.verify.greedy import is_greedy, verify_greedy
from specgraph.kernels.verify.verify import VERIFY, verify_reference

VOCAB, DRAFTS, BATCH = 5, 4, 256


def problem(count: int, rule: str = "strict", dtype: torch.dtype = torch.float32, **options: Any) -> Verify:
    """Sequences of every kind: drafts that are right, wrong, missing or no tokens, forced rows, padding, no row."""
    random = torch.Generator().manual_seed(count)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=random)

    logits = integers(-2, 3, BATCH, count, VOCAB).to(dtype)  # with ties
    num_forced = integers(0, DRAFTS + 1, BATCH)
    first = num_forced.clamp(max=DRAFTS + 1 - count)
    drafts = integers(-1, VOCAB + 1, BATCH, DRAFTS)
    rows = torch.arange(DRAFTS) - first.unsqueeze(1)
    right = (rows >= 0) & (rows < count) & (torch.rand(BATCH, DRAFTS, generator=random) < 0.7)
    drafts = torch.where(right, logits.argmax(-1).gather(1, rows.clamp(0, count - 1)), drafts)
    given = {
        "logits": logits, "draft_tokens": drafts, "draft_logits": None, "temperature": torch.zeros(BATCH),
        "top_k": None, "top_p": None, "min_p": None, "seeds": None,
        "positions": torch.arange(DRAFTS + 1).expand(BATCH, -1).contiguous(),
        "num_rows": integers(0, DRAFTS + 2, BATCH), "num_forced": num_forced, "target_to_draft": None, "rule": rule,
    }  # fmt: skip
    return Verify(**{**given, **options})


@pytest.mark.parametrize("count", range(1, DRAFTS + 2))
@pytest.mark.parametrize("rule", LOSSLESS_RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_is_the_definition(count: int, rule: str, dtype: torch.dtype) -> None:
    given = problem(count, rule, dtype)
    assert is_greedy(given) and VERIFY.choose("cpu", given).name == "cpu"
    found, expected = verify_greedy(given), verify_reference(given)
    assert found is not None and set(expected.num_emitted.tolist()) == {*range(DRAFTS + 2)}
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype, name


def test_a_row_of_nothing_but_minus_infinity_is_left_to_the_definition_which_tells_it() -> None:
    given = problem(3)
    given.logits[::2] = -math.inf
    given.num_rows[:], given.num_forced[:] = DRAFTS + 1, 0
    assert verify_greedy(given) is None
    found, expected = VERIFY.form("cpu")(**arguments(given)), verify_reference(given)
    assert all(map(torch.equal, found, expected))
    assert (found.bad[::2] > 0).all() and not found.bad[1::2].any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_the_definition_replaces_is_left_to_it(value: float) -> None:
    given = problem(3)
    given.logits[7, 1, 2] = value
    assert verify_greedy(given) is None
    assert all(map(torch.equal, VERIFY.form("cpu")(**arguments(given)), verify_reference(given)))


@pytest.mark.parametrize(
    "options",
    [{"rule": "typical"}, {"rule": "synthetic"}, {"logprobs": "raw"}, {"seeds": torch.zeros(BATCH, dtype=torch.int64)},
     {"temperature": torch.tensor([0.0] * (BATCH - 1) + [1.0])}],
)  # fmt: skip
def test_what_is_drawn_or_wanted_otherwise_takes_the_definition(options: dict[str, Any]) -> None:
    assert VERIFY.choose("cpu", problem(3, **options)).name == "reference"


def arguments(given: Verify) -> dict[str, Any]:
    return {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
