"""The bench command on the CPU: the bytes it counts, the columns it prints, the options it refuses."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.bench import steps
from specgraph.bench.config import BenchConfig
from specgraph.bench.models import SHAPES, random_head, random_target
from specgraph.bench.timing import measure_bandwidth, median_seconds, sweep
from specgraph.cli import main
from specgraph.drafters.eagle3 import RANDOM_VOCAB, Eagle3DraftConfig
from specgraph.ir.traffic import step_traffic
from specgraph.runtime.decoder import SpeculativeDecoder
from tests.decoding import compiled
from tests.models import VOCAB, make_head, make_model, shared_model

QUICK = ["device=cpu", "num_speculative_tokens=[2]", "steps=3", "warmup=1", "prompt_length=9"]

# tests.models: hidden 32, MLP 48, 4 heads and 2 groups of 8, 2 layers; float32
LAYER = 4 * (32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32)
TARGET = 2 * LAYER + 4 * (32 + 32 * VOCAB)
ROTARY = 4 * 4
PER_TOKEN = 4 * 2 * 2 * 8
"""Bytes of the keys and values of one layer."""


def decoder_of(kind: str, parallel: bool = False, k: int = 3, **extra: Any) -> SpeculativeDecoder:
    extra |= {"passes": {"parallel_draft": {"enabled": parallel}}, "debug": {"self_check": False}}
    draft: Any = {"eagle3": HEADS[parallel], "draft_model": shared_model("llama", 1)}.get(kind)
    return compiled(shared_model("llama"), kind, k, draft=draft, **extra)


HEADS = {parallel: make_head(shared_model("llama"), vocab=50) for parallel in (False, True)}
HEAD_CALL = 4 * (64 * 64 + 32 * 32 + 3 * 32 * 48 + 4 * 32 + 32 * 50)
"""One layer with inputs twice as wide, its norms, the last norm, a vocabulary of 50."""
FC = 4 * 3 * 32 * 32
MAP = 8 * 50


@pytest.mark.parametrize(
    ("kind", "parallel", "draft", "cached_layers"),
    [
        ("none", False, 0, 2),
        ("ngram", False, 0, 2),
        ("draft_model", False, 3 * (TARGET + ROTARY), 2 + 3 * 2),
        ("eagle3", False, 3 * (HEAD_CALL + ROTARY) + FC + MAP, 2 + 3),
        ("eagle3", True, HEAD_CALL + ROTARY + FC + MAP + 4 * 32, 2 + 1),
    ],
)
def test_bytes_of_a_step(kind: str, parallel: bool, draft: int, cached_layers: int) -> None:
    """Each weight once per call and no embedding, K calls or one, the context of every sequence in every call."""
    traffic = step_traffic(decoder_of(kind, parallel).stages["insert_verify"], 5, 20.5, 3)
    assert traffic.target_weights == TARGET + ROTARY
    assert traffic.draft_weights == draft
    assert traffic.cache == 5 * 20.5 * PER_TOKEN * cached_layers
    assert traffic.total == TARGET + ROTARY + draft + traffic.cache


def test_a_window_bounds_what_is_read_and_a_tied_head_counts() -> None:
    model = make_model("mistral", tie_word_embeddings=True)
    program = compiled(model, "none", debug={"self_check": False}).stages["insert_verify"]
    traffic = step_traffic(program, 1, 100.0, 0)
    assert traffic.cache == 2 * PER_TOKEN * model.config.sliding_window
    assert traffic.target_weights == TARGET + ROTARY


@functools.cache
def decoder_with_experts() -> SpeculativeDecoder:
    return compiled(shared_model("qwen3_moe"), "ngram", debug={"self_check": False})


@pytest.mark.parametrize(("batch", "k", "met"), [(1, 0, 1 / 2), (2, 0, 3 / 4), (1, 3, 15 / 16)])
def test_of_experts_those_count_that_rows_meet(batch: int, k: int, met: float) -> None:
    """Two of four for each row, all alike."""
    program = decoder_with_experts().stages["insert_verify"]
    experts = shared_model("qwen3_moe").model.layers[0].mlp.experts
    per_layer = 4 * (experts.gate_up_proj.numel() + experts.down_proj.numel())
    every = step_traffic(program, 10**6, 0.0, k).target_weights
    assert every > 2 * per_layer
    assert step_traffic(program, batch, 0.0, k).target_weights == every - round(2 * per_layer * (1 - met))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_can_be_built(name: str) -> None:
    with torch.device("meta"):
        target = random_target(name, torch.device("meta"), torch.bfloat16)
        head = random_head(target, Eagle3DraftConfig(parallel=True))
    assert target.dtype == head.module.lm_head.weight.dtype == torch.bfloat16
    assert target.model.rotary_emb.inv_freq.dtype == torch.float32
    assert head.module.lm_head.out_features == min(RANDOM_VOCAB, target.config.vocab_size)
    assert head.module.embed_tokens.weight.shape == target.get_input_embeddings().weight.shape
    if name == "llama-3-8b-shape":
        sizes = {n: p.numel() * 2 for n, p in head.module.named_parameters() if n != "embed_tokens.weight"}
        fc = sizes.pop("fc.weight")
        assert (sum(sizes.values()), fc) == (pytest.approx(0.75e9, rel=0.01), pytest.approx(0.10e9, rel=0.01))


def test_random_weights_repeat_and_leave_the_callers_numbers_alone() -> None:
    torch.manual_seed(3)
    first = random_target("tiny-shape", torch.device("cpu"), torch.float32)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after) and torch.get_default_dtype() == torch.float32
    again = random_target("tiny-shape", torch.device("cpu"), torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    head = random_head(first, Eagle3DraftConfig())
    assert head.module.embed_tokens.weight.data_ptr() == first.get_input_embeddings().weight.data_ptr()
    assert head.module.mask_hidden is None and head.features == (0, 1, 2)


def test_steps_that_are_timed_are_decode_steps() -> None:
    """Every draft accepted: K + 1 tokens in each; the context grows by as many."""
    decoder = decoder_of("eagle3", verify={"rule": "synthetic", "acceptance_rate": 1.0})
    options = BenchConfig(target="x", prompt_length=11, steps=4, warmup=2)
    prompts = steps.random_prompts(VOCAB, 2, 11)
    timed = steps.time_steps(decoder, prompts, 3, options)
    assert len(timed.seconds) == 4 and min(timed.seconds) > 0
    assert timed.tokens_per_step == 4
    # The prompt's step gives one token, two warm-up steps four each at most (the first has no drafts yet: one).
    assert 11 + 1 + 1 + 4 <= timed.context - 6 <= 11 + 1 + 8


def test_bandwidth_and_times_are_positive() -> None:
    assert measure_bandwidth(torch.device("cpu"), 2**20) > 0
    assert median_seconds(torch.device("cpu"), [lambda: torch.ones(3), lambda: torch.ones(4)], 3, 1) > 0


def test_the_sweep_reads_every_value() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    values = torch.randn(2 * 8 * 4096, device=device)
    expected = values.double().view(2, -1).sum(1)
    assert torch.allclose(sweep(values).double(), expected, atol=1e-2)


def test_table_json_and_plot_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "a b.json", tmp_path / "steps.svg"
    given = ["target=tiny-shape", "batch_sizes=[1,2]", *QUICK, f"json={written}", f"plot={drawn}"]
    assert main(["bench", *given]) == 0
    shown = capsys.readouterr().out
    titles = "batch K ms/step tokens/step tokens/s target GB draft GB cache GB state GB state GB/seq limit ms ms/limit"
    assert " ".join(shown.splitlines()[-3].split()) == f"{titles} compile s peak GB"
    assert "draft               eagle3 (random)" in shown and "bandwidth_gb_per_s  1.0" in shown
    found = json.loads(written.read_text())
    assert [(row["batch"], row["k"]) for row in found["rows"]] == [(1, 2), (2, 2)]
    for row in found["rows"]:
        assert row["tokens_per_step"] == pytest.approx(1 + 0.7 + 0.49)
        total = row["target_bytes"] + row["draft_bytes"] + row["cache_bytes"] + row["state_bytes"]
        assert row["limit_ms"] == pytest.approx(total / 1e9 * 1e3)
        assert row["ratio"] == pytest.approx(row["ms"] / row["limit_ms"])
        assert row["tokens_per_second"] == pytest.approx(row["batch"] * row["tokens_per_step"] / row["ms"] * 1e3)
    assert drawn.read_text().startswith("<?xml")


def test_a_model_and_its_draft_by_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_model("llama", num_hidden_layers=1).save_pretrained(tmp_path / "target")
    make_model("llama", seed=1, num_hidden_layers=1).save_pretrained(tmp_path / "draft")
    given = [f"target={tmp_path / 'target'}", f"draft={tmp_path / 'draft'}", "batch_sizes=[2]", *QUICK]
    assert main(["bench", *given, "verify=strict"]) == 0
    shown = capsys.readouterr().out
    assert f"draft               {tmp_path / 'draft'}" in shown
    assert shown.splitlines()[-1].split()[:2] == ["2", "2"]


MISTAKES = {
    "target=llama-3-8-shape": ("target=llama-3-8-shape", "'llama-3-8b-shape'"),
    "target=./nowhere": ("target=./nowhere", "no such folder"),
    "session": ("session", "'sessions'"),
    "batch_sizes=[0,4]": ("batch_sizes", "[0, 4]"),
    "batch_sizes=4": ("batch_sizes", "a list"),
    "num_speculative_tokens=[]": ("num_speculative_tokens", "[]"),
    "prompt_lengths=[0]": ("prompt_lengths", "[0]"),
    "steps=0": ("steps", "at least 1"),
    "prompt_lenght=3": ("'prompt_lenght'", "'prompt_length'"),
    "prompt_length=200000": ("prompt_length=200000", "tiny-shape is right for 131072"),
    "json=no/such/folder.json": ("json=no/such/folder.json", "no folder"),
    "plot=a.gif": ("plot=a.gif", ".svg"),
    "dtype=float31": ("dtype=float31", "'float32'"),
    "draft=./nowhere": ("draft=./nowhere", "no such file or folder"),
    "cpu threads=[0]": ("threads", "[0]"),
    "cpu rounds=0": ("rounds", "at least 1"),
    "cpu plot=a.png": ("plot=a.png", "no limits to draw"),
    "cpu drafts=[./nowhere]": ("drafts=./nowhere", "no such folder"),
    "sessions num_prompts=0": ("num_prompts", "at least 1"),
    "sessions prompt_range=[5]": ("prompt_range", "the least and the most"),
    "sessions new_range=[9,3]": ("new_range", "[9, 3]"),
    "sessions prompts=a.txt": ("prompts=a.txt", "tokenizer"),
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_names_the_key_and_what_is_allowed(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = [] if given.startswith("target=") else ["target=tiny-shape"]
    assert main(["bench", *given.split(), *target]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.count("\n") == 1
    assert all(word in shown for word in MISTAKES[given])


def test_a_target_that_is_no_model_is_named_as_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", f"target={tmp_path}"]) == 2
    assert capsys.readouterr().err.startswith(f"error: target={tmp_path} cannot be loaded as a causal LM: ")


def test_missing_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 2
    assert capsys.readouterr().err.startswith("error: target is not set: python -m specgraph bench ")


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("specgraph.plots.find_spec", lambda name: None)
    assert main(["bench", "target=tiny-shape", "plot=a.png"]) == 2
    assert capsys.readouterr().err.startswith("error: plot=a.png needs matplotlib: pip install -e '.[plot]'")
