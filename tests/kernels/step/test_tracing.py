"""What a traced step tells the host: worked out by hand, and the Triton forms against plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from specgraph.kernels import step
from specgraph.kernels.ops import OPS, Op
from tests.kernels.step.step_cases import moved, step_cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = pytest.mark.parametrize("form", ["reference", "triton"])
NAN = float("nan")


def ids(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def there(tree: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(DEVICE), tree)


def logits_of(rows: int) -> Tensor:
    """Logits of which the number of rows is read alone."""
    return torch.zeros(1, rows, 1)


def run(op: Op, form: str, *given: Any, **options: Any) -> Any:
    """What a form of an op gives, on the CPU."""
    return pytree.tree_map_only(Tensor, lambda t: t.cpu(), op.form(form)(*there(given), **options))


def assert_same_bits(found: Any, expected: Any) -> None:
    for a, b in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


@FORMS
def test_what_is_verified_and_emitted_is_counted(form: str) -> None:
    """A block of four rows, of which two have logits: decoding, behind two known tokens, and nothing at all."""
    window = ids([5, 6, -1, -1], [1, 2, 7, 8], [3, 9, -1, -1], [4, 9, 9, 9])
    emitted = ids([6, 7, -1, -1], [1, 2, 7, 8], [3, -1, -1, -1], [-1, -1, -1, -1])
    num_rows, forced, num_emitted = ids(2, 4, 1, 0), ids(0, 2, 0, 0), ids(2, 4, 1, 0)
    warmth = torch.tensor([0.0, 0.5, 1.0, 0.0])
    traced = run(OPS["trace_tokens"], form, window, num_rows, forced, emitted, num_emitted, warmth, logits_of(2))
    tokens, counts, scored, temperature = traced
    assert tokens[..., 0].tolist() == [[6, 0], [2, 0], [9, 0], [9, 0]]  # the last row verifies no draft
    assert tokens[..., 1].tolist() == [[6, 7], [7, 8], [3, 0], [0, 0]]
    assert counts.tolist() == [[1, 2], [0, 2], [0, 1], [0, 0]] and scored.tolist() == [2, 2, 1, 0]
    assert temperature.tolist() == [1.0, 0.5, 1.0, 1.0]


@FORMS
def test_the_last_token_has_the_row_that_verify_takes_it_from(form: str) -> None:
    """A known token before the last row is in the first row, because the block has only one row behind it."""
    block, forced = ids([1, 2, 7, 8]), ids(3)
    tokens, counts, _, _ = run(
        OPS["trace_tokens"], form, block, ids(4), forced, block, ids(4), torch.ones(1), logits_of(2)
    )
    assert tokens[0, :, 1].tolist() == [7, 8] and counts.tolist() == [[0, 2]]
    tokens, counts, _, _ = run(
        OPS["trace_tokens"], form, block, ids(4), ids(0), block, ids(3), torch.ones(1), logits_of(4)
    )
    assert tokens[0].tolist() == [[2, 1], [7, 2], [8, 7], [0, 8]] and counts.tolist() == [[3, 3]]


@FORMS
def test_ids_are_those_of_the_draft_and_none_were_drawn_where_nothing_is_emitted(form: str) -> None:
    drawn, vocabulary = [ids([7], [5]), ids([2, 9], [7, 7])], ids(2, 5, 7)
    found, count = run(OPS["drawn_ids"], form, drawn, ids(2, 0), vocabulary)
    assert found.tolist() == [[2, 0, 0], [1, 2, 2]] and count.tolist() == [3, 0]  # the draft has no 9
    found, count = run(OPS["drawn_ids"], form, drawn, ids(0, 1))
    assert found.tolist() == [[7, 2, 9], [5, 7, 7]] and count.tolist() == [0, 3]


@FORMS
def test_columns_are_numbers_and_the_bits_of_floats(form: str) -> None:
    target = torch.tensor([[[-0.5, -3.0], [-1.5, -6.0], [-7.0, -8.0]], [[-9.0, -9.0], [-9.0, -4.0], [-9.0, -9.0]]])
    drawn, proposed, logprobs = ids([4], [9]), ids([4, 7], [8, -1]), torch.tensor([[-0.25], [-0.75]])
    ranks = torch.arange(1, 13, dtype=torch.int32).view(2, 3, 2)
    given = (target, ranks, ids([2, 1], [0, 2]), [drawn], [logprobs], [proposed])
    found = run(OPS["trace_columns"], form, *given, count=3)
    assert found.dtype == torch.int32 and found.shape == (2, 14)
    floats = found.view(torch.float32)
    assert floats[:, :2].tolist() == [[-0.5, -1.5], [0.0, 0.0]] and floats[:, 2].isnan().all()
    assert found[:, 3:6].tolist() == [[4, 7, -1], [8, -1, -1]]
    # The second sequence does not take the draft that was drawn for it.
    assert floats[0, 6] == -0.25 and floats[0, 7:9].isnan().all() and floats[1, 6:9].isnan().all()
    assert floats[:, 9].tolist() == [-3.0, -4.0]
    assert found[:, 10:].tolist() == [[1, 3, 0, 2], [0, 0, 0, 10]]
    nothing = run(OPS["trace_columns"], form, target, ranks, ids([0, 0], [0, 1]), [], [], [], count=0)
    assert nothing[:, :1].view(torch.float32).tolist() == [[0.0], [-9.0]] and nothing[:, 1].tolist() == [0, 8]


@pytest.mark.parametrize(("batch", "width", "count"), [(1, 1, 1), (5, 4, 4), (3, 9, 4), (2, 300, 17), (0, 2, 1)])
def test_the_tokens_of_the_triton_form_are_those_of_the_definition(batch: int, width: int, count: int) -> None:
    draw = torch.Generator().manual_seed(width)

    def numbers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=draw)

    forced = numbers(width + 1, batch) * numbers(2, batch)
    window, emitted = (numbers(99, batch, width) - 1 for _ in range(2))
    temperature = torch.rand(batch, generator=draw) * numbers(2, batch)
    given = (window, numbers(width + 2, batch), forced, emitted, numbers(width + 1, batch))
    given = (*given, temperature, logits_of(count))
    assert_same_bits(run(OPS["trace_tokens"], "triton", *given), run(OPS["trace_tokens"], "reference", *given))


@pytest.mark.parametrize("vocab", [None, 1, 50, 9000])
@pytest.mark.parametrize("widths", [(1,), (4,), (1, 1, 1), (2, 0, 3), (0,)])
def test_the_ids_of_the_triton_form_are_those_of_the_definition(widths: tuple[int, ...], vocab: int | None) -> None:
    draw = torch.Generator().manual_seed(sum(widths))
    drawn = [torch.randint(0, 2 * (vocab or 50), (3, width + 2), generator=draw)[:, :width] for width in widths]
    vocabulary = None if vocab is None else torch.randperm(2 * vocab, generator=draw)[:vocab]
    given = (drawn, ids(1, 0, 4), vocabulary)
    assert_same_bits(run(OPS["drawn_ids"], "triton", *given), run(OPS["drawn_ids"], "reference", *given))


@pytest.mark.parametrize(("rows", "count"), [(1, 0), (1, 3), (4, 3), (9, 8), (4, 2)])
@pytest.mark.parametrize("drawn", [(), (1,), (1, 1, 1), (3,), (2, 4)])
def test_the_columns_of_the_triton_form_are_those_of_the_definition(
    rows: int, count: int, drawn: tuple[int, ...]
) -> None:
    draw = torch.Generator().manual_seed(rows)
    logprobs = -torch.rand(4, rows, 2, generator=draw)
    logprobs[1, 0] = torch.tensor([NAN, -torch.inf])
    ranks = torch.randint(1, 99, (4, rows, 2), generator=draw, dtype=torch.int32)
    tokens = [torch.randint(0, 3, (4, width), generator=draw) for width in drawn]
    own = [-torch.rand(4, width, generator=draw) for width in drawn]
    drafts = torch.randint(-1, 3, (4, count + 2), generator=draw)
    counts = torch.stack([torch.tensor([rows - 1, 0, rows // 2, 0]), torch.tensor([rows, 1, 0, 1])], 1)
    for made in ([], [drafts[:, :count]], [drafts[:, :1], drafts[:, 1:3]]):
        given = (logprobs, ranks, counts, tokens, own, made)
        found, expected = (run(OPS["trace_columns"], form, *given, count=count) for form in ("triton", "reference"))
        assert_same_bits(found, expected)


def test_the_ops_are_registered_as_they_behave() -> None:
    checks = ("test_schema", "test_faketensor")
    cases = step_cases()
    for name in ("trace_tokens", "drawn_ids", "trace_columns"):
        _, args, options = moved(cases[name], DEVICE)
        torch.library.opcheck(getattr(torch.ops.specgraph, name), args, options, test_utils=checks)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (step.trace_tokens, {0: ids(1, 2)}, "window must be [B, T], not [2]"),
        (step.trace_tokens, {3: ids([1, 2])}, "emitted must be [B, T] = [3, 4], not [1, 2]"),
        (step.trace_tokens, {6: torch.empty(3, 5, 11)}, "count must be from 1 to T = 4, not 5"),
        (step.trace_tokens, {2: ids(1)}, "num_forced must be [B] = [3], not [1]"),
        (step.drawn_ids, {0: []}, "tokens must be one tensor [B, k] or more, not an empty list"),
        (step.drawn_ids, {0: [ids([1])]}, "tokens must be [B, *] = [3, *], not [1, 1]"),
        (step.trace_columns, {0: torch.empty(3, 4)}, "logprobs must be [B, R, 2], not [3, 4]"),
        (step.trace_columns, {0: torch.empty(3, 4, 2).double()}, "logprobs must be float32, not torch.float64"),
        (step.trace_columns, {1: torch.empty(3, 4, 1).int()}, "ranks must be [B, R, 2] = [3, 4, 2], not [3, 4, 1]"),
        (step.trace_columns, {1: torch.empty(3, 4, 2)}, "ranks must be int32, not torch.float32"),
        (step.trace_columns, {4: [torch.empty(3, 2).double()]}, "drawn_logprobs must be float32, not torch.float64"),
        (step.trace_columns, {2: ids(1, 2, 3)}, "counts must be [B, 2] = [3, 2], not [3]"),
        (step.trace_columns, {5: [ids([1])]}, "drafts must be [B, *] = [3, *], not [1, 1]"),
        (step.trace_columns, {4: []}, "drawn_logprobs must have the 2 columns of drawn, not 0"),
    ],
)
def test_what_does_not_fit_is_refused(function: Any, arguments: dict[int, Any], message: str) -> None:
    _, given, options = moved(step_cases()[function.__name__], "meta")
    args = [arguments.get(place, value) for place, value in enumerate(given)]
    with pytest.raises(ValueError) as caught:
        function(*pytree.tree_map_only(Tensor, lambda t: t.to("meta"), args), **options)
    assert str(caught.value) == message
