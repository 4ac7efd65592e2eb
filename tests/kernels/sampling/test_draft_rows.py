"""Drafts drawn from wide rows on a CPU, one row after the other, are those of the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.ops import OPS
from specgraph.kernels.sampling import kept
from specgraph.kernels.sampling.arguments import SampleDraft
from specgraph.kernels.sampling.draft import sample_draft_cpu, sample_draft_reference
from specgraph.kernels.sampling.sample import RULES
from tests.kernels.sampling.rows import ROWS
from tests.pairwise import cover, product

BATCH, COUNT, VOCAB = 40, 2, 800


@pytest.fixture(autouse=True)
def every_row_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "WIDE", 1)


def problem(**options: Any) -> SampleDraft:
    random = torch.Generator().manual_seed(0)
    rows = [*ROWS.values()]
    logits = torch.stack(
        [torch.stack([rows[b % len(rows)](VOCAB, random) for _ in range(COUNT)]) for b in range(BATCH)]
    )
    given = {
        "logits": logits, "temperature": torch.tensor([0.0, 0.7, 1.0, 9.0]).repeat(BATCH // 4),
        "seeds": torch.randint(-(2**62), 2**62, (BATCH,), generator=random), "key": torch.arange(BATCH) + 2**32 - 9,
        "top_k": torch.tensor([0, 30]).repeat(BATCH // 2), "top_p": torch.tensor([0.9, 1.0]).repeat(BATCH // 2),
        "min_p": torch.tensor([0.0, 0.0, 0.1, 0.1]).repeat(BATCH // 4), "draft_to_target": None, "row": 1,
        "rule": "strict", "target_vocab_size": VOCAB, "return_processed": True,
    }  # fmt: skip
    return SampleDraft(**{**given, **options})


AXES = {"rule": RULES, "limit": (None, 500, VOCAB), "mapped": (False, True), "keep": (False, True)}


@pytest.mark.parametrize([*AXES], cover(product(AXES), (0, 1)))
def test_they_are_those_of_the_definition(rule: str, mapped: bool, limit: int | None, keep: bool) -> None:
    ids: Tensor | None = torch.randperm(5 * VOCAB, generator=torch.Generator().manual_seed(1))[:VOCAB]
    given = problem(
        rule=rule, draft_to_target=ids if mapped else None, target_vocab_size=limit, return_processed=keep
    )  # fmt: skip
    assert OPS["sample_draft"].choose("cpu", given).name == "cpu"
    for found, expected in zip(sample_draft_cpu(given), sample_draft_reference(given), strict=True):
        assert torch.equal(found, expected) and found.dtype == expected.dtype and found.shape == expected.shape


def test_options_that_are_off_and_short_dtypes() -> None:
    given = problem(top_k=None, top_p=None, min_p=None)
    given.logits = given.logits.bfloat16()
    assert all(map(torch.equal, sample_draft_cpu(given), sample_draft_reference(given)))


def test_narrow_rows_and_float64_take_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    given.logits = given.logits.double()
    assert OPS["sample_draft"].choose("cpu", given).name == "reference"
    monkeypatch.setattr(kept, "WIDE", VOCAB + 1)
    assert OPS["sample_draft"].choose("cpu", problem()).name == "reference"
