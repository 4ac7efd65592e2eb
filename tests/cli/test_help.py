"""Every help text is true: the examples of each help run, and in a sweep as well."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from specgraph.cli import commands, main
from specgraph.cli.command_table import COMMANDS

pytestmark = pytest.mark.usefixtures("cached_decoders")
CALL = "python -m specgraph "
QUICK = {
    "generate": "debug.self_check=false pipeline.verify=false max_new_tokens=4 limit=2",
    "dump": "debug.self_check=false pipeline.verify=false",
    "explore": "",
    "diff": "",
    "inspect": "",
    "bench": "pipeline.verify=false steps=1 warmup=0 prompt_length=8 num_speculative_tokens=[2]",
    "train": "device=cpu heldout=2 max_length=64 optim.steps=2 optim.batch_size=2 rollout.max_new_tokens=8 "
                  "head.num_attention_heads=2 head.num_key_value_heads=2 head.intermediate_size=32",
}  # fmt: skip
"""Values that make a command quick, without a change of what its examples say."""


@pytest.fixture
def files(model: Path, draft: Path, empty_folder: Path) -> None:
    """What the examples name."""
    folder = empty_folder / "path" / "of" / "a"
    folder.mkdir(parents=True)
    (folder / "model").symlink_to(model)
    (folder / "draft").symlink_to(draft)
    records = [{"question": f"What is {a} + {a}?", "answer": f"It is {a + a}."} for a in range(12)]
    Path("questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def _examples(capsys: pytest.CaptureFixture[str], name: str) -> list[list[str]]:
    """The examples that the help of a command prints, as arguments."""
    assert main([name, "--help"]) == 0
    part = capsys.readouterr().out.partition("== Examples ==\n")[2].partition("\n\n")[0]
    return [shlex.split(line.removeprefix(CALL)) for line in part.splitlines()]


def _dumps_and_trace() -> None:
    """What the examples of ``explore`` and ``diff`` name."""
    common = ["model=path/of/a/model", "draft=ngram", "lowering=eager"]
    # With a length of their own, as a cached decoder that has met requests has more stages, which diff does not run.
    own = [*common, "max_length=60", *shlex.split(QUICK["dump"])]
    for folder in ("graphs", "other/graphs"):
        assert main(["dump", *own, f"out={folder}"]) == 0
    further = ["prompts=questions.jsonl", "trace=trace.jsonl", *shlex.split(QUICK["generate"])]
    assert main(["generate", *common, *further]) == 0


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The configurations with which commands are called, which do nothing."""
    seen: list[dict[str, Any]] = []

    def note(name: str, cfg: DictConfig, first: bool = True) -> dict[str, str]:
        seen.append(cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False)))
        return {}

    monkeypatch.setattr(commands, "run", note)
    return seen


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_the_help_run(name: str, files: None, capsys: pytest.CaptureFixture[str]) -> None:
    if name in ("explore", "diff"):
        _dumps_and_trace()
    examples = _examples(capsys, name)
    assert examples
    for example in examples:
        assert main([*example, *shlex.split(QUICK[name])]) == 0, capsys.readouterr().err
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_mean_the_same_in_a_sweep(
    name: str, files: None, composed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for example in _examples(capsys, name):
        if "-m" not in example:
            assert main(example) == main([*example, "-m"]) == 0
            assert composed[0] == composed[1]
            composed.clear()


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.findall(r"^  (\w+) ", shown, re.MULTILINE) == [*COMMANDS, "doctor"]


def test_texts_of_a_sweep_are_taken_literally(composed: list[dict[str, Any]]) -> None:
    prompt = """Why (it's "so"), {x}=[1,2]: 50%?"""
    assert main(["generate", f"prompt={prompt}", "template={prompt}, A:", "-m", "seed=1,2"]) == 0
    assert [(cfg["prompt"], cfg["template"], cfg["seed"]) for cfg in composed] == [
        (prompt, "{prompt}, A:", seed) for seed in (1, 2)
    ]
    composed.clear()
    assert main(["generate", "prompt='one, two','three'", "-m"]) == 0
    assert [cfg["prompt"] for cfg in composed] == ["one, two", "three"]


def test_a_reader_that_stops_reading() -> None:
    """As ``| head`` does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "specgraph", "generate", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141
    process.stderr.close()
