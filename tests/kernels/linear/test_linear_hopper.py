"""The kernel for few rows on Hopper, compiled for it without a GPU; tests/gpu/test_linear_gpu.py runs it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")

COMPILE = """
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specgraph.kernels.linear import hopper as hopper

ROWS, GATED, PIECES = int(sys.argv[1]), sys.argv[2] == "gated", int(sys.argv[3])
tiling = hopper.ring(ROWS, 4096, PIECES, GATED)
kernel = hopper.linear_hopper_kernel


def descriptor(rows):
    return f"tensordesc<bf16[{rows}, {hopper.BLOCK_K}],{hopper._layout(rows, torch.bfloat16)!r}>"


fixed = {"BLOCK_N": tiling.block_n, "BLOCK_K": hopper.BLOCK_K, "BLOCKS": 8, "PIECES": PIECES, "GROUPS": 64}
fixed |= {"SPLIT": tiling.split, "STAGES": tiling.stages, "GATED": GATED, "ACTIVATION": "silu" if GATED else "none"}
fixed["PDL"] = True
if not tiling.split:
    fixed |= {"partial_ptr": None, "counter_ptr": None}
types = dict.fromkeys(kernel.arg_names, "i32")
types |= {name: "*bf16" for name in types if name.endswith("_ptr")}
types |= {"sum_sq_ptr": "*fp32", "out_sum_sq_ptr": "*fp32", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
types |= {"weight": descriptor(hopper.TILE_O), "x": descriptor(tiling.block_n)}
types |= {"norm_eps": "fp32", "norm_offset": "fp32"}
types |= dict.fromkeys(fixed, "constexpr")
places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
compiled = triton.compile(
    GluonASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32),
    options={"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True},
)
assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
seen = r"griddepcontrol.launch_dependents|griddepcontrol.wait|cp.async.bulk.tensor|wgmma.mma_async|st.global|ld.global"
for instruction in re.findall(seen, compiled.asm["ptx"]):
    print(instruction)
"""


@pytest.mark.parametrize("kind", ["8 plain 2", "16 gated 1", "64 plain 1", "64 gated 1", "128 plain 2"])
def test_weights_are_asked_for_before_the_wait_and_nothing_else_is(kind: str):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, *kind.split()]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    order = result.stdout.split()
    assert order[0] == "griddepcontrol.launch_dependents"
    last_wait = max(place for place, name in enumerate(order) if name == "griddepcontrol.wait")
    before, after = order[1:last_wait], order[last_wait + 1 :]
    copies = "cp.async.bulk.tensor"
    assert set(before) == {"griddepcontrol.wait", copies}  # the other wait is that for weights that are not constant
    assert before.count(copies) >= 3 and after.count(copies) > before.count(copies) / 2
    assert "wgmma.mma_async" in after and "st.global" in after
