"""The emitted tokens do not depend on the drafter or K, for every architecture the design names."""

from __future__ import annotations

import itertools
from collections import Counter
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
BOTH_OCCUR = [pattern for pattern in itertools.product((0, 1), repeat=len(KS)) if len({*pattern}) == 2]
DECODERS = [
    (architecture, DTYPES[dtype], KINDS[kind], k)
    for index, architecture in enumerate(ARCHITECTURES)
    for dtype, kind, k in zip(BOTH_OCCUR[index % 6], BOTH_OCCUR[(index + index // 6) % 6], KS, strict=True)
]
"""Every architecture runs with every K, in both dtypes and with both drafters, and all combinations of these occur."""
DRAFTS: dict[tuple[str, torch.dtype], list[tuple[str, int]]] = {}
for _architecture, _dtype, _kind, _k in DECODERS:
    DRAFTS.setdefault((_architecture, _dtype), []).append((_kind, _k))


@pytest.mark.parametrize(("architecture", "dtype"), DRAFTS, ids=lambda value: str(value).removeprefix("torch."))
def test_tokens_do_not_depend_on_drafts(architecture: str, dtype: torch.dtype) -> None:
    model = make_model(architecture, dtype=dtype)
    plain = compiled(model, "none", pipeline={"verify": False})
    expected = plain.generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN).new_tokens
    greedy, sampled = expected[: len(PROMPTS)], expected[len(PROMPTS) :]
    assert_same_tokens(model, PROMPTS, greedy, reference_greedy(model, PROMPTS, NEW_TOKENS))
    assert any(not torch.equal(a, b) for a, b in zip(greedy, sampled, strict=True))
    for kind, k in DRAFTS[architecture, dtype]:
        draft = shared_model("llama", seed=1, dtype=dtype) if kind == "draft_model" else None
        decoder = compiled(model, kind, k, draft, pipeline={"verify": k == 4})
        out = decoder.generate(BOTH, max_new_tokens=NEW_TOKENS, **DRAWN).new_tokens
        assert_same_tokens(model, BOTH, out, expected)


def test_every_architecture_has_every_value_and_every_combination_occurs() -> None:
    for architecture in ARCHITECTURES:
        own = [case[1:] for case in DECODERS if case[0] == architecture]
        assert [{*values} for values in zip(*own, strict=True)] == [{*DTYPES}, {*KINDS}, {*KS}]
    counts = Counter(case[1:] for case in DECODERS)
    assert len(counts) == len(DTYPES) * len(KINDS) * len(KS) and min(counts.values()) > 4
