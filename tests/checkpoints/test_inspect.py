"""``python -m specgraph inspect``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specgraph.cli import main
from tests.checkpoints import layouts
from tests.checkpoints.running import target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target().save_pretrained(folder)
    return folder


def _inspect(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[list[str]]:
    """The printed lines, in columns."""
    assert main(["inspect", *arguments]) == 0
    return [line.split("  ") for line in capsys.readouterr().out.splitlines()]


def _cells(rows: list[list[str]]) -> list[list[str]]:
    return [[cell.strip() for cell in row if cell.strip()] for row in rows]


@pytest.mark.parametrize("given", ["{}", "path={}"])
def test_a_head_that_fits(given: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = layouts.nvidia().save(tmp_path / "a, b")
    cells = _cells(_inspect(capsys, given.format(folder), f"target={model}"))
    for expected in (
        ["checkpoint", str(folder)],
        ["kind", "eagle3"],
        ["layout", "nvidia"],
        ["algorithm", "eagle3"],
        ["drafts in parallel", "no"],
        ["size", "27 tensors, 108.7 kB"],
        ["fits the target", "yes"],
        ["layer_type", "qwen3", "tensors"],
        ["feature_layers", "hs[2], hs[3], hs[4]", "default: 2, L // 2, L - 3"],
        ["norm_before_residual", "yes", "config.json"],
        ["layers.*.mlp.up_proj.weight", "[48, 32]", "float32", "2", "12.3 kB"],
        ["layers.0.self_attn.q_proj.weight", "[32, 64]", "float32", "1", "8.2 kB"],
    ):
        assert expected in cells


def test_a_head_that_does_not_fit(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = layouts.speculators("peagle").save(tmp_path / "head")
    cells = _cells(_inspect(capsys, str(folder), f"target={model}", "draft.feature_layers=[1,2]"))
    assert ["fits the target", "no"] in cells and ["mask token", "7"] in cells
    assert ["feature_layers", "hs[1], hs[2]", "draft.feature_layers"] in cells
    assert cells[-1] == [
        f"{folder} does not fit: fc.weight has the shape [32, 96], but the target LlamaForCausalLM and config.json "
        "need [32, 64]."
    ]


def test_without_a_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = _cells(_inspect(capsys, str(layouts.eagle().save(tmp_path / "head"))))
    assert not any(row and row[0] == "fits the target" for row in cells)
    assert ["feature_layers", "unknown without a target", "default: 2, L // 2, L - 3"] in cells


@pytest.mark.parametrize("head", ["eagle3", "dflash", "dspark"])
def test_a_head_for_a_target_of_another_size(head: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "examples" / "models" / "tiny-math" / head
    cells = _cells(_inspect(capsys, str(folder), f"target={model}"))
    assert ["fits the target", "no"] in cells and any(row[:1] == ["feature_layers"] for row in cells)
    message = "it was made for a target with hidden size 256, but the target LlamaForCausalLM has 32."
    assert cells[-1] == [f"{folder} does not fit: {message}"]


def test_a_causal_lm(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = _cells(_inspect(capsys, str(model), f"target={model}"))
    assert ["layout", "transformers"] in cells and ["fits the target", "yes"] in cells
    target().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 5000, "pard_token": 4}))
    cells = _cells(_inspect(capsys, str(tmp_path), f"target={model}"))
    assert ["layout", "pard"] in cells and ["mask token", "4"] in cells and ["fits the target", "no"] in cells
    assert cells[-1][0].startswith("The draft has 5000 tokens and the target 101")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: path is not set: python -m specgraph inspect PATH [target=MODEL]"),
        (["/no/such"], "error: There is nothing at '/no/such'; give the folder of a checkpoint"),
        (["{}", "target=/no/such"], "error: target=/no/such: there is no such folder."),
        (["{}", "target={}"], "error: target={} has no configuration of a causal LM: "),
        (
            ["{}", "draft.feature_layer=[1]"],
            "error: Unknown configuration key 'draft.feature_layer': did you mean 'draft.feature_layers'?",
        ),
    ],
)
def test_refusals(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(layouts.speculators().save(tmp_path / "head"))
    assert main(["inspect", *(argument.format(folder) for argument in arguments)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(message.format(folder)) and shown.count("\n") == 1


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--help"]) == 0
    assert "usage: python -m specgraph inspect PATH [target=MODEL]" in capsys.readouterr().out
