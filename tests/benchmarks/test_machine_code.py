"""What tells that two commits compile to the same machine code."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")


def _lines(given: list[str]) -> list[str]:
    """In a process of its own, since nothing may be interpreted there."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.machine_code", *given]
    return subprocess.run(command, env=own, capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_kernel_of_attention_has_a_line() -> None:
    lines = _lines(["--products", "attention", "--rows", "1", "300", "--formats", "bfloat16"])
    kernels = ["decode_attention_kernel", "write_cache_kernel", "prefill_hopper_kernel"]
    assert [line.split()[4] for line in lines] == kernels


def test_every_kernel_of_a_product_has_a_line() -> None:
    formats = ["bfloat16", "int4_arranged", "fp8_blocks", "mxfp4_arranged"]
    given = ["--products", "o", "experts_down", "--rows", "1", "--formats", *formats]
    lines = _lines(given)
    kernels = [(line.partition(":")[0], line.partition(": ")[2].split()[0]) for line in lines]
    assert kernels == [
        ("bfloat16 o 1 rows", "linear_hopper_kernel"), ("bfloat16 o 1 rows norm", "linear_hopper_kernel"),
        ("bfloat16 experts_down 1 rows", "_expert_linear_kernel"),
        ("int4_arranged o 1 rows", "linear_hopper_kernel"), ("int4_arranged o 1 rows norm", "linear_hopper_kernel"),
        ("fp8_blocks o 1 rows", "quantise_rows_kernel"), ("fp8_blocks o 1 rows", "linear_kernel"),
        ("fp8_blocks o 1 rows norm", "quantise_rows_kernel"), ("fp8_blocks o 1 rows norm", "linear_kernel"),
        ("mxfp4_arranged o 1 rows", "linear_hopper_kernel"), ("mxfp4_arranged o 1 rows norm", "linear_hopper_kernel"),
        ("mxfp4_arranged experts_down 1 rows", "_sort_rows_kernel"),
        ("mxfp4_arranged experts_down 1 rows", "experts_hopper_kernel"),
    ]  # fmt: skip
    assert len({line.split()[-1] for line in lines}) == 12, "only rows are quantised twice by the same kernel"
