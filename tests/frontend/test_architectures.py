"""The emitted tokens do not depend on the drafter or K, for every architecture the design names."""

from __future__ import annotations

import itertools
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

DTYPES, KINDS, KS = (torch.float32, torch.float64), ("ngram", "draft_model"), (1, 4, 7)
DECODERS: dict[str, tuple[torch.dtype, str, int]] = {
    architecture: (DTYPES[index % 2], KINDS[index // 2 % 2], KS[index // 4 % 3])
    for index, architecture in enumerate(ARCHITECTURES)
}
"""A dtype, a drafter of which little is accepted, and its K. All combinations occur.

``test_tracing.py`` compares every architecture in float64 with transformers. Which dtype a step computes in chooses the
variants of kernels, which do not know of architectures.
"""


@pytest.mark.parametrize("architecture", DECODERS)
def test_tokens_do_not_depend_on_drafts(architecture: str) -> None:
    """The second draft is the model itself, of which every row of a window is accepted and read again.

    Of the first, nearly every token has a step of its own, as without drafts, with which ``test_matrix.py`` compares.
    """
    dtype, kind, k = DECODERS[architecture]
    model = make_model(architecture, dtype=dtype)
    other = shared_model("llama", seed=1, dtype=dtype) if kind == "draft_model" else None
    decoder = compiled(model, kind, k, other, pipeline={"verify": True})
    expected = decoder.generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN).new_tokens
    greedy, sampled = expected[: len(PROMPTS)], expected[len(PROMPTS) :]
    assert_same_tokens(model, PROMPTS, greedy, reference_greedy(model, PROMPTS, NEW_TOKENS))
    assert any(not torch.equal(a, b) for a, b in zip(greedy, sampled, strict=True))
    out = compiled(model, "draft_model", 7, model).generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN)
    assert_same_tokens(model, BOTH, out.new_tokens, expected)
    assert 8 in {count for steps in out.stats.emitted_per_step for count in steps}


def test_every_combination_occurs() -> None:
    assert {*DECODERS.values()} == {*itertools.product(DTYPES, KINDS, KS)}
    for option in ("sliding_window", "num_experts", "head_dim"):
        assert {DECODERS[name][0] for name, own in ARCHITECTURES.items() if option in own} == {*DTYPES}
