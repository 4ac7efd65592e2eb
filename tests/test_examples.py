"""Every example runs, so CI need not run ``make examples`` as well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
NAMES = ("quickstart", "batch_with_draft_model", "own_pass", "read_a_dump")


@pytest.mark.parametrize("name", NAMES)
def test_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], cwd=tmp_path, env=environment, capture_output=True,
                          text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_make_runs_the_same_examples() -> None:
    (named,) = re.findall(
        r"for file in ([\w ]+); do \$\(BIN\)/python examples/", (EXAMPLES.parent / "Makefile").read_text()
    )
    assert tuple(named.split()) == NAMES
