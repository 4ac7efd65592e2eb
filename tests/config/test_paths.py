"""The nearest name of a path that does not exist, where paths are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import specgraph
from specgraph.checkpoints.causal_lm import load_by_transformers
from specgraph.checkpoints.files import open_files
from specgraph.cli import main
from specgraph.config.paths import did_you_mean_path
from specgraph.errors import SpecgraphError
from specgraph.explore import explore
from specgraph.explore.trace_file import read_trace
from tests.models import shared_model


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder: ``models/tiny/head``, ``mine.yaml``, ``graphs`` and ``questions.txt``."""
    (tmp_path / "models" / "tiny" / "head").mkdir(parents=True)
    (tmp_path / "graphs").mkdir()
    (tmp_path / "mine.yaml").write_text("temperature: 0.5\n")
    (tmp_path / "questions.txt").write_text("What is 3 + 4?\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_wrong_part_is_replaced(folder: Path) -> None:
    for wrong in ("models/tiny/haed", "model/tiny/head", "./modles/tinny/heads/"):
        assert did_you_mean_path(wrong) == " (did you mean 'models/tiny/head'?)"
    assert did_you_mean_path(folder / "mien.yaml") == f" (did you mean '{folder / 'mine.yaml'}'?)"
    assert did_you_mean_path(Path("~") / "x" / "y") == ""
    for far in ("models/tiny/head/inside", "elsewhere", "questions.txt/inside", "models/other/head", "mine.yaml/"):
        assert did_you_mean_path(far) == ""


CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "a draft": (lambda: specgraph.compile_speculative(shared_model("llama"), draft="models/tiny/haed"),
                "there is no such folder (did you mean 'models/tiny/head'?)."),
    "a name that is a path": (lambda: load_by_transformers("models/tinny", "auto", "model=models/tinny"),
                              " (did you mean 'models/tiny'?)."),
    "a checkpoint": (lambda: open_files("models/tiny/haed"), "'models/tiny/haed' (did you mean 'models/tiny/head'?); "),
    "a configuration": (lambda: specgraph.compile_speculative(shared_model("llama"), "mien.yaml"),
                        "no configuration file 'mien.yaml' (did you mean 'mine.yaml'?); give a YAML file"),
    "a dump": (lambda: explore("grphs", "page.html"), "no such folder (did you mean 'graphs'?); give one that"),
    "a stage": (lambda: specgraph.load_dump("grphs"), "There is no folder grphs (did you mean 'graphs'?); give"),
    "a trace": (lambda: read_trace("question.txt"), "(No such file or directory) (did you mean 'questions.txt'?); "),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls_name_it(name: str) -> None:
    call, message = CALLS[name]
    with pytest.raises(SpecgraphError) as caught:
        call()
    assert message in str(caught.value)


COMMANDS: dict[str, tuple[list[str], str]] = {
    "config": (["config=mien.yaml"], "no configuration file 'mien.yaml' (did you mean 'mine.yaml'?); give a YAML file"),
    "draft": (["prompt=a", "model=models/tiny", "draft=models/tiny/haed"],
              "draft=models/tiny/haed: there is no such file or folder (did you mean 'models/tiny/head'?); draft"),
    "model": (["prompt=a", "model=./models/tinny"], "no such folder (did you mean 'models/tiny'?)."),
    "prompts": (["model=models/tiny", "prompts=question.txt"], "no such file (did you mean 'questions.txt'?)."),
}  # fmt: skip


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_names_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = COMMANDS[name]
    assert main(["generate", *arguments]) == 2
    assert message in capsys.readouterr().err
