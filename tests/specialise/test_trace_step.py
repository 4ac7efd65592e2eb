"""The nodes that say how probable drafts are: where they stand, and what their columns hold."""

from __future__ import annotations

from specgraph.ir.graphs import calls
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.passes.insert_processors import InsertProcessors
from specgraph.passes.pipeline import apply
from specgraph.runtime.requests.processing import OPTION_STATE
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.score_rows import SCORE
from specgraph.specialise.specialise_step import SpecialiseStep
from specgraph.specialise.trace_step import TraceStep
from tests.compiler.test_pipeline import body, text
from tests.passes.test_insert_processors import built

WHOLE = (InsertProcessors(), IndexRows())
EXPECTED = """
traced_tokens, traced_counts, traced_rows, traced_temperature = step_trace_tokens(
    window, gathered_num_rows, gathered_num_forced, emitted, num_emitted, gathered_temperature, logits)
target_logprobs, _, _ = torch.ops.specgraph.score.default(
    logits, traced_tokens, traced_rows, temperature=traced_temperature, logprobs="processed")
target_ranks = torch.ops.specgraph.rank.default(logits, traced_tokens, traced_rows)
draft_ids, num_drawn = step_drawn_ids([token_1, token_2, token_3], num_emitted)
drawn_logits = torch.cat([draft_0, draft_1, draft_2], 1)
draft_logprobs, _, _ = torch.ops.specgraph.score.default(
    drawn_logits, draft_ids, num_drawn, temperature=traced_temperature, logprobs="processed")
traced = trace_columns(
    target_logprobs, target_ranks, traced_counts, [token_1, token_2, token_3], [draft_logprobs],
    [token_1, token_2, token_3], count=3)
"""
OFF = tuple(sorted({*OPTION_STATE, "top_k", "top_p", "min_p"}))


def test_every_draft_is_scored_in_front_of_the_state_update() -> None:
    report, program = apply(TraceStep(OFF), built("draft_model", *WHOLE, SpecialiseStep(unused=OFF)))
    verify_program(program)
    scored = list(calls(program.graph, SCORE))
    assert len(scored) == 2  # one for the drafts that are verified and the emitted tokens, and one for all draws
    assert report.result.matches == 5
    assert report.result.notes == ("the drafts that are verified, the token behind them, and 3 draws",)
    (advance,) = calls(program.graph, step.advance_)
    assert all(node < advance for node in scored)
    assert all({*node.kwargs} == {"temperature", "logprobs"} for node in scored)
    lines = body(program)
    first = next(index for index, line in enumerate(lines) if "trace_tokens(" in line)
    assert text(lines[first : first + 7]) == text(EXPECTED)
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
    assert report.result.matches == 2 and columns.args[3:5] == ([], [])
