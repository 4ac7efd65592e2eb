"""Times the linears of a target in our kernels and in a library's, and finds for how many rows each is faster.

    python -m benchmarks.linears target=llama-3-8b-shape [rows=[1,8,64]] [json=FILE]

Each linear of a step is timed with everything that lowering joins to it (the norms, the activation, the residual).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.case import Kind, Product, Shape
from benchmarks.command import model_config_of, place_of, read_options
from benchmarks.kernels import LIBRARY_FORM, KernelRow, measure, step_products
from benchmarks.sizes import Sizes
from specgraph.bench.config import BenchConfig
from specgraph.bench.report import about_repeats, about_run, finish, gather, plot_ratios
from specgraph.bench.run import dtype_on
from specgraph.bench.timing import measure_bandwidth

MARGIN = 0.03
"""The share by which the library must be faster to count. The linears are timed by themselves, and in a step our
kernels gain more, because they overlap with their neighbours."""
Table = dict[Shape, tuple[int, ...]]


@dataclass
class LinearOptions(BenchConfig):
    """The numbers of rows that are measured, beside what other scripts take."""

    rows: list[int] = field(default_factory=lambda: [1, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048])


@dataclass(frozen=True)
class LinearRow(KernelRow):
    """One linear: ``us`` is the time of our kernel and ``library_us`` that of the library's (None if it cannot run).

    Attributes:
        product: the kind of linear, the shape of its weight, and the number of rows.
    """

    product: Product

    @property
    def time(self) -> str:
        """Both times as text."""
        other = "cannot run" if self.library_us is None else f"{self.library_us:.2f} us"
        return f"our form {self.us:.2f} us, the library's {other}"

    @property
    def faster(self) -> bool:
        """Whether the library's product is faster by more than :data:`MARGIN`."""
        return self.library_us is not None and self.library_us < (1 - MARGIN) * self.us


def bench_linears(
    sizes: Sizes, options: LinearOptions, device: torch.device, dtype: torch.dtype, bandwidth: float
) -> Iterator[LinearRow]:
    """Measure every linear of a step, including the experts', for every number of ``options.rows``."""
    for rows in sorted(set(options.rows)):
        for case in step_products(sizes, rows, device, dtype):
            product = case.product
            assert product is not None
            timed = measure(case, options, device, bandwidth, LIBRARY_FORM)
            yield LinearRow(**{**vars(timed), "library": LIBRARY_FORM}, product=product)


def crossovers(rows: Sequence[LinearRow]) -> dict[Kind, Table]:
    """The numbers of rows at which the faster form changes, by kind and shape of the weight.

    If one weight was timed with different neighbours, the library must be faster with all of them.
    """
    faster: dict[Product, bool] = defaultdict(lambda: True)
    for row in rows:
        faster[row.product] &= row.faster
    weights: dict[tuple[Kind, Shape], dict[int, bool]] = defaultdict(dict)
    for product, wins in faster.items():
        weights[product.kind, product.weight][product.rows] = wins
    tables: dict[Kind, Table] = defaultdict(dict)
    for (kind, weight), measured in weights.items():
        tables[kind][weight] = changes(measured)
    return dict(tables)


def changes(faster: Mapping[int, bool]) -> tuple[int, ...]:
    """The numbers of rows at which the choice between our kernel and the library's changes.

    Between two measured numbers, the library is chosen if it is faster at both. Above the largest, it is chosen if it
    is faster at the largest.
    """
    found: list[int] = []
    last = 0
    for rows in sorted(faster):
        if faster[rows] != bool(len(found) % 2):
            found.append(rows if faster[rows] else last + 1)
        last = rows
    return tuple(found)


def describe_crossovers(rows: Sequence[LinearRow]) -> Iterator[str]:
    """The tables as text."""
    yield f"by these times the library's form is faster by more than {MARGIN:.0%} where these tables say so:"
    for kind, table in crossovers(rows).items():
        yield f"    {kind}={table},"


def main(words: Sequence[str]) -> list[LinearRow]:
    """Measure and print the linears of a target in both forms, and the tables that follow."""
    _, options = read_options(words, LinearOptions, {"what": "linears"})
    device, name = place_of(options)
    dtype, bandwidth = dtype_on(name, device), measure_bandwidth(device)
    rows = bench_linears(Sizes.of(model_config_of(options)), options, device, dtype, bandwidth)
    found = gather(rows)
    finish(options, about_run(options, device, dtype, bandwidth) | about_repeats(options), found, plot_ratios)
    print("\n" + "\n".join(describe_crossovers(found)))
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
