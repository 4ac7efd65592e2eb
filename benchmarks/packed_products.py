"""Checks and times products with packed weights on a GPU, for several tilings.

    python -m benchmarks.packed_products [--formats int4 mxfp4 fp8_blocks] [--rows 1 8 32] [--products qkv o]
        [--experts experts_down] [--tilings 64x128x4x4x4 128x128x4x4x2] [--seconds 140] [--no-check]

A tiling is ``BLOCK_O x BLOCK_K x warps x stages x slices``; 0 slices are those of the table, ``table`` is the table's
choice, and ``op`` is whatever the op chooses, also the kernel for Hopper. Products are those of Llama-3-8B and, with
experts, of gpt-oss-20b. Other processes compile the kernels first. Times are microseconds of one product in a CUDA
graph that holds so many of them that no weight is still in the L2 cache.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator

import torch
import triton
from torch import Tensor

from specgraph.bench.timing import median_seconds
from specgraph.kernels import catalogue  # noqa: F401  (registers the ops)
from specgraph.kernels.linear import experts
from specgraph.kernels.linear.product import Tiles, packed_slices
from specgraph.kernels.packed.experts import PACKED_EXPERT_LINEAR, packed_expert_linear
from specgraph.kernels.packed.formats import FORMATS
from specgraph.kernels.packed.linear import PACKED_LINEAR, packed_linear

PRODUCTS = {
    "qkv": (6144, 4096, "none"), "o": (4096, 4096, "none"), "gate_up": (28672, 4096, "silu_mul"),
    "down": (4096, 14336, "none"),
}  # fmt: skip
"""The shape of the weight and the activation."""
EXPERTS, CHOSEN = 32, 4
EXPERT_PRODUCTS = {"experts_gate_up": (5760, 2880), "experts_down": (2880, 2880)}
"""The shapes of the weights of an expert of gpt-oss-20b."""
COPIES_BYTES = 200 * 2**20
ROWS_OF_CHECKS = (1, 3, 8, 17, 32, 64, 200)
Case = tuple[str, str, int, str]
"""A format, a product, the number of rows, and a tiling."""


def tiling_of(name: str, rows: int, out_features: int, in_features: int, *, arranged: bool = False) -> Tiles | None:
    """The tiling of that name."""
    if name == "table":
        return None
    block_o, block_k, warps, stages, slices = map(int, name.split("x"))
    block_n = min(max(triton.next_power_of_2(rows), 16), 64)
    return Tiles(
        block_o,
        block_n,
        block_k,
        slices or packed_slices(out_features, in_features, arranged=arranged),
        rows > 64,
        warps,
        stages,
    )


def form_of(name: str, tiling: str, rows: int, out_features: int, in_features: int) -> Callable[..., Tensor]:
    """What computes a product in a tiling."""
    if tiling == "op":
        return packed_linear
    form: Callable[..., Tensor] = PACKED_LINEAR.form(
        "triton", tiling=tiling_of(tiling, rows, out_features, in_features)
    )
    return form


def random_weight(name: str, out_features: int, in_features: int, group: int = 128) -> list[Tensor]:
    """A weight whose entries have a standard deviation of about one in a hundred."""
    words = torch.randint(-(2**31), 2**31, (out_features, in_features // 8), dtype=torch.int32, device="cuda")
    if name.startswith("int4"):
        scale = torch.rand(out_features, in_features // group, device="cuda") * 0.004 + 0.001
        return [words, scale.bfloat16()]
    if name == "mxfp4":
        scale = torch.randint(117, 122, (out_features, in_features // 32), dtype=torch.uint8, device="cuda")
        return [words.view(torch.uint8), scale]
    weight = torch.randn(out_features, in_features, device="cuda") * 0.01
    return list(FORMATS[name].quantise(weight))


def product(case: Case, weight: list[Tensor], x: Tensor, residual: Tensor | None = None) -> Tensor:
    """The product of a case."""
    name, shape, _, tiling = case
    out_features, in_features, activation = PRODUCTS[shape]
    out: Tensor = form_of(name, tiling, x.shape[0], out_features, in_features)(
        x, weight, None, residual, format=name, activation=activation
    )
    return out


def expert_ids(rows: int) -> Tensor:
    """Ids of different experts for every token, as a router gives them: ``[rows * CHOSEN]``."""
    return torch.cat([torch.randperm(EXPERTS, device="cuda")[:CHOSEN] for _ in range(rows)])


def random_stack(name: str, shape: str) -> list[Tensor]:
    """A stack of weights in a format."""
    group = 32 if name != "fp8_blocks" else 128
    return [part.repeat(EXPERTS, 1, 1) for part in random_weight(name, *EXPERT_PRODUCTS[shape], group)]


def expert_product(case: Case, weight: list[Tensor], x: Tensor, ids: Tensor) -> Tensor:
    """The product of a case with experts."""
    name, _, _, tiling = case
    chosen = None
    if tiling == "op":
        return packed_expert_linear(x, weight, None, ids, format=name)
    if (cut := tiling_of(tiling, 16, *EXPERT_PRODUCTS[case[1]])) is not None:
        chosen = experts.Tiles(cut.block_o, 16, cut.block_k, cut.warps, cut.stages)
    out: Tensor = PACKED_EXPERT_LINEAR.form("triton", tiling=chosen)(x, weight, None, ids, format=name)
    return out


def compile_case(case: Case) -> None:
    """Compile the kernels of a case, which then are on disk."""
    name, shape, rows, _ = case
    if shape in EXPERT_PRODUCTS:
        x = torch.zeros(CHOSEN, EXPERT_PRODUCTS[shape][1], dtype=torch.bfloat16, device="cuda")
        expert_product(case, random_stack(name, shape), x, expert_ids(1))
        torch.cuda.synchronize()
        return
    out_features, in_features, _ = PRODUCTS[shape]
    x = torch.zeros(rows, in_features, dtype=torch.bfloat16, device="cuda")
    product(case, [part.zero_() for part in random_weight(name, out_features, in_features)], x)
    torch.cuda.synchronize()


def compile_all(cases: list[Case]) -> None:
    """Compile the kernels of all cases, in processes of their own."""
    unique = {(name, shape, max(rows, 16), tiling) for name, shape, rows, tiling in cases if shape in PRODUCTS}
    unique |= {(name, shape, 1, tiling) for name, shape, _, tiling in cases if shape in EXPERT_PRODUCTS}
    with multiprocessing.get_context("spawn").Pool(min(12, os.cpu_count() or 1)) as pool:
        pool.map(compile_case, sorted(unique), chunksize=1)


def share_of_rounding(found: Tensor, expected: Tensor, spread: Tensor, inputs: int) -> str:
    """How far results are from float64, beside what float32 may lose in sums of ``spread`` and rounding behind them."""
    allowed = (inputs + 3) * 2.0**-24 * spread + torch.finfo(found.dtype).eps / 2 * expected.abs()
    worst = float(((found.double() - expected).abs() / allowed).max())
    return f"{worst:.3f} of what rounding may be{'' if worst <= 1 else ' WRONG'}"


def check(name: str, tilings: list[str]) -> Iterator[str]:
    """Compare with float64, and rows with rows in other company."""
    generator = torch.Generator("cuda").manual_seed(0)
    for in_features, dtype, group in itertools.product(
        (2880, 3840, 4096), (torch.bfloat16, torch.float16), (32, 64, 128)
    ):
        wanted = {"int4": group, "int4_arranged": 128}.get(name, 32)
        if in_features % group or group != wanted or FORMATS[name].why_not(1000, in_features, None):
            continue
        weight = random_weight(name, 1000, in_features, group)
        x = torch.randn(200, in_features, device="cuda", generator=generator).to(dtype)
        form = FORMATS[name]
        rows, dense = form.quantise_rows(x).double(), form.dequantise(weight, torch.float64)
        expected, spread = rows @ dense.T, rows.abs() @ dense.T.abs()
        for tiling in tilings:
            results = {}
            for count in ROWS_OF_CHECKS:
                results[count] = form_of(name, tiling, count, 1000, in_features)(x[:count], weight, format=name)
            found = results[200]
            same = [count for count in ROWS_OF_CHECKS if torch.equal(results[count], found[:count])]
            equal = "equal bits" if len(same) == len(ROWS_OF_CHECKS) else f"EQUAL BITS ONLY FOR {same}"
            worst = share_of_rounding(found, expected, spread, in_features)
            yield f"check {name}, {in_features} inputs, groups of {group}, {dtype}, {tiling}: {worst}; {equal}"


def check_experts(name: str) -> Iterator[str]:
    """Compare what the op does with experts with float64, with the Triton kernel, and with rows in other company."""
    weight, form = random_stack(name, "experts_down"), FORMATS[name]
    weight = [part[:8].contiguous() for part in weight]
    weight[0] = weight[0].roll(1, 0)  # experts that are not alike
    inputs = EXPERT_PRODUCTS["experts_down"][1]
    bias = torch.randn(8, EXPERT_PRODUCTS["experts_down"][0], device="cuda").bfloat16()
    for rows in (1, 4, 33, 128, 300):
        x, ids = torch.randn(rows, inputs, device="cuda").bfloat16(), torch.randint(0, 7, (rows,), device="cuda")
        dense = form.dequantise(weight, torch.float64)
        place = torch.arange(rows, device="cuda")
        expected = torch.einsum("si,eoi->eso", x.double(), dense)[ids, place] + bias[ids].double()
        spread = torch.einsum("si,eoi->eso", x.double().abs(), dense.abs())[ids, place] + bias[ids].double().abs()
        found = packed_expert_linear(x, weight, bias, ids, format=name)
        by_tiles = PACKED_EXPERT_LINEAR.form("triton")(x, weight, bias, ids, format=name)
        last = packed_expert_linear(x[-1:], weight, bias, ids[-1:], format=name)
        equal = torch.equal(found, by_tiles) and torch.equal(found[-1:], last)
        worst = share_of_rounding(found, expected, spread, inputs)
        yield f"check experts in {name}, {rows} rows: {worst}; {'equal bits' if equal else 'OTHER BITS'}"


def copies(make: Callable[[], list[Tensor]]) -> list[list[Tensor]]:
    """So many weights that the first is no longer in the L2 cache after the last."""
    first = make()
    size = sum(part.nbytes for part in first)
    return [first, *([part.clone() for part in first] for _ in range(math.ceil(COPIES_BYTES / size) - 1))]


def timed(calls: list[Callable[[], Tensor]]) -> float:
    """The microseconds of one call."""
    return 1e6 * median_seconds(torch.device("cuda"), calls, repeats=20, warmup=3)


def time_experts(shape: str, given: argparse.Namespace, begin: float) -> None:
    """Time the products of a mixture of experts; the bytes are those of the experts that are chosen."""
    inputs = EXPERT_PRODUCTS[shape][1]
    chosen = {rows: [expert_ids(rows) for _ in range(8)] for rows in given.rows}  # other experts in every call
    read = {rows: sum(len(ids.unique()) for ids in sets) / len(sets) for rows, sets in chosen.items()}
    xs = {rows: torch.randn(rows * CHOSEN, inputs, device="cuda").bfloat16() for rows in given.rows}

    def report(rows: int, what: str, size: int, call: Callable[[Tensor], Tensor]) -> None:
        us = timed([functools.partial(call, ids) for ids in chosen[rows]])
        rate = read[rows] / EXPERTS * size / us / 1e3
        print(f"{shape}, {rows} rows, {what}: {us:.2f} us, {rate:.0f} GB/s", flush=True)

    dense = torch.randn(EXPERTS, *EXPERT_PRODUCTS[shape], device="cuda").bfloat16()
    for rows in given.rows:
        call = functools.partial(torch.ops.specgraph.expert_linear, xs[rows], dense, None)
        report(rows, "bfloat16", dense.nbytes, call)
    for name in given.formats:
        weight = random_stack(name, shape)
        for rows, tiling in itertools.product(given.rows, given.tilings):
            if time.monotonic() - begin > given.seconds:
                print(f"{shape}, {rows} rows, {name}, {tiling}: no time left", flush=True)
                continue
            size = sum(part.nbytes for part in weight)
            call = functools.partial(expert_product, (name, shape, rows, tiling), weight, xs[rows])
            report(rows, f"{name}, {tiling}", size, call)


def main() -> None:
    """Check and time."""
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=[name for name, form in FORMATS.items() if form.expanded])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--products", nargs="+", default=list(PRODUCTS))
    parser.add_argument("--experts", nargs="*", default=list(EXPERT_PRODUCTS))
    parser.add_argument("--tilings", nargs="+", default=["64x128x4x4x0", "64x256x4x3x0", "128x128x4x4x0"])
    parser.add_argument("--seconds", type=float, default=140.0, help="start nothing more after them")
    parser.add_argument("--no-check", action="store_true")
    given = parser.parse_args()
    cases = list(itertools.product(given.formats, given.products + given.experts, given.rows, given.tilings))
    compile_all(cases)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    for name in [] if given.no_check else given.formats:
        for line in check(name, [*given.tilings[:1], "table", "op"]):
            print(line, flush=True)
        for line in check_experts(name) if given.experts else ():
            print(line, flush=True)
    print(f"checked after {time.monotonic() - begin:.0f} s", flush=True)
    for shape in given.experts:
        time_experts(shape, given, begin)
    for shape in given.products:
        out_features, in_features, activation = PRODUCTS[shape]
        dense = copies(lambda n=out_features, k=in_features: [torch.randn(n, k, device="cuda").bfloat16()])
        for rows in given.rows:
            x = torch.randn(rows, in_features, device="cuda").bfloat16()
            linear = torch.ops.specgraph.linear
            us = timed([functools.partial(linear, x, *one, activation=activation) for one in dense])
            print(f"{shape}, {rows} rows, bfloat16: {us:.2f} us, {dense[0][0].nbytes / us / 1e3:.0f} GB/s", flush=True)
        del dense
        for name in given.formats:
            weights = copies(functools.partial(random_weight, name, out_features, in_features))
            size = sum(part.nbytes for part in weights[0])
            for rows, tiling in itertools.product(given.rows, given.tilings):
                if time.monotonic() - begin > given.seconds:
                    print(f"{shape}, {rows} rows, {name}, {tiling}: no time left", flush=True)
                    continue
                x = torch.randn(rows, in_features, device="cuda").bfloat16()
                case = (name, shape, rows, tiling)
                try:
                    us = timed([functools.partial(product, case, weight, x) for weight in weights])
                except Exception as error:  # another tiling may do
                    print(
                        f"{shape}, {rows} rows, {name}, {tiling}: {type(error).__name__} {str(error)[:200]}", flush=True
                    )
                    continue
                print(f"{shape}, {rows} rows, {name}, {tiling}: {us:.2f} us, {size / us / 1e3:.0f} GB/s", flush=True)
            del weights
    print(f"done after {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
