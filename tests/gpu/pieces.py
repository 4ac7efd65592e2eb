"""Run the tests of this folder in pieces that fit ten minutes each, and record what passed at which commit.

``python -m tests.gpu.pieces --list`` says what the pieces are and when they last ran, and ``--piece NAME`` runs one (or
several, or ``all``). A piece that takes too long is ended, and what it did until then is recorded. The records are the
table of ``docs/gpu-tests.md``, which has one row for each piece: that of its last run. It says how long each file took,
so that a piece that grows too long can be divided.

``tests/gpu/run_offline.sh`` calls this on a machine without a network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "gpu-tests.md"
LIMIT = 570
"""Seconds after which a piece is ended, of the 600 that a command may take."""


@dataclass(frozen=True)
class Piece:
    """Files of this folder, without ``test_`` and ``_gpu.py``, and the number of processes that share the card."""

    name: str
    files: tuple[str, ...]
    processes: int
    select: str = ""
    """For pytest's ``-k``."""


PIECES = (
    Piece(
        "kernels",
        ("attention", "linear", "packed", "norm", "experts", "route", "fast", "ngram", "suffix", "step", "verify"),
        6,
    ),
    Piece("processors", ("processors", "pause", "trace", "score"), 6),
    Piece("runners", ("runner", "session", "remainder"), 4),
    Piece("drafters", ("decoder", "dflash", "dspark", "checkpoints", "attach"), 6),
    Piece("bits", ("bitwise",), 6),
    Piece("architectures", ("architectures",), 6),
    Piece("recurrent", ("recurrent",), 6),
    # Each process keeps a model of 16 to 18 GB and two decoders with their caches. Four of them ran out of memory.
    Piece("llama 8b", ("bitwise_8b",), 2, "llama-3-8b-shape-"),
    Piece("qwen 9b", ("bitwise_8b",), 2, "qwen3.5-9b-shape-"),
    Piece("packed int4", ("bitwise_8b",), 4, "int4"),
    Piece("packed fp8", ("bitwise_8b",), 3, "fp8"),
    Piece("packed mxfp4", ("bitwise_8b",), 4, "mxfp4"),
    Piece("schemes", ("schemes",), 10),
    # The benchmarks want the card for themselves, and training takes most of its memory.
    Piece("benchmarks", ("bench", "reinforce"), 1),
    # Each of them starts processes of its own. Skipped with fewer than two GPUs.
    Piece("two cards", ("ray", "parallel"), 1),
)
COLUMNS = ("piece", "passed", "failed", "skipped", "seconds", "seconds of each file", "card", "versions", "commit")


def pytest_runtest_logreport(report: Any) -> None:
    """Write a line about each test that is over. This module is a plugin of the runs that it starts."""
    file = os.environ.get("SPECGRAPH_GPU_RECORD")
    if file is None or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    over = report.when == "call" or report.outcome != "passed"
    line = {"test": report.nodeid, "outcome": report.outcome if over else None, "seconds": report.duration}
    with Path(file).open("a") as lines:
        lines.write(json.dumps(line) + "\n")


def command(piece: Piece) -> list[str]:
    """The command of pytest that runs a piece."""
    files = [f"tests/gpu/test_{name}_gpu.py" for name in piece.files]
    spread = ["-n", str(piece.processes), "--dist", "worksteal"] if piece.processes > 1 else []
    select = ["-k", piece.select] if piece.select else []
    return [sys.executable, "-m", "pytest", "-p", "tests.gpu.pieces", "-rs", *spread, *select, *files]


def run(piece: Piece, limit: float) -> tuple[dict[str, str], bool]:
    """Run a piece. Returns the cells of its row that follow from the run, and whether all of it passed."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        record.touch()
        begin = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment["SPECGRAPH_GPU_RECORD"] = str(record)
        with subprocess.Popen(command(piece), cwd=ROOT, env=environment, start_new_session=True) as tests:
            try:
                status: int | None = tests.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
                os.killpg(tests.pid, signal.SIGKILL)
        seconds = time.monotonic() - begin
        lines = [json.loads(line) for line in record.read_text().splitlines()]
    return summary(lines, seconds, status), status == 0


def summary(lines: Sequence[dict[str, Any]], seconds: float, status: int | None) -> dict[str, str]:
    """The cells that follow from the lines of a record, and from the status of pytest, None if the piece was ended."""
    counts = Counter(line["outcome"] for line in lines)
    failed = sorted({line["test"].rpartition("::")[2] for line in lines if line["outcome"] == "failed"})
    if status is None:
        failed.append(f"not finished after {seconds:.0f} s")
    elif status != 0 and not failed:
        failed.append(f"pytest ended with {status}")
    by_file: defaultdict[str, float] = defaultdict(float)
    for line in lines:
        file = Path(line["test"].partition("::")[0]).name.removeprefix("test_").removesuffix("_gpu.py")
        by_file[file] += line["seconds"]
    files = [f"{file} {spent:.0f}" for file, spent in sorted(by_file.items(), key=lambda item: -item[1])]
    return {
        "passed": str(counts["passed"]),
        "failed": f"**{counts['failed']}**: {', '.join(failed)}".replace("|", "\\|") if failed else "0",
        "skipped": str(counts["skipped"]),
        "seconds": f"{seconds:.0f}",
        "seconds of each file": ", ".join(files),
    }


def machine() -> dict[str, str]:
    """The cells that follow from the machine."""
    import torch  # `--list` should not wait for these
    import transformers
    import triton

    if not torch.cuda.is_available():
        raise SystemExit("There is no GPU, so that every test would be skipped. --list says what the pieces are.")
    versions = f"torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}"
    return {"card": torch.cuda.get_device_name(), "versions": versions}


def commit() -> str:
    """The commit of the working tree, and whether it was changed; without git, the caller has to say it."""
    asked = [["git", "rev-parse", "--short", "HEAD"], ["git", "status", "--porcelain", "--untracked-files=no"]]
    try:
        head, changed = (subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
                         for words in asked)  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        raise SystemExit(
            "This is no git repository. Give --commit, as `git rev-parse --short HEAD` prints it."
        ) from None
    return f"{head}, changed" if changed else head


def read_rows(page: str) -> dict[str, dict[str, str]]:
    """The rows of the table of a page, by the name of the piece."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip().replace("\\|", "|") for cell in line.replace("\\|", "\0").strip("| ").split("|")]
             for line in lines[1:]]  # fmt: skip
    return {row[0]: dict(zip(COLUMNS, (cell.replace("\0", "\\|") for cell in row), strict=True)) for row in cells}


def write_rows(page: str, rows: dict[str, dict[str, str]]) -> str:
    """The page with these rows in its table, in the order of the pieces, and a row for each that has not run."""
    before, _, after = page.partition("| piece |")
    rest = after.partition("\n\n")[2]
    table = [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    for piece in PIECES:
        row = rows.get(piece.name, {"commit": "not run yet"})
        table.append(f"| {' | '.join({'piece': piece.name, **row}.get(column, '') for column in COLUMNS)} |")
    return before + "\n".join(table) + "\n" + ("\n" + rest if rest else "")


def listed(rows: dict[str, dict[str, str]]) -> str:
    """The pieces, one in a line."""
    found = []
    for piece in PIECES:
        row = rows.get(piece.name, {})
        last = f"{row['seconds']} s at {row['commit']}" if row.get("seconds") else "not run yet"
        select = f" -k {piece.select}" if piece.select else ""
        found.append(f"{piece.name:14} {piece.processes} processes, {last}: {' '.join(piece.files)}{select}")
    return "\n".join(found)


def main(words: Sequence[str] | None = None) -> int:
    names = [piece.name for piece in PIECES]
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.pieces", description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="say what the pieces are, and run nothing")
    parser.add_argument("--piece", nargs="+", choices=[*names, "all"], metavar="NAME", help="the pieces to run")
    parser.add_argument("--commit", help="what is tested, where there is no git to ask")
    parser.add_argument("--table", type=Path, default=PAGE, help="the page to write, in place of docs/gpu-tests.md")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds after which a piece is ended")
    given = parser.parse_args(words)
    page = given.table if given.table.exists() else PAGE
    rows = read_rows(page.read_text())
    if given.list or not given.piece:
        print(listed(rows))
        return 0
    known = {**machine(), "commit": given.commit or commit()}
    good = True
    for piece in PIECES:
        if piece.name not in given.piece and "all" not in given.piece:
            continue
        cells, passed = run(piece, given.limit)
        good &= passed
        rows[piece.name] = {"piece": piece.name, **cells, **known}
        given.table.write_text(write_rows(PAGE.read_text(), rows))
        print(f"{piece.name}: {', '.join(f'{name} {value}' for name, value in cells.items())}", flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
