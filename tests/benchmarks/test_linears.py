"""The linears in both forms: what is timed, and the tables that follow from the times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.case import Product
from benchmarks.kernels import LIBRARY_FORM, step_products
from benchmarks.linears import LinearRow, changes, crossovers, describe_crossovers, main
from benchmarks.sizes import Experts, Sizes
from specgraph.bench.models import shape_config

SIZES = Sizes.of(shape_config("tiny-shape"))
SPARSE = Sizes(64, 192, 4, 2, 16, 512, Experts(8, 2, 24))


@pytest.mark.parametrize(
    ("faster", "expected"),
    [
        ([], ()),
        ([1, 8, 16, 32], (1,)),
        ([16, 32], (16,)),
        ([32], (32,)),
        ([8], (8, 9)),
        ([1, 8], (1, 9)),
        ([1, 16], (1, 2, 16, 17)),
        ([1, 32], (1, 2, 32)),
    ],
)
def test_the_library_is_taken_between_numbers_at_which_it_is_faster(
    faster: list[int], expected: tuple[int, ...]
) -> None:
    assert changes({rows: rows in faster for rows in (32, 1, 8, 16)}) == expected


def row(us: float, library_us: float | None, product: Product) -> LinearRow:
    return LinearRow("linear", f"w, {product.rows} rows", us, 8, 1.0, us, library_us, LIBRARY_FORM, product)


def test_tables_follow_from_times() -> None:
    def plain(rows: int) -> Product:
        return Product("linear", (6, 4), rows)

    found = [
        row(10.0, 9.0, plain(1)),
        row(10.0, 9.8, plain(1)),  # with other neighbours: not faster by the margin
        row(10.0, 9.6, plain(2)),
        row(10.0, 5.0, plain(4)),
        row(10.0, 11.0, Product("gated", (8, 4), 4)),
        row(10.0, None, Product("experts", (2, 6, 4), 8)),
    ]
    assert crossovers(found) == {"linear": {(6, 4): (2,)}, "gated": {(8, 4): ()}, "experts": {(2, 6, 4): ()}}
    assert list(describe_crossovers(found)) == [
        "by these times the library's form is faster by more than 3% where these tables say so:",
        "    linear={(6, 4): (2,)},",
        "    gated={(8, 4): ()},",
        "    experts={(2, 6, 4): ()},",
    ]


@pytest.mark.parametrize("sizes", [SIZES, SPARSE], ids=["dense", "experts"])
def test_both_forms_compute_the_same(sizes: Sizes) -> None:
    """What is timed is compared, with every neighbour that a step joins."""
    kinds = set()
    for case in step_products(sizes, 3, torch.device("cpu"), torch.float32):
        assert case.product is not None
        kinds.add(case.product.kind)
        ours, libraries = case.make()
        torch.testing.assert_close(ours(), libraries[LIBRARY_FORM](), atol=1e-4, rtol=1e-4)
    assert kinds == ({"linear", "experts"} if sizes.experts else {"linear", "gated"})


def test_the_script_names_both_times_and_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "linears.json"
    given = ["target=tiny-shape", "rows=[2,1,2]", "device=cpu", "dtype=bfloat16", "steps=2", "warmup=0"]
    found = main([*given, f"json={written}"])
    assert [row.product.rows for row in found] == [1] * 5 + [2] * 5
    assert {row.library for row in found} == {LIBRARY_FORM}
    assert [row["product"]["rows"] for row in json.loads(written.read_text())["rows"]] == [1] * 5 + [2] * 5
    shown = capsys.readouterr().out
    assert "    linear={(128, 64): " in shown and "    gated={(384, 64): " in shown
