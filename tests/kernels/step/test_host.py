"""Forms for CPUs of the step's small ops give what the definitions give, for random sequences of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.ops import OPS
from specgraph.kernels.step.host import MOST_INTEGERS, cut_tokens

SEEDS = range(40)


def ids(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator)


def emitted_of(generator: torch.Generator, batch: int, width: int) -> tuple[Tensor, Tensor]:
    """Tokens padded with -1 and their number; one sequence in three emits none."""
    count = ids(generator, 0, width + 1, batch) * ids(generator, 0, 3, batch).clamp(max=1)
    return ids(generator, 0, 9, batch, width).masked_fill(torch.arange(width) >= count.unsqueeze(1), -1), count


def both(name: str) -> tuple[object, ...]:
    return OPS[name].form("cpu"), OPS[name].form("reference")


@pytest.mark.parametrize("seed", SEEDS)
def test_finalize_step(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width = 1 + seed % 4, 1 + seed % 5
    tokens, count = emitted_of(generator, batch, width)
    forced = torch.minimum(ids(generator, 0, width, batch), count)
    given = (
        tokens,
        ids(generator, 0, 9, batch, width),
        ids(generator, 0, 50, batch),
        forced,
        ids(generator, -1, 9, batch, 2),
    )
    options = {"shifted": seed % 3 > 0, "vocab_size": 7, "chain": seed % 4}
    found, expected = (form(*given, **options) for form in both("finalize_step"))  # type: ignore[operator]
    for name, a, b in zip(expected._fields, found, expected, strict=True):
        pairs = zip(a, b, strict=True) if name == "chain" else [(a, b)]
        assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in pairs), name


@pytest.mark.parametrize("seed", SEEDS)
def test_advance(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width = 1 + seed % 4, 1 + seed % 5
    emitted, count = emitted_of(generator, batch, width)
    widths = [[], [1], [2, 1], [4]][seed % 4]
    drafts = [ids(generator, -1, 9, batch, each) for each in widths]
    state = [ids(generator, 0, 9, batch, sum(widths) + 1 + seed % 3), *[ids(generator, 0, 30, batch) for _ in range(2)]]
    state.append(ids(generator, 0, width, batch))
    longest, ends, results = ids(generator, 20, 40, batch), ids(generator, -1, 9, batch, 2), []
    for form in both("advance"):
        own = [tensor.clone() for tensor in state]
        form(*own, emitted, count, drafts, longest, ends)  # type: ignore[operator]
        results.append(own)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("seed", SEEDS)
def test_row_slots(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, width = 1 + seed % 4, 1 + seed % 5
    positions = ids(generator, -3, 30, batch, 1) + torch.arange(width)
    table = ids(generator, -1, 20, batch, 6)
    given = (positions, ids(generator, 0, width + 1, batch), table, ids(generator, 1, 30, batch))
    found, expected = (form(*given, block_size=4) for form in both("row_slots"))  # type: ignore[operator]
    assert torch.equal(found, expected) and found.dtype == expected.dtype


@pytest.mark.parametrize("seed", SEEDS)
def test_pack_results(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, rows = 1 + seed % 4, 1 + seed % 5
    emitted, count = emitted_of(generator, batch, rows)
    bad, index = ids(generator, 0, 2, batch).bool(), ids(generator, -1, 6, batch)
    given = (emitted, count, torch.empty(batch, 0), bad, ids(generator, 0, 9, 6), min(rows, 1 + seed % 3), index)
    found, expected = (form(*given) for form in both("pack_results"))  # type: ignore[operator]
    assert torch.equal(found, expected) and found.dtype == expected.dtype


def test_many_rows_take_the_definitions() -> None:
    def chosen(width: int) -> str:
        rows = torch.zeros(1, width, dtype=torch.int64)
        one = torch.zeros(1, dtype=torch.int64)
        op = OPS["row_slots"]
        return op.choose("cpu", op.arguments(rows, one, rows, one, block_size=4)).name

    assert (chosen(MOST_INTEGERS), chosen(MOST_INTEGERS + 1)) == ("cpu", "reference")


def test_an_eos_among_forced_tokens_cuts_nothing() -> None:
    assert cut_tokens([3, 4, 5, 6], 1, [3, 5]) == [3, 4, 5, -1]
    assert cut_tokens([3, -1], 1, [3, -1]) == [3, -1]
