"""``bench sessions`` on the CPU: the work it draws, the steps and bytes it counts, what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specgraph.bench.config import BenchConfig
from specgraph.bench.report import table
from specgraph.bench.sessions import (
    BATCHES,
    SESSION,
    Work,
    Workload,
    file_workload,
    measure,
    random_workload,
)
from specgraph.cli import main
from tests.bench.test_bench import PER_TOKEN, ROTARY, TARGET
from tests.cli.conftest import save_model
from tests.decoding import compiled
from tests.models import make_head, ragged_prompts, shared_model

PROMPTS = ragged_prompts((3, 9, 5, 2, 7))
NEW = [6, 2, 9, 1, 4]
QUICK = ["device=cpu", "max_batch_size=2", "num_speculative_tokens=[2]", "debug.self_check=false"]


def test_random_work_repeats_and_stays_in_its_ranges() -> None:
    options = BenchConfig(target="x", num_prompts=200, prompt_range=[3, 9], new_range=[2, 4])
    work, again = random_workload(options, 50), random_workload(options, 50)
    assert {len(prompt) for prompt in work.prompts} == set(range(3, 10))
    assert {*work.new_tokens} == {2, 3, 4}
    assert {int(token) for prompt in work.prompts for token in prompt} == set(range(50))
    assert all(map(torch.equal, work.prompts, again.prompts)) and work.new_tokens == again.new_tokens


def test_calls_cut_the_work_into_batches_and_keep_seeds() -> None:
    calls = Workload(PROMPTS, NEW, []).calls(2)
    assert [len(call["input_ids"]) for call in calls] == [2, 2, 1]
    assert [call["seed"] for call in calls] == [[0, 1], [2, 3], [4]]
    assert [call["max_new_tokens"] for call in calls] == [NEW[:2], NEW[2:4], NEW[4:]]


def test_prompts_of_a_file_are_repeated_and_end_as_the_model_says() -> None:
    options = BenchConfig(target="x", num_prompts=7, prompts="a.txt", new_range=[2, 30])
    work = file_workload(options, PROMPTS)
    assert [id(prompt) for prompt in work.prompts] == [id(PROMPTS[index % 5]) for index in range(7)]
    assert work.new_tokens == [30] * 7 and work.eos_ids is None


def test_bytes_are_those_of_every_step() -> None:
    """A plain sequence of p tokens that adds n reads contexts of p + 1 to p + n - 1 tokens in two layers."""
    decoder = compiled(shared_model("llama"), "none", cache={"prefill_chunk": 64, "block_size": 4}, max_batch_size=2)
    work = Work()
    (call,) = Workload(PROMPTS, NEW, []).calls(5)
    work.add_call([len(prompt) for prompt in PROMPTS], decoder.stream(**call))
    contexts = sum(len(prompt) + i for prompt, n in zip(PROMPTS, NEW, strict=True) for i in range(1, n))
    assert sum(batch * steps for batch, steps in work.decode_steps.items()) == sum(n - 1 for n in NEW)
    assert (max(work.decode_steps), work.prompt_tokens, work.prompt_steps) == (2, 8, 1)  # other prompts join others
    assert work.shared_steps == 3
    steps = work.prompt_steps + work.decode_steps.total()
    assert steps == decoder.generate(**call).stats.steps
    expected = (TARGET + ROTARY) * steps + 2 * PER_TOKEN * contexts
    # Contexts are means, so each number of sequences may lose a part of a byte.
    assert 0 <= expected - work.num_bytes(decoder.stages["insert_verify"], 0) <= len(work.decode_steps)


def test_batches_wait_for_their_longest_sequence_and_a_session_does_not() -> None:
    """Every draft is accepted, so the steps of both can be counted by hand."""
    model = shared_model("llama", dtype=torch.float64)
    decoder = compiled(
        model, "eagle3", 3, draft=make_head(model), max_batch_size=2, cache={"prefill_chunk": 64, "block_size": 4},
        verify={"rule": "synthetic", "acceptance_rate": 1.0},
    )  # fmt: skip
    prompts, new_tokens = ragged_prompts((4,) * 8), [41, 5] * 4
    batches, session = measure(decoder, Workload(prompts, new_tokens, []), 3, 1e9, rounds=2)
    assert (batches["how"], session["how"]) == (BATCHES, SESSION)
    # The first token, then 10 steps of 4 for 40 tokens.
    assert (batches["prompt_steps"], batches["decode_steps"]) == (4, 40)
    assert session["decode_steps"] < 30
    for row in (batches, session):
        assert row["new_tokens"] == sum(new_tokens) and row["acceptance_length"] == 4
        assert row["tokens_per_second"] == pytest.approx(row["new_tokens"] / row["seconds"])
        assert row["share"] == pytest.approx(row["limit_s"] / row["seconds"])
        assert row["ratio"] == pytest.approx(1 / row["share"])
        assert row["differing"] == 0
    assert batches["speedup"] == 1
    assert session["speedup"] == pytest.approx(batches["seconds"] / session["seconds"])
    assert session["limit_s"] < batches["limit_s"]
    titles = "K decoded prompt steps decode steps with prompts tokens tokens/step s tokens/s x batches limit s share of"
    assert " ".join(table([batches, session]).splitlines()[0].split()) == f"{titles} limit differ compile s"


def test_table_json_and_plot_of_random_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "a.json", tmp_path / "a.svg"
    given = ["target=tiny-shape", "num_prompts=5", "prompt_range=[3,9]", "new_range=[2,9]", "dtype=float64"]
    assert main(["bench", "sessions", *given, *QUICK, f"json={written}", f"plot={drawn}"]) == 0
    shown = capsys.readouterr().out
    assert "draft               eagle3 (random)" in shown and "prompts             random" in shown
    found = json.loads(written.read_text())
    assert (found["num_prompts"], found["max_batch_size"], found["what"]) == (5, 2, "sessions")
    assert [(row["k"], row["how"], row["differing"]) for row in found["rows"]] == [(2, BATCHES, 0), (2, SESSION, 0)]
    assert drawn.read_text().startswith("<?xml")


def test_prompts_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = save_model(tmp_path / "target"), tmp_path / "a.txt"
    file.write_text("one\nand two\n")
    given = [f"target={model}", f"prompts={file}", "template='Q: {question}'", "num_prompts=3", "new_range=[1,4]"]
    assert main(["bench", "sessions", *given, *QUICK, "draft=ngram", "verify=strict"]) == 0
    shown = capsys.readouterr().out
    assert f"prompts             {file}" in shown
    assert f"prompt_tokens       {2 * len('Q: one') + len('Q: and two')}" in shown
