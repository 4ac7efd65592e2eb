"""Ops on rows: the Triton forms against plain PyTorch, and ``settle`` against the functions it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph.kernels import step
from specgraph.kernels.ops import OPS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NONE, EOS = -1, 7
REFERENCE, TRITON = ({name: op.form(form) for name, op in OPS.items() if op.on("cuda")[0].name == "triton"}
                     for form in ("reference", "triton"))  # fmt: skip


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def there(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE), tree)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b)


@pytest.mark.parametrize(("batch", "width", "count"), [(1, 1, 1), (3, 5, 2), (2, 300, 2), (5, 4, 0), (2, 0, 2)])
def test_positions(batch: int, width: int, count: int):
    start = torch.arange(batch) * 11
    same(TRITON["row_positions"](there(start), width, count), REFERENCE["row_positions"](start, width, count))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("width", [1, 7, 64, 1500])
def test_taken_rows_are_copied_whatever_their_width(dtype: torch.dtype, together: bool, width: int):
    values = torch.randn(5, 6, width + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 0, 0] = torch.nan
    for part in (values[..., :width], values.transpose(0, 1)[:5, :5, 3:]):
        for count in (1, 3, 5) if together else (1, 5, 9):
            first = ids(0, 3, 1, 5, 9) if together else ids(-4, 0, 3, 5, 99)
            found = TRITON["take_rows"](there(part), there(first), count, together)
            torch.testing.assert_close(
                found.cpu(), REFERENCE["take_rows"](part, first, count, together), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [0, 5, 1200])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_mask_rows(dtype: torch.dtype, width: int, count: int):
    generator = torch.Generator().manual_seed(count)
    tokens, num_rows = torch.arange(12).view(4, 3) + 20, ids(0, 1, 2, 3)
    hidden = torch.randn(4, 3, width, generator=generator).to(dtype) if width else None
    mask = torch.randn(width, generator=generator).to(dtype) if width else None
    args, options = (tokens, num_rows, hidden, mask), {"mask_token_id": 5, "count": count}
    found = TRITON["expand_rows"](*there(args), **options)
    expected = REFERENCE["expand_rows"](*args, **options)
    same(found, expected)
    assert (expected[0] == 5).sum(1).tolist() == [count] * 4


@pytest.mark.parametrize("seed", range(8))
def test_settling_is_what_the_functions_it_stands_for_give(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch, width, chain, shifted = int(draw(1, 5)), int(draw(1, 10)), seed % 4, bool(seed % 2)
    tokens, window, start = draw(0, 9, batch, width), draw(0, 12, batch, width), draw(0, 50, batch)
    tokens = tokens.where(torch.arange(width) < draw(0, width + 1, batch, 1), NONE)
    forced, eos_ids = draw(0, 3, batch), draw(NONE, EOS + 1, batch, 1 + seed % 3)
    kept = draw(0, 20, batch, width).where(tokens >= 0, NONE) if seed % 3 else None
    args, options = (
        (tokens, window, start, forced, eos_ids, kept),
        {"shifted": shifted, "vocab_size": 6, "chain": chain},
    )
    emitted = step.cut_at_eos(tokens, forced, eos_ids)
    count = step.count_emitted(emitted)
    fed = (step.next_tokens if shifted else lambda e, **o: step.draft_inputs(window, e, **o))(emitted, vocab_size=6)
    expected = (
        emitted, count, emitted[:, :0] if kept is None else step.cut_rows(kept, emitted), fed,
        step.row_positions(start, fed), count if shifted else step.catch_up_rows(count),
        step.last_row(count), step.history_length(start, count),
        [step.chain_positions(start, count, i) for i in range(chain)],
    )  # fmt: skip
    same(step.settle(*args, **options), expected)
    same(TRITON["settle"](*there(args), **options), expected)


def test_settling_a_wide_block_and_an_empty_one():
    tokens = torch.arange(600).view(2, 300) % 11
    args, options = (tokens, tokens, ids(0, 9), ids(300, 299), ids([EOS], [NONE])), {"shifted": False, "vocab_size": 11}
    empty = (tokens[:0], tokens[:0], ids(), ids(), ids([EOS])[:0])
    for case in (args, (*args, tokens), empty, (*empty, tokens[:0])):
        same(TRITON["settle"](*there(case), **options, chain=2), REFERENCE["settle"](*case, **options, chain=2))


def test_rows_that_need_no_selection_are_the_block_itself():
    hidden = torch.zeros(2, 3, 4)
    assert step.needed_rows(hidden, ids(0, 2), 3) is hidden and step.needed_rows(hidden, ids(0, 2), 4) is hidden
    one = torch.zeros(2, 1, 4)
    assert step.take_rows(one, ids(0, 5), 1) is one


def test_the_ops_are_registered_as_they_behave():
    ops, checks = torch.ops.specgraph, ("test_schema", "test_faketensor")
    hidden, tokens = torch.randn(2, 3, 4), ids([1, 2, 3], [4, 5, NONE])
    settled = (tokens, tokens, ids(4, 0), ids(0, 1), ids([EOS], [NONE]))
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ops.row_positions, (ids(3, 4), 5, 2), {}),
        (ops.take_rows, (hidden, ids(0, 2), 2, True), {}),
        (ops.take_rows, (hidden, ids(0, 2), 4, False), {}),
        (ops.expand_rows, (tokens, ids(3, 0), hidden, torch.ones(4)), {"mask_token_id": 1, "count": 2}),
        (ops.expand_rows, (tokens, ids(3, 0), None, None), {"mask_token_id": 1, "count": 2}),
        (ops.settle, settled, {"shifted": True, "vocab_size": 4, "chain": 2}),
        (ops.settle, settled, {"shifted": False, "vocab_size": 4, "chain": 0}),
        (ops.settle, (*settled, tokens), {"shifted": True, "vocab_size": 4, "chain": 1}),
    ]
    for op, args, options in cases:
        torch.library.opcheck(op, there(args), options, test_utils=checks)


def test_what_does_not_fit_is_refused():
    ops, meta = torch.ops.specgraph, torch.zeros(2, 3, 4, device="meta")
    with pytest.raises(ValueError, match="there are no 4 rows together"):
        ops.take_rows(meta, meta[:, 0, 0].long(), 4, True)
    with pytest.raises(ValueError, match="first must have one row per sequence, 2, not 1"):
        ops.take_rows(meta, meta[:1, 0, 0].long(), 2, False)
    places = (meta[:, 0, 0].long(),) * 2
    with pytest.raises(ValueError, match=r"accepted_rows must be \[2, 3\], not \[2, 2\]"):
        tokens = meta[..., 0].long()
        ops.settle(tokens, tokens, *places, tokens, tokens[:, :2], shifted=True, vocab_size=1, chain=0)
    with pytest.raises(ValueError, match=r"hidden must be \[B, T, H\], mask_hidden \[H\]"):
        ops.expand_rows(meta[..., 0].long(), meta[:, 0, 0].long(), meta, meta[0, 0, :2], mask_token_id=1, count=1)
