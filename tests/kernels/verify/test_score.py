"""``score``: log-probabilities of given tokens, with the bits that verification gives the tokens that it emits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.sampling.sample import process_logits
from specgraph.kernels.verify import Verify
from specgraph.kernels.verify.score import SCORE, Score, Scored, covers, score_reference, score_triton
from specgraph.kernels.verify.verify_triton import verify_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCAB = 1100
"""Two splits, of which the last is not full."""
TEMPERATURE = [0.7, 0.0, 1.6]
CUTS = {"top_k": [40, 0, 5], "top_p": [0.9, 1.0, 0.5], "min_p": [0.0, 0.05, 0.01]}


def problem(rows: int = 4, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> dict[str, Any]:
    """Every second token is the largest of its row; sequences have three different numbers of tokens."""
    draw = torch.Generator().manual_seed(rows)
    logits = (torch.randn(3, rows, vocab, generator=draw) * 2).to(dtype)
    tokens = torch.randint(vocab, (3, rows - 1), generator=draw)
    tokens[:, ::2] = logits[:, : rows - 1].argmax(-1)[:, ::2]
    given = {"logits": logits, "tokens": tokens, "num_scored": torch.tensor([rows - 1, 0, rows // 2])}
    return {name: value.to(DEVICE) for name, value in given.items()}


def processing(*cuts: str) -> dict[str, Any]:
    values = {"temperature": TEMPERATURE, **{name: CUTS[name] for name in cuts}}
    return {name: torch.tensor(value).to(DEVICE) for name, value in values.items()}


def exact(given: dict[str, Any], options: dict[str, Any]) -> Tensor:
    """Log-probabilities in float64, for all rows that have a token."""
    logits = given["logits"].double()
    source = process_logits(logits, **options) if options else logits
    every = source.log_softmax(-1)[:, : given["tokens"].shape[1]]
    return every.gather(-1, given["tokens"].unsqueeze(-1)).squeeze(-1)


def wanted(given: dict[str, Any]) -> Tensor:
    return torch.arange(given["tokens"].shape[1], device=DEVICE) < given["num_scored"].unsqueeze(1)


@pytest.mark.parametrize("form", [score_reference, score_triton])
@pytest.mark.parametrize("cuts", [None, (), ("top_k", "top_p", "min_p")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_values_are_those_of_float64(form: Any, cuts: tuple[str, ...] | None, dtype: torch.dtype) -> None:
    given = problem(dtype=dtype)
    options = {} if cuts is None else processing(*cuts)
    scored: Scored = form(Score(**given, **options, logprobs="processed" if options else "raw"))
    keep = wanted(given)
    assert torch.allclose(scored.logprobs[keep].double(), exact(given, options)[keep], rtol=1e-5, atol=1e-5)
    assert not scored.logprobs[~keep].any() and not scored.is_greedy[~keep].any()
    best = given["logits"][:, :-1].float().argmax(-1) == given["tokens"]
    assert torch.equal(scored.is_greedy, best & keep) and scored.is_greedy.any() and not scored.is_greedy[keep].all()
    assert not scored.bad.any()


@pytest.mark.parametrize(("logprobs", "cuts"), [("raw", ()), ("processed", ()), ("processed", ("top_k", "top_p"))])
def test_the_bits_are_those_of_verification(logprobs: str, cuts: tuple[str, ...]) -> None:
    """Verification accepts no draft, so it emits one token for every sequence, each of which is then scored."""
    draw = torch.Generator().manual_seed(5)
    logits = (torch.randn(3, 1, VOCAB, generator=draw) * 3).to(torch.bfloat16).to(DEVICE)
    count, zero = torch.ones(3, dtype=torch.int64, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    options = {"top_k": None, "top_p": None, "min_p": None, **processing(*cuts)}
    verified = verify_triton(Verify(
        logits, torch.empty(3, 0, dtype=torch.int64, device=DEVICE), None, seeds=zero + 7,
        positions=zero.unsqueeze(1) + 9, num_rows=count, num_forced=zero, target_to_draft=None, logprobs=logprobs,
        **options,
    ))  # fmt: skip
    scored = score_triton(Score(logits, verified.emitted, count, **options, logprobs=logprobs))
    assert torch.equal(scored.logprobs, verified.logprobs)
    assert scored.logprobs[0] < 0


def test_the_bits_of_a_row_do_not_depend_on_the_others() -> None:
    given = problem(9)
    many = score_triton(Score(**given))
    for b, row in ((0, 0), (0, 5), (2, 3)):
        one = score_triton(Score(
            given["logits"][b : b + 1, row : row + 1], given["tokens"][b : b + 1, row : row + 1],
            given["num_scored"].new_ones(1),
        ))  # fmt: skip
        assert torch.equal(one.logprobs[0, 0], many.logprobs[b, row])
        assert torch.equal(one.is_greedy[0, 0], many.is_greedy[b, row])


@pytest.mark.parametrize("form", [score_reference, score_triton])
def test_a_nan_is_told_of_the_sequences_that_need_the_row(form: Any) -> None:
    given = problem()
    given["logits"][:, 2, 700] = float("nan")
    assert form(Score(**given)).bad.tolist() == [[False, False, True], [False] * 3, [False] * 3]


def candidates(given: dict[str, Any], count: int) -> Tensor:
    """For every row its own token and others, ``[B, K, count]``; where a row is greedy, the first is its best."""
    draw = torch.Generator().manual_seed(count)
    more = torch.randint(given["logits"].shape[2], (*given["tokens"].shape, count - 1), generator=draw)
    return torch.cat([given["tokens"].unsqueeze(2), more.to(DEVICE)], 2)


@pytest.mark.parametrize("form", [score_reference, score_triton])
@pytest.mark.parametrize(("cuts", "rows", "count"), [(None, 4, 2), ((), 3, 5), (("top_k", "top_p"), 3, 2)])
def test_candidates_have_the_bits_of_a_call_each(
    form: Any, cuts: tuple[str, ...] | None, rows: int, count: int
) -> None:
    given = problem(rows, torch.bfloat16)
    given["logits"][0, 0, 7] = float("nan")
    options = {} if cuts is None else processing(*cuts)
    options |= {"logprobs": "processed" if options else "raw"}
    tokens = candidates(given, count)
    together: Scored = form(Score(**{**given, "tokens": tokens}, **options))
    for index in range(count):
        alone = form(Score(**{**given, "tokens": tokens[..., index]}, **options))
        for found, expected in zip(together, alone, strict=True):
            assert found.shape == tokens.shape and torch.equal(found[..., index], expected)
    assert together.bad.any() and together.is_greedy[..., 0].any() and together.logprobs[..., 0].any()


def test_tokens_need_not_be_a_block_of_memory() -> None:
    given = problem(3)
    tokens = candidates(given, 2)
    expected = score_triton(Score(**{**given, "tokens": tokens}))
    for source in (torch.cat([tokens, tokens], 1)[:, :2], tokens.transpose(1, 2).contiguous().mT):
        found = score_triton(Score(**{**given, "tokens": source}))
        assert not source.is_contiguous() and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("form", [score_reference, score_triton])
def test_there_may_be_no_tokens(form: Any) -> None:
    given = problem(1)
    for shape in ((3, 0), (3, 0, 2), (3, 1, 0)):
        scored = form(Score(**{**given, "tokens": given["tokens"].new_zeros(shape)}))
        assert all(result.shape == shape for result in scored)


def test_the_op_follows_its_schema() -> None:
    given = problem(dtype=torch.float64)
    torch.library.opcheck(torch.ops.specgraph.score.default, tuple(given.values()))
    several = {**given, "tokens": candidates(given, 2)}
    torch.library.opcheck(torch.ops.specgraph.score.default, tuple(several.values()))
    assert not covers(Score(**given)) and SCORE.batch_invariant("cuda")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(3, 4)}, "logits must be [B, R, V], not [3, 4]"),
        ({"logits": torch.zeros(3, 4, 9, dtype=torch.int64)}, "logits must be floating point, got torch.int64."),
        ({"tokens": torch.zeros(3, 2, dtype=torch.int64)},
         "tokens must be [B, R] or [B, R - 1] for B = 3 and R = 4, with or without a last dimension for candidates, "
         "got [3, 2]."),
        ({"tokens": torch.zeros(3, 2, 2, dtype=torch.int64)},
         "tokens must be [B, R] or [B, R - 1] for B = 3 and R = 4, with or without a last dimension for candidates, "
         "got [3, 2, 2]."),
        ({"num_scored": torch.zeros(3, 2, dtype=torch.int64)},
         "num_scored must be [B] = [3], not [3, 2]"),
        ({"tokens": torch.zeros(3, 3)}, "tokens must be int64, got torch.float32."),
        ({"num_scored": torch.zeros(2, dtype=torch.int64)},
         "num_scored must be [B] = [3], not [2]"),
        ({"logprobs": "both"}, "logprobs must be one of raw, processed; got 'both'."),
        ({"logprobs": "processed"}, "logprobs='processed' needs a temperature for every sequence."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        score_reference(Score(**{**problem(), **change}))
    assert str(caught.value) == message
