"""The kernels compile for a GPU that is not there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specgraph.kernels import catalogue

FOLDER = Path(__file__).parent
SOURCES = {file: file.read_text() for file in Path(catalogue.__file__).parent.rglob("*.py")}


def launched(source: str) -> list[str]:
    """The Triton functions of a file that no other one calls, and that are therefore kernels."""
    names = re.findall(r"^@triton\.jit(?:\(.*\))?\ndef (\w+)\(", source, re.MULTILINE)
    called = [name for name in names if re.search(rf"(?<!def )\b{name}\(", "".join(SOURCES.values()))]
    written = re.findall(r"triton\.jit\(\w+\[\"(\w+)\"\]\)", source)  # kernels whose source is made as it is needed
    return [name for name in names + written if name not in called]


KERNELS: dict[str, list[str]] = {}
"""The Triton kernels of every room as ``file.function``, which the tests of the room launch."""
for file, source in sorted(SOURCES.items()):
    for name in launched(source):
        KERNELS.setdefault(file.parent.name, []).append(f"{file.stem}.{name}")
LAUNCHES_NOTHING = FOLDER / "verify" / "test_verify_distribution.py"
"""It runs the references alone, for minutes, which compiles nothing."""


@pytest.mark.parametrize("rooms", [[*KERNELS][::2], [*KERNELS][1::2]], ids=", ".join)
def test_every_triton_kernel_compiles_for_hopper(rooms: list[str]) -> None:
    """As the tests of its room launch it. The interpreter takes much that the compiler refuses.

    Half of the rooms share a process, because each one would import everything again.
    """
    folders = [str(FOLDER / room) for room in rooms]
    command = [sys.executable, "-m", "pytest", "-p", "tests.compile_only", *folders, "--ignore", str(LAUNCHES_NOTHING)]
    own = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=own, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:]
    names = [f"specgraph.kernels.{room}.{name} " for room in rooms for name in KERNELS[room]]
    assert names and not [name for name in names if name not in run.stdout]
