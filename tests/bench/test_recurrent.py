"""Bench on targets with recurrent layers: the bytes of their states, and the shape of Qwen3.5-9B."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specgraph.bench.models import SHAPES, random_target
from specgraph.bench.sessions import Work
from specgraph.cli import main
from specgraph.ir.program import Program
from specgraph.ir.traffic import STAGE, CallReads, state_size, step_reads, step_traffic
from specgraph.kernels.recurrent.arguments import CHUNK
from specgraph.runtime.outputs.output import StreamChunk
from tests.decoding import compiled
from tests.models import HYBRIDS, make_head, shared_model

NAME = "qwen3.5-9b-shape"
QUICK = ["device=cpu", "num_speculative_tokens=[2]", "steps=3", "warmup=1", "prompt_length=9",
         "debug.self_check=false", "pipeline.verify=false"]  # fmt: skip

# Each is the bytes of a state and of a cached row, and the most settled rows that are cached; see tests.models.
CONV = 0, 4 * (2 * 2 * 8 + 4 * 8), 3
"""The inputs of the convolution are the queries, keys and values of the delta rule."""
DELTA_RULE = 4 * 4 * 8 * 8, 4 * (2 * 8 + 4 * 8 + 4 + 4 * CHUNK), CHUNK - 1
SCAN_CONV = 0, 4 * 48, 3
SCAN = 4 * 48 * 8, 4 * (48 + 48 + 8), CHUNK - 1
LFM2_CONV = 0, 4 * 32, 2
"""Two layers, of which each has inputs as wide as the hidden state."""
KDA_CONV = 0, 4 * 3 * 4 * 8, 3
KDA = 4 * 4 * 8 * 8, 4 * (3 * 4 * 8 + 4 * CHUNK), CHUNK - 1
"""A cached row has a gate for each channel of its keys."""
EXPECTED = {"qwen3_5_text": [CONV, DELTA_RULE], "mamba": 2 * [SCAN_CONV, SCAN], "lfm2": 2 * [LFM2_CONV],
            "kimi_linear": [KDA_CONV, KDA], "bailing_hybrid": [KDA_CONV, KDA]}  # fmt: skip
PER_TOKEN = {"qwen3_5_text": 4 * 2 * 2 * 8, "mamba": 0, "lfm2": 4 * 2 * 2 * 8,
             "kimi_linear": 4 * 4 * (8 + 8 + 12), "bailing_hybrid": 4 * 4 * (8 + 8 + 12)}  # fmt: skip
"""The bytes of the keys and values of one token, in the layer with attention."""
COUNTED = [("qwen3_5_text", 3), ("mamba", 2), ("lfm2", 2), ("kimi_linear", 3),
           *((name, 3) for name in HYBRIDS if name == "bailing_hybrid")]  # fmt: skip
"""Architectures, each with a K. An older transformers does not have the last one."""


@functools.cache
def program_of(architecture: str, k: int) -> Program:
    return compiled(shared_model(architecture), "ngram", k).stages[STAGE]


def moved(state: int, row: int, settled: int, new: int, tokens: float) -> float:
    """A state is read, and written once in a chunk; the rows behind it are half of those that a chunk can cache."""
    if not state:
        return row * (settled + new)
    return state + state * tokens / CHUNK + row * ((CHUNK - 1) / 2 + new)


@pytest.mark.parametrize(("architecture", "k"), COUNTED)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1.0), (5, 2.5)])
def test_bytes_of_states_follow_from_the_buffers(architecture: str, k: int, batch: int, tokens: float) -> None:
    traffic = step_traffic(program_of(architecture, k), batch, 20.0, k, tokens)
    ops = EXPECTED[architecture]
    assert traffic.state == batch * sum(moved(*op, k + 1, tokens) for op in ops)
    assert traffic.cache == batch * 20 * PER_TOKEN[architecture]
    assert traffic.total == traffic.target_weights + traffic.cache + traffic.state


@pytest.mark.parametrize(("architecture", "k"), COUNTED)
def test_memory_of_a_sequence_has_room_for_rows_that_are_not_settled(architecture: str, k: int) -> None:
    expected = 0
    for state, row, settled in EXPECTED[architecture]:
        # A layer without a state goes on from the last boundary with the rows in front of it, which it keeps for that.
        kept = settled if state else settled + CHUNK - 1
        expected += state + row * (kept + 1 + 2 * k)
    assert state_size(program_of(architecture, k)) == expected


def test_what_a_step_reads_survives_a_file() -> None:
    calls = step_reads(program_of("qwen3_5_text", 3))
    assert calls[0].reads.states and not calls[-1].reads.states
    records = json.loads(json.dumps([call.to_record() for call in calls]))
    assert [CallReads.of_record(record) for record in records] == calls


@pytest.mark.parametrize("tokens", [1.0, 2.5])
def test_of_a_chain_only_the_first_call_writes_states(tokens: float) -> None:
    """The rows of the others are drafts, which the next step runs again if they were accepted."""
    draft = shared_model("qwen3_5_text", 1)
    program = compiled(shared_model("llama"), "draft_model", 3, draft=draft).stages[STAGE]
    calls = [call for call in step_reads(program) if call.reads.states]
    assert [(call.node, call.settles) for call in calls] == [("draft_0", True), ("draft_1", False), ("draft_2", False)]
    first, other = (sum(moved(*op, 1, kept) for op in EXPECTED["qwen3_5_text"]) for kept in (tokens, 0.0))
    assert step_traffic(program, 5, 20.0, 3, tokens).state == 5 * (first + 2 * other)
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


def test_states_of_a_session_are_written_as_often_as_its_steps_give_tokens() -> None:
    """Five steps of two sequences, of which one gets 4 tokens in each and the other 1: 2.5 for both on average."""
    program, work = program_of("qwen3_5_text", 3), Work()
    steps = [StreamChunk([[7] * 4, [7]], [False, False], None) for _ in range(6)]
    work.add_call([9, 9], steps)
    assert (work.prompt_steps, work.decode_steps, work.emitted) == (1, {2: 5}, {2: 25})
    contexts = [[9 + 4 * (step + 1), 9 + step + 1] for step in range(5)]
    mean = sum(map(sum, contexts)) / 10
    prompts = step_traffic(program, 1, 0.0, 3).target_weights
    assert work.num_bytes(program, 3) == 5 * step_traffic(program, 2, mean, 3, 2.5).total + prompts


def test_weights_of_the_9b_shape() -> None:
    """A step reads all of them but the embedding: 15.87 GB in bf16."""
    target = random_target(NAME, torch.device("meta"), torch.bfloat16)
    embedding = target.get_input_embeddings().weight.numel()
    read = sum(parameter.numel() for parameter in target.parameters()) - embedding
    assert 2 * read == pytest.approx(15.87e9, rel=1e-3) and 2 * embedding == pytest.approx(2.034e9, rel=1e-3)
    kinds = [layer for layer in target.config.layer_types if layer == "linear_attention"]
    assert len(kinds) == 24 and target.config.num_hidden_layers == 32


@pytest.fixture(scope="module")
def small() -> Iterator[str]:
    """The name of a shape with the heads of :data:`NAME`, and with one layer of each kind that is small otherwise.

    There is one model of it, so that it is traced once.
    """
    layers = ["linear_attention", "full_attention"]
    fewer = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 512, "num_hidden_layers": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES, "small-9b-shape", {**SHAPES[NAME], **fewer, "layer_types": layers})
        patch.setattr("specgraph.bench.models.random_target", functools.cache(random_target))
        yield "small-9b-shape"


@pytest.mark.parametrize(("draft", "k"), [("none", 0), ("ngram", 2), ("eagle3", 2), ("mtp", 2)])
def test_drafts_of_the_9b_shape(
    small: str, draft: str, k: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """How often a state is written follows from how many tokens a step gives, which are between 1 and K + 1."""
    written = tmp_path / "steps.json"
    given = [f"target={small}", f"draft={draft}", "batch_sizes=[1,2]", *QUICK, f"json={written}"]
    assert main(["bench", *given]) == 0
    assert "state GB  state GB/seq  limit ms" in capsys.readouterr().out
    state, row = 4 * 32 * 128 * 128, 4 * (16 * 128 + 32 * 128 + 32 + 32 * CHUNK)
    conv = 4 * (2 * 16 * 128 + 32 * 128)
    for found in json.loads(written.read_text())["rows"]:
        assert found["k"] == k and found["sequence_bytes"] == state + row * (CHUNK + 2 * k) + conv * (3 + CHUNK + 2 * k)
        least = found["batch"] * (moved(state, row, CHUNK - 1, k + 1, 1.0) + conv * (3 + k + 1))
        assert least <= found["state_bytes"] <= least + found["batch"] * state * k / CHUNK
        total = sum(found[f"{part}_bytes"] for part in ("target", "draft", "cache", "state"))
        assert found["limit_ms"] == pytest.approx(total / 1e9 * 1e3)
