"""The replay of lookups: it counts the steps that a decoder takes, and knows requests that repeat."""

from __future__ import annotations

from typing import Any

import pytest

import specgraph
from benchmarks.replay_lookup import LOOKUPS, replayed, tasks, tokens_per_step
from tests.decoding import CONFIG
from tests.models import double_model, ragged_prompts


@pytest.mark.parametrize("kind", LOOKUPS)
def test_a_decoder_takes_as_many_steps(kind: str) -> None:
    draft = {"kind": kind, "num_speculative_tokens": 3, "adaptive": False, "max_cached_tokens": 200}
    decoder = specgraph.compile_speculative(double_model("llama", 0), {**CONFIG, "draft": draft})
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 0.0, "eos_token_id": []}
    pairs, lengths = [], []
    for prompt in ragged_prompts((9, 5, 9)):
        out = decoder.generate([prompt], **options)
        pairs.append((prompt.tolist(), out.new_tokens[0].tolist()))
        lengths.append(len(out.stats.emitted_per_step[0]) / 39)
    assert max(lengths) < 1
    assert replayed(kind, 3, pairs, 200) == pytest.approx(len(lengths) / sum(lengths))


@pytest.mark.parametrize("kind", LOOKUPS)
def test_what_repeats_and_what_does_not(kind: str) -> None:
    text = [*range(100, 161)]
    assert tokens_per_step(kind, 4, [1, 2, 3], text) == 1
    assert tokens_per_step(kind, 4, text, text) == 5
    assert replayed(kind, 4, [([1], text), ([2], text)], 0) == 1
    assert replayed(kind, 4, [([1], text), ([2], text)], 100) == pytest.approx(2 / (1 + 1 / 5))


def test_every_task_has_prompts_and_answers() -> None:
    for name, requests in tasks(2, 3000).items():
        assert len(requests) == 2, name
        assert all(prompt and answer and prompt != answer for prompt, answer in requests), name
