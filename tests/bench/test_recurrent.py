"""Bench on targets with recurrent layers: the bytes of their states."""

from __future__ import annotations

import functools
import json

import pytest

from specgraph.bench.sessions import Work
from specgraph.ir.program import Program
from specgraph.ir.traffic import STAGE, CallReads, state_size, step_reads, step_traffic
from specgraph.kernels.recurrent.arguments import CHUNK
from tests.decoding import compiled
from tests.models import make_head, shared_model

pytestmark = pytest.mark.usefixtures("cached_traces")

# Each is the bytes of a state and of a cached row, and the most settled rows that are cached; see tests.models.
CONV = 0, 4 * (2 * 2 * 8 + 4 * 8), 3
"""The inputs of the convolution are the queries, keys and values of the delta rule."""
DELTA_RULE = 4 * 4 * 8 * 8, 4 * (2 * 8 + 4 * 8 + 4 + 4 * CHUNK), CHUNK - 1
SCAN_CONV = 0, 4 * 48, 3
SCAN = 4 * 48 * 8, 4 * (48 + 48 + 8), CHUNK - 1
LFM2_CONV = 0, 4 * 32, 2
"""Two layers, of which each has inputs as wide as the hidden state."""
EXPECTED = {"qwen3_5_text": [CONV, DELTA_RULE], "mamba": 2 * [SCAN_CONV, SCAN], "lfm2": 2 * [LFM2_CONV]}


@functools.cache
def program_of(architecture: str, k: int) -> Program:
    return compiled(shared_model(architecture), "ngram", k).stages[STAGE]


def moved(state: int, row: int, settled: int, new: int, tokens: float) -> float:
    """A state is read, and written once in a chunk; the rows behind it are half of those that a chunk can cache."""
    if not state:
        return row * (settled + new)
    return state + state * tokens / CHUNK + row * ((CHUNK - 1) / 2 + new)


@pytest.mark.parametrize(("architecture", "k"), [("qwen3_5_text", 3), ("mamba", 2), ("lfm2", 2)])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1.0), (5, 2.5)])
def test_bytes_of_states_follow_from_the_buffers(architecture: str, k: int, batch: int, tokens: float) -> None:
    traffic = step_traffic(program_of(architecture, k), batch, 20.0, k, tokens)
    ops = EXPECTED[architecture]
    assert traffic.state == batch * sum(moved(*op, k + 1, tokens) for op in ops)
    attention_layers = {"qwen3_5_text": 1, "mamba": 0, "lfm2": 1}[architecture]
    assert traffic.cache == batch * 20 * attention_layers * 4 * 2 * 2 * 8
    assert traffic.total == traffic.target_weights + traffic.cache + traffic.state


@pytest.mark.parametrize(("architecture", "k"), [("qwen3_5_text", 3), ("mamba", 2), ("lfm2", 2)])
def test_memory_of_a_sequence_has_room_for_rows_that_are_not_settled(architecture: str, k: int) -> None:
    expected = sum(state + row * (settled + 1 + 2 * k) for state, row, settled in EXPECTED[architecture])
    assert state_size(program_of(architecture, k)) == expected


def test_what_a_step_reads_survives_a_file() -> None:
    calls = step_reads(program_of("qwen3_5_text", 3))
    assert calls[0].reads.states and not calls[-1].reads.states
    records = json.loads(json.dumps([call.to_record() for call in calls]))
    assert [CallReads.of_record(record) for record in records] == calls


def test_a_head_has_no_state_of_this_kind() -> None:
    model = shared_model("qwen3_5_text")
    program = compiled(model, "eagle3", 3, draft=make_head(model)).stages[STAGE]
    with_head, plain = (step_traffic(given, 4, 20.0, 3) for given in (program, program_of("qwen3_5_text", 3)))
    assert with_head.state == plain.state and with_head.cache == plain.cache + 4 * 20 * 3 * 4 * 2 * 2 * 8


def test_without_recurrent_layers_there_are_no_states() -> None:
    program = program_of("llama", 3)
    assert state_size(program) == 0 and step_traffic(program, 2, 20.0, 3).state == 0


def test_of_steps_that_ran_prompts_only_the_weights_count() -> None:
    """How many sequences their rows belong to is not known."""
    program = program_of("qwen3_5_text", 3)
    weights = step_traffic(program, 1, 0.0, 3).target_weights
    assert Work(prompt_steps=2, prompt_tokens=80).num_bytes(program, 3) == 2 * weights
