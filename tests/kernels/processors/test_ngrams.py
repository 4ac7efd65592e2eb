"""N-grams that may not be repeated: every form against a search in plain Python."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels import gpus
from specgraph.kernels.processors import ngrams
from tests.kernels.processors.cases import context, contexts, forms, of_one, run

FORMS = forms(ngrams.BAN_NGRAMS)


def case(seed: int, sizes: tuple[int, ...] = (1, 2, 3, 2, 2), **shape: Any) -> dict[str, Any]:
    return {**context(seed, **{"ids": 3, **shape}), "no_repeat_ngram_size": torch.tensor(sizes)}


def expected(given: dict[str, Any]) -> Tensor:
    out = given["logits"].to(torch.promote_types(given["logits"].dtype, torch.float32), copy=True)
    for b, r, tokens in contexts(given):
        n = int(given["no_repeat_ngram_size"][b])
        seen = {tuple(tokens[p : p + n]) for p in range(len(tokens) - n + 1)} if n else set()
        for token in range(out.shape[2]):
            if n and (*tokens[len(tokens) - n + 1 :], token) in seen:
                out[b, r, token] = -float("inf")
    return out


@pytest.fixture(params=[None, 4], ids=["one tile", "tiles of 4"])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param is not None:
        monkeypatch.setattr(ngrams, "TILE", request.param)
        monkeypatch.setattr(gpus, "HOPPER", dataclasses.replace(gpus.HOPPER, search_programs=30))


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4, 4), (2, 9)])
def test_every_form_forbids_what_would_repeat(form: str, rows: int, width: int) -> None:
    for seed in range(3):
        given = case(seed, rows=rows, width=width)
        wanted = expected(given)
        assert wanted.isinf().any()
        assert torch.equal(run(FORMS[form], given), wanted)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes_and_tokens_outside_the_vocabulary(form: str, dtype: torch.dtype) -> None:
    given = case(4, (1, 1, 1, 1, 1), dtype=dtype, ids=0)
    assert torch.equal(run(FORMS[form], given), expected(given))


@pytest.mark.parametrize("form", FORMS)
def test_sizes_of_nothing_and_of_more_than_there_is(form: str) -> None:
    given = case(5, (0, 0, 0, 0, 0))
    assert torch.equal(run(FORMS[form], given), given["logits"])
    for longer in (25, 200):
        given["no_repeat_ngram_size"][:] = longer
        assert torch.equal(run(FORMS[form], given), given["logits"])


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_does_not_depend_on_others(form: str) -> None:
    given = case(6)
    whole = run(FORMS[form], given)
    for b in range(5):
        assert torch.equal(run(FORMS[form], of_one(given, b)), whole[b : b + 1])


def test_float64_no_sequences_and_no_sizes() -> None:
    given = case(7, dtype=torch.float64)
    assert torch.equal(run(FORMS["op"], given), expected(given)) and run(FORMS["op"], given).dtype == torch.float64
    none = {name: part if name == "history" else part[:0] for name, part in given.items()}
    for name in ("reference", "triton"):
        assert run(FORMS[name], none).shape == (0, 3, 19)
    with pytest.raises(ValueError, match=r"no_repeat_ngram_size must be \[B\] = \[5\], not \[2\]"):
        torch.ops.specgraph.ban_ngrams(*{**given, "no_repeat_ngram_size": given["no_repeat_ngram_size"][:2]}.values())


def test_the_op_is_sound() -> None:
    torch.library.opcheck(torch.ops.specgraph.ban_ngrams.default, tuple(case(8).values()))
