"""Keys that are written as flags."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from specgraph.cli import main


def _composed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--cfg", "job"]) == 0
    composed: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return composed


def test_flags_mean_the_keys_of_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--format", "jsonl", "--max-new-tokens", "7", "--prompt", "a=b, --c", "--stream", "--temperature=0.5"]
    flags += ["--draft", "eagle3", "--draft.num_speculative_tokens", "3", "--compare", "false", "--do-sample"]
    keys = ["format=jsonl", "max_new_tokens=7", "prompt=a=b, --c", "stream=true", "temperature=0.5", "draft=eagle3"]
    keys += ["draft.num_speculative_tokens=3", "compare=false", "do_sample=true"]
    assert _composed(capsys, "generate", *flags) == _composed(capsys, "generate", *keys)


def test_flags_beside_those_of_hydra(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--draft", "eagle3", "--help"]) == 0
    assert "head.draft_vocab_size" in capsys.readouterr().out
    shown = _composed(capsys, "train", "--draft", "eagle3", "--chain.steps", "3", "--package", "_global_")
    assert shown["chain"]["steps"] == 3


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--formt", "jsonl"], "There is no flag --formt (did you mean 'format'?); --help lists the keys."),
        (["--nothing-like-it"], "There is no flag --nothing-like-it; --help lists the keys."),
        (["--prompt"], "--prompt has no value; write prompt=VALUE."),
        (["--temperature", "warm"], "temperature is a number or null, not 'warm'."),
        (["-x"], "There is no flag -x; --help lists the keys."),
        (["prompt=a", "=3"], "There is no key in front of '=3'; write key=value."),
    ],
)
def test_flags_that_do_not_work(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", *flags]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
