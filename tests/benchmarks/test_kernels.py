"""Single kernels: their sizes, the bytes they move, and that a library computes the same as what is timed."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import cases, main, split_maxima
from benchmarks.sizes import Experts, Sizes
from specgraph.bench.config import BenchConfig
from specgraph.bench.models import random_target, shape_config


@pytest.mark.parametrize(("name", "billions"), [("llama-3-8b-shape", 15.01), ("qwen3.5-9b-shape", 15.87)])
def test_linears_are_all_weights_that_a_step_reads(name: str, billions: float) -> None:
    """All but the embedding, up to the norms and what is as small; in GB of bf16."""
    target = random_target(name, torch.device("meta"), torch.bfloat16)
    read = sum(p.numel() for p in target.parameters()) - target.get_input_embeddings().weight.numel()
    products = {name: inputs * outputs for name, (inputs, outputs) in Sizes.of(target.config).linears.items()}
    kinds = getattr(target.config, "layer_types", None) or ["full_attention"] * target.config.num_hidden_layers
    mixers = {"full_attention": ("qkv", "o"), "linear_attention": ("delta_rule_in", "delta_rule_out")}
    layers = [products[name] for kind in kinds for name in (*mixers[kind], "gate_up", "down")]
    assert 2 * (sum(layers) + products["lm_head"]) == pytest.approx(billions * 1e9, rel=1e-3)
    assert 2 * read == pytest.approx(billions * 1e9, rel=1e-3)


def test_experts_are_in_the_place_of_the_feed_forward_part() -> None:
    sizes = Sizes.of(shape_config("qwen3-30b-a3b-shape"))
    assert sizes.experts == Experts(128, 8, 768)
    assert {*sizes.linears} == {"qkv", "o", "lm_head"}


def test_maxima_of_splits() -> None:
    rows = torch.randn(3, 300, device="cuda" if torch.cuda.is_available() else "cpu")
    expected = torch.stack([part.amax(-1) for part in rows.split(128, -1)], -1)
    assert torch.equal(split_maxima(rows, 128, 4), expected)


def test_table_json_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written, drawn = tmp_path / "kernels.json", tmp_path / "kernels.svg"
    given = ["target=tiny-shape", "device=cpu", "batch_sizes=[2]", "num_speculative_tokens=[2]", "prompt_length=9"]
    found = main([*given, "steps=3", "warmup=1", f"json={written}", f"plot={drawn}"])
    assert "library us" in capsys.readouterr().out and drawn.read_text().startswith("<?xml")
    assert json.loads(written.read_text())["rows"] == [row.values for row in found]
    assert {row["kernel"] for row in found} == {
        "linear", "rms_norm", "paged_attention", "verify", "record_tokens", "ngram_lookup", "suffix_lookup"
    }  # fmt: skip
    alone = {"ngram_lookup", "suffix_lookup"}  # which PyTorch has no form of that could be captured
    assert all(row["us"] > 0 and bool(row["library_us"]) == (row["kernel"] not in alone) for row in found)
    moved = {(row["kernel"], row["shape"]): row["bytes"] for row in found}
    assert moved["linear", "gate_up with norm, silu, 384x64, 2 rows"] == 4 * (384 * 64 + 2 * 64 + 2 * 192)
    assert moved["verify", "batch 2, K = 2, 512 tokens, greedy"] == 4 * 2 * 3 * 512
    attended = 2 * 2 * 2 * 16 * (9 + 2 * 3) + 2 * 2 * 3 * 64
    assert moved["paged_attention", "batch 2, 3 rows, context 9"] == 4 * attended


def small_options() -> BenchConfig:
    options = BenchConfig(target="x", batch_sizes=[2], num_speculative_tokens=[2], prompt_length=9)
    options.cache.prefill_chunk = 16
    return options


TINY_EXPERTS = dataclasses.replace(Sizes.of(shape_config("tiny-shape")), experts=Experts(8, 2, 24))


def test_only_experts_that_are_met_count() -> None:
    found = cases(TINY_EXPERTS, small_options(), torch.device("cpu"), torch.float32)
    first = next(case for case in found if case.kernel == "expert_linear")
    assert first.shape == "gate_up 48x64, 2 rows, 2 of 8 experts, 2 met"
    assert first.bytes == 4 * (2 * 48 * 64 + 4 * 64 + 4 * 48)


@pytest.mark.parametrize("sizes", [Sizes.of(shape_config("tiny-shape")), TINY_EXPERTS], ids=["dense", "experts"])
def test_what_is_compared_with_a_library_is_the_same(sizes: Sizes) -> None:
    for case in cases(sizes, small_options(), torch.device("cpu"), torch.float32):
        ours, libraries = case.make()
        if case.kernel in ("linear", "rms_norm", "expert_linear"):
            for call in libraries.values():
                assert torch.allclose(ours(), call(), atol=1e-4), case.shape  # type: ignore[arg-type]
        if case.kernel == "verify":
            assert bool((ours()[1] >= 1).all())  # type: ignore[index]
