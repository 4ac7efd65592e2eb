"""``explore``: a page of a dump and a trace that other commands wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgraph.cli import main
from tests.explore.conftest import page_data

pytestmark = pytest.mark.usefixtures("cached_decoders")
COMMON = ["draft=ngram", "lowering=eager", "debug.self_check=false", "pipeline.verify=false"]


@pytest.fixture
def written(model: Path) -> None:
    """A dump and a trace of one decoder, in the current folder."""
    assert main(["dump", f"model={model}", "out=graphs", *COMMON]) == 0
    prompt = ["prompt=one two one two one", "max_new_tokens=8", "trace=trace.jsonl"]
    assert main(["generate", f"model={model}", *COMMON, *prompt]) == 0


def test_a_page_is_written_from_what_other_commands_wrote(written: None, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["explore", "graphs", "trace=trace.jsonl", "out=page.html", "bandwidth=100"]) == 0
    assert capsys.readouterr().out.startswith("page.html: ")
    data = page_data(Path("page.html"))
    lines = [json.loads(line) for line in Path("trace.jsonl").read_text().splitlines()]
    assert data["trace"]["prompts"] == lines[0]["texts"] and len(data["trace"]["steps"]) == len(lines) - 1
    assert data["trace"]["times"]["bandwidth"] == 100e9 and data["trace"]["times"]["source"] == "as given"
    assert data["about"]["target"] == "LlamaForCausalLM" and data["stages"][-1]["name"] == "index_rows"


def test_without_a_bandwidth_it_is_measured(
    written: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("specgraph.bench.timing.measure_bandwidth", lambda device: 7e9)
    assert main(["explore", "graphs", "trace=trace.jsonl"]) == 0
    times = page_data(Path("explore.html"))["trace"]["times"]
    assert times["bandwidth"] == 7e9 and times["source"] == "measured when this page was made"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "dump is not set: python -m specgraph explore DUMP"),
        (["nothing"], "nothing: there is no such folder; give one that python -m specgraph dump wrote."),
        (["graphs,a"], "graphs,a: there is no such folder"),
        (["graphs", "bandwidth=0"], "bandwidth=0.0 is in GB/s, so it is a number above 0."),
        (["graphs", "bandwidth=fast"], "bandwidth"),
        (["graphs", "out=no/such/page.html"], "out=no/such/page.html is no file that can be written"),
        (["graphs", "trace=nothing"], "trace=nothing cannot be read (No such file or directory)"),
        (["graphs", "trace=other.jsonl"], "trace=other.jsonl is of another decoder than the dump: its drafter is"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(
    arguments: list[str], message: str, written: None, capsys: pytest.CaptureFixture[str]
) -> None:
    about, *steps = Path("trace.jsonl").read_text().splitlines()
    Path("other.jsonl").write_text("\n".join([json.dumps(json.loads(about) | {"drafter": "other"}), *steps]))
    before = sorted(path.name for path in Path().iterdir())
    capsys.readouterr()
    assert main(["explore", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == before
