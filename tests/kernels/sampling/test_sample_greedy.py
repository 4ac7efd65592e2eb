"""Drafts at temperature 0 on a CPU are those of the definition, which everything else takes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling.arguments import SampleDraft
from specgraph.kernels.sampling.draft import sample_draft_cpu, sample_draft_reference
from specgraph.kernels.sampling.sample import RULES

BATCH, ROWS, VOCAB = 32, 3, 7
IDS = torch.tensor([4, 0, 9, 2, 11, 6, 3])


def problem(dtype: torch.dtype = torch.float32, **options: Any) -> SampleDraft:
    """Logits with ties, and by default no vocabulary of the draft's own."""
    random = torch.Generator().manual_seed(0)
    logits = torch.randint(-2, 3, (BATCH, ROWS, VOCAB), generator=random).to(dtype)
    given = {
        "logits": logits, "temperature": torch.zeros(BATCH), "seeds": None, "key": torch.arange(BATCH), "top_k": None,
        "top_p": None, "min_p": None, "draft_to_target": None, "row": 1, "rule": "strict", "target_vocab_size": VOCAB,
        "return_processed": False,
    }  # fmt: skip
    return SampleDraft(**{**given, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("ids", [None, IDS], ids=["all", "mapped"])
@pytest.mark.parametrize("limit", [None, 5, VOCAB, 20])
def test_they_are_those_of_the_definition(dtype: torch.dtype, rule: str, ids: Tensor | None, limit: int | None) -> None:
    given = problem(dtype, rule=rule, draft_to_target=ids, target_vocab_size=limit)
    given.logits[3] = -math.inf
    assert OPS["sample_draft"].choose("cpu", given).name == "cpu"
    for found, expected in zip(sample_draft_cpu(given), sample_draft_reference(given), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype and found.shape == expected.shape


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_replaced_take_the_definition(value: float) -> None:
    given = problem()
    given.logits[5, 1, 6] = value
    assert all(map(torch.equal, sample_draft_cpu(given), sample_draft_reference(given)))


@pytest.mark.parametrize(
    "options",
    [{"return_processed": True}, {"seeds": torch.zeros(BATCH, dtype=torch.int64)},
     {"temperature": torch.tensor([0.0] * (BATCH - 1) + [1.0])}],
)  # fmt: skip
def test_what_is_drawn_or_kept_takes_the_definition(options: dict[str, Any]) -> None:
    assert OPS["sample_draft"].choose("cpu", problem(**options)).name == "reference"


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="rule"):
        sample_draft_cpu(problem(rule="stricter"))
