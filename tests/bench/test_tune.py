"""``bench tune``: what it measures, what it recommends, and what it refuses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specgraph.bench.report import Cell, Row
from specgraph.bench.tune import recommendation
from specgraph.cli import main
from specgraph.runtime.schedule.num_drafts import Choice
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts, saved

HERE = Path(__file__).parent
MODELS = Path(__file__).parents[2] / "examples" / "models" / "tiny-math"
QUICK = ["device=cpu", "lowering=eager", "steps=2", "warmup=0", "new_tokens=6", "dtype=float64", "verify=strict"]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Prompts of random models, which have no tokenizer."""
    found = ragged_prompts((5, 9, 4))
    monkeypatch.setattr("specgraph.cli.commands._file_prompts", lambda options, limit: found[:limit])
    return found


def row(batch: int, draft: str, k: int | str, per_step: float, ms: float, **options: Any) -> Row:
    speed = batch * per_step / ms * 1e3
    plain = batch * 1e3 / {1: 10.0, 8: 20.0}[batch]
    values = {
        "batch": batch, "draft": draft, "rule": "strict", "k": k, "tokens_per_step": per_step, "error": 0.01, "ms": ms,
        "tokens_per_second": speed, "to_plain": speed / plain, **options,
    }  # fmt: skip
    return Row("", "", {name: Cell(value) for name, value in values.items()})


PLAIN = [row(1, "none", 0, 1.0, 10.0, error=0.0), row(8, "none", 0, 1.0, 20.0, error=0.0)]


def test_every_draft_rule_k_and_batch_stands_beside_plain_decoding(
    tmp_path: Path, prompts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, small = make_model("llama"), make_model("llama", seed=1, num_hidden_layers=1)
    target, draft = saved(model, tmp_path / "target"), saved(small, tmp_path / "small")
    found, plot = tmp_path / "found.json", tmp_path / "found.svg"
    asked = [f"target={target}", f"drafts=[ngram,{draft}]", "prompts=any.jsonl", f"json={found}", f"plot={plot}"]
    lists = ["rules=[strict,block]", "temperature=0.8", "num_speculative_tokens=[1,3]", "batch_sizes=[1,2]"]
    assert main(["bench", "tune", *asked, *lists, *QUICK]) == 0
    shown = capsys.readouterr().out
    rows = json.loads(found.read_text())["rows"]
    assert len(rows) == 2 + 2 * 2 * 2 * 2 == len({(r["batch"], r["draft"], r["rule"], r["k"]) for r in rows})
    plain = {r["batch"]: r["tokens_per_second"] for r in rows if r["draft"] == "none"}
    for one in rows:
        assert one["to_plain"] == pytest.approx(one["tokens_per_second"] / plain[one["batch"]])
        speed = one["batch"] * one["tokens_per_step"] / one["ms"] * 1e3
        assert one["tokens_per_second"] == pytest.approx(speed)
    # What it says of acceptance is what a decoder of the same options does.
    config = {"verify": {"rule": "block"}, "lowering": {"name": "eager"}, "max_batch_size": 2}
    alone = compiled(model.double(), "draft_model", 3, small.double(), **config)
    stats = alone.generate(prompts, max_new_tokens=6, temperature=0.8, seed=0).stats
    same = [r for r in rows if (r["draft"], r["rule"], r["k"]) == (str(draft), "block", 3)]
    assert [r["tokens_per_step"] for r in same] == [stats.acceptance_length] * 2
    assert [r["acceptance"] for r in same] == [stats.acceptance_per_position] * 2
    fastest = max((r for r in rows if r["batch"] == 2), key=lambda r: r["tokens_per_second"])
    assert f"batch 2: draft={fastest['draft']}" in shown and shown.splitlines()[-1].startswith("draft=")
    assert "small, block" in plot.read_text() and "batch 2, none" in plot.read_text()


def test_the_recommendation_is_the_fastest_and_says_what_is_as_good() -> None:
    rows = [*PLAIN, row(1, "a", 4, 3.0, 12.0), row(1, "b", 4, 3.01, 12.0), row(1, "a", 2, 2.0, 11.0),
            row(8, "a", 4, 3.0, 70.0), row(8, "b", 4, 3.0, 90.0), row(8, "a", 2, 2.0, 30.0)]  # fmt: skip
    one, eight, said, every = recommendation(rows)
    fastest = "batch 1: draft=b draft.num_speculative_tokens=4 verify=strict (250.8 tokens/s, 2.51 x plain)"
    assert one.startswith(fastest)
    assert one.endswith("as good within the error: draft=a draft.num_speculative_tokens=4 verify=strict")
    assert eight.startswith("batch 8: draft=a draft.num_speculative_tokens=2") and "as good" not in eight
    assert every == "draft=a verify=strict 'draft.num_speculative_tokens={1:4,8:2}'"
    assert said == "for all of these, on average 1.83 x plain, to be pasted:"


def test_one_k_that_is_best_for_all_is_a_number_and_no_gain_is_said() -> None:
    *_, every = recommendation([*PLAIN, row(1, "a", 4, 3.0, 12.0), row(8, "a", 4, 3.0, 22.0)])
    assert every == "draft=a verify=strict draft.num_speculative_tokens=4"
    *_, said, every = recommendation([*PLAIN, row(1, "a", 4, 1.0, 12.0), row(8, "a", 4, 1.0, 22.0)])
    assert every == "draft=none" and "no draft gains anything" in said


def test_a_recommended_table_is_read_by_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    *_, every = recommendation([*PLAIN, row(1, "ngram", 3, 3.0, 12.0), row(8, "ngram", 2, 2.0, 22.0),
                                row(8, "ngram", 3, 3.0, 90.0)])  # fmt: skip
    assert main(["generate", "model=any", *shlex.split(every), "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "num_speculative_tokens_by_load:\n    1: 3\n    8: 2\n" in shown and "kind: ngram" in shown


def test_a_chosen_k_is_a_choice_for_all_numbers_of_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    fixed = [row(1, "ngram", 3, 3.0, 12.0), row(8, "ngram", 1, 2.0, 22.0)]
    *_, every = recommendation([*PLAIN, *fixed, row(1, "ngram", "auto", 3.0, 13.0), row(8, "ngram", "auto", 2.0, 22.5)])
    assert every == "draft=ngram verify=strict 'draft.num_speculative_tokens={1:3,8:1}'"
    *_, every = recommendation([*PLAIN, *fixed, row(1, "ngram", "auto", 3.0, 11.0), row(8, "ngram", "auto", 2.0, 22.5)])
    assert main(["generate", "model=any", *shlex.split(every), "--cfg", "job"]) == 0
    assert every.endswith("=auto") and "adaptive: true" in capsys.readouterr().out


def test_a_chosen_k_is_measured_over_whole_answers(
    tmp_path: Path, prompts: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every step is given the same K, they have the tokens of that K."""
    found, given = tmp_path / "found.json", list[int]()

    def choose(worth: RecentAcceptance, kind: Any, sequences: Any, drafts: Any) -> Choice:
        given.append(len(sequences))
        return Choice(2)

    monkeypatch.setattr(RecentAcceptance, "choose", choose)
    asked = [f"target={MODELS / 'target'}", f"drafts=[{MODELS / 'eagle3'}]", "prompts=any.jsonl", f"json={found}"]
    assert main(["bench", "tune", *asked, "batch_sizes=[1,2]", "num_speculative_tokens=[2,auto]", *QUICK]) == 0
    rows = json.loads(found.read_text())["rows"]
    fixed, chosen = ([r for r in rows if r["k"] == k and r["batch"] == 1] for k in (2, "auto"))
    assert chosen[0]["tokens_per_step"] == pytest.approx(fixed[0]["tokens_per_step"]) and {*given} >= {1, 2}
    for one in rows:
        speed = one["batch"] * one["tokens_per_step"] / one["ms"] * 1e3
        assert one["tokens_per_second"] == pytest.approx(speed)


def test_what_a_draft_does_not_allow_is_left_out_with_a_reason(
    tmp_path: Path, prompts: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [f"target={MODELS / 'target'}", f"drafts=[{MODELS / 'medusa'}]", "prompts=any.jsonl", "batch_sizes=[1]"]
    assert main(["bench", "tune", *arguments, "num_speculative_tokens=[1,30]", *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "medusa, K = 1, strict: " in shown and "medusa, K = 30, strict: " not in shown
    assert "Not possible:" in shown and "draft.num_speculative_tokens=30 verify=strict: " in shown
    assert main(["bench", "tune", *arguments, "num_speculative_tokens=[30]", *QUICK]) == 2
    assert "30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "bench tune measures how many drafts are accepted, which depends on the text: give prompts=FILE"),
        (["prompts=a.jsonl", "drafts=[eagle3]"], "drafts has eagle3, whose head would be random"),
        (["prompts=a.jsonl", "rules=[strict,block]"], "At temperature 0 the rules strict, block accept the same"),
        (["prompts=a.jsonl", "rules=[synthetic]"], "The rule synthetic accepts drafts by chance"),
        (["prompts=a.jsonl", "drafts=[no/such/folder]"], "drafts=no/such/folder: there is no such folder."),
        (["prompts=a.jsonl", "drafts=[eagl3]"], "drafts=eagl3: there is no such drafter (did you mean 'eagle3'?) and "),
        (["prompts=a.jsonl", f"drafts=[{HERE}]"], f"There is no {HERE}/config.json; a "),
        (["batch_sizes=[1,many]"], "batch_sizes is a list of integers or null, not [1, 'many']."),
        (["num_speculative_tokens=[3,automatic]"], "num_speculative_tokens is a list of numbers from 1 up, or auto"),
        (["prompts=a.jsonl", "plot=a.gif"], "plot=a.gif: a plot ends in .png, .svg or .pdf."),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tune", f"target={tmp_path}", *given]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
