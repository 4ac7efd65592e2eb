"""A lookup in front of a drafter: what the pass appends, what it keeps, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specgraph.config import load_config
from specgraph.config.draft import LOOKUPS as ALLOWED
from specgraph.config.draft import MOST_MATCHED
from specgraph.drafters.step import POINT_MASS
from specgraph.errors import ConfigError, PassError
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels.state import Buffer
from specgraph.kernels.step import suffix
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.lookup_first import LOOKUPS, LookupFirst
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import body, first, last, text


def looked_up(rule: str = "strict", drafter: str = "draft_model", kind: str = "ngram", match: int = 3) -> Program:
    program = last(first(drafter, 2), [InsertKVCache(4), InsertDraft(rule), LookupFirst(kind, match, rule)])
    verify_program(program)
    return program


RECORDED = "step_record_accepted_(history, window, emitted, start, num_emitted, rows)"
FOUND = {
    "ngram": "found = ngram_lookup(history, rows, length, num_speculative_tokens=2, max_ngram=4, min_ngram=3)",
    "suffix": "found = suffix_lookup(history, rows, length, num_speculative_tokens=2, max_match=24, min_match=3, "
    "max_spec_factor=8.0, max_spec_offset=0.0, min_token_prob=0.1)",
}


@pytest.mark.parametrize("kind", LOOKUPS)
def test_the_lookup_and_the_choice_follow_the_drafters_nodes(kind: str) -> None:
    *own, _ = body(last(first("draft_model", 2), [InsertKVCache(4), InsertDraft("strict")]))
    own = [line.replace("_, num_emitted, drafter_tokens", "emitted, num_emitted, drafter_tokens") for line in own]
    lines = [FOUND[kind], "chosen = prefer_found(found, token_1, token_2)", "return logits, chosen"]
    assert text(body(looked_up(kind=kind))) == text([*own, RECORDED, *lines])


def test_rules_that_compare_distributions_keep_which_drafts_were_found() -> None:
    program = looked_up("block")
    assert body(program)[-4:] == [
        "chosen = prefer_found(found, token_1, token_2)",
        "was_found = any_found(found)",
        "step_keep_point_mass_(point_mass, was_found, num_emitted)",
        "return logits, chosen",
    ]
    assert program.inputs[POINT_MASS] == Buffer(("B",), torch.bool)
    assert POINT_MASS not in looked_up("strict").inputs and not any(
        "was_found" in line for line in body(looked_up("strict"))
    )


@pytest.mark.parametrize("match", [1, 4, 9])
def test_the_match_is_the_shortest_that_is_looked_up(match: int) -> None:
    (found,) = (node for node in looked_up(match=match).graph.nodes if node.name == "found")
    assert (found.kwargs["min_ngram"], found.kwargs["max_ngram"]) == (match, max(match, 4))


def test_it_is_skipped_unless_it_is_asked_for() -> None:
    assert LookupFirst().skipped == "draft.first is not set" and LookupFirst("ngram").skipped is None


def test_the_configuration_allows_what_there_is() -> None:
    assert tuple(LOOKUPS) == ALLOWED and MOST_MATCHED == suffix.MOST_MATCHED


def test_drafts_that_something_reads_are_refused() -> None:
    with pytest.raises(PassError, match="which insert_verify has undone: put lookup_first before insert_verify"):
        last(first("draft_model"), [InsertKVCache(4), InsertDraft(), InsertVerify(), LookupFirst("ngram")])


def test_a_drafter_without_drafts_is_refused() -> None:
    with pytest.raises(PassError, match=r"lookup_first: none makes no drafts; leave draft\.first out"):
        looked_up(drafter="none")


def test_a_drafter_that_says_itself_which_drafts_are_point_masses_is_refused() -> None:
    with pytest.raises(
        PassError, match=r"draft_model says itself which drafts are point masses; leave out draft\.first"
    ):
        run_passes(looked_up("block"), [LookupFirst("ngram", rule="block")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"draft": {"first": "eagle3"}}, "draft.first is one of ngram, suffix, not 'eagle3'."),
        ({"draft": {"first": "ngram", "first_match": 0}}, "draft.first_match must be from 1 to 127, got 0."),
        ({"draft": {"first": "ngram", "first_match": 128}}, "draft.first_match must be from 1 to 127, got 128."),
        (
            {"draft": {"first": "ngram"}, "pipeline": {"order": ["insert_kv_cache"]}},
            "draft.first=ngram is carried out by the pass lookup_first, which pipeline.order does not have; put it beh",
        ),
    ],
)
def test_values_that_make_no_sense_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(given)
    assert str(caught.value).startswith(message)


def test_options_of_the_pass_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"lookup_first: first is one of ngram, suffix, or null, not 'egram'"):
        LookupFirst("egram")
    with pytest.raises(ConfigError, match=r"lookup_first: .*'exact'"):
        LookupFirst("ngram", rule="exact")
