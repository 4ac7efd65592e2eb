"""Paged attention on a GPU: the 8B shapes in bfloat16, bits over batches and chunks, and no host in the way."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specgraph.kernels.attention import paged
from specgraph.kernels.attention.attention import PAGED_ATTENTION
from specgraph.kernels.attention.paged import Tiling, suits_hopper
from specgraph.kernels.launch import runs_gluon
from tests.kernels.attention.test_packed_attention import InPacks
from tests.kernels.attention.test_paged_attention import SINKS, Case, assert_near

SHAPE: dict[str, Any] = {
    "dtype": torch.bfloat16, "heads": 32, "groups": 8, "dim": 128, "value_dim": 128, "block_size": 16, "rotary": True,
}  # fmt: skip
DEFAULT = Tiling()


def case(starts: tuple[int, ...], counts: tuple[int, ...], **changes: Any) -> Case:
    return Case(starts, counts, **{**SHAPE, **changes})


@pytest.mark.parametrize("prefill", [False, True], ids=["few rows", "many rows"])
@pytest.mark.parametrize(
    ("starts", "counts", "changes", "options"),
    [
        ((128,), (1,), {}, {}),
        ((3000, 700, 255, 256, 0), (9, 3, 1, 2, 5), {}, {}),
        ((1000, 0), (300, 257), {}, {}),
        ((900, 20), (8, 8), {}, {"window": 300}),
        ((700,), (4,), {"heads": 8, "groups": 1}, {"sinks": SINKS, "softcap": 5.0}),
        ((700, 3), (40, 9), {"heads": 16, "groups": 16, "dim": 64, "value_dim": 64}, {}),
        ((400, 30), (9, 40), {"heads": 8, "groups": 4, "dim": 80, "value_dim": 96}, {}),
        ((400, 30), (9, 40), {"heads": 8, "groups": 8, "dim": 192, "value_dim": 128}, {}),
        ((400, 30), (3, 40), {"heads": 8, "groups": 4, "dim": 256, "value_dim": 256}, {"softcap": 50.0}),
        ((300, 30), (5, 20), {"heads": 8, "groups": 4, "dtype": torch.float32}, {}),
    ],
)
def test_equals_float64_and_both_kernels_have_the_same_bits(
    starts: tuple[int, ...], counts: tuple[int, ...], changes: Any, options: dict[str, Any], prefill: bool
):
    some = case(starts, counts, **changes)
    options = {"scale": some.dim**-0.5, **options}
    found = some.run(Tiling(prefill=prefill), **options)
    assert_near(found, some.expected(**options))
    if some.dtype != torch.float32:
        assert torch.equal(found, some.run(Tiling(prefill=not prefill), **options))


@pytest.mark.parametrize(
    ("starts", "counts", "changes", "options"),
    [
        ((3000, 700, 255, 256, 0), (9, 3, 1, 2, 5), {"heads": 8, "groups": 2}, {}),
        ((1000, 0), (300, 257), {}, {}),
        ((1000, 0, 30), (100, 257, 70), {"packed": True}, {}),
        ((1000, 0, 30), (100, 257, 70), {"packed": True}, {"window": 200}),
        ((4090, 2040), (70, 130), {"heads": 8, "groups": 2, "dtype": torch.float16}, {}),
        ((900, 1400), (80, 8), {}, {"window": 300}),
        ((700,), (90,), {"heads": 8, "groups": 1}, {"sinks": SINKS, "softcap": 5.0}),
        ((1500, 3), (40, 90), {"heads": 8, "groups": 8, "dim": 64, "value_dim": 64}, {}),
        ((700, 1030), (40, 90), {"heads": 16, "groups": 2, "dim": 64, "value_dim": 64, "rotary": 32}, {}),
        ((700,), (90,), {"block_size": 8}, {}),
        ((700,), (90,), {"block_size": 64}, {}),
        ((700,), (90,), {"block_size": 256}, {}),
    ],
)
def test_the_kernel_for_hopper_has_the_bits_of_the_triton_kernel(
    starts: tuple[int, ...], counts: tuple[int, ...], changes: Any, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    taken: list[bool] = []

    def observed(*given: Any) -> bool:
        taken.append(suits_hopper(*given))
        return taken[-1]

    monkeypatch.setattr(paged, "suits_hopper", observed)
    some = case(starts, counts, **{name: value for name, value in changes.items() if name != "packed"})
    if "packed" in changes:
        some.op = InPacks(PAGED_ATTENTION)
    options = {"scale": some.dim**-0.5, **options}
    found = some.run(Tiling(prefill=True), **options)
    assert_near(found, some.expected(**options))
    assert torch.equal(found, some.run(Tiling(prefill=True, hopper=False), **options))
    assert taken == [runs_gluon(found.device), False]


@pytest.mark.parametrize("tiling", [Tiling(), Tiling(prefill=True), Tiling(prefill=True, hopper=False)])
def test_blocks_of_keys_in_front_of_a_window_are_not_read(tiling: Tiling):
    """The first query sees positions from 801 on, and blocks have 64 keys."""
    some = case((1000,), (80,))
    expected = some.run(tiling, window=200)
    for unread in (768, 816):
        for cache in (some.k_cache, some.v_cache):
            cache[some.table[0, : unread // some.block_size]] = float("nan")
        assert torch.equal(some.run(tiling, window=200), expected) == (unread == 768)


@pytest.mark.parametrize("options", [{}, {"window": 200}], ids=["full", "window"])
def test_rows_of_every_batch_size_have_the_same_bits(options: dict[str, Any]):
    lengths = random.Random(0)
    some = case(tuple(lengths.randrange(600) for _ in range(64)), (9,) * 64)
    wanted = some.run(DEFAULT, **options)
    for of in (0, 17, 63):
        for first, count in ((0, 1), (0, 9), (3, 2), (8, 1), (2, 5)):
            found = some.run(DEFAULT, first=first, count=count, of=of, **options)
            assert torch.equal(found[0], wanted[of, first : first + count]), (of, first, count)


def test_chunks_of_any_size_have_the_same_bits():
    some = case((0, 40), (576, 500))
    wanted = some.run(DEFAULT)
    for first, count in ((0, 576), (0, 64), (64, 256), (300, 1), (255, 17), (256, 16), (490, 9)):
        found = some.run(DEFAULT, first=first, count=count, of=0)
        assert torch.equal(found[0], wanted[0, first : first + count]), (first, count)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [(torch.bfloat16, 16), (torch.bfloat16, 64), (torch.float16, 32)],
    ids=["2", "8", "4 in float16"],
)
def test_no_tiling_of_rows_and_programs_changes_a_bit(dtype: torch.dtype, heads: int):
    some = case((2900, 257, 600, 10), (12, 7, 9, 12), dtype=dtype, heads=heads)
    wanted = some.run(DEFAULT)
    for block_queries, programs, write_first in (
        (16, 1, False),
        (16, 3, True),
        (16, 12, False),
        (32, 8, False),
        (32, 1, True),
        (64, 1, True),
        (64, 3, False),
    ):
        tiling = Tiling(block_queries=block_queries, programs=programs, write_first=write_first, num_stages=2)
        assert torch.equal(some.run(tiling), wanted), tiling


def test_caches_of_more_than_two_thousand_million_elements_have_the_same_bits():
    """Offsets in such a cache are longer than 32 bits."""
    some = case((300,), (20,))
    wanted = some.run(DEFAULT)
    pages = 2**31 // (16 * some.groups * some.dim) + 40
    small = [some.k_cache, some.v_cache]
    some.k_cache, some.v_cache = (x.new_zeros(pages, *x.shape[1:]) for x in small)
    for cache, x in zip((some.k_cache, some.v_cache), small, strict=True):
        cache[-len(x) :] = x
    some.table = torch.where(some.table >= 0, some.table + pages - len(small[0]), some.table)
    assert torch.equal(some.run(DEFAULT), wanted)
    assert torch.equal(some.run(Tiling(prefill=True)), wanted)


def test_runs_in_a_cuda_graph_without_the_host():
    some = case((300, 700), (3, 2))
    wanted = some.run(DEFAULT)
    arguments: list[Any] = []
    original = some.op
    some.op = lambda *given, **options: arguments.append((given, options)) or original(*given, **options)
    some.run(DEFAULT)
    ((given, options),) = arguments
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        original(*given, **options)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    with torch.cuda.graph(graph):
        out = original(*given, **options)
    for _ in range(20):
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)
