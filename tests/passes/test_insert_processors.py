"""Processors between the logits and verification: where the nodes stand, and that nothing is left of unused ones."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels.processors import PROCESSORS
from specgraph.passes.base import Pass
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_processors import OPTIONS, STATE, InsertProcessors, first_of
from specgraph.passes.insert_verify import InsertVerify
from specgraph.runtime.requests.processing import OPTION_STATE, Bias, Processing
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.specialise_step import SpecialiseStep
from tests.compiler.test_pipeline import body, first, last, text

BUILT: list[Pass] = [InsertKVCache(4), InsertDraft("strict"), InsertVerify("strict")]
CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5},
    {"biases": (Bias((3,), 1.0),)}, {"no_repeat_ngram_size": 2}, {"forced_bos_token_id": 4},
    {"forced_eos_token_id": 5},
]  # fmt: skip
"""What a request may ask for, one at a time."""


def built(drafter: str, *more: Pass) -> Program:
    """A step with as few passes as it takes, and ``more``."""
    program = last(first(drafter, 3), [*BUILT, *more])
    verify_program(program)
    return program


def test_processors_stand_between_the_logits_and_what_verifies_them() -> None:
    before, after = body(built("none")), body(built("none", InsertProcessors()))
    at = next(index for index, line in enumerate(before) if "verify.default" in line)
    context, ops = "history, rows, window, start, num_forced", "torch.ops.specgraph"
    assert after[:at] == before[:at]
    assert text(after[at : at + 5]) == text(f"""
        after_add_biases = {ops}.add_biases.default(logits, {context}, prompt_length, bias_tokens, bias_ends,
                                                    bias_values, bias_until)
        after_penalise = {ops}.penalise.default(after_add_biases, {context}, prompt_length, repetition_penalty,
                                                frequency_penalty, presence_penalty)
        after_ban_ngrams = {ops}.ban_ngrams.default(after_penalise, {context}, no_repeat_ngram_size)
        after_force_tokens = {ops}.force_tokens.default(after_ban_ngrams, window, start, num_forced, max_length,
                                                        forced_bos_token_id, forced_eos_token_id)
        {before[at].replace("(logits,", "(after_force_tokens,").replace('"none")', '"none", raw_logits=logits)')}
    """)
    record = "record_accepted_(history, window, emitted, start, num_emitted, rows)"
    assert text(after[at + 5 :]) == text([*before[at + 1 : -2], record, *before[-2:]])


def test_a_drafter_that_keeps_the_tokens_keeps_them_for_processors_too() -> None:
    lines = body(built("ngram", InsertProcessors()))
    assert not any("record_accepted_(" in line for line in lines)
    assert sum("record_tokens_(" in line for line in lines) == 1


@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_nothing_is_left_of_what_no_request_asks_for(drafter: str) -> None:
    off = SpecialiseStep(logprobs="raw", unused=tuple(OPTIONS))
    expected = body(built(drafter, IndexRows(), SpecialiseStep(logprobs="raw")))
    assert body(built(drafter, InsertProcessors(), IndexRows(), off)) == expected


def test_a_drafter_keeps_the_tokens_where_no_drafts_are_made() -> None:
    off = SpecialiseStep(unused=tuple(OPTIONS), drafts=0)
    lines = body(built("ngram", InsertProcessors(), IndexRows(), off))
    assert any("record_tokens_(" in line for line in lines)
    assert not any("ngram_lookup(" in line or "penalise.default(" in line for line in lines)


@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: next(iter(changes)))
def test_one_option_keeps_its_processor_alone(changes: dict[str, Any]) -> None:
    asked = Processing(**changes)
    off = SpecialiseStep(unused=tuple(sorted(OPTION_STATE - asked.state.keys())))
    program = built("none", InsertProcessors(), IndexRows(), off)
    (kept,) = (node for node in program.graph.nodes if node.target in PROCESSORS)
    assert asked.state.keys() <= {*PROCESSORS[kept.target]}
    lines = body(program)
    reads_history = kept.target is not torch.ops.specgraph.force_tokens.default
    assert any(line.startswith("record_accepted_(") for line in lines) == reads_history
    assert {name for name in OPTIONS if any(f"gathered_{name}" in line for line in lines)} == asked.state.keys()


def test_options_are_those_that_requests_have() -> None:
    neutral = Processing()
    assert set(OPTIONS) == OPTION_STATE == {name for names in PROCESSORS.values() for name in names}
    assert not neutral.state and {*chain(*(Processing(**changes).state for changes in CHANGES))} == set(OPTIONS)
    for name, buffer in OPTIONS.items():
        assert name.startswith("bias_") or buffer.fill == getattr(neutral, name)


def test_the_row_index_comes_later() -> None:
    with pytest.raises(PassError, match="which index_rows has undone: put insert_processors before index_rows"):
        built("none", IndexRows(), InsertProcessors())


def test_a_step_computes_with_what_its_sequence_asks_for() -> None:
    program = built("none", InsertProcessors())
    sizes = {"B": 2, "M": 4, "N": 8, "S": 16, "E": 1, "T": 3, "W": 2}
    state = {}
    for name, spec in program.inputs.items():
        buffers = spec if isinstance(spec, tuple) else (spec,)
        made = tuple(buffer.allocate(sizes, "cpu") for buffer in buffers)
        state[name] = made if isinstance(spec, tuple) else made[0]
    prompt = torch.tensor([[5, 6, 7]])
    state |= {"window": prompt.repeat(2, 1), "rows": torch.arange(2), "num_rows": torch.tensor([3, 3])}
    state |= {
        "num_forced": torch.tensor([2, 2]),
        "prompt_length": torch.tensor([3, 3]),
        "max_length": torch.tensor([9, 9]),
    }
    state |= {"block_table": torch.arange(8).view(2, 4), "repetition_penalty": torch.tensor([1.0, 1e6])}
    plain = program.step()(**state)[0]
    assert torch.equal(plain[0, :2], prompt[0, 1:]) and torch.equal(plain[1, :2], prompt[0, 1:])
    assert torch.equal(state["history"][:, :3], state["window"]) and torch.equal(state["history"][:, 3], plain[:, 2])
    assert int(plain[1, 2]) not in (5, 6, 7)


def test_a_parameter_that_is_no_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(STATE, "bias_ends")
    with pytest.raises(PassError, match="add_biases has the parameter 'bias_ends', which is no input of the step"):
        built("none", InsertProcessors())


def test_logits_that_nothing_reads_are_refused() -> None:
    with pytest.raises(PassError, match="Nothing reads the logits of the target"):
        first_of([])
