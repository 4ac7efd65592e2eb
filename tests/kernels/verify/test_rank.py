"""``rank``: the ranks of tokens among the logits of their row, against a stable sort in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.verify.rank import RANK, Rank, rank_reference, rank_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = pytest.mark.parametrize("form", [rank_reference, rank_triton])


def problem(vocab: int, dtype: torch.dtype = torch.float32, candidates: int = 2) -> dict[str, Tensor]:
    """Four sequences of three rows with many equal logits and some of -inf; the first candidate is the greedy token."""
    draw = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(4, 3, vocab, generator=draw, dtype=torch.float64) * 4).round() / 4
    logits[:, 1, ::3] = -torch.inf
    tokens = torch.randint(vocab, (4, 3, candidates), generator=draw)
    tokens[..., 0] = logits.argmax(-1)
    given = {"logits": logits.to(dtype), "tokens": tokens, "num_ranked": torch.tensor([3, 0, 1, 2])}
    return {name: value.to(DEVICE) for name, value in given.items()}


def expected(given: dict[str, Tensor]) -> Tensor:
    """The places of the tokens in a stable sort, whose order of equal logits is that of the ids."""
    order = given["logits"].double().sort(dim=-1, descending=True, stable=True).indices
    ranks = (order.unsqueeze(2) == given["tokens"].unsqueeze(3)).int().argmax(3) + 1
    wanted = torch.arange(3, device=DEVICE) < given["num_ranked"].unsqueeze(1)
    return torch.where(wanted.unsqueeze(2), ranks, 0).int()


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "candidates"), [(1, 1), (50, 3), (4096, 2), (9001, 2)])
def test_ranks_are_the_places_in_a_stable_sort(form: Any, dtype: torch.dtype, vocab: int, candidates: int) -> None:
    given = problem(vocab, dtype, candidates)
    found = form(Rank(**given))
    assert found.dtype == torch.int32 and torch.equal(found, expected(given))
    assert found[given["num_ranked"] > 0, 0, 0].tolist() == [1, 1, 1]


@FORMS
def test_a_nan_stands_in_front_of_nothing(form: Any) -> None:
    logits = torch.tensor([[[2.0, torch.nan, 1.0, torch.inf]]], device=DEVICE)
    tokens, one = torch.tensor([[[0, 1, 2, 3]]], device=DEVICE), torch.ones(1, dtype=torch.int64, device=DEVICE)
    assert form(Rank(logits, tokens, one)).tolist() == [[[2, 1, 3, 1]]]


@FORMS
def test_tokens_and_logits_need_not_be_a_block_of_memory(form: Any) -> None:
    given = problem(50)
    shuffled = {**given, "logits": given["logits"].mT.contiguous().mT, "tokens": given["tokens"].mT.contiguous().mT}
    assert not shuffled["tokens"].is_contiguous() and torch.equal(form(Rank(**shuffled)), expected(given))


@FORMS
@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 0, 2), (4, 3, 0)])
def test_there_may_be_no_tokens(form: Any, shape: tuple[int, ...]) -> None:
    tokens = torch.zeros(shape, dtype=torch.int64, device=DEVICE)
    given = Rank(torch.zeros(*shape[:2], 7, device=DEVICE), tokens, tokens.new_ones(shape[0]))
    assert form(given).shape == shape


def test_the_op_follows_its_schema() -> None:
    given = problem(50, torch.float64)
    torch.library.opcheck(torch.ops.specgraph.rank.default, tuple(given.values()))
    assert torch.equal(torch.ops.specgraph.rank(*given.values()), expected(given))
    assert RANK.batch_invariant("cuda") and RANK.batch_invariant("cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(4, 3)}, "logits must be [B, R, V], not [4, 3]"),
        ({"tokens": torch.zeros(4, 2, 2, dtype=torch.int64)}, "tokens must be [B, R, C] = [4, 3, C], not [4, 2, 2]"),
        ({"num_ranked": torch.zeros(2, dtype=torch.int64)}, "num_ranked must be [B] = [4], not [2]"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    given = {name: value.to("meta") for name, value in (problem(9) | change).items()}
    with pytest.raises(ValueError) as caught:
        torch.ops.specgraph.rank(*given.values())
    assert str(caught.value) == message
