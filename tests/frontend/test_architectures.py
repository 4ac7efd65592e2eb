"""The emitted tokens do not depend on the drafter or K, for every architecture the design names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.decoding import assert_same_tokens, compiled, reference_greedy
from tests.models import ARCHITECTURES, make_model, ragged_prompts, shared_model

NEW_TOKENS = 16
PROMPTS = ragged_prompts((3, 17, 8))
BOTH = [*PROMPTS, *PROMPTS]
DRAWN: dict[str, Any] = {"temperature": [0.0] * 3 + [1.0] * 3, "seed": [*range(6)]}
"""Every prompt greedily, and at temperature 1, in one batch."""


DRAFTS = {
    torch.float32: (("ngram", 1), ("draft_model", 4), ("ngram", 7)),
    torch.float64: (("draft_model", 1), ("ngram", 4), ("draft_model", 7)),
}
"""The drafter and K of three decoders for every dtype: any two values of different parameters meet."""


@pytest.mark.parametrize("dtype", DRAFTS, ids=["float32", "float64"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokens_do_not_depend_on_drafts(architecture: str, dtype: torch.dtype) -> None:
    model = make_model(architecture, dtype=dtype)
    plain = compiled(model, "none", pipeline={"verify": False})
    expected = plain.generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN).new_tokens
    greedy, sampled = expected[: len(PROMPTS)], expected[len(PROMPTS) :]
    assert_same_tokens(model, PROMPTS, greedy, reference_greedy(model, PROMPTS, NEW_TOKENS))
    assert any(not torch.equal(a, b) for a, b in zip(greedy, sampled, strict=True))
    for kind, k in DRAFTS[dtype]:
        draft = shared_model("llama", seed=1, dtype=dtype) if kind == "draft_model" else None
        decoder = compiled(model, kind, k, draft, pipeline={"verify": k == 4})
        out = decoder.generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN).new_tokens
        assert_same_tokens(model, BOTH, out, expected)
