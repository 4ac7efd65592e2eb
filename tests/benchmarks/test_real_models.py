"""The scripts of ``benchmarks/``, run on the shipped models: cells, a restart, the budget, and planted differences."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

ROOT = Path(__file__).parents[2]
BENCHMARKS, MODELS = ROOT / "benchmarks", ROOT / "examples" / "models" / "tiny-math"
QUESTIONS = ROOT / "examples" / "data" / "gsm8k_test_200.jsonl"
NUMBERS = "--prompts 3 --new-tokens 12 --batch 2 --sets gsm8k --drafters ngram --k 2 --peer-k 2 --lowering eager"
DECODERS = ["none", "ngram", "draft", "transformers generate", "transformers lookup", "transformers assisted draft"]


def run_script(name: str, *arguments: object) -> None:
    """Run a script as ``python -m`` does, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [name, *map(str, arguments)])
        patch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # runpy warns about what is imported already
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


def measure(out: Path, budget: int = 500) -> None:
    """Measure what is missing of two temperatures and six decoders on the smallest models."""
    run_script(
        "real_models", MODELS / "target", "--out", out, "--draft", MODELS / "draft", "--gsm8k", QUESTIONS,
        "--temperature", 0, 0.7, "--budget", budget, "--device", "cpu", "--dtype", "float64", *NUMBERS.split(),
    )  # fmt: skip


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def decoder_of(line: dict[str, Any]) -> str:
    """The decoder without the folders of a draft."""
    *words, last = line["cell"]["decoder"].split(" ")
    return " ".join([*words, Path(last).name])


class Run(NamedTuple):
    """The file of a whole measurement, and what it printed."""

    file: Path
    table: str


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    file = tmp_path_factory.mktemp("measured") / "cells.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("builtins.print", lambda *words, file=None, **_: None if file else shown.append(*words))
        measure(file)
    return Run(file, "\n".join(shown))


def test_every_cell_is_measured_and_transformers_come_last(run: Run) -> None:
    lines = lines_of(run.file)
    assert [decoder_of(line) for line in lines] == [name for name in DECODERS for _ in range(2)]
    for line in lines:
        ours, cell = not cell_is_peer(line), line["cell"]
        assert cell["batch"] == (1 if cell["k"] and not ours else 2) and cell["k"] == (2 if cell["k"] else 0)
        assert line["sequences"] == 3 and 3 <= line["new_tokens"] <= 36
        assert line["tokens_per_second"] == pytest.approx(line["new_tokens"] / line["seconds"])
        assert line["differ"] == (0 if ours and cell["decoder"] != "none" else None)
        assert line["differ_in_bits"] is None  # compared on a GPU only
        assert (line["model"], line["dtype"]) == ("target", "float64")
    steps = {decoder_of(line): line["tokens_per_step"] for line in lines if line["cell"]["temperature"] == 0}
    assert steps["none"] == 1 and 1 < steps["draft"] <= 3


def cell_is_peer(line: dict[str, Any]) -> bool:
    return str(line["cell"]["decoder"]).startswith("transformers ")


def test_a_restart_measures_only_what_is_missing_and_reports_a_planted_difference(run: Run, tmp_path: Path) -> None:
    file, whole = tmp_path / "cells.jsonl", run.file.read_text().splitlines()
    (place,) = [at for at, line in enumerate(lines_of(run.file))
                if decoder_of(line) == "draft" and line["cell"]["temperature"] == 0]  # fmt: skip
    kept = whole[:place] + whole[place + 1 :]
    file.write_text("\n".join(kept) + "\n")
    plain = torch.load(run.file.with_suffix(".plain.pt"))
    plain["gsm8k", 2, 0.0][0][1][0] += 1  # one token of the second sequence
    torch.save(plain, file.with_suffix(".plain.pt"))
    measure(file)
    again = file.read_text().splitlines()
    assert again[:-1] == kept
    line = json.loads(again[-1])
    assert line["cell"] == json.loads(whole[place])["cell"] and line["differ"] == 1


def test_no_cell_begins_behind_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cells.jsonl"
    file.touch()
    measure(file, budget=0)
    assert "12 cells are left: run the same command again." in capsys.readouterr().out
    assert file.read_text() == ""


def test_the_table_has_a_row_for_each_cell_and_ratios_to_plain_decoding(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run_script("markdown", run.file)
    table = capsys.readouterr().out.strip()
    assert table == run.table.strip()
    title, blank, header, ruler, *rows = table.splitlines()
    assert title == f"target, float64, CPU, {torch.get_num_threads()} threads:" and blank == ""
    assert header.startswith("| prompts | temperature | batch | decoder | K | tokens/step | tokens/s | x plain |")
    assert ruler == "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    lines = lines_of(run.file)
    cells = [[word.strip() for word in row.strip("|").split("|")] for row in rows]
    assert len(cells) == len(lines) and {len(row) for row in cells} == {10}
    speed = {(decoder_of(line), f"{line['cell']['temperature']:g}"): line["tokens_per_second"] for line in lines}
    for _, temperature, batch, decoder, *_, rate, ratio, differ, _ in cells:
        assert rate == f"{speed[decoder, temperature]:.1f}"
        plain = f"{speed[decoder, temperature] / speed['none', temperature]:.2f}"
        assert ratio == (plain if batch == "2" else "")  # plain decoding was measured with two sequences
        assert differ == ("0 of 3" if decoder in ("ngram", "draft") else "")


def test_a_folder_takes_the_place_of_a_model_to_fetch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK..")
    with pytest.raises(SystemExit, match=r"model\.gguf is no GGUF file: it begins with b'PK\.\.'\."):
        run_script("fetch_models", file, tmp_path / "out")
    with pytest.raises(SystemExit):
        run_script("fetch_models", "another", tmp_path)
    assert "another is neither a file nor one of gemma-270m, qwen-0.5b, qwen-1.5b" in capsys.readouterr().err


def test_a_file_is_carried_in_pieces_in_any_order(tmp_path: Path) -> None:
    script = BENCHMARKS / "carry.sh"

    def carry(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", script, *map(str, arguments)], cwd=tmp_path, capture_output=True, text=True)

    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(54 * 2**20)  # a piece of zeros, and one of what follows
        file.seek(54 * 2**20)
        file.write(b"the end")
    assert carry("split", large).returncode == 0
    pieces, there = tmp_path / ".carry" / "large", tmp_path / "there" / "large"
    assert [piece.name for piece in sorted(pieces.iterdir())] == ["00", "01"]
    assert carry("add", pieces / "01", there).returncode == 0
    (there.parent / "damaged").write_bytes(b"the end")
    damaged = carry("check", f"{pieces}.sum", there.parent / "damaged")
    assert damaged.returncode == 1 and "is damaged, or lacks a piece" in damaged.stderr
    for _ in range(2):
        assert carry("add", pieces / "00", there).returncode == 0
    assert carry("check", f"{pieces}.sum", there).returncode == 0
