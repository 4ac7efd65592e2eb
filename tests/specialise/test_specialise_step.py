"""The step for one kind of request, and for fewer drafts: what is left out, what stays, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specgraph.errors import ConfigError
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.pipeline import run_passes
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.specialise_step import SpecialiseStep
from tests.compiler.test_pipeline import body, first, last
from tests.drafters.test_matrix import decoder, heads_exported_once

__all__ = ["heads_exported_once"]

K = 7


def small(rule: str = "strict", k: int = 3) -> Program:
    """A step of a draft model, with as few passes as it takes."""
    return last(first("draft_model", k), [InsertKVCache(4), InsertDraft(rule), InsertVerify(rule), IndexRows()])


def fewer(program: Program, drafts: int | None) -> tuple[Program, str]:
    """The step of so many drafts, verified, and what the report says."""
    stages, reports = run_passes(program, [SpecialiseStep(drafts=drafts)])
    verify_program(stages["specialise_step"])
    return stages["specialise_step"], reports[0].result.notes[-1]


def called(program: Program) -> list[str]:
    """The modules that a step calls, without those of the target."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_module"]
    return [name for name in names if name not in ("target", "lm_head", "draft_to_target")]


def test_a_step_of_fewer_drafts_has_neither_the_calls_nor_the_draws_of_the_others() -> None:
    whole, made = body(small()), fewer(small(), 1)[0]
    gone = [line for line in whole if line.startswith(("position_1", "draft_1", "token_2", "position_2", "draft_2",
                                                       "token_3"))]  # fmt: skip
    expected = [line for line in whole if line not in gone]
    expected = [line.replace("[token_1, token_2, token_3]", "[token_1]") for line in expected]
    expected = [line.replace("length, chain = finalize_step(", "length, _ = finalize_step(") for line in expected]
    assert len(gone) == 6
    assert body(made) == [line.replace("num_forced, 4)", "num_forced, 2)") for line in expected]


@pytest.mark.parametrize(("drafts", "masks", "rows"), [(0, 0, 1), (2, 1, 2), (3, 2, 3)])
def test_a_call_that_makes_all_drafts_has_mask_rows_for_those_that_are_made(drafts: int, masks: int, rows: int) -> None:
    program = decoder("pard", None, "llama", "strict", 3).stages["index_rows"]
    made, _ = fewer(program, drafts)
    (expanded,) = calls(made.graph, step.expand_draft_inputs)
    assert expanded.kwargs["count"] == masks
    taken = [node.args[-1] for node in calls(made.modules.unchanged["draft"].graph, step.take_rows)]
    assert taken == ([rows] if drafts else [])
    (whole,) = calls(program.modules.unchanged["draft"].graph, step.take_rows)
    assert whole.args[-1] == 3


def test_without_drafts_the_draft_model_still_reads_what_was_accepted() -> None:
    made, note = fewer(small(), 0)
    assert called(made) == ["draft"] and not [*calls(made.graph, step.propose_)]
    assert note == "0 of 3 drafts; 2 draft calls left out; of draft what it writes"


def test_all_drafts_leave_the_graph_as_it_is() -> None:
    expected = body(fewer(small(), None)[0])
    for drafts in (3, 9):
        made, note = fewer(small(), drafts)
        assert body(made) == expected and note == "all 3 drafts"


LEFT: dict[tuple[str, str | None], dict[int, list[str]]] = {
    ("eagle3", None): {0: ["draft_features", "draft"], 2: ["draft_features", *["draft"] * 2],
                       K: ["draft_features", *["draft"] * K]},
    ("draft_model", "ngram"): {0: ["draft"], 2: ["draft"] * 2, K: ["draft"] * K},
    ("peagle", None): {0: ["draft_features", "mask_hidden", "draft"], 2: ["draft_features", "mask_hidden", "draft"]},
    # Rows of later modules become final, whatever is drafted.
    ("mtp, 3 chained", None): {0: ["mtp_0", "mtp_1", "mtp_2"], 2: ["mtp_0", "mtp_1", "mtp_2"],
                               K: ["mtp_0", "mtp_1", *["mtp_2"] * (K - 2)]},
    ("medusa", None): {0: [], 2: ["draft"]},
    ("dflash", "suffix"): {0: ["draft_features", "draft_context"], 2: ["draft_features", "draft_context", "draft"]},
    ("dflash2", None): {2: ["draft_features", "draft_context", "draft", *["draft_selector"] * 2]},
    ("dspark", None): {0: ["draft_features", "draft_context"],
                       2: ["draft_features", "draft_context", "draft", *["draft_markov"] * 2, "draft_confidence"]},
}  # fmt: skip
"""The modules that are called, by the number of drafts: those that keep up with the accepted tokens, and the others as
far as drafts need them."""


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize(("drafter", "lookup"), LEFT)
def test_calls_that_only_make_later_drafts_go(drafter: str, lookup: str | None, rule: str) -> None:
    program = decoder(drafter, lookup, "llama", rule, K)._program
    for drafts, expected in LEFT[drafter, lookup].items():
        assert called(fewer(program, drafts)[0]) == expected


def test_lookups_go_with_the_drafts_and_what_they_record_stays() -> None:
    for drafter, lookup in (("ngram", None), ("suffix", None), ("eagle3", "ngram")):
        made = fewer(decoder(drafter, lookup, "llama", "probabilistic", K)._program, 0)[0]
        names = {getattr(node.target, "__name__", "") for node in made.graph.nodes}
        assert {"record_tokens_", "record_accepted_"} & names
        assert not {"ngram_lookup", "suffix_lookup", "prefer_found", "keep_point_mass_"} & names


def test_estimates_of_drafts_that_are_not_made_need_no_tokens() -> None:
    made = fewer(decoder("dspark", None, "llama", "strict", 5)._program, 2)[0]
    (joined,) = calls(made.graph, torch.cat)
    assert [node.name for node in joined.args[0]] == ["anchor", "token_1", "token_2", "anchor", "anchor"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logprobs": "some"}, "specialise_step: logprobs is one of none, raw, processed, not 'some'."),
        ({"drafts": -1}, "specialise_step: drafts is a number from 0 up, or null for all, not -1."),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpecialiseStep(**options)
    assert str(caught.value) == message
