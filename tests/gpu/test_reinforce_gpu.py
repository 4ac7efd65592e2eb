"""Weights that an optimiser writes reach a decoder on a GPU, and scoring gives the bits of the rollout every time."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import specgraph

FOLDER = Path(__file__).parents[2] / "examples" / "models" / "tiny-math"
PROMPTS = [f"Question: What is {n} + 4?\nAnswer:" for n in range(8)]
OPTIONS: dict[str, Any] = {"max_new_tokens": 64, "temperature": 1.0, "seed": [*range(8)], "return_logprobs": True}


@pytest.mark.parametrize("draft", [None, "eagle3"])
def test_rollout_and_evaluation_agree_to_the_bit_after_every_update(draft: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    model: Any = AutoModelForCausalLM.from_pretrained(FOLDER / "target", dtype=torch.bfloat16).cuda()
    policy = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    decoder = specgraph.compile_speculative(policy, draft=FOLDER / draft if draft else None)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    prompts, seen = [tokenizer(text)["input_ids"] for text in PROMPTS], []
    for _ in range(3):
        out = decoder.generate(prompts, **OPTIONS)
        scored = decoder.score(out)
        assert all(map(torch.equal, scored.logprobs, out.logprobs or ()))
        seen.append([tokens.tolist() for tokens in out.new_tokens])
        ids = out.sequences.cuda()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    assert seen[0] != seen[1] != seen[2]
    fresh = specgraph.compile_speculative(copy.deepcopy(model), {"draft": {"kind": "none"}}).generate(
        prompts, **OPTIONS
    )
    last = decoder.generate(prompts, **OPTIONS)
    assert all(map(torch.equal, last.new_tokens, fresh.new_tokens))
    assert all(map(torch.equal, last.logprobs or (), fresh.logprobs or ()))
