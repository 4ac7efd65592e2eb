"""Logits of candidates behind a token: the definition, the Triton form, rows by themselves, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.linear.candidates import score_candidates
from specgraph.kernels.ops import OPS
from tests.kernels.linear.test_norm import normal

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-5, torch.float64: 1e-12}
"""Sums of up to 300 products, whose operands are exact, differ by their order alone."""


def arguments(
    dtype: torch.dtype, vocab: int, rank: int, count: int, batch: int = 3, rows: int = 2
) -> dict[str, Tensor | int]:
    """Codebooks have a row more than there are logits, and no two candidates of a row are the same."""
    tables = [0.3 * normal(vocab + 1, rank, dtype=dtype, seed=seed) for seed in (1, 2)]
    generator = torch.Generator().manual_seed(5)
    candidates = torch.rand(batch, rows, vocab, generator=generator).argsort(-1)[..., :count].to(tables[0].device)
    tokens = torch.randint(0, vocab + 1, (batch, rows), generator=generator).to(tables[0].device)
    return {"predecessor": tables[0], "successor": tables[1], "tokens": tokens, "candidates": candidates,
            "unary": normal(batch, rows, count, dtype=dtype, seed=3),
            "gates": 0.3 * normal(batch, rows, rank, dtype=dtype, seed=4), "vocab_size": vocab}  # fmt: skip


TRITON = [("triton", torch.float32), ("triton", torch.bfloat16)]
SIZES = [(7, 3, 7), (101, 12, 6), (5000, 300, 16), (9, 1, 1)]


@pytest.mark.parametrize(("form", "dtype"), [("reference", each) for each in BOUND] + TRITON, ids=str)
@pytest.mark.parametrize(("vocab", "rank", "count"), SIZES)
def test_it_is_the_definition(form: str, dtype: torch.dtype, vocab: int, rank: int, count: int) -> None:
    given: dict[str, Any] = arguments(dtype, vocab, rank, count)
    found = OPS["score_candidates"].form(form)(**given)
    assert found.dtype == torch.promote_types(dtype, torch.float32) and found.shape == (3, 2, vocab)
    exact = {key: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
             for key, value in given.items()}  # fmt: skip
    expected = torch.full(found.shape, -torch.inf, dtype=torch.float64)
    for b, r, k in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(count)).tolist():
        token, candidate = int(exact["tokens"][b, r]), int(exact["candidates"][b, r, k])
        pair = exact["predecessor"][token] * exact["gates"][b, r] * exact["successor"][candidate]
        expected[b, r, candidate] = exact["unary"][b, r, k] + pair.sum()
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0.0, atol=BOUND[dtype])


def test_a_row_is_bit_for_bit_the_same_beside_any_others() -> None:
    given: dict[str, Any] = arguments(torch.bfloat16, 101, 300, 16, batch=4, rows=3)
    run = OPS["score_candidates"].form("triton")
    part = {key: value[1:2, 2:] if key in ("tokens", "candidates", "unary", "gates") else value
            for key, value in given.items()}  # fmt: skip
    assert torch.equal(run(**part), run(**given)[1:2, 2:])


def test_shapes_that_do_not_fit_are_refused() -> None:
    given: dict[str, Any] = arguments(torch.float32, 9, 4, 2)
    with pytest.raises(ValueError, match=r"unary must be \[B, R, k\] = \[3, 2, 2\], not \[3, 2, 1\]"):
        score_candidates(**{**given, "unary": given["unary"][..., :1]})
    with pytest.raises(ValueError, match=r"gates must be \[B, R, r\] = \[3, 2, 4\], not \[3, 2, 3\]"):
        score_candidates(**{**given, "gates": given["gates"][..., :3]})
