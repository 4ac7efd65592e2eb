"""The pieces of tests/gpu, and what is recorded of them. Here every test of that folder is skipped."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import REASON
from tests.gpu.pieces import COLUMNS, PAGE, PIECES, Piece, listed, main, read_rows, run, summary, write_rows

ROOT = Path(__file__).parents[1]
FILES = {path.name.removeprefix("test_").removesuffix("_gpu.py") for path in (ROOT / "tests/gpu").glob("test_*.py")}
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")


def test_every_file_is_in_one_piece() -> None:
    counts = Counter(file for piece in PIECES if not piece.select for file in piece.files)
    shared = {file for piece in PIECES if piece.select for file in piece.files}
    assert counts.keys() | shared == FILES and not counts.keys() & shared and {*counts.values()} == {1}


def test_the_pieces_that_share_a_file_divide_its_tests() -> None:
    file = "tests/gpu/test_bitwise_8b_gpu.py"
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--co", "-o", "addopts=", "-q", file]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    names = [line for line in shown.splitlines() if line.startswith(f"{file}::")]
    selects = [piece.select for piece in PIECES if piece.select]
    assert len(names) > 50 and all(sum(select in name for select in selects) == 1 for name in names), shown


@without_gpu
def test_without_a_gpu_tests_are_skipped_by_name_counted_and_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    cells, good = run(Piece("small", ("trace", "norm"), 1, "trace or width"), 300)
    shown = capfd.readouterr().out
    assert f"tests/gpu/test_trace_gpu.py:19: {REASON}" in shown and f"{cells['skipped']} skipped" in shown
    assert good and (cells["passed"], cells["failed"]) == ("0", "0") and int(cells["skipped"]) >= 11


def test_a_piece_that_takes_too_long_is_ended(capfd: pytest.CaptureFixture[str]) -> None:
    cells, good = run(Piece("small", ("step",), 1), 0.3)
    assert not good and cells["failed"] == "**0**: not finished after 0 s"


def test_a_row_counts_tests_and_names_those_that_failed() -> None:
    lines = [{"test": f"tests/gpu/test_{file}_gpu.py::test_{name}", "outcome": outcome, "seconds": seconds}
             for file, name, outcome, seconds in [
                 ("step", "a", None, 1.0), ("step", "a", "passed", 2.0), ("step", "a", None, 0.0),
                 ("trace", "b[x|y]", "failed", 5.0), ("trace", "c", "skipped", 0.0),
             ]]  # fmt: skip
    cells = summary(lines, 8.4, 1)
    assert cells == {"passed": "1", "failed": "**1**: test_b[x\\|y]", "skipped": "1", "seconds": "8",
                     "seconds of each file": "trace 5, step 3"}  # fmt: skip
    assert summary([], 8.4, 4)["failed"] == "**0**: pytest ended with 4"
    assert summary(lines, 8.4, None)["failed"].endswith(", not finished after 8 s")
    row = {**dict.fromkeys(COLUMNS, "-"), "piece": "bits", **cells, "commit": "abc1234"}
    page = write_rows(PAGE.read_text(), {"bits": row})
    assert read_rows(page)["bits"] == row and write_rows(page, read_rows(page)) == page
    assert "bits           6 processes, 8 s at abc1234: bitwise\n" in listed(read_rows(page))


def test_the_page_has_a_row_for_every_piece() -> None:
    assert [*read_rows(PAGE.read_text())] == [piece.name for piece in PIECES]


@without_gpu
def test_nothing_is_recorded_where_all_would_be_skipped() -> None:
    before = PAGE.read_text()
    with pytest.raises(SystemExit, match=r"There is no GPU, so that every test would be skipped\. --list says"):
        main(["--piece", "all"])
    assert PAGE.read_text() == before
