"""The kernels compile for a GPU that is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
KERNELS = (
    "attention.decode", "attention.prefill", "attention.rotary", "linear.experts", "linear.norm",
    "linear.triton_form", "sampling.floors", "sampling.triton_form", "step.ngram", "step.results", "step.rows",
    "step.tokens", "verify.race", "verify.triton_residual", "verify.triton_form",
)  # fmt: skip


def test_every_triton_kernel_compiles_for_hopper() -> None:
    """As the other tests of this folder launch it. The interpreter takes much that the compiler refuses."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.compile_only", str(FOLDER), "--ignore", __file__]
    own = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, env=own, cwd=FOLDER.parents[1], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-10_000:]
    assert not [name for name in KERNELS if f"specgraph.kernels.{name}." not in run.stdout]
