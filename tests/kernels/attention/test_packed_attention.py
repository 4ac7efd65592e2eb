"""Attention of packed rows has the bits of the same rows in a grid, and writes the same cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.attention.attention import PAGED_ATTENTION
from specgraph.kernels.attention.packing import PackedPlaces, PackRows, pack_rows_reference, packed_places_reference
from specgraph.kernels.attention.paged import Tiling
from specgraph.kernels.ops import Op
from tests.kernels.attention.test_paged_attention import (
    DEVICE,
    PREFILL,
    SHAPES,
    SINKS,
    SMALL,
    Case,
    products_do_not_depend_on_the_number_of_columns,
)

__all__ = ["products_do_not_depend_on_the_number_of_columns"]
SPARE = 7
"""Packed rows that nothing needs."""
FORMS = {"few rows": SMALL, "many rows": PREFILL}


class InPacks:
    """An op whose arguments, grids of rows, are packed before it runs. Its result is a grid again."""

    def __init__(self, op: Op) -> None:
        self.op = op

    def __call__(self, *given: Tensor, tiling: Tiling | None = None, **options: Any) -> Tensor:
        form = self.op.form("reference") if tiling is None else self.op.form("triton", tiling=tiling)
        *rows, k_cache, v_cache, slots, table, positions = given
        counts = (slots >= 0).sum(1)
        width = slots.shape[1]
        starts, source = packed_places_reference(PackedPlaces(counts, int(counts.sum()) + SPARE, width))
        self.starts = starts

        def pack(values: Tensor, fill: int = 0) -> Tensor:
            return pack_rows_reference(PackRows(values, source, fill))

        heads = [pack(x.transpose(1, 2)).transpose(1, 2) for x in rows]
        for x in heads:
            x[:, :, int(starts[-2]) :] = torch.nan
        angles = {name: pack(options.pop(name)) for name in ("cos", "sin") if name in options}
        places = (k_cache, v_cache, pack(slots, -1), table, pack(positions))
        out = form(*heads, *places, **angles, cu_seqlens=starts, **options)
        assert out.shape[:2] == (1, len(source)) and not out[0, int(starts[-2]) :].any()
        grid = out.new_zeros(*slots.shape, *out.shape[2:])
        for b in range(len(slots)):
            begin, end = int(starts[b]), int(starts[b + 1])
            grid[b, : end - begin] = out[0, begin:end]
        return grid


def both(case: Case, tiling: Tiling | None, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The result and the caches for a grid, and those for packed rows."""
    op = PAGED_ATTENTION
    if tiling is None:
        case.op = lambda *given, tiling, **kept: op.form("reference")(*given, **kept)
    found = [case.run(tiling or SMALL, **options), *case.written]
    packed = InPacks(op)
    case.op = lambda *given, tiling, **kept: packed(*given, tiling=None if case.reference else tiling, **kept)  # type: ignore[attr-defined]
    return found, [case.run(tiling or SMALL, **options), *case.written]


@pytest.mark.parametrize("tiling", [None, *FORMS.values()], ids=["reference", *FORMS])
@pytest.mark.parametrize(("shape", "options"), SHAPES.values(), ids=SHAPES)
def test_packed_rows_have_the_bits_of_a_grid(
    shape: dict[str, Any], options: dict[str, Any], tiling: Tiling | None
) -> None:
    case = Case(**shape, dtype=torch.float64 if tiling is None else torch.float16)
    case.reference = tiling is None  # type: ignore[attr-defined]
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].to(case.dtype)}
    for grid, packed in zip(*both(case, tiling, **options), strict=True):
        torch.testing.assert_close(packed, grid, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("programs", [1, 3, 8])
def test_contexts_that_programs_share(programs: int) -> None:
    """Contexts of ten, four and no KV splits; a sequence without tokens in between."""
    case = Case((300, 120, 44, 5), (3, 2, 0, 40), torch.float16, rotary=True)
    case.reference = False  # type: ignore[attr-defined]
    for grid, packed in zip(*both(case, dataclasses.replace(SMALL, programs=programs), sinks=SINKS[:4]), strict=True):
        torch.testing.assert_close(packed, grid, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tiling", FORMS.values(), ids=FORMS)
def test_more_sequences_than_are_looked_at_at_a_time(tiling: Tiling) -> None:
    batch = 140
    case = Case(
        tuple(n % 5 for n in range(batch)), tuple(n % 3 for n in range(batch)), torch.float16, heads=2, groups=1
    )
    case.reference = False  # type: ignore[attr-defined]
    for grid, packed in zip(*both(case, tiling), strict=True):
        torch.testing.assert_close(packed, grid, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.zeros(3, dtype=torch.int64)}, r"cu_seqlens must be \[B \+ 2\] = \[4\], not \[3\]"),
        ({"q": torch.empty(2, 4, 5, 8)}, r"packed rows are|k must be \[B, Hkv, T, D\] = \[2, "),
    ],
)
def test_packed_rows_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    given: dict[str, Any] = {
        "q": torch.empty(1, 4, 5, 8), "k": torch.empty(1, 2, 5, 8), "v": torch.empty(1, 2, 5, 8),
        "k_cache": torch.empty(6, 4, 2, 8), "v_cache": torch.empty(6, 4, 2, 8),
        "slots": torch.empty(1, 5, dtype=torch.int64), "block_table": torch.empty(2, 3, dtype=torch.int64),
        "positions": torch.empty(1, 5, dtype=torch.int64), "cu_seqlens": torch.zeros(4, dtype=torch.int64),
    }  # fmt: skip
    meta = {name: value.to("meta") for name, value in {**given, **change}.items()}
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.specgraph.paged_attention(*list(meta.values())[:-1], scale=1.0, cu_seqlens=meta["cu_seqlens"])
    assert DEVICE in ("cpu", "cuda")
