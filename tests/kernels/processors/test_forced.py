"""Forced tokens: every form against plain Python."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.kernels.processors import forced
from tests.kernels.processors.cases import context, forms, of_one, run

FORMS = forms(forced.FORCE_TOKENS)


def case(seed: int, *, width: int = 4, **shape: Any) -> dict[str, Any]:
    """Sequences of which one begins, one ends in its third row, one both begins and ends, and two are in between."""
    own = context(seed, width=width, **shape)
    return {
        "logits": own["logits"], "window": own["window"], "start": torch.tensor([0, 13, 0, 17, 3]),
        "num_forced": torch.tensor([0, 0, 0, 2, 0]),
        "max_length": torch.tensor([90, 17, 2, 99, 50]), "forced_bos_token_id": torch.tensor([4, 5, 6, 7, -1]),
        "forced_eos_token_id": torch.tensor([8, 9, 10, -1, 11]),
    }  # fmt: skip


def expected(given: dict[str, Any]) -> Tensor:
    out = given["logits"].to(torch.promote_types(given["logits"].dtype, torch.float32), copy=True)
    first, last, width = given["forced_bos_token_id"], given["forced_eos_token_id"], given["window"].shape[1]
    for b in range(out.shape[0]):
        for r in range(out.shape[1]):
            at = int(given["start"][b]) + min(int(given["num_forced"][b]), width - out.shape[1]) + r + 1
            token = -1
            if at == 1 and first is not None:
                token = int(first[b])
            if at == given["max_length"][b] - 1 and last is not None and last[b] >= 0:
                token = int(last[b])
            if token >= 0:
                out[b, r] = -float("inf")
                out[b, r, token] = 0
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "width"), [(3, 4), (1, 1), (4, 4)])
def test_every_form_forces_the_tokens(form: str, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forced, "TILE", 8)
    for dtype in (torch.float32, torch.bfloat16):
        given = case(rows, rows=rows, width=width, dtype=dtype)
        for off in ({}, {"forced_bos_token_id": None}, {"forced_eos_token_id": None}):
            assert torch.equal(run(FORMS[form], given | off), expected(given | off))


@pytest.mark.parametrize("form", FORMS)
def test_a_token_beyond_the_vocabulary_leaves_nothing(form: str) -> None:
    given = case(2)
    given["forced_eos_token_id"][1] = given["logits"].shape[2]
    assert bool((run(FORMS[form], given)[1, 2] == -float("inf")).all())


@pytest.mark.parametrize("form", FORMS)
def test_a_sequence_does_not_depend_on_others(form: str) -> None:
    given = case(1)
    whole = run(FORMS[form], given)
    assert whole.isinf().sum() > 3 * 17
    for b in range(5):
        assert torch.equal(run(FORMS[form], of_one(given, b)), whole[b : b + 1])


def test_what_is_not_finite_is_forced_too_and_float64_stays() -> None:
    given = case(2, dtype=torch.float64)
    given["logits"][0, 0] = torch.nan
    out = run(FORMS["op"], given)
    assert out.dtype == torch.float64 and out[0, 0, 4] == 0 and out[0, 0].isinf().sum() == 18


def test_shapes_that_do_not_fit() -> None:
    given = case(3)
    with pytest.raises(ValueError, match=r"forced_bos_token_id must be \[B\] = \[5\], not \[2\]"):
        torch.ops.specgraph.force_tokens(*{**given, "forced_bos_token_id": given["forced_bos_token_id"][:2]}.values())
    with pytest.raises(ValueError, match="there are 3 rows of logits for a window of 2 rows"):
        torch.ops.specgraph.force_tokens(*{**given, "window": given["window"][:, :2]}.values())


def test_the_op_is_sound() -> None:
    torch.library.opcheck(torch.ops.specgraph.force_tokens.default, tuple(case(4).values()))
