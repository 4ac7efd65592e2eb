"""Lists the machine code of products and attention on Hopper, which need not be there, to compare two commits.

    python -m benchmarks.machine_code [--products qkv o] [--rows 1 32 300] [--formats bfloat16 int4_arranged]

A line has a kernel, its grid, its shared memory, its registers and a digest of its instructions. Where the lines of two
commits are equal, so are the times and the bits of their products: a change of the source was one of words.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton

from benchmarks.no_gpu import Hopper
from benchmarks.packed_products import CHOSEN, EXPERT_PRODUCTS, PRODUCTS
from specgraph.kernels import launch
from specgraph.kernels.attention.attention import PAGED_ATTENTION
from specgraph.kernels.linear.experts import EXPERT_LINEAR
from specgraph.kernels.linear.linear import LINEAR, LINEAR_NORM
from specgraph.kernels.ops import Op
from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR
from specgraph.kernels.packed.formats import FORMATS
from specgraph.kernels.packed.linear import PACKED_LINEAR, PACKED_LINEAR_NORM

DENSE = "bfloat16"
ATTENTION = "attention"
EVERY = [*PRODUCTS, *EXPERT_PRODUCTS, ATTENTION]
_RUN = triton.JITFunction.run


def _disassembled(program: bytes) -> tuple[str, str]:
    """The instructions of a program, and the line about its registers."""
    tools = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program)
        file.flush()
        listed, used = (
            subprocess.run([tools / name, option, file.name], capture_output=True, text=True, check=True).stdout
            for name, option in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        )
    lines = [
        re.sub(r"/\*.*?\*/", "", line).strip() for line in listed.splitlines() if re.search(r"/\*\w{4,5}\*/\s", line)
    ]
    return "\n".join(lines), re.findall(r"REG:\d+ STACK:\d+", used)[0]


def lines(products: list[str], rows: list[int], formats: list[str]) -> Iterator[str]:
    """One line for each kernel that a product launches."""
    found: list[tuple[str, tuple[int, ...], Any]] = []

    def compile_only(kernel: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        found.append((kernel.fn.__name__, grid, _RUN(kernel, *args, grid=grid, warmup=True, **options)))

    triton.runtime.driver.set_active(Hopper())
    with (
        mock.patch.object(triton.JITFunction, "run", compile_only),
        mock.patch.object(launch, "_capability", lambda device: (9, 0)),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: True),
    ):
        for form, product, count, norm in itertools.product(formats, products, rows, (False, True)):
            if product == ATTENTION:
                if norm or form != DENSE:
                    continue
                _launch_attention(count)
            elif product in EXPERT_PRODUCTS:
                if norm or form not in (DENSE, "mxfp4", "mxfp4_arranged"):
                    continue
                _launch_experts(form, *EXPERT_PRODUCTS[product], count)
            else:
                outputs, inputs, activation = PRODUCTS[product]
                if norm and activation != "none":
                    continue
                _launch(form, outputs, inputs, activation, count, norm=norm)
            for name, grid, compiled in found:
                code, registers = _disassembled(compiled.asm["cubin"])
                digest = hashlib.sha256(code.encode()).hexdigest()[:16]
                what = f"{form} {product} {count} rows{' norm' if norm else ''}"
                yield f"{what}: {name} {grid} {compiled.metadata.shared} B {registers} {digest}"
            found.clear()


def _chosen(op: Op, *given: Any, tuning: dict[str, Any] | None = None, **options: Any) -> None:
    """Call the variant of an op that it would choose on a GPU."""
    op.form(op.choose("cuda", op.arguments(*given, **options)).name, **(tuning or {}))(*given, **options)


def _launch(form: str, outputs: int, inputs: int, activation: str, rows: int, *, norm: bool) -> None:
    """What a GPU would launch for a product. Nothing is: it is compiled."""
    x = torch.zeros(rows, inputs, dtype=torch.bfloat16)
    dense = torch.zeros(outputs, inputs, dtype=torch.bfloat16)
    weight: Any = dense if form == DENSE else list(FORMATS[form].quantise(dense))
    op = ((LINEAR, LINEAR_NORM) if form == DENSE else (PACKED_LINEAR, PACKED_LINEAR_NORM))[norm]
    options = {"activation": activation} | ({} if form == DENSE else {"format": form})
    behind = (torch.ones(outputs, dtype=torch.bfloat16), None, torch.zeros(rows, outputs, dtype=torch.bfloat16))
    _chosen(op, x, weight, *(behind if norm else ()), tuning={"pdl": True}, **options)


def _launch_experts(form: str, outputs: int, inputs: int, rows: int) -> None:
    """The same for a mixture of so many experts that those of one row are few."""
    count = 4 * CHOSEN
    x, ids = torch.zeros(rows * CHOSEN, inputs, dtype=torch.bfloat16), torch.arange(rows * CHOSEN) % count
    one = torch.zeros(1, outputs, inputs, dtype=torch.bfloat16)
    if form == DENSE:
        EXPERT_LINEAR.form("triton")(x, one.expand(count, -1, -1), None, ids)
        return
    stack = [part.repeat(count, 1, 1) for part in FORMATS[form].quantise(one)]
    _chosen(PACKED_EXPERT_LINEAR, x, stack, None, ids, format=form)


def _launch_attention(rows: int) -> None:
    """The same for rows of one sequence, with the heads of Llama-3-8B."""
    q, k = (torch.zeros(1, heads, rows, 128, dtype=torch.bfloat16) for heads in (32, 8))
    cache, angles = torch.zeros(8, 16, 8, 128, dtype=torch.bfloat16), torch.zeros(1, rows, 128, dtype=torch.bfloat16)
    places, table = torch.zeros(1, rows, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)
    given = (q, k, k, cache, cache, places, table, places)
    PAGED_ATTENTION.form("triton")(*given, cos=angles, sin=angles, scale=0.1)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--products", nargs="+", default=EVERY, choices=EVERY)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 32, 64, 300])
    parser.add_argument("--formats", nargs="+", default=[DENSE, *FORMATS], choices=[DENSE, *FORMATS])
    given = parser.parse_args()
    for line in lines(given.products, given.rows, given.formats):
        print(line, flush=True)


if __name__ == "__main__":
    main()
