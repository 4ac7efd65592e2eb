"""Behind its forced rows, a block gives what the rest of it gives alone: not even the noise depends on the front."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling.sample import RULES, STEP_NOISE_RULES
from tests.kernels.verify.test_verify_triton import DEVICE, launch, problem, reference, with_draft_logits

BATCH, DRAFTS, VOCAB, MOST = 7, 3, 300, 4
FORCED = torch.arange(BATCH) % (MOST + 1)
"""How many rows come before those of the block, at most ``MOST``."""


def short(drawn: int) -> dict[str, Any]:
    """A block without forced rows; ``drawn`` of its drafts have logits. Some sequences have fewer rows."""
    given = problem(BATCH, DRAFTS, VOCAB)
    given = with_draft_logits(given, drawn) if drawn else given
    given["num_rows"] = torch.tensor([4, 4, 4, 3, 1, 4, 2]).repeat(BATCH)[:BATCH].to(DEVICE)
    return given


def longer(values: Tensor, fill: float) -> Tensor:
    """``values`` ``[B, R, ...]`` as rows of a block of ``R + MOST``, behind those that are forced."""
    rows = values.shape[1]
    wide = values.new_full((BATCH, rows + MOST, *values.shape[2:]), fill)
    for index, first in enumerate(FORCED.tolist()):
        wide[index, first : first + rows] = values[index]
    return wide


def behind_forced_rows(given: dict[str, Any], every_row: bool) -> dict[str, Any]:
    """The block with forced rows in front. Rows that are not of it have logits only if ``every_row``."""
    forced = FORCED.to(DEVICE)
    known = (torch.arange(DRAFTS + MOST) < FORCED.unsqueeze(1)).to(DEVICE)
    drafts = longer(given["draft_tokens"], -1)
    wide = {
        **given,
        "draft_tokens": torch.where(known, 7, drafts),
        "positions": given["positions"][:, :1] - forced.unsqueeze(1) + torch.arange(DRAFTS + 1 + MOST, device=DEVICE),
        "num_rows": given["num_rows"] + forced,
        "num_forced": forced,
    }
    if every_row:
        wide["logits"] = longer(given["logits"], 0.5)
    if "draft_logits" in given:
        wide["draft_logits"] = longer(given["draft_logits"], 0.5)
    return wide


@pytest.mark.parametrize("form", [reference, launch], ids=["reference", "triton"])
@pytest.mark.parametrize("every_row", [False, True], ids=["needed logits", "all logits"])
@pytest.mark.parametrize("rule", RULES)
def test_the_rest_of_a_block_does_not_depend_on_forced_rows(form: Any, every_row: bool, rule: str) -> None:
    given = short(DRAFTS if rule in STEP_NOISE_RULES else 0)
    alone, found = form(given, rule, "raw"), form(behind_forced_rows(given, every_row), rule, "raw")
    assert torch.equal(found.num_emitted, alone.num_emitted + FORCED.to(DEVICE))
    for index, (first, count) in enumerate(zip(FORCED.tolist(), alone.num_emitted.tolist(), strict=True)):
        assert found.emitted[index, :first].tolist() == [7] * first
        assert torch.equal(found.emitted[index, first : first + count], alone.emitted[index, :count])
        assert torch.equal(found.logprobs[index, first : first + count], alone.logprobs[index, :count])
    assert len(set(alone.num_emitted.tolist())) > 2


@pytest.mark.parametrize("drawn", [0, 2, DRAFTS])
@pytest.mark.parametrize("rule", STEP_NOISE_RULES)
def test_blocks_with_forced_rows_are_verified_as_in_the_reference(rule: str, drawn: int) -> None:
    given = behind_forced_rows(short(drawn), every_row=True)
    wanted, found = reference(given, rule), launch(given, rule)
    assert torch.equal(found.emitted, wanted.emitted) and torch.equal(found.num_emitted, wanted.num_emitted)
