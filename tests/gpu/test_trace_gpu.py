"""Traces on a GPU: the same bits as without, nothing waits, and what is told is what ``score`` says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.gpu.capture import no_synchronisation
from tests.gpu.test_bitwise_gpu import decoder, prompts
from tests.runtime.test_trace import check

COUNT = 8
OPTIONS: dict[str, Any] = {"max_new_tokens": 96, "seed": 3, "return_logprobs": True, "eos_token_id": []}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("kind", "k"), [("ngram", 4), ("eagle3", 3), ("draft", 5), ("peagle", 4)])
def test_a_trace_changes_no_bit(kind: str, k: int, temperature: float) -> None:
    given = prompts()[:COUNT]
    tested = decoder(kind, k)
    plain = tested.generate(given, temperature=temperature, **OPTIONS)
    traced = tested.generate(given, temperature=temperature, trace=True, **OPTIONS)
    check(traced, given)
    for name in ("new_tokens", "logprobs"):
        assert all(map(torch.equal, getattr(traced, name), getattr(plain, name)))


def test_probabilities_are_those_that_score_gives() -> None:
    """Of accepted drafts and of the target's own tokens, in float32 beside the op that generate's log-probabilities
    come from."""
    given = prompts()[:COUNT]
    out = decoder("eagle3", 3).generate(given, temperature=1.0, trace=True, **OPTIONS)
    assert out.logprobs is not None
    compared = 0
    for number, logprobs in enumerate(out.logprobs):
        for step in out.trace.of(number):
            first = step.position - len(given[number])
            for place, draft in enumerate(step.drafts):
                if draft.accepted:
                    compared += 1
                    assert math.log(draft.target_probability) == pytest.approx(float(logprobs[first + place]), abs=1e-4)
            if step.own_probability is not None:
                own = float(logprobs[first + len(step.tokens) - 1])
                assert math.log(step.own_probability) == pytest.approx(own, abs=1e-4)
    assert compared > 200


def test_what_is_told_of_a_sequence_does_not_depend_on_the_batch() -> None:
    """Each float, bit for bit: of the target, of the drafter with its own vocabulary, and under options."""
    given, tested = prompts()[:COUNT], decoder("eagle3", 3)
    options: dict[str, Any] = {**OPTIONS, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "trace": True}
    together = tested.generate(given, **{**options, "seed": [*range(COUNT)]}).trace
    for number in (0, 3, COUNT - 1):
        alone = tested.generate(given[number : number + 1], **{**options, "seed": [number]}).trace
        told = [
            [(s.position, s.drafts, s.tokens, s.own_probability) for s in own] for own in (alone, together.of(number))
        ]
        assert told[0] == told[1] and len(told[0]) > 20


def test_nothing_waits_for_the_device() -> None:
    tested, given = decoder("eagle3", 3), [prompt.cpu() for prompt in prompts()[:COUNT]]
    for _ in range(2):
        tested.generate(given, trace=True, temperature=0.0, **OPTIONS)
    with no_synchronisation():
        tested.generate(given, trace=True, temperature=0.0, **OPTIONS)
