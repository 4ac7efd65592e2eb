"""The kernels compile for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
KERNELS = {
    "attention": ("decode", "prefill", "rotary"),
    "linear": ("experts", "norm", "triton_form"),
    "sampling": ("floors", "triton_form"),
    "step": ("ngram", "results", "rows", "tokens"),
    "verify": ("race", "triton_residual", "triton_form"),
}
"""The files of every room whose Triton kernels its tests launch."""
LAUNCHES_NOTHING = FOLDER / "verify" / "test_verify_distribution.py"
"""It runs the references alone, for minutes, which compiles nothing."""


@pytest.mark.parametrize("room", KERNELS)
def test_every_triton_kernel_compiles_for_hopper(room: str) -> None:
    """As the tests of its room launch it. The interpreter takes much that the compiler refuses."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.compile_only", str(FOLDER / room), "--ignore",
               str(LAUNCHES_NOTHING)]  # fmt: skip
    own = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=own, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:]
    assert not [name for name in KERNELS[room] if f"specgraph.kernels.{room}.{name}." not in run.stdout]
