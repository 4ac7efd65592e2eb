"""The example of reinforcement learning: rollouts are of the newest weights, and scoring agrees with them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import specgraph

EXAMPLES = Path(__file__).parents[2] / "examples"
POLICY = EXAMPLES / "models" / "tiny-math" / "draft"
STEPS = 3


@pytest.fixture(scope="module")
def example() -> Any:
    pytest.importorskip("trl", reason="needs specgraph[rl]")
    spec = importlib.util.spec_from_file_location("reinforce", EXAMPLES / "reinforce.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_decoder_rolls_out_what_the_trainer_has_learnt(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    calls, compiled = [], specgraph.compile_speculative
    monkeypatch.setattr(specgraph, "compile_speculative", lambda *a, **k: calls.append(a) or compiled(*a, **k))
    trainer, rollout = example.train(POLICY, None, torch.float64, STEPS, questions=2, answers=4)
    assert len(calls) == 1 and len(rollout.rewards) == STEPS
    assert max(rollout.differences) < 1e-12

    before = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float64)
    learnt = dict(trainer.model.named_parameters())
    assert all(not torch.equal(learnt[name], old) for name, old in before.named_parameters())
    after = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float64)
    after.load_state_dict(trainer.model.state_dict())
    prompts = [rollout.tokenizer(f"Question: What is {n} + 4?\nAnswer:")["input_ids"] for n in range(4)]
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 1.0, "seed": [*range(4)]}
    tokens = rollout.decoder.generate(prompts, **options).new_tokens
    fresh = compiled(after, {"draft": {"kind": "none"}})
    assert all(map(torch.equal, tokens, fresh.generate(prompts, **options).new_tokens))
    old = compiled(before, {"draft": {"kind": "none"}})
    assert not all(map(torch.equal, tokens, old.generate(prompts, **options).new_tokens))

    out = fresh.generate(prompts, **options, return_logprobs=True)
    scored = rollout.decoder.score(out)
    for own, new in zip(scored.logprobs, out.logprobs or (), strict=True):
        torch.testing.assert_close(own, new, rtol=0, atol=1e-12)
