"""The emitted tokens do not depend on the drafter or K, for every architecture the design names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.decoding import assert_same_tokens, compiled, reference_greedy
from tests.models import ARCHITECTURES, make_model, ragged_prompts, shared_model

NEW_TOKENS = 12
PROMPTS = ragged_prompts((3, 17, 8))
BOTH = [*PROMPTS, *PROMPTS]
DRAWN: dict[str, Any] = {"temperature": [0.0] * 3 + [1.0] * 3, "seed": [*range(6)]}
"""Every prompt greedily, and at temperature 1, in one batch."""

KINDS, KS = ("ngram", "draft_model"), (1, 4, 7)
DECODERS: dict[str, tuple[str, int]] = {
    architecture: (KINDS[index % 2], KS[index // 2 % 3]) for index, architecture in enumerate(ARCHITECTURES)
}
"""A drafter of which little is accepted, and its K. All combinations occur.

All is in float64, in which ``test_tracing.py`` traces every architecture, so that a process traces it once. Which dtype
a step computes in chooses the variants of kernels, which do not know of architectures.
"""


@pytest.mark.parametrize("architecture", DECODERS)
def test_tokens_do_not_depend_on_drafts(architecture: str) -> None:
    """The second draft is the model itself, of which every row of a window is accepted and read again.

    Of the first, nearly every token has a step of its own, as without drafts, with which ``test_matrix.py`` compares.
    """
    kind, k = DECODERS[architecture]
    model = make_model(architecture, dtype=torch.float64)
    other = shared_model("llama", seed=1, dtype=torch.float64) if kind == "draft_model" else None
    decoder = compiled(model, kind, k, other, pipeline={"verify": True})
    expected = decoder.generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN).new_tokens
    greedy, sampled = expected[: len(PROMPTS)], expected[len(PROMPTS) :]
    assert_same_tokens(model, PROMPTS, greedy, reference_greedy(model, PROMPTS, NEW_TOKENS))
    assert any(not torch.equal(a, b) for a, b in zip(greedy, sampled, strict=True))
    out = compiled(model, "draft_model", 7, model).generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN)
    assert_same_tokens(model, BOTH, out.new_tokens, expected)
    assert 8 in {count for steps in out.stats.emitted_per_step for count in steps}


def test_every_combination_occurs() -> None:
    assert {*DECODERS.values()} == {*itertools.product(KINDS, KS)}
