"""The nodes that say how probable drafts are: where they stand, and what their columns hold."""

from __future__ import annotations

import torch

from specgraph.ir.graphs import calls
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.passes.fuse_step import FuseStep
from specgraph.passes.fuse_verify import FuseVerify
from specgraph.passes.index_rows import IndexRows
from specgraph.passes.insert_processors import InsertProcessors
from specgraph.passes.pipeline import apply
from specgraph.passes.score_rows import SCORE
from specgraph.passes.specialise_step import SpecialiseStep
from specgraph.passes.trace_step import TraceStep
from specgraph.runtime.processing import Processing
from tests.compiler.test_pipeline import body
from tests.passes.test_insert_processors import built

WHOLE = (FuseVerify(), InsertProcessors(), FuseStep(), IndexRows())
OFF = tuple(sorted({*Processing().unused(), "top_k", "top_p", "min_p"}))


def test_every_draft_is_scored_in_front_of_the_state_update() -> None:
    report, program = apply(TraceStep(OFF), built("draft_model", *WHOLE, SpecialiseStep(unused=OFF)))
    verify_program(program)
    scored = list(calls(program.graph, SCORE))
    assert len(scored) == 3  # the drafts that are verified, the emitted tokens, and all drafts that are made
    assert report.result.matches == 5
    assert report.result.notes == ("the drafts that are verified, the token behind them, and 3 draws",)
    (advance,) = calls(program.graph, step.advance_)
    (emitted,) = calls(program.graph, step.emitted_tokens)
    assert emitted.args[0] is advance.args[4] and scored[1].args[:2] == (scored[0].args[0], emitted)
    assert all(node < advance for node in scored)
    assert all({*node.kwargs} == {"temperature", "logprobs"} for node in scored)
    lines = body(program)
    (traced,) = [line for line in lines if line.startswith("traced = ")]
    assert "[token_1, token_2, token_3]" in traced and traced.endswith("count=3)")
    assert sum(line.endswith("torch.cat([token_1, token_2, token_3], 1)") for line in lines) == 1
    assert lines[-1] == "return emitted, num_emitted, logprobs, bad, traced"


def test_a_step_of_fewer_drafts_tells_of_these() -> None:
    program = built("draft_model", *WHOLE, SpecialiseStep(unused=OFF, drafts=1))
    report, after = apply(TraceStep(OFF), program)
    (columns,) = calls(after.graph, step.trace_columns)
    assert report.result.matches == 3 and columns.kwargs == {"count": 1}


def test_a_step_whose_drafts_are_looked_up_has_no_draws() -> None:
    report, program = apply(TraceStep(), built("ngram", *WHOLE))
    verify_program(program)
    (columns,) = calls(program.graph, step.trace_columns)
    assert report.result.matches == 2 and columns.args[2:4] == ([], [])


def test_columns_are_numbers_and_the_bits_of_floats() -> None:
    verified, drawn = torch.tensor([[-0.5, -1.5], [0.0, 0.0]]), torch.tensor([[4], [9]])
    proposed, logprobs = torch.tensor([[4, 7], [8, -1]]), torch.tensor([[-0.25], [-0.75]])
    last = torch.tensor([[-3.0], [-4.0]])
    found = step.trace_columns(verified, last, [drawn], [logprobs], [proposed], count=3)
    assert found.dtype == torch.int32 and found.shape == (2, 10)
    floats = found.view(torch.float32)
    assert floats[0, :2].tolist() == [-0.5, -1.5] and floats[0, 2].isnan()
    assert found[:, 3:6].tolist() == [[4, 7, -1], [8, -1, -1]]
    # The second sequence does not take the draft that was drawn for it.
    assert floats[0, 6] == -0.25 and floats[0, 7:9].isnan().all() and floats[1, 6:9].isnan().all()
    assert floats[:, 9].tolist() == [-3.0, -4.0]


def test_what_is_verified_and_drawn_is_counted() -> None:
    window, logits = torch.tensor([[5, 6, -1], [7, 8, 9], [1, 2, 3]]), torch.empty(3, 3, 11)
    drafts = step.verified_drafts(window, logits)
    assert drafts.tolist() == [[6, 0], [8, 9], [2, 3]]
    rows, forced = torch.tensor([2, 3, 0]), torch.tensor([0, 2, 0])
    assert step.num_verified(rows, forced, drafts).tolist() == [1, 0, 0]
    assert step.active_drafts(torch.tensor([2, 0]), drafts).tolist() == [2, 0]
    assert step.trace_temperature(torch.tensor([0.0, 0.5])).tolist() == [1.0, 0.5]
    assert step.draft_ids(torch.tensor([[7, 2]]), torch.tensor([2, 5, 7])).tolist() == [[2, 0]]


def test_the_last_token_of_a_step_has_the_row_that_verify_takes_it_from() -> None:
    """A block of four rows, of which two have logits: decoding, behind two known tokens, and nothing at all."""
    emitted = torch.tensor([[5, 6, -1, -1], [1, 2, 7, 8], [3, -1, -1, -1], [-1, -1, -1, -1]])
    num_emitted, forced, logits = torch.tensor([2, 4, 1, 0]), torch.tensor([0, 2, 0, 0]), torch.empty(4, 2, 11)
    tokens = step.emitted_tokens(emitted, forced, logits)
    assert tokens.tolist() == [[5, 6], [7, 8], [3, 0], [0, 0]]
    count = step.num_emitted_rows(emitted, num_emitted, forced, tokens)
    assert count.tolist() == [2, 2, 1, 0]
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0], [-5.0, 0.0], [0.0, 0.0]])
    assert step.last_logprob(logprobs, count).tolist() == [[-2.0], [-4.0], [-5.0], [0.0]]
    # A known token before the last row is in the first row, because the block has only one row behind it.
    late = step.emitted_tokens(emitted[1:2], torch.tensor([3]), logits[:1])
    assert late.tolist() == [[7, 8]]
    assert step.num_emitted_rows(emitted[1:2], torch.tensor([4]), torch.tensor([3]), late).tolist() == [2]
    assert step.emitted_tokens(emitted, forced, torch.empty(4, 4, 11)).tolist() == emitted.clamp_min(0).tolist()
