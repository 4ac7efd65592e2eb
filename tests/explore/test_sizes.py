"""Numbers for the byte formulas of a dump, and the layers of a module."""

from __future__ import annotations

import pytest
import torch

from specgraph.explore.dump_files import Node
from specgraph.explore.graphs import layers
from specgraph.explore.sizes import decode_sizes, evaluate
from specgraph.ir.shapes import SIZES, describe_bytes
from specgraph.ir.traffic import CallReads, step_reads, traffic
from tests.explore.conftest import Made


@pytest.mark.parametrize(
    ("formula", "value"),
    [
        ("0", 0),
        ("1024*B*T", 1024 * 3 * 5),
        ("8*B*(T-1) + 4*B", 8 * 3 * 4 + 4 * 3),
        ("?", None),
        ("8*?", None),
        ("8*Z", None),
        ("__import__('os')", None),
        ("2**9", None),
        (None, None),
    ],
)
def test_formulas_are_sums_of_products_and_nothing_else(formula: str | None, value: int | None) -> None:
    assert evaluate(formula, decode_sizes(4, 3, 100)) == value


def test_a_value_is_described_by_its_letters() -> None:
    batch, rows = SIZES["B"], SIZES["T"]
    grid = torch.empty(batch, rows, 256, dtype=torch.bfloat16, device="meta")
    drafts = torch.empty(batch, rows - 1, dtype=torch.int64, device="meta")
    assert describe_bytes(grid) == "512*B*T"
    assert describe_bytes((grid, [grid], drafts, 7, None)) == "1024*B*T + 8*B*(T-1)"
    # Bytes of a weight are a number, although some numbers come near to what stands for a letter.
    assert describe_bytes(torch.empty(16, SIZES["T"] // 16, dtype=torch.int8, device="meta")) == "467888"
    assert describe_bytes(None) == "0" and describe_bytes(torch.empty(0, batch, device="meta")) == "0"
    sizes = decode_sizes(4, 3, 100)
    for value, expected in ((grid, 512 * 3 * 5), (drafts, 8 * 3 * 4)):
        assert evaluate(describe_bytes(value), sizes) == expected


def node(name: str, *inputs: str, op: str = "call_function", calls: str = "f") -> Node:
    return Node(name, op, calls, inputs, name, None, None, "trace")


def test_nodes_belong_to_the_layer_whose_weights_they_read() -> None:
    weights = [node(f"w{i}", op="get_attr", calls=f"model.layers.{i}.up.weight") for i in range(2)]
    graph = [node("x", op="placeholder"), *weights, node("embed", "x"), node("a", "embed", "w0"), node("b", "a"),
             node("c", "b", "w1"), node("d", "c"), node("output", "d", op="output")]  # fmt: skip
    assert layers(graph) == [None, 0, 1, None, 0, 0, 1, 1, None]
    assert layers([weights[0], node("a", "w0")]) == [None, None]


def test_what_a_step_reads_survives_the_file(made: Made) -> None:
    calls = step_reads(made.decoder.stages["insert_verify"])
    assert [CallReads.of_record(record) for record in made.data["calls"]] == calls
    assert traffic(calls, [10.0, 30.0], 3) == traffic(calls, [20.0, 20.0], 3)


def test_a_variant_of_the_step_comes_from_the_compiled_step(made: Made) -> None:
    """A request has made more stages since the dump was written; the first of them does not follow the last pass."""
    from specgraph.passes.report import report_record

    decoder = made.decoder
    record = report_record(decoder.stages, decoder._reports, [], "strict")
    before = {entry["stage"]: entry["before"] for entry in record["passes"]}
    variants = [*decoder.stages][[*decoder.stages].index("index_rows") + 1 :]
    assert variants and before[variants[0]] == "index_rows" and before["insert_processors"] == "insert_verify"
    assert all(entry["about"] for entry in record["passes"])
