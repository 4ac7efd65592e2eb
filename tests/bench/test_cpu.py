"""``bench cpu``: transformers' own decoding beside ours, in one table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specgraph.bench import run
from specgraph.bench.cpu import GENERATE
from specgraph.bench.peers import transformers_generate
from specgraph.bench.report import Cell, Row
from specgraph.cli import main
from tests.decoding import compiled, reference_greedy
from tests.models import make_model, ragged_prompts, saved, shared_model

QUICK = ["device=cpu", "threads=[1]", "rounds=1", "new_tokens=6", "limit=2", "prompt_length=9", "lowering=eager"]


def test_all_decoders_stand_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = saved(make_model("llama"), tmp_path / "target")
    draft = saved(make_model("llama", seed=1, num_hidden_layers=1), tmp_path / "small")
    found = tmp_path / "found.json"
    before = torch.get_num_threads()
    assert main(["bench", "cpu", f"target={target}", f"drafts=[none,{draft}]", f"json={found}", *QUICK]) == 0
    assert torch.get_num_threads() == before
    shown = capsys.readouterr().out
    assert "threads" in shown and "x generate" in shown and "x assisted" in shown
    rows = json.loads(found.read_text())["rows"]
    names = ["transformers generate", "none", "transformers assisted, small", "small"]
    assert [row["decoder"] for row in rows] == names
    assert [row["equal"] for row in rows] == ["2 of 2"] * 4
    generate, none, assisted, small = rows
    assert generate["to_generate"] == assisted["to_assisted"] == 1.0
    assert generate["to_assisted"] is None and none["to_assisted"] is None and small["to_assisted"] > 0
    assert none["tokens_per_step"] == 1.0 and generate["tokens_per_step"] is None


def test_random_heads_are_accepted_at_the_rate_that_is_given(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    drafts = ["drafts=[none,eagle3,peagle]", "verify.acceptance_rate=1.0"]
    assert main(["bench", "cpu", "target=tiny-shape", f"json={found}", *drafts, *QUICK, "new_tokens=11"]) == 0
    _, none, *heads = json.loads(found.read_text())["rows"]
    assert none["equal"] == "2 of 2" and none["tokens_per_step"] == 1.0
    assert [row["equal"] for row in heads] == [None, None]
    assert [row["tokens_per_step"] for row in heads] == [5.0, 5.0]


@pytest.mark.parametrize("lengths", [(5,), (3, 9)])
def test_the_peer_is_what_transformers_generates(lengths: tuple[int, ...]) -> None:
    model = shared_model("llama")
    prompts = ragged_prompts(lengths)
    found = transformers_generate(model, prompts, max_new_tokens=7, do_sample=False)
    expected = reference_greedy(model, prompts, 7)
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in expected]


def test_the_peer_ends_with_an_eos_as_we_do() -> None:
    model = make_model("llama")
    prompts = ragged_prompts((4, 6))
    free = transformers_generate(model, prompts, max_new_tokens=8, do_sample=False)
    model.generation_config.eos_token_id = [int(free[0][2])]
    found = transformers_generate(model, prompts, max_new_tokens=8, do_sample=False)
    assert found[0].tolist() == free[0][:3].tolist()
    ours = compiled(model, "none", lowering={"name": "eager"}).generate(prompts, max_new_tokens=8).new_tokens
    assert [tokens.tolist() for tokens in found] == [tokens.tolist() for tokens in ours]


def test_prompts_of_a_file_are_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    models = Path(__file__).parents[2] / "examples" / "models" / "tiny-math"
    data = models.parents[1] / "data" / "gsm8k_test_200.jsonl"
    given: list[Any] = []

    def record(model: PreTrainedModel, options: Any, config: Any, prompts: list[torch.Tensor]) -> Any:
        given.extend(prompts)
        return iter([Row(GENERATE, "0 ms", {"decoder": Cell(GENERATE, "decoder")})])

    monkeypatch.setattr(run, "bench_cpu", record)
    template = "template=Question: {question}\\nAnswer:"
    assert main(["bench", "cpu", f"target={models / 'target'}", f"prompts={data}", template, *QUICK]) == 0
    assert len(given) == 2 and all(prompt.dim() == 1 and len(prompt) > 20 for prompt in given)
