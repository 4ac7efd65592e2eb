"""A block drafter's attention: the definition against a dense formula, and the Triton form against float64.

Without a GPU the kernels run in Triton's interpreter, with KV splits and blocks small enough that few keys make many.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from specgraph.kernels.attention.arguments import PADDING_SLOT
from specgraph.kernels.attention.block import BLOCK_ATTENTION, PAGED_BLOCK_ATTENTION, WRITE_CONTEXT
from specgraph.kernels.attention.paged import Tiling
from tests.kernels.rounding import assert_within, attention_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.float64: 1e-14, torch.float32: 1e-5}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = Tiling(kv_split=32, block_keys=16, split_group=2)
NAN = float("nan")


@pytest.fixture(autouse=True)
def products_do_not_depend_on_the_number_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with a BLAS, whose float32 sums change with the width; float64 hides that."""

    def multiply(a: Any, b: Any, dtype: Any) -> Any:
        return (a.astype(numpy.float64) @ b.astype(numpy.float64)).astype(dtype)

    monkeypatch.setattr(numpy, "matmul", multiply)


@dataclasses.dataclass
class Case:
    """Blocks of ``rows`` rows behind contexts of ``starts[b]`` rows, in scattered pages that hold NaN elsewhere."""

    starts: tuple[int, ...]
    rows: int
    dtype: torch.dtype = torch.float32
    heads: int = 4
    groups: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 8
    spare_pages: int = 3
    rotary: bool | int = False
    """How many values of a head are rotated; True is all."""

    def __post_init__(self) -> None:
        self.length = max(self.starts) + self.rows
        batch, sizes = len(self.starts), (self.heads * self.dim, self.groups * self.dim, self.groups * self.value_dim)
        random = torch.Generator().manual_seed(0)
        merged = torch.randn(batch, self.length, sum(sizes), generator=random).to(self.dtype).to(DEVICE)
        counts = (self.heads, self.groups, self.groups)
        parts = zip(merged.split(sizes, -1), counts, strict=True)
        self.q, self.k, self.v = (x.unflatten(2, (count, -1)).transpose(1, 2) for x, count in parts)
        self.turned = self.dim if self.rotary is True else int(self.rotary)
        angles = torch.rand(batch, self.length, self.turned // 2, generator=random) * 6.3
        angles = torch.cat([angles, angles], -1)
        self.cos, self.sin = (x.to(self.dtype).to(DEVICE) for x in (angles.cos(), angles.sin()))
        pages = -(-self.length // self.block_size)
        order = torch.randperm(batch * pages, generator=random).reshape(batch, pages)
        self.table = torch.cat([order, torch.full((batch, self.spare_pages), -1)], 1).to(DEVICE)
        cache = (batch * pages, self.block_size, self.groups)
        self.caches = [torch.full((*cache, width), NAN, dtype=self.dtype, device=DEVICE)
                       for width in (self.dim, self.value_dim)]  # fmt: skip

    def slots(self, b: int, positions: Tensor) -> Tensor:
        return self.table[b, positions // self.block_size] * self.block_size + positions % self.block_size

    def write(self, form: str = "triton") -> list[Tensor]:
        """The caches after one call that writes all contexts; rows at the end of shorter ones are padding."""
        caches, longest = [cache.clone() for cache in self.caches], max(self.starts)
        positions = torch.arange(longest, device=DEVICE)
        slots = torch.full((len(self.starts), longest), PADDING_SLOT, device=DEVICE)
        for b, start in enumerate(self.starts):
            slots[b, :start] = self.slots(b, positions[:start])
        rows = (x[:, :, :longest] for x in (self.k, self.v))
        angles = [x[:, :longest] for x in (self.cos, self.sin)] if self.rotary else []
        WRITE_CONTEXT.form(form)(*rows, *caches, slots, *angles)
        return caches

    def run(self, form: str = "triton", of: int | None = None, tiling: Tiling = SMALL, **options: Any) -> Tensor:
        """The blocks of all sequences, or of sequence ``of`` alone."""
        chosen = range(len(self.starts)) if of is None else [of]
        rows = [torch.arange(self.starts[b], self.starts[b] + self.rows, device=DEVICE) for b in chosen]
        q, k, v = (torch.stack([x[b][:, own] for b, own in zip(chosen, rows, strict=True)])
                   for x in (self.q, self.k, self.v))  # fmt: skip
        angles: dict[str, Tensor] = {}
        if self.rotary:
            both = {"cos": self.cos, "sin": self.sin}
            angles = {name: torch.stack([x[b][own] for b, own in zip(chosen, rows, strict=True)])
                      for name, x in both.items()}  # fmt: skip
        tuned = {"tiling": tiling} if form == "triton" else {}
        arguments = (q, k, v, *self.write(form), self.table[list(chosen)], torch.stack(rows))
        out: Tensor = PAGED_BLOCK_ATTENTION.form(form, **tuned)(*arguments, **angles, **{"scale": 0.3, **options})
        return out

    def rotated(self, x: Tensor) -> Tensor:
        """Rotated in float64: pairs ``(i, i + n/2)`` as complex numbers; then rounded as the cache rounds."""
        half = self.turned // 2
        lower, upper, others = x.double().split([half, half, self.dim - self.turned], -1)
        rotation = torch.complex(self.cos[..., :half].double(), self.sin[..., :half].double()).unsqueeze(1)
        y = torch.complex(lower, upper) * rotation
        return torch.cat([y.real, y.imag, others], -1).to(self.dtype).double()

    def expected(
        self, *, sinks: Tensor | None = None, window: int | None = None, causal: bool = False, anchored: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The blocks in float64, row by row: each key is asked whether the row sees it.

        And the same for the magnitudes of the values.
        """
        shared, found, magnitudes = self.heads // self.groups, [], []
        q, k, v = self.rotated(self.q), self.rotated(self.k), self.v.double()
        for b, start in enumerate(self.starts):
            for row in range(self.rows):
                places = [s for s in range(start + self.rows)
                          if _seen(row, s - start, window, causal, anchored)]  # fmt: skip
                for head in range(self.heads):
                    keys, values = k[b, head // shared][places], v[b, head // shared][places]
                    weights = torch.exp(0.3 * keys @ q[b, head, start + row])
                    extra = math.exp(sinks[head]) if sinks is not None else 0.0
                    weights = weights / (weights.sum() + extra)
                    found.append(weights @ values)
                    magnitudes.append(weights @ values.abs())
        shape = (len(self.starts), self.rows, self.heads, -1)
        return torch.stack(found).view(shape), torch.stack(magnitudes).view(shape)


def _seen(row: int, key: int, window: int | None, causal: bool, anchored: bool) -> bool:
    """Whether row ``row`` of a block sees the key at ``key``, counted from the first row."""
    if causal and key > row:
        return False
    if window is None:
        return True
    return key >= -window if anchored else abs(row - key) < window


def assert_near(found: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    values, magnitudes = expected
    if found.dtype not in LIMITS:
        assert_within(found, values, attention_error(magnitudes, found.dtype))
        return
    error = (found.double() - values).norm() / values.norm()
    assert bool(error < LIMITS[found.dtype]), f"relative error {error:.2e}"


SINKS = torch.tensor([0.5, -1.0, 3.0, -30.0], device=DEVICE)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no context": ({"starts": (0,), "rows": 4}, {}),
    "ragged": ({"starts": (0, 70, 31), "rows": 8, "rotary": True}, {}),
    "causal": ({"starts": (40, 3), "rows": 5}, {"causal": True}),
    "window": ({"starts": (80, 5), "rows": 8, "rotary": True}, {"window": 5}),
    "a part of a head": ({"starts": (40, 3), "rows": 5, "rotary": 6, "dim": 24}, {}),
    "causal window": ({"starts": (80, 0), "rows": 4}, {"window": 20, "causal": True}),
    "window of one": ({"starts": (33,), "rows": 4}, {"window": 1}),
    "anchored window": ({"starts": (64, 5), "rows": 8}, {"window": 33, "anchored": True}),
    "anchored causal window": ({"starts": (64, 5), "rows": 8}, {"window": 3, "anchored": True, "causal": True}),
    "sinks": ({"starts": (40, 64), "rows": 3, "value_dim": 8}, {"sinks": SINKS}),
    "more rows than a tile": ({"starts": (30,), "rows": 20, "dim": 24, "value_dim": 40}, {}),
    "three heads each": ({"starts": (30, 3), "rows": 6, "heads": 6}, {}),
    "pages of 5": ({"starts": (35,), "rows": 7, "block_size": 5}, {}),
}
cases = pytest.mark.parametrize(("shape", "options"), SHAPES.values(), ids=SHAPES)


@cases
def test_the_definition_is_the_formula(shape: dict[str, Any], options: dict[str, Any]) -> None:
    case = Case(**shape, dtype=torch.float64)
    assert_near(case.run("reference", **options), case.expected(**options))


@cases
def test_the_triton_form_equals_float64(shape: dict[str, Any], options: dict[str, Any]) -> None:
    for dtype in DTYPES if DEVICE == "cuda" or not options else (torch.float32, torch.bfloat16):
        case = Case(**shape, dtype=dtype)
        assert_near(case.run(**options), case.expected(**options))


@pytest.mark.parametrize("options", [{}, {"window": 5, "causal": True}, {"window": 9, "anchored": True}])
def test_without_a_context_it_is_attention_within_the_block(options: dict[str, Any]) -> None:
    case = Case((0, 0), 6, torch.float64)
    dense = BLOCK_ATTENTION.form("reference")(case.q, case.k, case.v, scale=0.3, **options)
    torch.testing.assert_close(dense, case.run("reference", **options), rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": 37}], ids=["all", "window"])
def test_a_block_has_the_same_bits_in_any_company_and_division(dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = Case((3, 90, 33), 8, dtype, rotary=True, groups=1)
    wanted = case.run(**options)
    changes = (
        {"programs": 1},
        {"programs": 3},
        {"block_queries": 16, "programs": 8},
        {"block_queries": 32, "programs": 2},
    )
    for change in changes:
        if dtype == torch.float32 and DEVICE == "cuda":
            change["block_queries"] = 16
        assert torch.equal(case.run(tiling=dataclasses.replace(SMALL, **change), **options), wanted), change
    assert all(torch.equal(case.run(of=b, **options)[0], wanted[b]) for b in range(3))


@pytest.mark.parametrize("rotary", [False, True, 6], ids=["as they are", "rotated", "partly rotated"])
def test_context_rows_are_written_to_their_slots_and_nowhere_else(rotary: bool | int) -> None:
    case = Case((6, 0, 19), 2, torch.float16, rotary=rotary, value_dim=12)
    for form in ("reference", "triton"):
        for cache, whole in zip(case.write(form), (case.rotated(case.k), case.v), strict=True):
            left = torch.full_like(cache, NAN).flatten(0, 1)
            for b, start in enumerate(case.starts):
                slots = case.slots(b, torch.arange(start, device=DEVICE))
                rows = whole[b, :, :start].transpose(0, 1)
                torch.testing.assert_close(cache.flatten(0, 1)[slots].double(), rows.double(), rtol=0, atol=2e-3)
                left[slots] = cache.flatten(0, 1)[slots]
            assert torch.equal(cache.flatten(0, 1).nan_to_num(9.0), left.nan_to_num(9.0))


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"q": (2, 5, 4, 16)}, "5 heads do not group over 2"),
    "cache": ({"k_cache": (3, 8, 2, 24)}, r"k_cache must be \[N, S, H, D\] = .*, 2, 16\], not \[3, 8, 2, 24\]"),
    "positions": ({"positions": (2, 5)}, r"positions must be \[B, T\] = \[2, 4\], not \[2, 5\]"),
    "table": ({"block_table": (3, 7)}, r"block_table must be \[B, M\] = \[2, M\], not \[3, 7\]"),
    "angles": ({"cos": (2, 4, 16)}, "cos and sin must both be given, or neither of them"),
    "window": ({"window": 0}, "a window has at least one position, not 0"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case: str) -> None:
    changed, message = MISFITS[case]
    shapes: dict[str, tuple[int, ...]] = {
        "q": (2, 4, 4, 16), "k": (2, 2, 4, 16), "v": (2, 2, 4, 16), "k_cache": (3, 8, 2, 16), "v_cache": (3, 8, 2, 16),
    }  # fmt: skip
    given: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    given |= {"block_table": torch.zeros(2, 7, dtype=torch.int64), "positions": torch.zeros(2, 4, dtype=torch.int64)}
    given |= {name: torch.zeros(value) if isinstance(value, tuple) else value for name, value in changed.items()}
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in given.items()}
    with pytest.raises((ValueError, RuntimeError), match=message):
        torch.ops.specgraph.paged_block_attention(**meta, scale=1.0)


@pytest.mark.parametrize(("form", "unread", "read"), [("triton", 48, 64), ("reference", 56, 64)])
def test_what_lies_in_front_of_a_window_is_not_read(
    form: str, unread: int, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 16 keys, or in pages of 8; an anchored window of 20 begins at position 60."""
    case, options = Case((80,), 4, block_size=8), {"form": form, "window": 20, "anchored": True}
    expected, write = case.run(**options), case.write
    for count in (unread, read):

        def poisoned(form: str, count: int = count) -> list[Tensor]:
            caches = write(form)
            for cache in caches:
                cache[case.table[0, : count // case.block_size]] = NAN
            return caches

        monkeypatch.setattr(case, "write", poisoned)
        assert torch.equal(case.run(**options), expected) == (count == unread)
