"""What ``make`` installs, and what it shows of that.

A script stands for Python, and makes another one that stands for pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")

PYTHON = """#!/bin/sh
[ "$1" = -c ] && exit 0
mkdir -p "$3/bin"
cat > "$3/bin/pip" << 'END'
#!/bin/sh
echo "WARNING: Location is ignored"
echo "WARNING: it is a script" >&2
echo "pip $*" >> "$PIP_CALLS"
case "$*" in *"$PIP_FAILS"*) exit 1 ;; esac
END
chmod +x "$3/bin/pip"
"""


def make(folder: Path, target: str, fails: str = "nothing") -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The result of ``make target`` with a new environment, and the calls of pip."""
    python, calls = folder / "python", folder / "calls"
    python.write_text(PYTHON)
    python.chmod(0o755)
    calls.write_text("")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of `make test`
    environment |= {"PIP_CALLS": str(calls), "PIP_FAILS": fails}
    command = ["make", "-C", ROOT, "--no-print-directory", target, f"PYTHON={python}", f"VENV={folder / 'venv'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done, calls.read_text().splitlines()


def test_the_demo_needs_torch_and_the_package_and_nothing_of_the_tools(tmp_path: Path) -> None:
    done, calls = make(tmp_path, "package")
    assert done.returncode == 0, done.stderr
    assert [call.rpartition(" -c constraints.txt ")[2] for call in calls] == ["torch", "-e ."]
    planned = subprocess.run(["make", "-C", ROOT, "-n", "demo", f"VENV={tmp_path / 'venv'}"], capture_output=True,
                             text=True, check=True).stdout  # fmt: skip
    assert "examples/demo.py" in planned and "pip" not in planned


def test_the_tools_come_on_top_once(tmp_path: Path) -> None:
    make(tmp_path, "package")
    _, calls = make(tmp_path, "install")
    given = [call.rpartition(" -c constraints.txt ")[2] for call in calls]
    assert given == ["--upgrade pip setuptools wheel", "-e .[dev]", "--no-deps speculators hs-connectors"]
    _, calls = make(tmp_path, "install")
    assert not calls


def test_steps_are_named_and_timed_and_pip_is_not_heard(tmp_path: Path) -> None:
    done, _ = make(tmp_path, "package")
    assert not done.stderr
    first, *steps = done.stdout.splitlines()
    assert first.startswith("Installing PyTorch, transformers and specgraph into ")
    names = ("an environment", "PyTorch", "specgraph and what it imports")
    for number, (step, name) in enumerate(zip(steps, names, strict=True), 1):
        assert step.removesuffix(" s").rstrip("0123456789") == f"{number} of 3: {name} ... "
    assert "WARNING: Location is ignored" in (tmp_path / "venv" / "install.log").read_text()


def test_a_step_that_fails_shows_what_pip_said(tmp_path: Path) -> None:
    done, calls = make(tmp_path, "package", fails="torch")
    assert done.returncode != 0 and len(calls) == 1
    assert "2 of 3: PyTorch ... failed\nWARNING: Location is ignored\nWARNING: it is a script\n" in done.stdout
    assert f"The whole log is {tmp_path / 'venv' / 'install.log'}." in done.stdout
    assert not (tmp_path / "venv" / ".ready").exists()
    _, calls = make(tmp_path, "package")
    assert len(calls) == 2
