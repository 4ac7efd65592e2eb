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


def test_every_triton_kernel_compiles_for_hopper() -> None:
    """As the tests of its room launch it. The interpreter takes much that the compiler refuses."""
    folders = [str(FOLDER / room) for room in KERNELS]
    ignored = [f"--ignore={FOLDER / file}" for file in LAUNCHES_NOTHING]
    command = [sys.executable, "-m", "pytest", "-p", "tests.compile_only", *folders, *ignored]
    own = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=own, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:]
    names = [f"specgraph.kernels.{room}.{name} " for room, kernels in KERNELS.items() for name in kernels]
    assert names and not [name for name in names if name not in run.stdout]
