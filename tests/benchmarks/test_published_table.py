"""The table of gpt-oss-120b, measured on a tiny model: experts as they are asked for, and bytes as they are read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import published_drafts, published_table, routing
from benchmarks.published_drafts import DraftCalls, HeadShape, published_head
from benchmarks.published_table import Line, acceptance_for, bytes_read, even_experts, findings, table
from specgraph.bench import models
from specgraph.compiler.compile import compile_speculative
from specgraph.ir.traffic import STAGE, step_traffic

TINY: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 2048, "num_hidden_layers": 4, "num_local_experts": 32,
}  # fmt: skip
HEADS = {"eagle3": HeadShape(1, 96, 512), "peagle": HeadShape(2, 64, None)}
EXPERT = 2 * (64 * 128 + 128 * 32) // 4 + 2 * (64 * 128 + 128 * 32) // 64 + 4 * (64 + 128)
"""Bytes of an expert's two products: half a byte a number, a byte for each 32 of them, and biases in float32."""
K = 5


@pytest.fixture(scope="module", autouse=True)
def tiny() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.SHAPES, "tiny-gpt-oss-shape", models.SHAPES["gpt-oss-20b-shape"] | TINY)
        for name, shape in HEADS.items():
            patch.setitem(published_drafts.SHAPES, name, shape)
        patch.setattr(published_table, "measure_bandwidth", lambda device: 1e9)
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Line], Path]:
    path = tmp_path_factory.mktemp("table") / "lines.jsonl"
    words = ["--target", "tiny-gpt-oss-shape", "--device", "cpu", "--ks", str(K), "--steps", "2", "--warmup", "0"]
    lines = published_table.main([*words, "--repeats", "1", "--routing", "even", "0.5", "--json", str(path)])
    return lines, path


def random_model() -> PreTrainedModel:
    model = models.random_target("tiny-gpt-oss-shape", torch.device("cpu"), torch.float32, weights="mxfp4")
    routing.separate_rows(model)
    return model


def test_routing_is_what_was_asked_for(measured: tuple[list[Line], Path]) -> None:
    lines, _ = measured
    assert [(line.draft, line.k, line.routing) for line in lines] == [
        (draft, K, routing) for draft in ("eagle3", "peagle") for routing in ("even", "0.5")
    ]
    for line in lines:
        wanted = 4 / 32 if line.routing == "even" else 0.5
        assert line.kept == pytest.approx(wanted, abs=0.12)
        assert line.even == pytest.approx(32 * (1 - (28 / 32) ** 6))
        if line.routing == "even":
            assert line.distinct == pytest.approx(line.even, rel=0.1)
        else:
            assert line.distinct < 0.75 * line.even


def test_repeated_experts_are_read_once(measured: tuple[list[Line], Path]) -> None:
    lines, _ = measured
    for even, repeated in (lines[:2], lines[2:]):
        assert repeated.bytes < even.bytes


def test_lines_are_kept_and_shown(measured: tuple[list[Line], Path], capsys: pytest.CaptureFixture[str]) -> None:
    lines, path = measured
    assert published_table.main(["--show", str(path)]) == lines
    shown = capsys.readouterr().out
    assert shown.rstrip() == table(lines).rstrip()
    assert [row.split(" | ")[:3] for row in shown.splitlines() if row.startswith("| peagle")] == [
        ["| peagle", str(K), "even"], ["| peagle", str(K), "0.5"],
    ]  # fmt: skip


def test_no_time_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "tiny-gpt-oss-shape", "--device", "cpu", "--ks", "3", "--drafts", "peagle", "--seconds", "0"]
    assert published_table.main(words) == []
    assert "peagle at K = 3: no time left" in capsys.readouterr().out


@pytest.mark.parametrize(("draft", "num_calls"), [("eagle3", 1 + 3), ("peagle", 1 + 1 + 1)])
def test_a_step_is_counted(draft: str, num_calls: int) -> None:
    """Its calls of a head: features, the mask of a parallel head, and a call for each draft or for all of them.

    Its bytes: those that ``bench`` expects if experts are drawn evenly, and else what an expert has in every layer.
    """
    model = random_model()
    routing.set_routing(model, None)
    config = replace(published_table.config_of(draft, 3, 2.5), max_length=128)
    head = published_head(model, config.draft, HEADS[draft])
    decoder = compile_speculative(model, config, draft=head)
    prompts = [torch.arange(9)]
    [*decoder.stream(prompts, max_new_tokens=8, eos_token_id=[])]
    chosen, calls = published_table.count(decoder, model, prompts, 3, 1.0)
    assert chosen.ids.shape[1:] == (4, 4)
    assert len(calls) == num_calls
    assert calls.seconds(model.device, 1) > 0
    program, even = decoder.stages[STAGE], even_experts(32, 4, 4)
    expected = step_traffic(program, 1, 40.0, 3).total
    assert bytes_read(program, even / 32, 40.0, 3) == pytest.approx(expected, abs=1)
    fewer = expected - bytes_read(program, 4 / 32, 40.0, 3)
    assert fewer == pytest.approx((even - 4) * TINY["num_hidden_layers"] * EXPERT, abs=1)


def test_calls_have_to_be_noted() -> None:
    with pytest.raises(RuntimeError, match="no call of a drafter"):
        DraftCalls().seconds(torch.device("cpu"), 1)


@pytest.mark.parametrize("kept", [0.2, 0.6])
def test_strength_gives_the_share(kept: float) -> None:
    strength = routing.strength_for(kept, 128, 4)
    assert routing.kept_at(strength, 128, 4) == pytest.approx(kept, abs=0.005)


def test_a_share_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"independent rows share 0\.031"):
        routing.strength_for(0.02, 128, 4)
    with pytest.raises(ValueError, match="less than 1"):
        routing.strength_for(1.0, 128, 4)


def test_neighbours_are_compared() -> None:
    ids = torch.tensor([[[0, 1], [1, 2], [2, 1], [5, 6]]])
    assert routing.kept_share(ids) == pytest.approx(3 / 6)
    assert routing.Chosen(ids).distinct == 5


def test_acceptance_gives_the_tokens_of_a_step() -> None:
    for k in (3, 8):
        assert sum(acceptance_for(2.5, k) ** i for i in range(k + 1)) == pytest.approx(2.5)


def test_findings() -> None:
    line = Line("peagle", 3, "even", 0.0, 12.0, 12.0, 10, 1.0, 0.10, 1e9, 2.5, 1.0, "CPU")
    later = replace(line, k=8, draft_seconds=0.104, distinct=9.0)
    assert [*findings([line, later])] == [
        "The calls of peagle in a step take +4.0% from K = 3 to 8.",
        "peagle at K = 8 was not even: 9.0 experts were read where even rows read 12.0.",
    ]
