"""Log-weights of single rows have the bits of the definition, also where the likeliest tokens alone are looked at."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling import kept
from specgraph.kernels.sampling.kept import process_row, process_rows
from specgraph.kernels.sampling.sample import process_logits
from tests.kernels.sampling.rows import ROWS

TEMPERATURES = (0.0, 1e-31, 1e-3, 0.7, 1.0, 50.0, 1e30)
TOP_K = (None, 0, 1, 2, 64, 2500, 2999, 3000, 10**9)
TOP_P = (None, 1e-30, 1e-6, 0.25, 0.5, 0.9, 0.999, 1 - 2**-24, 1.0)
MIN_P = (None, 0.0, 1e-30, 0.05, 0.5, 1.0)


def options(*values: float | None) -> list[Tensor | None]:
    """Temperature, top-k, top-p and min-p of one row; top-k is an integer."""
    kinds = (torch.float32, torch.int64, torch.float32, torch.float32)
    return [None if v is None else torch.tensor([v], dtype=kind) for v, kind in zip(values, kinds, strict=True)]


def assert_defined(logits: Tensor, given: list[Tensor | None]) -> None:
    before = logits.clone()
    found, expected = process_row(logits, *given), process_logits(logits.view(1, 1, -1), *given)[0, 0]  # type: ignore[arg-type]
    assert torch.equal(found, expected) and found.dtype == torch.float32
    assert torch.equal(logits.nan_to_num(nan=7.0), before.nan_to_num(nan=7.0))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("size", [1, 2, 13, 3000])
def test_every_option_alone(name: str, size: int) -> None:
    logits = ROWS[name](size, torch.Generator().manual_seed(size))
    off = (None, None, None)
    every = [(t, *off) for t in TEMPERATURES]
    every += [(0.7, k, None, None) for k in TOP_K]
    every += [(1.0, None, p, None) for p in TOP_P]
    every += [(0.7, None, None, p) for p in MIN_P]
    for values in every:
        assert_defined(logits, options(*values))


@pytest.mark.parametrize("name", ROWS)
def test_options_together(name: str) -> None:
    random = torch.Generator().manual_seed(3)

    def pick(values: tuple[float | None, ...]) -> float | None:
        return values[int(torch.randint(len(values), (), generator=random))]

    for place in range(40):
        logits = ROWS[name]((700, 3000)[place % 2], random)
        assert_defined(logits, options(*map(pick, (TEMPERATURES, TOP_K, TOP_P, MIN_P))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_dtypes(dtype: torch.dtype) -> None:
    for name in ("normal", "ties", "partly masked", "nan"):
        logits = ROWS[name](2000, torch.Generator().manual_seed(0)).to(dtype)  # bfloat16 has many ties by itself
        for values in [(0.7, 64, 0.9, 0.01), (0.7, None, 0.9, None), (2.0, 5, None, None)]:
            assert_defined(logits, options(*values))


@pytest.mark.parametrize("scale", [0.5, 2.0, 4.0])
def test_top_p_of_wide_rows(scale: float) -> None:
    """The set lies among the 1024 likeliest tokens, among 16,384, or among neither."""
    logits = torch.randn(40_000, generator=torch.Generator().manual_seed(1)) * scale
    for mass in (0.1, 0.5, 0.8, 0.95, 0.99999):
        assert_defined(logits, options(1.0, None, mass, None))


def test_ties_beyond_the_likeliest_tokens_are_kept() -> None:
    logits = torch.zeros(20_000)
    logits[7], logits[15_000] = 1.0, -1.0
    for mass in (0.01, 0.05, 0.5, 0.99):  # the first token, and all that equal the next one
        assert_defined(logits, options(1.0, None, mass, None))
    assert int(process_row(logits, *options(1.0, None, 0.01, None)).isfinite().sum()) == 19_999  # type: ignore[arg-type]


def test_ties_with_the_last_of_top_k_count_for_top_p() -> None:
    logits = torch.zeros(3000)
    logits[5] = 3.0
    for mass in (0.01, 0.5, 0.99):
        assert_defined(logits, options(1.0, 3, mass, None))
    assert int(process_row(logits, *options(1.0, 3, 0.5, None)).isfinite().sum()) == 3000  # type: ignore[arg-type]


def test_masses_that_rounding_decides_are_left_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*given: Tensor) -> Tensor:
        asked.append(1)
        return process_logits(*given)

    monkeypatch.setattr(kept, "process_logits", spy)
    for mass, calls in ((0.5, 1), (0.75, 1), (0.6, 0), (0.5 + 2**-20, 0)):
        asked.clear()
        assert_defined(ROWS["halves"](3000, torch.Generator()), options(1.0, None, mass, None))
        assert len(asked) == calls, mass


def test_rows_of_several_sequences() -> None:
    random = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, 600, generator=random) * 4
    given = (torch.tensor([0.0, 0.5, 1.5]), torch.tensor([3, 0, 50]), torch.tensor([0.5, 0.9, 1.0]), None)
    assert torch.equal(process_rows(logits, *given), process_logits(logits, *given))


@pytest.mark.parametrize("value", [0.0, 1e-38, -1e-38, 1e-45])
def test_floors_whose_neighbour_may_be_flushed_to_zero(value: float) -> None:
    logits = torch.tensor([value, 0.0, -math.inf, -1e-45, -1.0] * 3)
    torch.set_flush_denormal(True)
    try:
        assert_defined(logits, options(1.0, None, None, 1.0))
    finally:
        torch.set_flush_denormal(False)
