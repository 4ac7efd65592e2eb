"""What ``inspect`` says of a draft whose weights are packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import specgraph
from specgraph.cli import main
from tests.models import make_model, saved


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make_model("llama", hidden_size=64, intermediate_size=96)
    return saved(specgraph.quantise(model, "mxfp4"), tmp_path)


def test_the_format_of_the_weights_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(folder), f"target={folder}"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["weights", "mxfp4"] in shown and ["fits", "the", "target", "yes"] in shown


def test_one_that_nobody_reads_does_not_fit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated = json.loads((folder / "config.json").read_text())
    target = saved(make_model("llama", hidden_size=64, intermediate_size=96), folder / "target")
    stated["quantization_config"] = {"quant_method": "torchao"}
    (folder / "config.json").write_text(json.dumps(stated))
    assert main(["inspect", str(folder), f"target={target}"]) == 0
    shown = capsys.readouterr().out
    assert "fits the target     no" in shown and "'torchao'" in shown
