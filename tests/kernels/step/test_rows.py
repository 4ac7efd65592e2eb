"""Ops on rows: the Triton forms against plain PyTorch, and ``finalize_step`` on cases worked out by hand."""

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
    same(
        TRITON["consecutive_positions"](there(start), width, count),
        REFERENCE["consecutive_positions"](start, width, count),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("width", [1, 7, 64, 1500])
def test_taken_rows_are_copied_whatever_their_width(dtype: torch.dtype, together: bool, width: int):
    values = torch.randn(5, 6, width + 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[0, 0, 0] = torch.nan
    for part in (values[..., :width], values.transpose(0, 1)[:5, :5, 3:]):
        for count in (1, 3, 5) if together else (1, 5, 9):
            first = ids(0, 3, 1, 5, 9) if together else ids(-4, 0, 3, 5, 99)
            found = TRITON["consecutive_rows"](there(part), there(first), count, together)
            torch.testing.assert_close(
                found.cpu(), REFERENCE["consecutive_rows"](part, first, count, together), rtol=0, atol=0, equal_nan=True
            )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [0, 5, 1200])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_mask_rows(dtype: torch.dtype, width: int, count: int):
    generator = torch.Generator().manual_seed(count)
    tokens, num_rows = torch.arange(12).view(4, 3) + 20, ids(0, 1, 2, 3)
    hidden = torch.randn(4, 3, width, generator=generator).to(dtype) if width else None
    mask = torch.randn(width, generator=generator).to(dtype) if width else None
    options = {"mask_token_id": 5, "count": count}
    for limit, drafts in ((None, [0, *[count + 1] * 3]), (ids(9, 0, 2, 9), [0, 0, min(2, count + 1), count + 1])):
        args = (tokens, num_rows, hidden, mask, limit)
        found = TRITON["expand_draft_inputs"](*there(args), **options)
        expected = REFERENCE["expand_draft_inputs"](*args, **options)
        same(found, expected)
        masks = [max(0, own - 1) for own in drafts]
        assert (expected[0] == 5).sum(1).tolist() == masks and expected[3].tolist() == drafts
        assert (expected[1] - num_rows).tolist() == masks


@pytest.mark.parametrize("form", [REFERENCE, TRITON])
def test_finalizing_shifted_rows(form: dict[str, Any]):
    """An EOS is met, one is the prompt's, no EOS ends the sequence, and nothing is emitted."""
    tokens = ids([3, EOS, 4, EOS], [EOS, 5, EOS, NONE], [1, 2, 9, NONE], [NONE] * 4)
    args = (tokens, tokens, ids(10, 0, 3, 6), ids(0, 1, 0, 0), ids([EOS, NONE], [EOS, NONE], [NONE, NONE], [EOS, 8]))
    expected = (
        ids([3, EOS, NONE, NONE], [EOS, 5, EOS, NONE], [1, 2, 9, NONE], [NONE] * 4),
        ids(2, 3, 3, 0),
        ids([3, EOS, 0, 0], [EOS, 5, EOS, 0], [1, 2, 8, 0], [0] * 4),
        ids([10, 11, 12, 13], [0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]),
        ids(2, 3, 3, 0), ids(1, 2, 2, -1), ids(13, 4, 7, 7), [ids([12], [3], [6], [6]), ids([13], [4], [7], [7])],
    )  # fmt: skip
    same(form["finalize_step"](*there(args), shifted=True, vocab_size=9, chain=2), expected)


@pytest.mark.parametrize("form", [REFERENCE, TRITON])
def test_finalizing_rows_that_begin_with_the_windows_first_token(form: dict[str, Any]):
    tokens, window = ids([5, 9, NONE], [NONE] * 3), ids([4, 5, 6], [8, 0, 0])
    args = (tokens, window, ids(10, 6), ids(0, 0), ids([EOS], [EOS]))
    expected = (
        tokens, ids(2, 0), ids([4, 5, 8, 0], [8, 0, 0, 0]), ids([10, 11, 12, 13], [6, 7, 8, 9]), ids(3, 0), ids(1, -1),
        ids(13, 7), [],
    )  # fmt: skip
    same(form["finalize_step"](*there(args), shifted=False, vocab_size=9), expected)


@pytest.mark.parametrize("seed", range(8))
def test_finalizing_in_triton_is_what_the_definition_says(seed: int):
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    batch, width = int(draw(1, 5)), int(draw(1, 10))
    tokens, window, start = draw(0, 9, batch, width), draw(0, 12, batch, width), draw(0, 50, batch)
    tokens = tokens.where(torch.arange(width) < draw(0, width + 1, batch, 1), NONE)
    args = (tokens, window, start, draw(0, 3, batch), draw(NONE, EOS + 1, batch, 1 + seed % 3))
    options = {"shifted": bool(seed % 2), "vocab_size": 6, "chain": seed % 4}
    same(TRITON["finalize_step"](*there(args), **options), REFERENCE["finalize_step"](*args, **options))


def test_finalizing_a_wide_block_and_an_empty_one():
    tokens = torch.arange(600).view(2, 300) % 11
    args, options = (tokens, tokens, ids(0, 9), ids(300, 299), ids([EOS], [NONE])), {"shifted": False, "vocab_size": 11}
    empty = (tokens[:0], tokens[:0], ids(), ids(), ids([EOS])[:0])
    for case in (args, empty):
        same(
            TRITON["finalize_step"](*there(case), **options, chain=2),
            REFERENCE["finalize_step"](*case, **options, chain=2),
        )


def test_rows_that_need_no_selection_are_the_block_itself():
    hidden = torch.zeros(2, 3, 4)
    assert step.needed_rows(hidden, ids(0, 2), 3) is hidden and step.needed_rows(hidden, ids(0, 2), 4) is hidden
    one = torch.zeros(2, 1, 4)
    assert step.take_rows(one, ids(0, 5), 1) is one


def test_the_ops_are_registered_as_they_behave():
    ops, checks = torch.ops.specgraph, ("test_schema", "test_faketensor")
    hidden, tokens = torch.randn(2, 3, 4), ids([1, 2, 3], [4, 5, NONE])
    verified = (tokens, tokens, ids(4, 0), ids(0, 1), ids([EOS], [NONE]))
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (ops.consecutive_positions, (ids(3, 4), 5, 2), {}),
        (ops.consecutive_rows, (hidden, ids(0, 2), 2, True), {}),
        (ops.consecutive_rows, (hidden, ids(0, 2), 4, False), {}),
        (ops.expand_draft_inputs, (tokens, ids(3, 0), hidden, torch.ones(4)), {"mask_token_id": 1, "count": 2}),
        (ops.expand_draft_inputs, (tokens, ids(3, 0), None, None), {"mask_token_id": 1, "count": 2}),
        (ops.finalize_step, verified, {"shifted": True, "vocab_size": 4, "chain": 2}),
        (ops.finalize_step, verified, {"shifted": False, "vocab_size": 4, "chain": 0}),
    ]
    for op, args, options in cases:
        torch.library.opcheck(op, there(args), options, test_utils=checks)


def test_what_does_not_fit_is_refused():
    ops, meta = torch.ops.specgraph, torch.zeros(2, 3, 4, device="meta")
    with pytest.raises(ValueError, match="there are no 4 rows together"):
        ops.consecutive_rows(meta, meta[:, 0, 0].long(), 4, True)
    with pytest.raises(ValueError, match=r"first must be \[B\] = \[2\], not \[1\]"):
        ops.consecutive_rows(meta, meta[:1, 0, 0].long(), 2, False)
    with pytest.raises(ValueError, match=r"start must be \[B\] = \[2\], not \[1\]"):
        tokens = meta[..., 0].long()
        ops.finalize_step(tokens, tokens, tokens[:1, 0], tokens[:, 0], tokens)
    with pytest.raises(ValueError, match=r"mask_hidden must be \[H\] = \[4\], not \[2\]"):
        ops.expand_draft_inputs(
            meta[..., 0].long(), meta[:, 0, 0].long(), meta, meta[0, 0, :2], mask_token_id=1, count=1
        )
