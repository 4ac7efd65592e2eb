"""The kernels compile for a GPU that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from specgraph.kernels import catalogue
from tests.kernels.conftest import LAUNCHES_NOTHING

FOLDER = Path(__file__).parent
SOURCES = Path(catalogue.__file__).parent


GLUON = ("prefill_hopper.prefill_hopper_kernel",)
"""The Gluon kernels that the tests of a room launch; those of linear layers are compiled by benchmarks.machine_code."""


def kernels() -> dict[str, list[str]]:
    """The kernels of every room as ``file.function``, which the tests of the room launch.

    They are the Triton functions that no other one calls, and some of Gluon.
    """
    files = {file: file.read_text() for file in sorted(SOURCES.rglob("*.py"))}
    called = set(re.findall(r"(?<!def )\b(\w+)\(", "".join(files.values())))
    found: dict[str, list[str]] = {}
    for file, source in files.items():
        names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)\(", source, re.MULTILINE)
        names += re.findall(r"triton\.jit\(\w+\[\"(\w+)\"\]\)", source)  # kernels whose source is made as it is needed
        found.setdefault(file.parent.name, []).extend(f"{file.stem}.{name}" for name in names if name not in called)
        found[file.parent.name] += [name for name in GLUON if name.startswith(f"{file.stem}.")]
    return {room: names for room, names in found.items() if names}


def test_every_triton_kernel_compiles_for_hopper() -> None:
    """As the tests of its room launch it. The interpreter takes much that the compiler refuses."""
    rooms = kernels()
    folders = [str(FOLDER / room) for room in rooms]
    ignored = [f"--ignore={FOLDER / file}" for file in LAUNCHES_NOTHING]
    command = [sys.executable, "-m", "pytest", "-p", "tests.compile_only", *folders, *ignored]
    own = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=own, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:]
    names = [f"specgraph.kernels.{room}.{name} " for room, found in rooms.items() for name in found]
    assert names and not [name for name in names if name not in run.stdout]
