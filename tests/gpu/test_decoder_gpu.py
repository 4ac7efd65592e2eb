"""The reference ops on a GPU: every architecture traces and decodes there, through the same graphs as on a CPU."""

from __future__ import annotations

import pytest
import torch

from tests.decoding import compiled
from tests.models import ARCHITECTURES, MORE, make_model, ragged_prompts

PROMPTS = ragged_prompts((3, 17, 8))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE])
def test_tokens_do_not_depend_on_drafts_and_equal_those_of_a_cpu(architecture: str) -> None:
    model = make_model(architecture, dtype=torch.float64)
    draft = make_model("llama", seed=1, dtype=torch.float64)
    options = {"max_new_tokens": 16, "temperature": 1.0, "seed": 3}
    expected = compiled(model, "none").generate(PROMPTS, **options).new_tokens
    model, draft = model.cuda(), draft.cuda()
    for kind, given in (("none", None), ("ngram", None), ("draft_model", draft)):
        out = compiled(model, kind, draft=given).generate(PROMPTS, **options).new_tokens
        assert all(map(torch.equal, out, expected)), kind


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_bfloat16_decodes_under_every_rule(rule: str) -> None:
    model, draft = (make_model("llama", seed=s, dtype=torch.bfloat16).cuda() for s in (0, 1))
    decoder = compiled(model, draft=draft, verify={"rule": rule}, debug={"self_check": True})
    out = decoder.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=3)
    again = decoder.generate(PROMPTS, max_new_tokens=16, temperature=1.0, seed=3)
    assert all(map(torch.equal, out.new_tokens, again.new_tokens))
