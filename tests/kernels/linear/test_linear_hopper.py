"""The kernels for Hopper, compiled for it without a GPU; tests/gpu/test_linear_gpu.py runs them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton.experimental.gluon")

KINDS = [
    "8 plain 2",
    "16 gated 1",
    "64 plain 1",
    "64 gated 1",
    "128 plain 2",
    "8 plain 8 int4",
    "32 gated 2 int4",
    "8 plain 8 fp8_blocks",
    "32 gated 1 mxfp4",
]
"""Rows, whether the product is gated, split-K slices, and the format of arranged words if the weight is not dense."""
TWO_GROUPS = [
    "8 plain 2 int4", "16 gated 2 int4", "32 plain 2 int4", "16 plain 2 fp8_blocks", "8 gated 2 mxfp4",
    "300 plain 2 int4", "300 gated 2 mxfp4", "2048 plain 2 fp8_blocks",
]  # fmt: skip
"""Kinds for which two groups of warps multiply."""
COMPILE = """
import json
import re
import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from specgraph.kernels.linear import hopper as hopper

SEEN = r"griddepcontrol.launch_dependents|griddepcontrol.wait|cp.async.bulk.tensor|wgmma.mma_async|st.global|ld.global"
kernel = hopper.linear_hopper_kernel


def descriptor(rows, name="bf16", width=hopper.BLOCK_K, dtype=torch.bfloat16):
    return f"tensordesc<{name}[{rows}, {width}],{hopper._layout(rows, width, dtype)!r}>"


def instructions(rows, gated, pieces, form=None):
    of_words = form is not None and hopper.packed_ring(rows, 4096, pieces, gated, form != "fp8_blocks")
    tiling = of_words or hopper.ring(rows, 4096, pieces, gated)
    fixed = {"BLOCK_N": tiling.block_n, "BLOCK_K": hopper.BLOCK_K, "BLOCKS": 8, "SLICES": pieces, "GROUPS": 64}
    fixed |= {"SPLIT": tiling.split, "STAGES": tiling.stages, "GATED": gated}
    fixed |= {"ACTIVATION": "silu" if gated else "none", "PDL": True}
    fixed |= {"FORMAT": form, "PARTS": tiling.parts, "WARP_GROUPS": tiling.warp_groups}
    fixed |= {"REGISTERS": tiling.registers or 0} | ({} if form else {"weight_scale_ptr": None})
    if not tiling.split:
        fixed |= {"partial_ptr": None, "counter_ptr": None}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {name: "*bf16" for name in types if name.endswith("_ptr")}
    types |= {"x_scale_ptr": "*fp32", "weight_scale_ptr": "*i32" if form == "mxfp4" else "*fp32"}
    types |= {"sum_sq_ptr": "*fp32", "out_sum_sq_ptr": "*fp32", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
    fixed |= {"x_scale_ptr": None} if form != "fp8_blocks" else {}
    words = descriptor(hopper.TILE_O, "i32", hopper.BLOCK_K // (4 if form == "fp8_blocks" else 8), torch.int32)
    types |= {"weight": words if form else descriptor(hopper.TILE_O), "x": descriptor(tiling.block_n)}
    if form == "fp8_blocks":
        types["x"] = descriptor(tiling.block_n, "fp16", dtype=torch.float16)
    types |= {"norm_eps": "fp32", "norm_offset": "fp32"}
    types |= dict.fromkeys(fixed, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    compiled = triton.compile(
        GluonASTSource(kernel, types, places), target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": True, "maxnreg": tiling.registers},
    )
    assert compiled.metadata.shared <= 227 * 1024, compiled.metadata.shared
    return re.findall(SEEN, compiled.asm["ptx"])


found = {}
for kind in sys.argv[1:]:
    rows, gated, pieces, *form = kind.split()
    found[kind] = instructions(int(rows), gated == "gated", int(pieces), *form)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def instructions() -> dict[str, list[str]]:
    """Those of interest, in order, of the kernel of every kind; all are compiled by one process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE, *KINDS, *TWO_GROUPS]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_asked_for_before_the_wait_and_nothing_else_is(kind: str, instructions: dict[str, list[str]]):
    order = instructions[kind]
    assert order[0] == "griddepcontrol.launch_dependents"
    last_wait = max(place for place, name in enumerate(order) if name == "griddepcontrol.wait")
    before, after = order[1:last_wait], order[last_wait + 1 :]
    copies = "cp.async.bulk.tensor"
    early = {"ld.global"} if len(kind.split()) > 3 else set()  # scales are part of the weight
    # The other wait is that for weights that are not constant.
    assert set(before) == {"griddepcontrol.wait", copies} | early
    assert before.count(copies) >= 3 and after.count(copies) > before.count(copies) / 2
    assert "wgmma.mma_async" in after and "st.global" in after


@pytest.mark.parametrize("kind", TWO_GROUPS)
def test_two_groups_of_warps_multiply(kind: str, instructions: dict[str, list[str]]) -> None:
    """Each of them has its own products, also of the last blocks."""
    rows, gated, *_ = kind.split()
    parts = 1 if gated == "gated" or int(rows) > 64 else 2
    tiles = 2 if gated == "gated" else 1
    assert instructions[kind].count("wgmma.mma_async") == 2 * parts * tiles * 8
    assert "griddepcontrol.wait" in instructions[kind]


def test_the_kernel_for_many_rows_fits_a_multiprocessor() -> None:
    """One program has it to itself: its ring fits the shared memory, and all sums the registers."""
    command = [sys.executable, "-m", "benchmarks.machine_code", "--formats", "bfloat16", "--rows", "300"]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [*command, "--products", "qkv", "o", "gate_up"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    wide = [line for line in result.stdout.splitlines() if "linear_wide_kernel" in line]
    assert len(wide) == 5  # with a norm behind the product and without one; a gated product has none
    for line in wide:
        found = re.search(r"\((\d+),\) (\d+) B REG:(\d+) STACK:0 ", line)
        assert found is not None, line
        programs, shared, registers = map(int, found.groups())
        assert programs <= 132 and shared <= 227 * 1024 and registers * 12 * 32 <= 65536, line
