"""``raw`` log-probabilities under the logits before a request changed them, whatever logits were verified."""

from __future__ import annotations

import pytest
import torch

from specgraph.kernels.verify import Verify, verify_reference
from specgraph.kernels.verify.verify_triton import verify_triton
from tests.kernels.verify.test_verify_triton import OPTIONS, problem

ABSENT = dict.fromkeys(("draft_logits", "top_k", "top_p", "min_p", "target_to_draft"))


def given(rule: str = "strict", logprobs: str = "raw", **changes: object) -> Verify:
    """Sequences of which one has forced rows, one padded rows, and one none."""
    values = problem(rows=3)
    values["num_rows"] = torch.tensor([4, 2, 4, 0, 4]).to(values["num_rows"])
    values["num_forced"] = torch.tensor([0, 0, 2, 0, 3]).to(values["num_forced"])
    return Verify(**{**ABSENT, **values, **changes}, rule=rule, logprobs=logprobs, **OPTIONS)


@pytest.mark.parametrize("rule", ["strict", "block"])
def test_the_same_logits_give_the_bits_that_they_give_without_being_named(rule: str) -> None:
    plain = verify_triton(given(rule))
    named = verify_triton(given(rule, raw_logits=given().logits.clone()))
    assert (plain.logprobs != 0).sum() >= 5
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_log_probabilities_are_those_of_the_raw_logits_and_tokens_those_of_the_others(dtype: torch.dtype) -> None:
    raw = (given().logits.flip(-1) * 0.5).to(dtype)
    for form in (verify_reference, verify_triton):
        plain, named = form(given()), form(given(raw_logits=raw))
        assert torch.equal(named.emitted, plain.emitted) and not torch.equal(named.logprobs, plain.logprobs)
        expected = raw.double().log_softmax(-1)
        first = given().num_forced.clamp(max=1)
        seen = 0
        for b, row in (named.emitted >= 0).nonzero().tolist():
            if row >= given().num_forced[b]:
                value = expected[b, row - first[b], named.emitted[b, row]]
                torch.testing.assert_close(named.logprobs[b, row].double(), value, rtol=1e-5, atol=1e-5)
                seen += 1
            else:
                assert named.logprobs[b, row] == 0
        assert seen >= 5


@pytest.mark.parametrize("form", [verify_reference, verify_triton])
def test_other_log_probabilities_are_those_of_what_was_verified(form: object) -> None:
    raw = given().logits.flip(-1)
    plain, named = (form(given(logprobs="processed", **more)) for more in ({}, {"raw_logits": raw}))  # type: ignore[operator]
    assert all(torch.equal(a, b) for a, b in zip(plain, named, strict=True))


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"raw_logits must be \[B, R, V\] = \[5, 3, 1500\], not \[5, 2, 1500\]"):
        verify_reference(given(raw_logits=given().logits[:, :2]))
