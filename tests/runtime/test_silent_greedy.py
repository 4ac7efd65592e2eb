"""Sampling options that have no effect, because nothing says whether to sample: they are warned of by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from transformers import GenerationConfig

from specgraph import SpecgraphWarning, SpeculativeDecoder
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts

PROMPTS = ragged_prompts()[:2]
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "top_k": ({"top_k": 50}, "top_k has no effect"),
    "top_p": ({"top_p": 0.95}, "top_p has no effect"),
    "min_p": ({"min_p": 0.01}, "min_p has no effect"),
    "seed": ({"seed": 5}, "seed has no effect"),
    "seeds": ({"seed": [5, 6]}, "seed has no effect"),
    "each": ({"top_k": [0, 3], "top_p": 1.0}, "top_k has no effect"),
    "several": ({"top_p": 0.95, "seed": 3}, "top_p and seed have no effect"),
    "configuration": (
        {"generation_config": GenerationConfig(temperature=0.7, top_p=0.9)}, "temperature and top_p have no effect",
    ),
}  # fmt: skip
CUT: list[dict[str, Any]] = [{}, {"top_k": 1, "top_p": 0.1, "min_p": 0.9}]
SAID: dict[str, dict[str, Any]] = {
    "off": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "greedy by temperature": {"temperature": 0, "top_p": 0.9, "seed": 1},
    "greedy by do_sample": {"do_sample": False, "top_p": 0.9, "seed": 1},
    "sampling": {"do_sample": True, "top_k": 5, "seed": 1},
    "some sample": {"temperature": [0, 0.7], "top_k": 5},
}


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    """A model whose own configuration has a top_k, which is no wish of a caller's."""
    model = make_model("llama")
    model.generation_config.top_k = 50
    return compiled(model, lowering="eager")


@pytest.mark.parametrize("name", GIVEN)
def test_generate_and_stream_warn_at_the_line_of_their_caller(decoder: SpeculativeDecoder, name: str) -> None:
    options, said = GIVEN[name]
    for call in (decoder.generate, decoder.stream):
        with pytest.warns(SpecgraphWarning, match=f"^{said}, because decoding is greedy .* give one of these") as seen:
            call(PROMPTS, max_new_tokens=2, **options)
        assert [(warning.filename, len(seen)) for warning in seen] == [(__file__, 1)]


def test_python_shows_the_warning_once_for_a_line(decoder: SpeculativeDecoder) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            decoder.generate(PROMPTS, max_new_tokens=1, top_p=0.5)
    assert len(seen) == 1


@pytest.mark.parametrize("name", SAID)
def test_nothing_is_said_where_a_caller_has_chosen(decoder: SpeculativeDecoder, name: str) -> None:
    decoder.generate(PROMPTS, max_new_tokens=2, **SAID[name])  # warnings are errors in tests


def test_a_seed_has_an_effect_where_the_rule_draws_acceptance() -> None:
    tested = compiled(make_model("llama"), lowering="eager", verify={"rule": "synthetic", "acceptance_rate": 0.5})
    prompt = [[5, 6, 7, 5] * 4]

    def emitted(seed: int) -> list[int]:
        return tested.generate(prompt, max_new_tokens=24, seed=seed, eos_token_id=[]).stats.emitted_per_step[0]

    assert emitted(1) == emitted(1) and len({tuple(emitted(seed)) for seed in range(5)}) > 1
    with pytest.warns(SpecgraphWarning, match="^top_p has no effect"):
        tested.generate(prompt, max_new_tokens=2, seed=1, top_p=0.5)


def test_a_copy_of_the_models_own_configuration_asks_for_nothing(decoder: SpeculativeDecoder) -> None:
    decoder.generate(PROMPTS, generation_config=GenerationConfig(top_k=50, max_new_tokens=2))
    decoder.generate(PROMPTS, max_new_tokens=2)


def test_a_session_warns(decoder: SpeculativeDecoder) -> None:
    with decoder.session() as session:
        with pytest.warns(SpecgraphWarning, match="^top_p and seed have no effect") as seen:
            session.submit(PROMPTS[0], top_p=0.95, seed=3, max_new_tokens=2)
        assert [warning.filename for warning in seen] == [__file__]


def test_scoring_asks_for_no_seed(decoder: SpeculativeDecoder) -> None:
    decoder.score(PROMPTS, logprobs="processed")
    with pytest.warns(SpecgraphWarning, match="^top_p has no effect"):
        decoder.score(PROMPTS, logprobs="processed", top_p=0.5)


def test_a_greedy_trace_shows_what_the_target_thinks_whatever_would_be_cut_off(decoder: SpeculativeDecoder) -> None:
    """A model's own top_k or top_p is no reason for a target's probability of 0."""
    traces = [
        decoder.generate([[5, 6, 7, 5] * 4], max_new_tokens=8, temperature=0, trace=True, **options).trace
        for options in CUT
    ]
    plain, cut = (
        [d.target_probability for step in trace for d in step.drafts] for trace in traces if trace is not None
    )
    assert plain == cut and plain and all(probability > 0 for probability in plain)
