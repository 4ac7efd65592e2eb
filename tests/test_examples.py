"""Every example runs, so CI need not run ``make examples`` as well."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specgraph.config.lowering import DISABLED, compiler

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("quickstart", "batch_with_draft_model", "own_pass", "read_a_dump")


ONE_AFTER_ANOTHER = """
import os, runpy, sys
for path in sys.argv[1:]:
    sys.argv = [path]
    print(f"\\f{os.path.basename(path)}")
    runpy.run_path(path, run_name="__main__")
"""
"""Runs scripts in one process, since each process imports PyTorch and transformers for four seconds."""


def test_examples_run(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, *(str(EXAMPLES / f"{name}.py") for name in NAMES)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
                          check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = dict(section.split("\n", 1) for section in done.stdout.split("\f")[1:])
    assert [*shown] == [f"{name}.py" for name in NAMES] and all(text.strip() for text in shown.values())


@pytest.mark.skipif(shutil.which(compiler()) is None, reason="there is no C++ compiler")
def test_the_demo_says_what_it_is_doing_and_nothing_else_does(tmp_path: Path) -> None:
    """The demo is ended when it begins to compile. ``.ci/run`` runs the whole of it."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", DISABLED: "0"}
    command, shown = [sys.executable, EXAMPLES / "demo.py"], ""
    with subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, stderr=subprocess.PIPE) as demo:
        assert demo.stderr is not None
        while (letter := demo.stderr.read(1)) and not shown.endswith("compiles ... "):
            shown += letter
        demo.kill()
    before = r"decoder 1 of \d, no draft \(plain decoding\):"
    lines = (r"loading the models \.\.\. [\d.]+ s", rf"{before} tracing and passes \.\.\. [\d.]+ s",
             rf"{before} the first request, in which Inductor compiles \.\.\. ")  # fmt: skip
    assert re.fullmatch("\n".join(lines), shown), shown


def test_make_runs_the_same_examples() -> None:
    (named,) = re.findall(
        r"for file in ([\w ]+); do \$\(BIN\)/python examples/", (EXAMPLES.parent / "Makefile").read_text()
    )
    assert tuple(named.split()) == NAMES
