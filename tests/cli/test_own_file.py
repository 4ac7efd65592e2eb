"""A user's YAML file of keys, and a folder of files in Hydra's own way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specgraph.cli import main

KEYS = """
prompt: "Why (it's \\"so\\"), {x}=[1,2]?"
verify: probabilistic
draft:
  num_speculative_tokens: {1: 3, 2: 0}
  max_ngram: 3
debug.self_check: false
passes:
  expose_features: {layers: [1]}
pipeline:
  order: [insert_kv_cache, insert_draft]
lowering: eager
temperature: 1.0e-05
stream: true
seed: null
"""


def _composed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["generate", *arguments, "--cfg", "job"]) == 0
    composed: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return composed


@pytest.mark.parametrize("name", ["mine.yaml", "with space, and comma.yml"])
def test_keys_of_a_file_are_as_if_typed(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(KEYS)
    shown = _composed(capsys, f"config={name}")
    assert shown["prompt"] == """Why (it's "so"), {x}=[1,2]?"""
    assert (shown["verify"]["rule"], shown["lowering"]["name"]) == ("probabilistic", "eager")
    assert shown["draft"]["num_speculative_tokens_by_load"] == {1: 3, 2: 0} and shown["draft"]["max_ngram"] == 3
    assert (shown["debug"]["self_check"], shown["stream"], shown["seed"]) == (False, True, None)
    assert (shown["temperature"], shown["passes"]["expose_features"]) == (1e-5, {"layers": [1]})
    assert shown["pipeline"]["order"] == ["insert_kv_cache", "insert_draft"]


def test_the_command_line_counts_more(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(KEYS)
    given = ["verify=strict", "config=mine.yaml", "temperature=0.5", "draft.max_ngram=2"]
    shown = _composed(capsys, *given)
    assert (shown["verify"]["rule"], shown["temperature"], shown["draft"]["max_ngram"]) == ("strict", 0.5, 2)


def test_a_file_may_name_a_checkpoint_or_a_preset_may_take_its_place(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.yaml").write_text(f"draft: {draft}\n")
    assert _composed(capsys, "config=mine.yaml")["draft"]["model"] == str(draft)
    assert _composed(capsys, "config=eagle3")["draft"]["kind"] == "eagle3"


def test_a_file_serves_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("optim: {steps: 7}\ndata: a b.jsonl\n")
    assert main(["train", "config=mine.yaml", "--cfg", "job"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["optim"]["steps"], shown["data"]) == (7, "a b.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no configuration file 'mine.yaml'; give a YAML file, or a preset's name."),
        (b"num_beams: 4\n", "num_beams is no key of generate"),
        (b"temprature: 1\n", "Unknown configuration key 'temprature': did you mean 'temperature'?"),
        (b"temperature: warm\n", "temperature is a number or null, not "),
        (b"draft: eagl3\n", "There is no draft=eagl3 (did you mean 'eagle3'?); "),
    ],
)
def test_files_that_do_not_work(content: bytes | None, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        Path("mine.yaml").write_bytes(content)
    assert main(["generate", "model=unused", "prompt=a", "config=mine.yaml"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {message}") and shown.count("\n") == 1


def test_two_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "config=a.yaml", "config=b.yaml"]) == 2
    assert capsys.readouterr().err == "error: config=a.yaml and config=b.yaml: give one file of keys.\n"


@pytest.mark.parametrize("flag", [["--config-dir", "own"], ["--config-dir=own"]])
def test_a_folder_of_files_as_hydra_takes_it(flag: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path("own/draft")
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("kind: ngram\nnum_speculative_tokens: 2\nmax_ngram: 3\n")
    shown = _composed(capsys, *flag, "draft=mine")["draft"]
    assert (shown["kind"], shown["num_speculative_tokens"], shown["max_ngram"]) == ("ngram", 2, 3)
