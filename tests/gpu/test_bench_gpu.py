"""The bench command and the scripts for developers run on a GPU; what they measure is not judged here."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
import torch

from benchmarks import kernels
from specgraph.bench.timing import measure_bandwidth, median_seconds
from specgraph.cli import main

SMALL = ["target=llama-3.2-1b-shape", "batch_sizes=[1,4]", "num_speculative_tokens=[3]", "steps=5", "warmup=2"]


def test_bandwidth_and_captured_calls() -> None:
    device = torch.device("cuda")
    assert measure_bandwidth(device, 2**26) > 0
    values = [torch.randn(1000, device=device) for _ in range(3)]
    assert median_seconds(device, [lambda x=x: x.sum() for x in values], repeats=3, warmup=1) > 0  # type: ignore[misc]


@pytest.mark.parametrize("draft", ["none", "ngram", "eagle3", "peagle"])
def test_steps(draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *SMALL, f"draft={draft}", f"json={tmp_path / 'a.json'}"]) == 0, capsys.readouterr().err
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["batch"] for row in found["rows"]] == [1, 4]
    assert found["dtype"] == "bfloat16"
    assert all(row["ms"] > 0 and row["peak_bytes"] > row["target_bytes"] for row in found["rows"])


@pytest.mark.parametrize("draft", ["none", "eagle3"])
def test_steps_of_a_shape_with_recurrent_layers(draft: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gc.collect()  # the peak is that of the process, and what the last test compiled holds itself in cycles
    given = ["target=qwen3.5-9b-shape", *SMALL[1:], f"draft={draft}", f"json={tmp_path / 'a.json'}"]
    assert main(["bench", *given]) == 0, capsys.readouterr().err
    for row in json.loads((tmp_path / "a.json").read_text())["rows"]:
        assert row["state_bytes"] > row["batch"] * 24 * 4 * 32 * 128 * 128
        assert row["target_bytes"] < row["peak_bytes"] < 2 * row["target_bytes"]


def test_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["target=llama-3.2-1b-shape", "draft=none", "prompt_lengths=[100,700]", "batch_sizes=[1,4]"]
    assert main(["bench", "first_token", *given, f"json={tmp_path / 'a.json'}"]) == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [(row["prompt_length"], row["batch"]) for row in rows] == [(100, 1), (100, 4), (700, 1), (700, 4)]
    assert all(row["ms"] > row["limit_ms"] / 2 > 0 and row["peak_bytes"] > 2e9 for row in rows)


def test_kernels() -> None:
    rows = kernels.main(SMALL)
    assert {row["kernel"] for row in rows} == {
        "linear", "rms_norm", "paged_attention", "verify", "record_tokens", "ngram_lookup", "suffix_lookup"
    }  # fmt: skip
    assert all(row["us"] > 0 for row in rows)
    # A lookup on a CPU is its definition, and no library has one.
    assert {row["kernel"] for row in rows if not row["library_us"]} == {"ngram_lookup", "suffix_lookup"}


def test_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["num_prompts=20", "prompt_range=[8,300]", "new_range=[2,60]", "max_batch_size=4"]
    assert main(["bench", "sessions", *SMALL, *given, f"json={tmp_path / 'a.json'}"]) == 0, capsys.readouterr().err
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert [row["differing"] for row in rows] == [0, 0]
    assert all(row["new_tokens"] > 0 and 0 < row["share"] < 1 for row in rows)
