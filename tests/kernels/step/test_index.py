"""The row index: what a call gathers, scatters and stores for the sequences that it runs, against loops in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import specgraph.kernels.step  # noqa: F401  (declares the ops)
from specgraph.kernels.ops import OPS
from specgraph.kernels.state import Buffer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = ("reference", "cpu", "triton", "op")
ROWS = {
    "some": [4, 0, 2], "with gaps": [-1, 3, -1, 1], "all": [0, 1, 2, 3, 4], "one": [2], "none": [-1], "empty": [],
}  # fmt: skip


def form(op: str, name: str) -> Callable[..., Any]:
    """An op, or one variant of it, which gets its tensors where it runs; buffers are written back to the host."""
    function = getattr(torch.ops.specgraph, op) if name == "op" else OPS[op].form(name)
    device = DEVICE if name == "triton" else "cpu"

    def moved(value: Any) -> Any:
        if isinstance(value, list):
            return [moved(part) for part in value]
        return value.to(device) if isinstance(value, Tensor) else value

    def run(*given: Any) -> Any:
        there = [moved(value) for value in given]
        result = function(*there)
        for mine, theirs in zip(given, there, strict=True):
            for own, other in zip(mine, theirs, strict=True) if isinstance(mine, list) else [(mine, theirs)]:
                if isinstance(own, Tensor):
                    own.copy_(other)
        return result

    return run


def buffers(seed: int, count: int) -> list[Tensor]:
    """State of ``count`` sequences in many dtypes and shapes; integers that a float would round, and a NaN."""
    generator = torch.Generator().manual_seed(seed)
    large = torch.randint(-(1 << 62), 1 << 62, (count,), generator=generator)
    real = torch.randn(count, 3, 2, generator=generator)
    real[0] = torch.nan
    return [
        large,
        real,
        torch.randint(0, 9, (count, 2100), generator=generator),
        real.double()[:, 0].clone(),
        large > 0,
    ]


def same(found: Tensor, expected: Tensor) -> bool:
    return (
        torch.equal(found.cpu().nan_to_num(nan=77.0), expected.nan_to_num(nan=77.0)) and found.dtype == expected.dtype
    )


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", FORMS)
def test_a_call_gathers_the_rows_that_it_names(name: str, rows: list[int]) -> None:
    state, fills = buffers(0, 5), [-1.0, 0.5, 3.0, 0.25, 1.0]
    found = form("gather_state", name)(torch.tensor(rows, dtype=torch.int64), state, fills)
    for own, buffer, fill in zip(found, state, fills, strict=True):
        missing = torch.full_like(buffer[0], fill)
        expected = [buffer[row] if row >= 0 else missing for row in rows]
        assert same(own, torch.stack(expected) if expected else buffer[:0])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("name", FORMS)
def test_a_call_writes_the_rows_that_it_names_and_no_others(name: str, rows: list[int]) -> None:
    state, values = buffers(0, 5), buffers(1, 5)
    expected = [buffer.clone() for buffer in state]
    for kept, new in zip(expected, values, strict=True):
        for place, row in enumerate(rows):
            if row >= 0:
                kept[row] = new[place]
    form("scatter_state", name)(torch.tensor(rows, dtype=torch.int64), state, [v[: len(rows)] for v in values])
    assert all(same(found, kept) for found, kept in zip(state, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [[3, -1, 0], None], ids=["rows", "as they are"])
@pytest.mark.parametrize("name", FORMS)
def test_draft_logits_are_stored_for_active_sequences(name: str, rows: list[int] | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    kept = torch.randn(3 if rows is None else 5, 4, 1500, generator=generator).to(dtype)
    drafted = torch.randn(3, 2, 1500, generator=generator).bfloat16()
    emitted, expected = torch.tensor([1, 2, 0]), kept.clone()
    for place, row in enumerate([0, 1, 2] if rows is None else rows):
        if row >= 0 and emitted[place] > 0:
            expected[row, 1:3] = drafted[place].to(dtype)
    form("store_drafted", name)(kept, drafted, None if rows is None else torch.tensor(rows), emitted, 1)
    assert torch.equal(kept, expected)


def test_what_does_not_fit_is_refused() -> None:
    ops, rows = torch.ops.specgraph, torch.tensor([0, 1])
    three = torch.zeros(3, 2)
    for refused, words in (
        (lambda: ops.gather_state(rows, [three], []), "1 buffers and 0 fills"),
        (lambda: ops.gather_state(rows.view(1, 2), [three], [0.0]), "rows must be"),
        (lambda: ops.scatter_state(rows, [three], [three]), r"a value must be \[2, 2\], not \[3, 2\]"),
        (
            lambda: ops.store_drafted(torch.zeros(3, 2, 4), torch.zeros(2, 1, 4), None, rows, 0),
            r"not \[3, 2, 4\]",
        ),
        (lambda: ops.store_drafted(torch.zeros(2, 2, 4), torch.zeros(2, 2, 4), None, rows, 1), "these are the first 3"),
        (
            lambda: ops.store_drafted(torch.zeros(2, 2, 4), torch.zeros(2, 1, 5), None, rows, 0),
            r"not \[2, 2, 4\]",
        ),
    ):
        # The checks are those of the fake implementation, which every pass runs.
        with pytest.raises(ValueError, match=words), torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
            refused()


def test_only_a_buffer_of_sequences_is_indexed() -> None:
    with pytest.raises(ValueError, match="no row for each sequence"):
        Buffer(("N", 16), owner="pages", indexed=True)


def test_the_ops_are_registered_as_they_behave() -> None:
    ops, checks = torch.ops.specgraph, ("test_schema", "test_faketensor")
    rows, state = torch.tensor([2, -1, 0], device=DEVICE), [torch.ones(4, 2, device=DEVICE)]
    torch.library.opcheck(ops.gather_state, (rows, state, [1.0]), test_utils=checks)
    torch.library.opcheck(ops.scatter_state, (rows, state, [torch.zeros(3, 2, device=DEVICE)]), test_utils=checks)
    kept, drafted = torch.zeros(4, 3, 8, device=DEVICE), torch.ones(3, 2, 8, device=DEVICE)
    torch.library.opcheck(ops.store_drafted, (kept, drafted, rows, rows + 1, 1), test_utils=checks)
