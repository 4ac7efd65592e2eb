"""Attention, dense and paged, against an oracle in loops over float64."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from specgraph.kernels.attention.arguments import PADDING_SLOT, PagedAttention
from specgraph.kernels.attention.attention import ATTENTION, PAGED_ATTENTION, rotate
from specgraph.kernels.attention.cpu import is_plain, paged_attention_cpu

attention = torch.ops.specgraph.attention
paged_attention = torch.ops.specgraph.paged_attention
NAN = float("nan")
HEADS, GROUPS, DIM, VALUE_DIM, BLOCK = 4, 2, 6, 5, 4
EXACT = {"rtol": 1e-12, "atol": 1e-12}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "window of one": {"window": 1},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0, -30.0], dtype=torch.float64)},
    "all": {"window": 4, "softcap": 1.5, "sinks": torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
value_dims = pytest.mark.parametrize("value_dim", [VALUE_DIM, DIM])
"""On a CPU, PyTorch's fused attention is for values as long as keys alone."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rows(
    length: int, batch: int = 1, groups: int = GROUPS, value_dim: int = VALUE_DIM
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of whole sequences."""
    return (
        randn(batch, HEADS, length, DIM, seed=1),
        randn(batch, groups, length, DIM, seed=2),
        randn(batch, groups, length, value_dim, seed=3),
    )


def oracle(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, scale: float, window: int | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """One output number at a time, with Python floats."""
    batch, heads, length, _ = q.shape
    out = torch.zeros(batch, length, heads, v.shape[3], dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            g = h // (heads // k.shape[1])
            for t in range(length):
                first = 0 if window is None else max(0, t - window + 1)
                scores = [scale * sum((q[b, h, t] * k[b, g, s]).tolist()) for s in range(first, t + 1)]
                if softcap is not None:
                    scores = [softcap * math.tanh(score / softcap) for score in scores]
                extra = [] if sinks is None else [float(sinks[h])]
                total = sum(map(math.exp, scores + extra))
                for score, s in zip(scores, range(first, t + 1), strict=True):
                    out[b, t, h] += math.exp(score) / total * v[b, g, s]
    return out


class Pages:
    """The cache of some sequences in scattered pages, and calls that write to it."""

    def __init__(
        self, lengths: list[int], *, fill: float = 0.0, order: list[int] | None = None, spare: int = 1,
        value_dim: int = VALUE_DIM,
    ) -> None:  # fmt: skip
        counts = [-(-n // BLOCK) for n in lengths]
        total = sum(counts) + spare
        free = order or torch.randperm(total, generator=torch.Generator().manual_seed(7)).tolist()
        self.table = torch.full((len(lengths), max(counts) + 2), -1)
        for row, count in enumerate(counts):
            self.table[row, :count] = torch.tensor([free.pop() for _ in range(count)])
        self.k = torch.full((total, BLOCK, GROUPS, DIM), fill, dtype=torch.float64)
        self.v = torch.full((total, BLOCK, GROUPS, value_dim), fill, dtype=torch.float64)

    def slot(self, row: int, position: int) -> int:
        return int(self.table[row, position // BLOCK]) * BLOCK + position % BLOCK

    def call(
        self, qkv: tuple[Tensor, Tensor, Tensor], starts: list[int], counts: list[int], width: int, **options: Any
    ) -> Tensor:
        """Rows ``starts[b] : starts[b] + counts[b]`` of every sequence, padded with NaN to ``width``."""
        chunk = [torch.full((len(starts), x.shape[1], width, x.shape[3]), NAN, dtype=x.dtype) for x in qkv]
        slots = torch.full((len(starts), width), PADDING_SLOT)
        positions = torch.tensor(starts).unsqueeze(1) + torch.arange(width)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for part, whole in zip(chunk, qkv, strict=True):
                part[b, :, :count] = whole[b, :, start : start + count]
            for r in range(count):
                slots[b, r] = self.slot(b, start + r)
        return paged_attention(*chunk, self.k, self.v, slots, self.table, positions, **options)


@pytest.fixture(params=["reference", "cpu"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both forms answer to a test, also in float64. What the one for CPUs does not compute is left to the other."""
    reference = PAGED_ATTENTION.form("reference")

    def on_a_cpu(*arguments: Any, **options: Any) -> Tensor:
        given = PagedAttention(*arguments, **options)
        return paged_attention_cpu(given) if is_plain(given) else reference(*arguments, **options)

    name: str = request.param
    monkeypatch.setattr(sys.modules[__name__], "paged_attention", reference if name == "reference" else on_a_cpu)
    return name


both_forms = pytest.mark.usefixtures("form")


def in_chunks(qkv: tuple[Tensor, Tensor, Tensor], size: int, pages: Pages, **options: Any) -> Tensor:
    """All rows of the sequences, ``size`` at a time."""
    length = qkv[0].shape[2]
    parts = []
    for start in range(0, length, size):
        count = min(size, length - start)
        batch = qkv[0].shape[0]
        parts.append(pages.call(qkv, [start] * batch, [count] * batch, size, **options)[:, :count])
    return torch.cat(parts, 1)


@variants
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_dense_equals_the_oracle(options: dict[str, Any], groups: int):
    qkv = rows(7, 2, groups)
    torch.testing.assert_close(attention(*qkv, scale=0.4, **options), oracle(*qkv, scale=0.4, **options), **EXACT)


@both_forms
@variants
@value_dims
@pytest.mark.parametrize("size", range(1, 12))
def test_chunks_of_any_size_equal_dense(options: dict[str, Any], size: int, value_dim: int):
    qkv, pages = rows(11, 2, value_dim=value_dim), Pages([11, 11], value_dim=value_dim)
    expected = ATTENTION.form("reference")(*qkv, scale=0.4, **options)
    torch.testing.assert_close(in_chunks(qkv, size, pages, scale=0.4, **options), expected, **EXACT)


@both_forms
def test_the_cache_holds_each_row_in_its_slot_and_nothing_else():
    qkv, pages = rows(6, 2), Pages([6, 3], fill=99.0)
    pages.call(qkv, [0, 0], [6, 3], 8, scale=1.0)
    left = set(range(pages.k.shape[0] * BLOCK))
    for row, count in ((0, 6), (1, 3)):
        for position in range(count):
            slot = pages.slot(row, position)
            left.remove(slot)
            assert torch.equal(pages.k.flatten(0, 1)[slot], qkv[1][row, :, position])
            assert torch.equal(pages.v.flatten(0, 1)[slot], qkv[2][row, :, position])
    assert bool((pages.k.flatten(0, 1)[sorted(left)] == 99.0).all())
    assert bool((pages.v.flatten(0, 1)[sorted(left)] == 99.0).all())


@both_forms
@variants
def test_padded_rows_give_zeros_even_if_they_hold_nan(options: dict[str, Any]):
    qkv = rows(6, 3)
    out = Pages([6, 6, 6]).call(qkv, [0, 0, 0], [6, 2, 0], 6, scale=0.4, **options)
    expected = oracle(*qkv, scale=0.4, **options)
    torch.testing.assert_close(out[0], expected[0], **EXACT)
    torch.testing.assert_close(out[1, :2], expected[1, :2], **EXACT)
    assert bool((out[1, 2:] == 0).all()) and bool((out[2] == 0).all())


@both_forms
@variants
def test_rows_before_the_first_position_see_and_write_nothing(options: dict[str, Any]):
    qkv, lead = rows(6, 2), 3
    padded = tuple(torch.nn.functional.pad(x, (0, 0, lead, 0), value=NAN) for x in qkv)
    pages = Pages([6, 6], fill=NAN)
    slots, positions = torch.full((2, 9), PADDING_SLOT), torch.arange(-lead, 6).expand(2, -1)
    for b in range(2):
        slots[b, lead:] = torch.tensor([pages.slot(b, place) for place in range(6)])
    out = paged_attention(*padded, pages.k, pages.v, slots, pages.table, positions, scale=0.4, **options)
    assert bool((out[:, :lead] == 0).all())
    torch.testing.assert_close(out[:, lead:], oracle(*qkv, scale=0.4, **options), **EXACT)
    assert int((~pages.k.isnan()).any(-1).any(-1).sum()) == 12


@both_forms
def test_a_call_without_any_real_row_writes_and_gives_nothing():
    pages = Pages([4, 4], fill=NAN)
    out = pages.call(rows(4, 2), [2, 0], [0, 0], 3, scale=1.0)
    assert out.shape == (2, 3, HEADS, VALUE_DIM) and bool((out == 0).all())
    assert bool(pages.k.isnan().all()) and bool(pages.v.isnan().all())


@both_forms
@variants
def test_stale_nan_in_unused_rows_and_pages_is_harmless(options: dict[str, Any]):
    qkv = rows(9, 2)
    pages = Pages([9, 16], fill=NAN)
    pages.call(qkv, [0, 0], [9, 2], 9, scale=0.4, **options)
    out = pages.call(qkv, [8, 2], [1, 3], 3, scale=0.4, **options)
    expected = oracle(*qkv, scale=0.4, **options)
    torch.testing.assert_close(out[0, 0], expected[0, 8], **EXACT)
    torch.testing.assert_close(out[1], expected[1, 2:5], **EXACT)


@pytest.mark.parametrize("whole", [True, False], ids=["first pages", "another one"])
def test_on_a_cpu_pages_in_front_of_a_window_are_not_read(whole: bool):
    """The first of three rows sees positions from 13 on; pages have four."""
    qkv, pages = rows(20), Pages([20])
    pages.call(qkv, [0], [17], 17, scale=0.4, window=5)
    given = PagedAttention(
        *(x[:, :, 17:] for x in qkv), pages.k, pages.v, torch.tensor([[pages.slot(0, p) for p in range(17, 20)]]),
        pages.table, torch.arange(17, 20).unsqueeze(0), scale=0.4, window=5,
    )  # fmt: skip
    expected = paged_attention_cpu(given)
    for cache in (pages.k, pages.v):
        cache[pages.table[0, :3] if whole else pages.table[0, 3]] = NAN
    assert torch.equal(paged_attention_cpu(given), expected) == whole


@both_forms
def test_rejected_rows_are_written_over_and_never_seen():
    qkv, other = rows(6), tuple(x + 1.0 for x in rows(6))
    pages = Pages([6])
    pages.call(qkv, [0], [2], 2, scale=0.4)
    pages.call(other, [2], [4], 4, scale=0.4)
    out = pages.call(qkv, [2], [2], 2, scale=0.4)
    torch.testing.assert_close(out[0], oracle(*qkv, scale=0.4)[0, 2:4], **EXACT)


@both_forms
def test_the_order_of_pages_changes_no_bit():
    qkv = rows(15)
    expected = in_chunks(qkv, 5, Pages([15], order=[3, 2, 1, 0]), scale=0.4)
    for order in ([0, 1, 2, 3], [4, 0, 3, 1], [2, 4, 1, 3]):
        assert torch.equal(in_chunks(qkv, 5, Pages([15], order=order), scale=0.4), expected)


@both_forms
@variants
def test_a_row_does_not_depend_on_the_other_rows_of_the_call(options: dict[str, Any]):
    qkv = rows(12, 3)
    together = Pages([12, 12, 12])
    together.call(qkv, [0, 0, 0], [3, 8, 5], 8, scale=0.4, **options)
    out = together.call(qkv, [3, 8, 5], [4, 4, 1], 4, scale=0.4, **options)
    for row, (start, count) in enumerate(((3, 4), (8, 4), (5, 1))):
        one = tuple(x[row : row + 1] for x in qkv)
        alone = Pages([12])
        alone.call(one, [0], [start], start, scale=0.4, **options)
        for r in range(count):
            single = alone.call(one, [start + r], [1], 1, scale=0.4, **options)
            torch.testing.assert_close(out[row, r], single[0, 0], **EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@value_dims
def test_on_a_cpu_low_precision_runs_the_form_for_it_and_is_near_the_definition(
    dtype: torch.dtype, window: int | None, value_dim: int
):
    exact, qkv = Pages([9, 9], value_dim=value_dim), tuple(x.to(dtype) for x in rows(9, 2, value_dim=value_dim))
    expected = in_chunks(tuple(x.double() for x in qkv), 4, exact, scale=0.4, window=window)  # type: ignore[arg-type]
    pages = Pages([9, 9], value_dim=value_dim)
    pages.k, pages.v = pages.k.to(dtype), pages.v.to(dtype)
    found = in_chunks(qkv, 4, pages, scale=0.4, window=window)  # type: ignore[arg-type]
    given = PagedAttention(
        *qkv, pages.k, pages.v, *[torch.zeros(2, 9, dtype=torch.int64)] * 3, scale=0.4, window=window
    )
    assert PAGED_ATTENTION.choose("cpu", given).name == "cpu" and found.dtype == dtype
    torch.testing.assert_close(
        found.double(), expected, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [12, 90])
def test_on_a_cpu_no_bit_depends_on_the_other_sequences(dtype: torch.dtype, length: int):
    qkv = tuple(x.to(dtype) for x in rows(length + 4, 3, value_dim=DIM))

    def attended(sequences: list[int], counts: list[int]) -> Tensor:
        pages, own = Pages([length + 4] * len(sequences), value_dim=DIM), tuple(x[sequences] for x in qkv)
        pages.k, pages.v = pages.k.to(dtype), pages.v.to(dtype)
        starts = [length - 3 * sequence for sequence in sequences]
        pages.call(own, [0] * len(sequences), starts, length, scale=0.4)  # type: ignore[arg-type]
        return pages.call(own, starts, counts, max(counts), scale=0.4)  # type: ignore[arg-type]

    for counts in ([1, 1, 1], [4, 2, 3]):
        together = attended([0, 1, 2], counts)
        for sequence, count in enumerate(counts):
            assert torch.equal(together[sequence, :count], attended([sequence], [count])[0])


@pytest.mark.parametrize("count", [1, 5, 9, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@value_dims
def test_on_a_cpu_the_result_has_the_strides_that_compiled_code_relies_on(
    count: int, dtype: torch.dtype, value_dim: int
):
    pages = Pages([20], value_dim=value_dim)
    slots = torch.tensor([[pages.slot(0, row) for row in range(count)]])
    qkv = [x.to(dtype) for x in rows(count, value_dim=value_dim)]
    positions = torch.arange(count).unsqueeze(0)
    found = torch.ops.specgraph.paged_attention(
        *qkv, pages.k.to(dtype), pages.v.to(dtype), slots, pages.table, positions, scale=0.4
    )
    assert found.shape[:2] == (1, count) and found.is_contiguous()


def test_low_precision_is_computed_in_float32_and_returned_as_given():
    q, k, v = (x.to(torch.bfloat16) for x in rows(5))
    out = attention(q, k, v, scale=0.4)
    assert out.dtype == torch.bfloat16
    exact = oracle(q.double(), k.double(), v.double(), scale=0.4)
    torch.testing.assert_close(out, exact.to(torch.bfloat16), rtol=2**-8, atol=0)


def test_scores_too_large_for_exp_do_not_overflow():
    q, k, v = rows(4)
    out = attention(q * 1e4, k * 1e4, v, torch.full((HEADS,), 1e3, dtype=torch.float64), scale=1.0)
    assert bool(out.isfinite().all())


def paged_arguments(seed: int = 0) -> tuple[Tensor, ...]:
    q, k, v = rows(3, 2)
    slots, table = torch.tensor([[0, 1, 2], [4, 5, -1]]), torch.tensor([[0], [1]])
    k_cache, v_cache = randn(2, BLOCK, GROUPS, DIM, seed=seed), randn(2, BLOCK, GROUPS, VALUE_DIM, seed=seed)
    return q, k, v, k_cache, v_cache, slots, table, torch.arange(3).expand(2, 3).contiguous()


def rotary_attention(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *rest: Tensor, scale: float) -> Tensor:
    return paged_attention(q, k, v, *rest, cos=cos, sin=sin, scale=scale)  # type: ignore[no-any-return]


def rotary_arguments(sequences: int = 2, width: int = DIM) -> tuple[Tensor, ...]:
    angles = randn(sequences, 3, width // 2, seed=4)
    angles = torch.cat([angles, angles], -1)
    q, k, v, *rest = paged_arguments()
    return q, k, v, angles.cos(), angles.sin(), *rest


@pytest.mark.parametrize("width", [2, 4, DIM])
@pytest.mark.parametrize("sequences", [1, 2])
def test_rotation_comes_before_the_cache(sequences: int, width: int):
    q, k, v, cos, sin, *rest = rotary_arguments(sequences, width)
    out = rotary_attention(q, k, v, cos, sin, *rest, scale=0.4)

    def turned(x: Tensor) -> Tensor:
        half = width // 2
        lower, upper, others = x.split([half, half, DIM - width], -1)
        y = torch.complex(lower, upper) * torch.complex(cos, sin)[:, None, :, :half]
        return torch.cat([y.real, y.imag, others], -1)

    _, _, _, *fresh = paged_arguments()
    expected = PAGED_ATTENTION.form("reference")(turned(q), turned(k), v, *fresh, scale=0.4)
    torch.testing.assert_close(out, expected, **EXACT)
    torch.testing.assert_close(rest[0], fresh[0], **EXACT)
    assert torch.equal(rest[1], fresh[1])


@pytest.mark.parametrize(("source", "width"), [("llama", DIM), ("gpt_neox", 4)])
def test_rotation_is_that_of_transformers(source: str, width: int):
    modeling = importlib.import_module(f"transformers.models.{source}.modeling_{source}")
    apply_rotary_pos_emb = modeling.apply_rotary_pos_emb
    q, k, _, cos, sin, *_ = rotary_arguments(width=width)
    for found, wanted in zip(
        (rotate(q, cos, sin), rotate(k, cos, sin)), apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(found, wanted, **EXACT)


@variants
def test_ops_are_registered_as_they_behave(options: dict[str, Any]):
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(attention, rows(3, 2), {"scale": 0.4, **options}, test_utils=checks)
    torch.library.opcheck(paged_attention, paged_arguments(), {"scale": 0.4, **options}, test_utils=checks)
    q, k, v, cos, sin, *rest = rotary_arguments()
    given = {"scale": 0.4, "cos": cos, "sin": sin, **options}
    torch.library.opcheck(paged_attention, (q, k, v, *rest), given, test_utils=checks)


Change = Callable[[list[Tensor]], None]


def put(index: int, *shape: int, dtype: torch.dtype = torch.float64) -> Change:
    def change(arguments: list[Tensor]) -> None:
        arguments[index] = torch.zeros(*shape, dtype=dtype)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(0, 2, 3, DIM), r"q must be \[B, Hq, T, D\], not \[2, 3, 6\]"),
        (put(2, 2, GROUPS, 4, VALUE_DIM), r"v must be \[B, Hkv, T, Dv\] = \[2, 2, 3, Dv\], not \[2, 2, 4, 5\]"),
        (put(0, 2, HEADS, 4, DIM), r"k must be \[B, Hkv, T, D\] = \[2, 2, 4, 6\], not \[2, 2, 3, 6\]"),
        (put(0, 2, HEADS, 3, 8), r"k must be \[B, Hkv, T, D\] = \[2, 2, 3, 8\], not \[2, 2, 3, 6\]"),
        (put(0, 2, 3, 3, DIM), "3 heads do not group over 2"),
        (put(3, 2, BLOCK, GROUPS, 8), r"k_cache must be \[N, S, H, D\] = .*, 2, 6\], not"),
        (put(4, 2, BLOCK, GROUPS, DIM), r"v_cache must be \[N, S, H, Dv\] = .*, 2, 5\], not"),
        (put(4, 2, BLOCK, GROUPS, VALUE_DIM, dtype=torch.float32), "v_cache must have the dtype of the rows"),
        (put(5, 2, 4), r"slots must be \[B, T\] = \[2, 3\], not \[2, 4\]"),
        (put(6, 3, 1), r"block_table must be \[B, M\] = \[2, M\], not \[3, 1\]"),
        (put(7, 2, 2), r"positions must be \[B, T\] = \[2, 3\], not \[2, 2\]"),
    ],
)
def test_fake_tensors_refuse_wrong_shapes(change: Change, message: str):
    arguments = [*paged_arguments()]
    change(arguments)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        paged_attention(*map(mode.from_tensor, arguments), scale=1.0)


def test_fake_tensors_refuse_sinks_that_are_not_one_per_head():
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=r"sinks must be \[Hq\] = \[4\], not \[3\]"):
        attention(*map(mode.from_tensor, rows(3)), mode.from_tensor(torch.zeros(3)), scale=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(3, 2, DIM), r"cos must be \[B, T, n\]"),
        (put(4, 2, 2, DIM), "sin must agree with q in T"),
        (put(4, 2, 3, DIM - 2), r"must be for the same values of a head, not for \(6, 4\)"),
        (put(3, 3, 3, DIM), "cos must be for B sequences or for one"),
        (put(3, 2, 3, 5), "cos must be for an even number of values of a head of 6, not for 5"),
        (put(4, 2, 3, 8), "sin must be for an even number of values of a head of 6, not for 8"),
        (put(3, 2, 3, 0), "cos must be for an even number of values of a head of 6, not for 0"),
    ],
)
def test_fake_tensors_refuse_wrong_angles(change: Change, message: str):
    arguments = [*rotary_arguments()]
    change(arguments)
    with FakeTensorMode() as mode, pytest.raises(ValueError, match=message):
        rotary_attention(*map(mode.from_tensor, arguments), scale=1.0)
