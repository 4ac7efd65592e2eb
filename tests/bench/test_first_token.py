"""The first token: the operations that a prompt needs, and the command that times requests for one token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgraph.bench import arithmetic, run
from specgraph.bench.arithmetic import prompt_flops
from specgraph.bench.config import BenchConfig
from specgraph.cli import main
from specgraph.ir.program import Program
from tests.decoding import compiled
from tests.models import VOCAB, make_model, shared_model

# tests.models: hidden 32, MLP 48, 4 heads and 2 groups of 8, 2 layers
PROJECTIONS = 32 * (32 + 16 + 16) + 32 * 32
LAYER = PROJECTIONS + 3 * 32 * 48


@pytest.fixture(autouse=True)
def known_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "measure_matmul", lambda device, dtype: 1e9)


def before_lowering(architecture: str, **overrides: Any) -> Program:
    model = make_model(architecture, **overrides) if overrides else shared_model(architecture)
    return compiled(model, "ngram").stages["insert_verify"]


@pytest.mark.parametrize("length", [1, 9, 40])
def test_operations_of_a_prompt(length: int) -> None:
    """All rows through two layers, one through the vocabulary, and 4 heads of 8 over all that a row sees."""
    seen = length * (length + 1) // 2
    expected = 2 * (2 * LAYER * length + 32 * VOCAB) + 2 * (2 * 4 * 16 * seen)
    assert prompt_flops(before_lowering("llama"), length) == expected


def test_a_window_bounds_what_a_row_sees() -> None:
    model = make_model("mistral")
    window = model.config.sliding_window
    program = compiled(model, "ngram").stages["insert_verify"]
    products = prompt_flops(before_lowering("llama"), 3 * window) - 2 * 2 * 4 * 16 * (
        3 * window * (3 * window + 1) // 2
    )
    seen = window * (window + 1) // 2 + 2 * window * window
    assert prompt_flops(program, 3 * window) == products + 2 * 2 * 4 * 16 * seen


def test_a_row_runs_through_the_experts_that_it_meets() -> None:
    config = shared_model("qwen3_moe").config
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    router = config.hidden_size * config.num_experts
    per_row = 2 * (PROJECTIONS + config.num_experts_per_tok * expert + router)
    program = before_lowering("qwen3_moe")
    attention = 2 * 2 * 4 * 16
    assert prompt_flops(program, 2) - prompt_flops(program, 1) == 2 * per_row + 2 * attention


CONV = 2 * 4 * (2 * 2 * 8 + 4 * 8)
RECURRENT = {
    "qwen3_5_text": CONV + 2 * 3 * 4 * 8 * 8,
    "kimi_linear": 2 * 4 * 3 * 4 * 8 + 2 * 3 * 4 * 8 * 8,
    "mamba2": 2 * (2 * 4 * (64 + 2 * 2 * 16) + 2 * 2 * 8 * 16 * 8),
    "mamba": 2 * (2 * 4 * 48 + 4 * 48 * 8),
    "lfm2": 2 * 2 * 3 * 32,
}
"""The operations of one row. Every convolution takes two for each weight, and every state of a gated delta rule six for
each of its elements: to add to it, to read it and to correct what is added. Without a correction, as in Mamba-2 and
Mamba, it takes four. See tests.models."""


@pytest.mark.parametrize("architecture", RECURRENT)
def test_recurrent_ops_count_for_every_row(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = before_lowering(architecture)
    counted = [prompt_flops(program, length) for length in (7, 40)]
    monkeypatch.setattr(arithmetic, "RECURRENT", {})
    without = [prompt_flops(program, length) for length in (7, 40)]
    assert [a - b for a, b in zip(counted, without, strict=True)] == [n * RECURRENT[architecture] for n in (7, 40)]


def test_batch_sizes_are_fewer_for_the_first_token() -> None:
    assert BenchConfig().batches == [1, 8, 32]
    assert BenchConfig(what="first_token").batches == [1, 8]
    assert BenchConfig(what="first_token", batch_sizes=[3]).batches == [3]


def test_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "a.json", tmp_path / "first.svg"
    given = ["target=tiny-shape", "device=cpu", "draft=none", "prompt_lengths=[5,33]", "batch_sizes=[1,2]"]
    assert main(["bench", "first_token", *given, f"json={written}", f"plot={drawn}"]) == 0
    shown = capsys.readouterr().out
    titles = "prompt batch ms bytes ms FLOPs ms ms/limit first call ms peak GB"
    assert " ".join(shown.splitlines()[-5].split()) == titles
    found = json.loads(written.read_text())
    assert found["matmul_tflop_per_s"] == 0.001 and found["draft"] == "none"
    assert [(row["prompt_length"], row["batch"]) for row in found["rows"]] == [(5, 1), (5, 2), (33, 1), (33, 2)]
    for row in found["rows"]:
        assert row["limit_ms"] == max(row["bytes_ms"], row["flops_ms"]) and row["ms"] > 0
        assert row["ratio"] == pytest.approx(row["ms"] / row["limit_ms"])
    one, two = found["rows"][:2]
    assert two["flops_ms"] == pytest.approx(2 * one["flops_ms"]) and two["bytes_ms"] == one["bytes_ms"]
    assert drawn.read_text().startswith("<?xml")


def test_a_drafter_with_a_random_head(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["target=tiny-shape", "device=cpu", "prompt_lengths=[9]", "batch_sizes=[1]", "num_speculative_tokens=[2]"]
    assert main(["bench", "first_token", *given]) == 0
    assert "eagle3 (random)" in capsys.readouterr().out


def test_a_prompt_that_the_target_has_no_positions_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "first_token", "target=tiny-shape", "device=cpu", "prompt_lengths=[8,131072]"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        "error: prompt_lengths=[8, 131072] take up to 131073 positions, but tiny-shape is right for"
    )
