"""``generate trace=...``: a file of JSON lines, or the drafts on the terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specgraph.cli import main

pytestmark = pytest.mark.usefixtures("cached_decoders")
QUICK = ["debug.self_check=false", "max_new_tokens=8", "lowering=eager", "dtype=float64"]


def run(model: Path, *further: str, draft: str = "ngram") -> int:
    prompts = model.parent / "prompts.txt"
    prompts.write_text("one two one two one\nthree\n")
    return main(["generate", f"model={model}", f"prompts={prompts}", f"draft={draft}", *QUICK, *further])


def test_a_trace_is_written_beside_the_answers(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.jsonl"
    assert run(model, f"trace={file}", "format=jsonl") == 0
    shown = capsys.readouterr()
    answers = [json.loads(line)["tokens"] for line in shown.out.splitlines()]
    about, *steps = [json.loads(line) for line in file.read_text().splitlines()]
    assert about["trace"] == 1 and about["drafter"] == "ngram" and len(about["texts"]) == 2
    for number, tokens in enumerate(answers):
        assert [token for step in steps if step["sequence"] == number for token in step["tokens"]] == tokens
    assert re.search(rf"^trace +{re.escape(str(file))}$", shown.err, re.MULTILINE)


def test_a_dash_prints_it_without_colours_where_there_is_no_terminal(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "trace=-") == 0
    shown = capsys.readouterr().out
    assert "\nsequence 0\n" in shown and "\nsequence 1\n" in shown and "\033" not in shown and " ms  " in shown


@pytest.mark.parametrize(
    ("further", "message"),
    [
        (["trace=no/such/folder/a.jsonl"], "trace=no/such/folder/a.jsonl is no file that can be written; give one in"),
        (["trace=."], "trace=. is no file that can be written"),
        (["trace=-", "stream=true"], "trace=- is of all prompts together, and stream=true decodes one by one"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_runs(
    model: Path, further: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, *further) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {message}") and not shown.out
