"""Packing what the host reads of a step."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specgraph.kernels.ops import OPS
from specgraph.kernels.step import results

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def step_results(width: int, counts: list[int], seed: int = 0, logprobs: bool = True) -> tuple[Tensor, ...]:
    """Outputs of a step of ``width`` rows: random tokens up to ``counts``, padded with -1."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.tensor(counts)
    real = torch.arange(width) < count.unsqueeze(1)
    emitted = torch.where(real, torch.randint(0, 1 << 30, real.shape, generator=generator), -1)
    values = torch.where(real, -torch.rand(real.shape, generator=generator), 0.0)
    bad = torch.randint(-1, 300, (len(counts),), generator=generator, dtype=torch.int32)
    rows = torch.arange(len(counts))
    return emitted, count, values if logprobs else values[:, :0], bad, rows


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize("width", [4, 9, 33])
def test_lists_are_those_of_the_outputs(width: int, logprobs: bool) -> None:
    counts = [0, 1, 3, 4, min(width, 7), width]
    emitted, count, values, bad, rows = step_results(width, counts, logprobs=logprobs)
    packed = results.pack_results(emitted, count, values, bad, rows, 4, rows)
    assert packed.shape == (6, 11) and packed.dtype == torch.int32
    found = results.unpack_results(packed, 4)
    assert (found.num_emitted, found.bad, found.num_rows) == (counts, bad.tolist(), rows.tolist())
    for row, n in enumerate(counts):
        last = slice(max(0, n - 4), n)
        assert found.tokens[row] == emitted[row, last].tolist()
        expected = values[row, last].tolist() if logprobs else [0.0] * min(n, 4)
        assert found.logprobs[row] == expected


def test_the_next_rows_are_those_of_the_named_sequences() -> None:
    emitted, count, values, bad, _ = step_results(4, [1, 2, 0])
    state, rows = torch.tensor([3, 7, 5, 9]), torch.tensor([3, 0, -1])
    given = (emitted, count, values, bad, state, 4, rows)
    assert results.unpack_results(results.pack_results(*given), 4).num_rows == [9, 3, 0]
    found = OPS["pack_results"].form("triton")(*(t.to(DEVICE) if isinstance(t, torch.Tensor) else t for t in given))
    assert results.unpack_results(found.cpu(), 4).num_rows == [9, 3, 0]


def test_bits_of_log_probabilities_stay_as_they_are() -> None:
    values = torch.tensor([[float("nan"), float("-inf"), -0.0, -1e-45]])
    one = torch.tensor([4])
    packed = results.pack_results(torch.ones(1, 4).long(), one, values, (one - one).int(), one, 4, one - one)
    found = results.unpack_results(packed, 4)
    assert torch.equal(torch.tensor(found.logprobs).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize(("width", "rows"), [(1, 1), (4, 4), (5, 5), (4, 37), (9, 16)])
@pytest.mark.parametrize(
    ("logprobs", "confident", "traced"), [(True, False, None), (False, True, 0), (True, True, 1), (False, False, 13)]
)
def test_the_kernel_does_what_plain_pytorch_does(
    width: int, rows: int, logprobs: bool, confident: bool, traced: int | None
) -> None:
    given = step_results(rows, [0, 1, rows // 2, rows], seed=rows, logprobs=logprobs)
    index = given[-1].flip(0)
    index[1] = -1
    thought = torch.rand(len(index), width - 1 + rows % 2) if confident else None
    why = None if traced is None else torch.arange(len(index) * traced, dtype=torch.int32).view(len(index), traced)
    moved = (None if tensor is None else tensor.to(DEVICE) for tensor in (thought, why))
    found = OPS["pack_results"].form("triton")(
        *(tensor.to(DEVICE) for tensor in given), width, index.to(DEVICE), *moved
    )
    assert torch.equal(found.cpu(), OPS["pack_results"].form("reference")(*given, width, index, thought, why))


def test_the_confidence_in_the_next_drafts_is_that_of_the_named_sequences() -> None:
    emitted, count, values, bad, state = step_results(4, [1, 2, 0])
    thought = torch.rand(3, 3)
    found = results.pack_results(emitted, count, values, bad, state, 4, torch.tensor([2, -1, 0]), thought)
    assert results.unpack_results(found, 4).confidence == [thought[2].tolist(), [0.0] * 3, thought[0].tolist()]
    found = results.pack_results(emitted, count, values, bad, state, 4, state)
    assert results.unpack_results(found, 4).confidence == [[], [], []]


def test_a_step_of_fewer_drafts_tells_the_confidence_in_these_alone() -> None:
    emitted, count, values, bad, rows = step_results(3, [1, 2, 0])
    thought = torch.rand(3, 5)
    for width in (1, 3):
        packed = results.pack_results(emitted, count, values, bad, rows, width, rows, thought)
        assert packed.shape[1] == results.num_columns(width, thought) == 3 * width + 2
        assert results.unpack_results(packed, width).confidence == thought[:, : width - 1].tolist()


def test_the_last_columns_are_those_of_a_trace() -> None:
    emitted, count, values, bad, rows = step_results(4, [1, 2, 0])
    thought, why = torch.rand(3, 3), torch.arange(-6, 24, dtype=torch.int32).view(3, 10)
    for beside in (None, thought):
        plain = results.pack_results(emitted, count, values, bad, rows, 4, rows, beside)
        packed = results.pack_results(emitted, count, values, bad, rows, 4, rows, beside, why)
        assert torch.equal(packed[:, :-10], plain) and torch.equal(packed[:, -10:], why)


@pytest.mark.parametrize(
    ("why", "message"),
    [
        (torch.zeros(3, 4), "traced must be int32, not torch.float32"),
        (torch.zeros(2, 4, dtype=torch.int32), r"traced must be \[B, X\] = \[3, X\], not \[2, 4\]"),
    ],
)
def test_a_trace_of_another_kind_is_refused(why: Tensor, message: str) -> None:
    given = [tensor.to("meta") for tensor in step_results(4, [1, 2, 0])]
    with pytest.raises(ValueError, match=message):
        results.pack_results(*given, 4, given[-1], None, why.to("meta"))


def test_the_op_is_registered_as_it_behaves() -> None:
    given = tuple(tensor.to(DEVICE) for tensor in step_results(6, [0, 3, 6]))
    checks = ("test_schema", "test_faketensor")
    for traced in (None, torch.ones(3, 10, dtype=torch.int32, device=DEVICE)):
        everything = (*given, 4, given[-1], None, traced)
        torch.library.opcheck(torch.ops.specgraph.pack_results, everything, {}, test_utils=checks)
