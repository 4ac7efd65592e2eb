"""The Triton form of paged attention: against float64, and bit for bit against itself.

Without a GPU the kernels run in Triton's interpreter, with KV splits and blocks small enough that few keys make many.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from specgraph.kernels.attention import paged
from specgraph.kernels.attention.arguments import PADDING_SLOT, PagedAttention
from specgraph.kernels.attention.attention import PAGED_ATTENTION
from specgraph.kernels.attention.paged import Tiling, block_queries, suits_hopper, suits_prefill
from specgraph.kernels.ops import Op
from tests.kernels.rounding import assert_within, attention_error, unit
from tests.pairwise import cover, product

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SMALL = Tiling(kv_split=32, block_keys=16, split_group=2)
PREFILL = dataclasses.replace(SMALL, prefill=True)
NAN = float("nan")


@pytest.fixture(autouse=True)
def products_do_not_depend_on_the_number_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies with a BLAS, whose float32 sums change with the width; float64 hides that."""

    def multiply(a: Any, b: Any, dtype: Any) -> Any:
        return (a.astype(numpy.float64) @ b.astype(numpy.float64)).astype(dtype)

    monkeypatch.setattr(numpy, "matmul", multiply)


def tuned(op: Op) -> Callable[..., Tensor]:
    """The Triton form of ``op``, which takes a tiling beside the op's own arguments."""
    return lambda *given, tiling, **options: op.form("triton", tiling=tiling)(*given, **options)


@dataclasses.dataclass
class Case:
    """Sequences of ``starts[b]`` cached rows and up to ``max(counts)`` new ones, in scattered pages that hold NaN."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    heads: int = 4
    groups: int = 2
    dim: int = 16
    value_dim: int = 16
    block_size: int = 8
    spare_pages: int = 3
    rotary: bool | int = False
    """How many values of a head are rotated; True is all."""
    seed: int = 0

    def __post_init__(self) -> None:
        self.length = max(s + c for s, c in zip(self.starts, self.counts, strict=True))
        batch, sizes = len(self.starts), (self.heads * self.dim, self.groups * self.dim, self.groups * self.value_dim)
        random = torch.Generator().manual_seed(self.seed)
        merged = torch.randn(batch, self.length, sum(sizes), generator=random).to(self.dtype)
        self.sizes = sizes
        self.op = tuned(PAGED_ATTENTION)
        self.merged = merged.to(DEVICE)
        self.turned = self.dim if self.rotary is True else int(self.rotary)
        angles = torch.rand(batch, self.length, self.turned // 2, generator=random) * 6.3
        angles = torch.cat([angles, angles], -1)
        self.cos, self.sin = angles.cos().to(self.dtype).to(DEVICE), angles.sin().to(self.dtype).to(DEVICE)
        pages = -(-self.length // self.block_size)
        order = torch.randperm(batch * pages + 2, generator=random)[: batch * pages].reshape(batch, pages)
        self.table = torch.cat([order, torch.full((batch, self.spare_pages), -1)], 1).to(DEVICE)
        cache = (batch * pages + 2, self.block_size, self.groups)
        self.k_cache = torch.full((*cache, self.dim), NAN, dtype=self.dtype, device=DEVICE)
        self.v_cache = torch.full((*cache, self.value_dim), NAN, dtype=self.dtype, device=DEVICE)
        _, k, v = self.heads_of(self.merged)
        k = self.rotated(k).to(self.dtype)
        for b, start in enumerate(self.starts):
            slots = self.slots(torch.arange(start, device=DEVICE), b)
            self.k_cache.flatten(0, 1)[slots] = k[b, :, :start].transpose(0, 1)
            self.v_cache.flatten(0, 1)[slots] = v[b, :, :start].transpose(0, 1)

    def slots(self, positions: Tensor, b: int) -> Tensor:
        return self.table[b, positions // self.block_size] * self.block_size + positions % self.block_size

    def heads_of(self, merged: Tensor) -> list[Tensor]:
        """``q``, ``k`` and ``v`` as views of what one merged linear layer gives."""
        counts = (self.heads, self.groups, self.groups)
        parts = merged.split(self.sizes, -1)
        return [x.unflatten(2, (count, -1)).transpose(1, 2) for x, count in zip(parts, counts, strict=True)]

    def rotated(self, x: Tensor) -> Tensor:
        """Rotated in float64: pairs ``(i, i + n/2)`` of the first ``n`` values as complex numbers."""
        half = self.turned // 2
        lower, upper, others = x.double().split([half, half, self.dim - self.turned], -1)
        rotation = torch.complex(self.cos[..., :half].double(), self.sin[..., :half].double()).unsqueeze(1)
        y = torch.complex(lower, upper) * rotation
        return torch.cat([y.real, y.imag, others], -1)

    def run(
        self, tiling: Tiling = SMALL, *, first: int = 0, count: int | None = None, of: int | None = None,
        front_padding: int = 0,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Rows ``first : first + count`` of every sequence (of sequence ``of``), from fresh copies of the caches.

        Rows before ``first`` are written by a call of their own. Rows a sequence does not have are padding and NaN, and
        so are ``front_padding`` rows in front of them.
        """
        chosen = list(range(len(self.starts))) if of is None else [of]
        width = max(self.counts) - first if count is None else count
        self.written = [self.k_cache.clone(), self.v_cache.clone()]
        if first > 0:
            self.call(chosen, 0, first, tiling, options)
        return self.call(chosen, first, width, tiling, options, front_padding)

    def call(
        self, chosen: list[int], first: int, count: int, tiling: Tiling, options: dict[str, Any], front_padding: int = 0
    ) -> Tensor:
        width = front_padding + count
        merged = torch.full((len(chosen), width, sum(self.sizes)), NAN, dtype=self.dtype, device=DEVICE)
        cos, sin = (x.new_ones(len(chosen), width, self.turned) for x in (self.cos, self.sin))
        slots = torch.full((len(chosen), width), PADDING_SLOT, device=DEVICE)
        starts = torch.tensor([self.starts[b] for b in chosen], device=DEVICE)
        positions = starts.unsqueeze(1) + first - front_padding + torch.arange(width, device=DEVICE)
        for i, b in enumerate(chosen):
            n = max(0, min(count, self.counts[b] - first))
            begin = self.starts[b] + first
            for whole, part in ((self.merged, merged), (self.cos, cos), (self.sin, sin)):
                part[i, front_padding : front_padding + n] = whole[b, begin : begin + n]
            slots[i, front_padding : front_padding + n] = self.slots(positions[i, front_padding : front_padding + n], b)
        q, k, v = self.heads_of(merged)
        places = (*self.written, slots, self.table[chosen], positions)
        options = {"scale": 0.3, "tiling": tiling, **options}
        angles = {"cos": cos, "sin": sin} if self.rotary else {}
        return self.op(q, k, v, *places, **angles, **options)

    def expected(
        self,
        *,
        sinks: Tensor | None = None,
        scale: float = 0.3,
        window: int | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """All new rows in float64, from the whole sequences without a cache; padding gives zeros.

        And the same for the magnitudes of the values.
        """
        q, k, v = self.heads_of(self.merged)
        q, k = (self.rotated(x).to(self.dtype).double() for x in (q, k))
        k, v = (x.double().repeat_interleave(self.heads // self.groups, 1) for x in (k, v))
        scores = torch.einsum("bhtd,bhsd->bhts", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        hidden = torch.ones(self.length, self.length, dtype=torch.bool, device=DEVICE).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
        out = torch.einsum("bhts,nbhsd->nbthd", scores.softmax(-1)[..., : self.length], torch.stack([v, v.abs()]))
        rows = torch.zeros(2, len(self.starts), max(self.counts), self.heads, self.value_dim, dtype=torch.float64)
        for b, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            rows[:, b, :count] = out[:, b, start : start + count]
        values, magnitudes = rows.to(DEVICE)
        return values, magnitudes


def assert_near(found: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    values, magnitudes = expected
    if found.dtype != torch.float32:
        assert_within(found, values, attention_error(magnitudes, found.dtype))
        return
    error = (found.double() - values).norm() / values.norm()
    assert bool(error < 1e-5), f"relative error {error:.2e}"


SINKS = torch.tensor([0.5, -1.0, 3.0, -30.0, 0.0, 1.0, 2.0, -2.0], device=DEVICE)
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one row": ({"starts": (0,), "counts": (1,)}, {}),
    "ragged": ({"starts": (0, 70, 31), "counts": (9, 3, 0)}, {}),
    "window": ({"starts": (80, 5), "counts": (4, 2), "rotary": True}, {"window": 20}),
    "window of one": ({"starts": (33,), "counts": (5,)}, {"window": 1}),
    "softcap": ({"starts": (40,), "counts": (2,), "dim": 24, "value_dim": 40}, {"softcap": 2.0}),
    "sinks": ({"starts": (40, 64), "counts": (3, 2), "value_dim": 8}, {"sinks": SINKS[:4]}),
    "one head each": ({"starts": (30,), "counts": (4,), "groups": 4, "rotary": True}, {}),
    "three heads each": ({"starts": (30, 3), "counts": (25, 5), "heads": 6}, {}),
    "eight heads each": ({"starts": (30,), "counts": (5,), "heads": 8, "groups": 1, "rotary": True}, {}),
    "wide": ({"starts": (11, 0), "counts": (40, 17), "rotary": True, "dim": 20}, {}),
    "a part of a head": ({"starts": (70, 3), "counts": (4, 18), "rotary": 4}, {}),
    "a part of an odd head": ({"starts": (30, 0), "counts": (5, 9), "rotary": 6, "dim": 11, "groups": 1}, {}),
    "pages of 5": ({"starts": (35,), "counts": (7,), "block_size": 5}, {}),
    "all": (
        {"starts": (50, 3), "counts": (6, 4), "heads": 8, "value_dim": 24, "rotary": True},
        {"sinks": SINKS, "window": 37, "softcap": 1.5},
    ),
}


@pytest.mark.parametrize("tiling", [SMALL, PREFILL], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("shape", "options"), SHAPES.values(), ids=SHAPES)
def test_equals_float64(shape: dict[str, Any], options: dict[str, Any], tiling: Tiling):
    for dtype in DTYPES if DEVICE == "cuda" or not options else (torch.float32, torch.bfloat16):
        case = Case(**shape, dtype=dtype)
        found, expected = case.run(tiling, **options), case.expected(**options)
        assert_near(found, expected)
        for b, count in enumerate(case.counts):
            assert bool((found[b, count:] == 0).all())


@pytest.mark.parametrize("tiling", [SMALL, PREFILL], ids=["few rows", "many rows"])
@pytest.mark.parametrize("options", [{}, {"window": 5, "sinks": SINKS[:4]}], ids=["plain", "window and sinks"])
def test_rows_before_the_first_position_see_nothing_and_change_no_bit(options: dict[str, Any], tiling: Tiling):
    # One sequence begins at position 0, so that rows lie at -20 and on; the other's rows in front are not real.
    case = Case((0, 33), (6, 4), torch.float16, rotary=True)
    expected, cached = case.run(tiling, **options), case.written
    for front_padding in (1, 20):
        found = case.run(tiling, front_padding=front_padding, **options)
        assert bool((found[:, :front_padding] == 0).all()) and torch.equal(found[:, front_padding:], expected)
        for cache, before in zip(case.written, cached, strict=True):
            assert torch.equal(cache.nan_to_num(9.0), before.nan_to_num(9.0))


@pytest.mark.parametrize("write_first", [False, True])
def test_the_cache_holds_each_row_in_its_slot_and_nothing_else(write_first: bool):
    case = Case((6, 13), (4, 2), torch.float16, rotary=True, value_dim=12)
    case.run(dataclasses.replace(SMALL, write_first=write_first))
    _, k, v = case.heads_of(case.merged)
    for whole, before, cache in ((case.rotated(k), case.k_cache, case.written[0]), (v, case.v_cache, case.written[1])):
        before = before.clone().flatten(0, 1)
        for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
            slots = case.slots(torch.arange(start, start + count, device=DEVICE), b)
            rows = whole[b, :, start : start + count].transpose(0, 1).double()
            assert_within(cache.flatten(0, 1)[slots], rows, 4 * unit(torch.float32) * rows.abs().amax())
            before[slots] = cache.flatten(0, 1)[slots]
        assert torch.equal(before.nan_to_num(99.0), cache.flatten(0, 1).nan_to_num(99.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_tiling_of_rows_and_programs_changes_a_bit(dtype: torch.dtype):
    options: dict[str, Any] = {"sinks": SINKS[:4].to(dtype), "window": 70}
    case = Case((5, 90), (9, 4), dtype, rotary=True, groups=1, value_dim=24)
    wanted = case.run(**options)
    for change in (
        {"block_queries": 16, "programs": 1},
        {"block_queries": 64, "programs": 2},
        {"block_queries": 16, "programs": 3, "write_first": True},
        {"block_queries": 32, "programs": 8},
        {"block_queries": 16, "programs": 8},
    ):
        if dtype == torch.float32 and DEVICE == "cuda":
            change["block_queries"] = 16
        assert torch.equal(case.run(dataclasses.replace(SMALL, **change), **options), wanted), change


@pytest.mark.parametrize("tiling", [SMALL, PREFILL], ids=["few rows", "many rows"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, tiling: Tiling):
    case = Case((3, 45), (18, 9), dtype, rotary=True, groups=1)
    wanted = case.run(tiling)
    for of, first, count in ((1, 0, 1), (1, 8, 1), (1, 3, 4), (0, 16, 2), (0, 0, 17)):
        found = case.run(tiling, first=first, count=count, of=of)
        assert torch.equal(found[0], wanted[of, first : first + count]), (of, first, count)


HEADS: dict[str, dict[str, Any]] = {
    "rotated": {"rotary": True},
    "partly rotated, odd sizes": {"dim": 24, "value_dim": 40, "groups": 1, "rotary": 6},
    "pages of 5": {"block_size": 5},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "all": {}, "window": {"window": 45}, "sinks": {"sinks": SINKS[:4]}, "softcap": {"softcap": 2.0},
}  # fmt: skip
BLOCKS = [64] if DEVICE == "cuda" else [16, 32, 64, 128]
KERNELS = cover(product({"block_keys": BLOCKS, "options": [*OPTIONS], "heads": [*HEADS]}), (0, 1))


@pytest.mark.parametrize(("block_keys", "options", "heads"), KERNELS)
def test_the_kernel_for_many_rows_gives_the_bits_of_that_for_few(block_keys: int, options: str, heads: str):
    """Contexts of several split groups, of one KV split and of none; pages that no block ends with; padding."""
    tiling = Tiling(kv_split=128, block_keys=block_keys, split_group=2)
    case = Case((300, 130, 0), (21, 3, 17), torch.float16, **HEADS[heads])
    found = case.run(dataclasses.replace(tiling, prefill=True), **OPTIONS[options])
    assert torch.equal(found, case.run(dataclasses.replace(tiling, prefill=False), **OPTIONS[options]))


@pytest.mark.parametrize("options", OPTIONS)
def test_heads_that_the_kernel_for_hopper_takes_have_the_bits_of_the_kernel_for_few(options: str):
    """Without such a GPU this is about the Triton kernel in its place."""
    tiling = Tiling(kv_split=128, split_group=2, prefill=True)
    case = Case((300, 130, 0), (21, 3, 17), torch.float16, dim=64, value_dim=64, groups=1, rotary=True)
    found = case.run(tiling, **OPTIONS[options])
    assert torch.equal(found, case.run(dataclasses.replace(tiling, prefill=False), **OPTIONS[options]))


@pytest.mark.parametrize("window", [None, 100])
def test_split_groups_and_kv_splits_give_the_same_bits_through_memory_and_in_registers(window: int | None):
    """Contexts of 10, 4, 2 and 1 KV splits; the first program takes split groups, the last one a KV split each."""
    case = Case((300, 120, 50, 5), (3, 2, 3, 1), torch.float16, rotary=True)
    wanted = case.run(dataclasses.replace(SMALL, programs=1), window=window)
    assert_near(wanted, case.expected(window=window))
    for programs in (2, 3, 7, 8, 16):
        tiling = dataclasses.replace(SMALL, programs=programs)
        assert torch.equal(case.run(tiling, window=window), wanted), tiling


@pytest.mark.parametrize("programs", [1, 4])
def test_the_width_of_the_block_table_changes_no_bit(programs: int):
    """With one KV split's worth of pages nothing goes through memory, with more it could."""
    tiling = dataclasses.replace(SMALL, programs=programs)
    wanted = Case((20,), (5,), spare_pages=0).run(tiling)
    case = Case((20,), (5,), spare_pages=40)
    assert torch.equal(case.run(tiling), wanted)


def test_rows_written_before_are_written_over():
    case = Case((17,), (6,))
    wanted = case.run()
    case.k_cache.nan_to_num_(7.0)
    case.v_cache.nan_to_num_(-7.0)
    assert torch.equal(case.run(), wanted)


def test_heads_that_no_tile_holds_are_refused():
    case = Case((0,), (1,), dim=272)
    with pytest.raises(ValueError, match="head dims up to 256, not 272 and 16"):
        case.run()


@pytest.mark.parametrize(("scale", "softcap"), [(0.0, None), (-0.5, None), (NAN, None), (1.0, 0.0), (1.0, -2.0)])
def test_factors_that_order_scores_otherwise_are_refused(scale: float, softcap: float | None):
    """The largest score is sought before they are scaled."""
    with pytest.raises(ValueError, match=f"a scale and a softcap above 0, not {scale} and {softcap}"):
        Case((0,), (1,)).run(scale=scale, softcap=softcap)


@pytest.mark.parametrize(("kv_split", "block_keys"), [(24, 16), (512, 256), (32, 8)])
def test_kv_splits_that_are_not_whole_blocks_are_refused(kv_split: int, block_keys: int):
    with pytest.raises(ValueError, match=f"not block_keys={block_keys} and kv_split={kv_split}"):
        Tiling(kv_split=kv_split, block_keys=block_keys)


@pytest.mark.parametrize(
    ("batch", "rows", "expected"), [(1, 1, 16), (1, 9, 16), (8, 9, 16), (64, 4, 16), (32, 8, 32), (64, 8, 32)]
)
def test_tiles_are_small_where_programs_are_left_over_and_hold_what_there_is(batch: int, rows: int, expected: int):
    """Four query heads for each of eight key-value heads."""
    assert block_queries(rows * 4, batch * 8, torch.bfloat16) == expected
    assert not suits_prefill(rows * 4, batch * 8, 128, torch.bfloat16)
    assert block_queries(rows * 4, batch * 8, torch.float32) == 16


@pytest.mark.parametrize(("batch", "rows"), [(1, 256), (8, 33), (32, 9), (64, 9), (1, 2048)])
def test_rows_that_fill_a_gpu_go_to_the_kernel_for_many(batch: int, rows: int):
    assert suits_prefill(rows * 4, batch * 8, 128, torch.bfloat16)
    assert not suits_prefill(rows * 4, batch * 8, 128, torch.float32)
    assert not suits_prefill(rows * 4, batch * 8, 32, torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "batch", "many"), [(256, 1, True), (8192, 16, True), (256, 65, False), (1024, 68, False)]
)
def test_packed_rows_go_to_the_kernel_for_many_where_sequences_fill_its_tiles(rows: int, batch: int, many: bool):
    assert suits_prefill(rows * 4, 8, 128, torch.bfloat16, batch) == many


def _call(rows: int = 40, dim: int = 64, value_dim: int = 64, page: int = 16, dtype: torch.dtype = torch.float16,
          slot: int = 64, sequences: int = 0) -> PagedAttention:  # fmt: skip
    """A call of four query heads for one key-value head, whose slots lie ``slot`` entries apart."""
    q, k, v = (torch.zeros(1, heads, rows, size, dtype=dtype) for heads, size in ((4, dim), (1, dim), (1, value_dim)))
    caches = (torch.zeros(4, page, 1, slot, dtype=dtype)[..., :size] for size in (dim, value_dim))
    places, table = torch.zeros(1, rows, dtype=torch.int64), torch.zeros(sequences or 1, 2, dtype=torch.int64)
    starts = torch.arange(sequences + 2) if sequences else None
    return PagedAttention(q, k, v, *caches, places, table, places, scale=1.0, cu_seqlens=starts)


@pytest.mark.parametrize(
    ("changes", "tiling", "taken"),
    [
        ({}, {}, True),
        ({"dim": 128, "value_dim": 128, "slot": 136, "page": 64}, {}, True),
        ({"rows": 16}, {}, False),
        ({"rows": 17}, {}, True),
        ({"rows": 1}, {"prefill": True}, True),
        ({"rows": 64, "sequences": 2}, {}, True),
        ({"rows": 63, "sequences": 2}, {}, False),
        ({}, {"hopper": False, "prefill": True}, False),
        ({}, {"block_keys": 32}, False),
        ({"value_dim": 32}, {}, False),
        ({"dim": 96, "value_dim": 96, "slot": 96}, {}, False),
        ({"dtype": torch.float32}, {}, False),
        ({"page": 12}, {}, False),
        ({"page": 4}, {}, False),
        ({"slot": 68}, {}, False),
    ],
)
def test_the_kernel_for_hopper_takes_what_it_can_copy_and_multiply(
    changes: dict[str, Any], tiling: dict[str, Any], taken: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(paged, "runs_gluon", lambda device: True)
    given = _call(**changes)
    assert suits_hopper(given, Tiling(**tiling), 4 * given.q.shape[2]) == taken
    monkeypatch.setattr(paged, "runs_gluon", lambda device: False)
    assert not suits_hopper(given, Tiling(**tiling), 4 * given.q.shape[2])


@pytest.mark.parametrize("tiling", [SMALL, PREFILL], ids=["few rows", "many rows"])
def test_blocks_of_keys_in_front_of_a_window_are_not_read(tiling: Tiling):
    case, window = Case((80,), (4,), block_size=8), 20
    expected = case.run(tiling, window=window)
    for unread in (48, 64):  # the first query sees positions from 61 on, and blocks have 16 keys
        for cache in (case.k_cache, case.v_cache):
            cache[case.table[0, : unread // case.block_size]] = NAN
        assert torch.equal(case.run(tiling, window=window), expected) == (unread == 48)
