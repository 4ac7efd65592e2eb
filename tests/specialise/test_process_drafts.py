"""Processors in front of draws: where the nodes stand, and what the pass refuses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from specgraph.errors import PassError
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.kernels import step
from specgraph.passes.insert_processors import InsertProcessors
from specgraph.passes.pipeline import apply
from specgraph.runtime.requests.processing import OPTION_STATE, Processing
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.process_drafts import ProcessDrafts
from specgraph.specialise.specialise_step import SpecialiseStep
from tests.compiler.test_pipeline import body
from tests.passes.test_insert_processors import built

ASKED = Processing(no_repeat_ngram_size=2)
WHOLE = (InsertProcessors(), IndexRows())


def off(asked: Processing) -> SpecialiseStep:
    return SpecialiseStep(unused=tuple(sorted(OPTION_STATE - asked.state.keys())))


def test_every_draw_sees_the_drafts_before_it() -> None:
    lines = body(built("draft_model", *WHOLE, ProcessDrafts(), off(ASKED)))
    begin = "history, rows, {}, last_position, known_drafts, gathered_no_repeat_ngram_size)"
    assert [line.partition(", ")[2] for line in lines if line.startswith("after_ban_ngrams_")] == [
        begin.format(window) for window in ("last_accepted", "cat", "cat_1")
    ]
    assert [line for line in lines if line.startswith("cat")] == [
        "cat = torch.cat([last_accepted, token_1], 1)",
        "cat_1 = torch.cat([last_accepted, token_1, token_2], 1)",
    ]
    draws = [line for line in lines if "propose_" in line]
    assert [f"(None, after_ban_ngrams_{number}, " in line for number, line in enumerate(draws)] == [True] * 3
    recorded = next(index for index, line in enumerate(lines) if line.startswith("record_accepted_("))
    assert recorded < next(index for index, line in enumerate(lines) if line.startswith("after_ban_ngrams_0"))


def test_without_an_option_nothing_is_left_of_it() -> None:
    """Not that the decoder would ask for this: it leaves the pass out."""
    lines = body(built("draft_model", *WHOLE, ProcessDrafts(), off(Processing())))
    assert not any(re.search(r"\bafter_", line) for line in lines)


@pytest.mark.parametrize(("kind", "note"), [("none", "no drafts are drawn"), ("ngram", "no drafts are drawn")])
def test_drafts_that_are_not_drawn_stay_as_they_are(kind: str, note: str) -> None:
    report, _ = apply(ProcessDrafts(), built(kind, *WHOLE))
    assert report.result.matches == 0 and note in report.result.notes[0]


def test_a_step_that_has_no_processors_left() -> None:
    program = built("draft_model", *WHOLE, off(Processing()))
    report, after = apply(ProcessDrafts(), program)
    assert report.result.notes == ("there are no processors",) and body(after) == body(program)


def changed(drafts: Any) -> Program:
    """A step whose drafter says that it makes another number of drafts than are drawn."""
    program = built("draft_model", *WHOLE)
    program.drafter = dataclasses.replace(program.drafter, num_speculative_tokens=drafts)
    return program


def test_draws_of_several_drafts_each_are_refused() -> None:
    with pytest.raises(PassError, match="process_drafts: 3 nodes draw 7 drafts; draw one at a time, or all at once"):
        apply(ProcessDrafts(), changed(7))


def test_tokens_that_are_recorded_too_late_are_refused() -> None:
    program = built("draft_model", *WHOLE)
    (record,) = calls(program.graph, step.record_accepted_)
    first = next(node for node in program.graph.nodes if node.target is step.propose_)
    with program.graph.inserting_before(record):
        late = program.graph.call_function(torch.add, (record.args[4], first.args[2]))
    late.name = "late"
    record.update_arg(4, late)
    with pytest.raises(PassError, match="keeps the tokens that drafts are to be drawn after, and depends on late, "):
        apply(ProcessDrafts(), program)


def test_logits_of_a_smaller_vocabulary_go_to_the_targets_ids_and_back() -> None:
    ids = torch.tensor([4, 0, 9, 2])  # the target has 7 tokens
    logits = torch.arange(8.0).view(1, 2, 4)
    every = step.in_target_vocabulary(logits, ids, 7)
    assert every.shape == (1, 2, 8) and torch.isinf(every[..., [1, 3, 5, 6]]).all()
    assert every[0, :, [4, 0, 2]].tolist() == logits[0][:, [0, 1, 3]].tolist()
    assert torch.equal(step.in_draft_vocabulary(every, ids, 7), logits)


def test_the_last_token_of_a_sequence_that_emitted_nothing_is_its_windows_first() -> None:
    window, emitted = torch.tensor([[5, 6], [7, 8]]), torch.tensor([[6, 9], [-1, -1]])
    assert step.last_accepted(window, emitted, torch.tensor([2, 0])).tolist() == [[9], [7]]
    assert step.last_position(torch.tensor([3, 4]), torch.tensor([2, 0])).tolist() == [5, 4]
