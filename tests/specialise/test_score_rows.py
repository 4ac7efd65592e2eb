"""The variant of the step that scores given tokens: what is left of it, and what is refused."""

from __future__ import annotations

import pytest
import torch

from specgraph.errors import ConfigError, PassError
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.passes.base import Pass
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.pipeline import run_passes
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.score_rows import ScoreRows
from tests.compiler.test_pipeline import body, first, last, text

EXPECTED = """
gathered_start, gathered_num_rows, gathered_block_table, gathered_max_length, gathered_num_forced = gather_state(
    rows, [start, num_rows, block_table, max_length, num_forced], [0, 0, -1, 0, 0])
positions, _ = step_positions_and_next(gathered_start, window)
hidden = self.target(tokens=window, positions=positions, num_rows=gathered_num_rows, block_table=gathered_block_table,
    max_length=gathered_max_length, caches=target_caches)
known_rows = rows_before_last(hidden)
logits = self.lm_head(known_rows)
given_tokens = draft_tokens(window)
logprobs, is_greedy, bad = torch.ops.specgraph.score.default(logits, given_tokens, gathered_num_forced, logprobs="raw")
return logprobs, is_greedy, bad
"""


def whole(drafter: str = "draft_model", *more: Pass) -> Program:
    return last(first(drafter), [InsertKVCache(4), InsertDraft(), InsertVerify(), *more, IndexRows()])


def scored(program: Program, pass_: ScoreRows | None = None) -> Program:
    """The step that scores, verified."""
    made = last(program, [pass_ or ScoreRows()])
    verify_program(made)
    return made


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_the_target_and_its_logits_are_left(drafter: str) -> None:
    made = scored(whole(drafter))
    assert text(body(made)) == text(EXPECTED)


def test_fused_passes_change_nothing_of_it() -> None:
    lines = text(body(scored(whole("draft_model"))))
    after = text(EXPECTED)[text(EXPECTED).index("hidden") :]
    assert lines[-len(after) :] == after


def test_processed_logits_need_the_options_that_are_in_use() -> None:
    made = scored(whole(), ScoreRows("processed", ("top_k", "min_p")))
    (node,) = calls(made.graph, torch.ops.specgraph.score.default)
    options = {name: str(value) for name, value in node.kwargs.items()}
    assert options == {"temperature": "gathered_temperature", "top_p": "gathered_top_p", "logprobs": "processed"}


def test_the_report_says_what_is_left_out() -> None:
    before = whole()
    _, (report,) = run_passes(before, [ScoreRows()])
    (note,) = report.result.notes
    kept = report.after["step"] - 6  # the rows, the tokens, the op and its three results
    assert note == f"log-probabilities: raw; {report.before['step'] - kept} nodes left out"


def test_logits_of_rows_that_something_else_chose_are_refused() -> None:
    program = whole()
    (needed,) = calls(program.graph, step.needed_rows)
    needed.replace_all_uses_with(needed.args[0])
    with pytest.raises(PassError, match=r"score_rows: logits reads hidden, not the result of needed_rows; leave that"):
        last(program, [ScoreRows()])


def test_a_step_without_verification_is_refused() -> None:
    with pytest.raises(PassError, match="score_rows needs 'row_index', which does not hold yet"):
        last(last(first("ngram"), [InsertKVCache(4), InsertDraft(), InsertVerify()]), [ScoreRows()])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="score_rows: logprobs is one of raw, processed, not 'none'"):
        ScoreRows("none")
