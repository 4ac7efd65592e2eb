"""The suffix drafter: a search in a trie as its oracle, fresh starts, planted bugs, and tokens of the model alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.config import load_config
from specgraph.errors import ConfigError
from tests import harness
from tests.decoding import CONFIG, assert_same_tokens, compiled
from tests.detectors import check_fresh_start, check_slots
from tests.harness import Run, drafting_stage, forced_run
from tests.kernels.step.test_suffix import searched
from tests.models import double_model, ragged_prompts

LIMITS = (48, 41, 23)
ALPHABET = 6
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "as vLLM": {"max_spec_factor": 1.0},
    "eager": {"max_match": 5, "max_spec_factor": 3.0, "max_spec_offset": 1.0, "min_token_prob": 0.0},
    "cautious": {"min_match": 2, "min_token_prob": 0.6},
}


@functools.cache
def decoder(k: int, options: str = "usual", bug: str | None = None, rule: str = "strict") -> SpeculativeDecoder:
    order = ["insert_kv_cache", "insert_draft", *["plant_bug"] * (bug is not None), "insert_verify"]
    config: dict[str, Any] = {**CONFIG, "pipeline": {"order": order, "verify": bug is None}, "verify": {"rule": rule}}
    config["draft"] = {"kind": "suffix", "num_speculative_tokens": k, **OPTIONS[options]}
    if bug is not None:
        config["passes"] = {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}}
    return specgraph.compile_speculative(target(), config)


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0)


@functools.cache
def plain() -> SpeculativeDecoder:
    return compiled(target(), "none", 1)


@functools.cache
def run(k: int, seed: int, options: str = "usual", bug: str | None = None) -> Run:
    """A history over few tokens, so that long matches repeat."""
    prompts = ragged_prompts((3, 19, 5), seed=seed, vocab=ALPHABET)
    return forced_run(drafting_stage(decoder(k, options, bug)), prompts, LIMITS, seed=seed, alphabet=ALPHABET)


def expected(tokens: list[int], tested: SpeculativeDecoder) -> list[int]:
    draft: Any = tested.config.draft
    return searched(
        tokens, draft.num_speculative_tokens, draft.max_match, draft.min_match, draft.max_spec_factor,
        draft.max_spec_offset, draft.min_token_prob,
    )  # fmt: skip


def check_history(recorded: Run) -> None:
    """The buffer holds accepted tokens and nothing else, after every step."""
    for step in recorded.steps:
        assert step.history is not None
        for row, tokens in enumerate(step.accepted):
            started = tokens if len(tokens) > 1 else []
            assert step.history[row].tolist() == started + [harness.UNWRITTEN] * (max(LIMITS) - len(started))


def check_drafts(recorded: Run, tested: SpeculativeDecoder) -> None:
    """Proposals are those of the search."""
    for step in recorded.steps:
        for row, count in enumerate(step.num_emitted):
            if count > 0:
                assert step.drafts[row].tolist() == expected(step.accepted[row], tested)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("k", [1, 3, 7])
def test_drafts_depend_on_accepted_tokens_alone(k: int, seed: int, options: str) -> None:
    recorded = run(k, seed, options)
    check_history(recorded)
    check_drafts(recorded, decoder(k, options))
    check_fresh_start(recorded, times=len(recorded.steps))
    check_slots(recorded)


@pytest.mark.parametrize("k", [3, 7])
def test_histories_accept_none_and_many_and_drafts_are_of_many_lengths(k: int) -> None:
    recorded = [run(k, seed, "eager") for seed in range(2)]
    assert {0, k} <= {count for one in recorded for count in one.accept_counts}
    made = {int((drafts >= 0).sum()) for one in recorded for step in one.steps for drafts in step.drafts}
    assert made >= {0, 1, k}


@pytest.mark.parametrize("bug", ["catch-up skips the last row", "rejected rows written", "window instead of emitted"])
def test_planted_bugs_are_caught_but_not_by_tokens(bug: str) -> None:
    prompts, options = ragged_prompts((3, 9, 5)), {"max_new_tokens": 18, "eos_token_id": []}
    found = decoder(3, bug=bug).generate(prompts, **options).new_tokens
    assert_same_tokens(target(), prompts, found, plain().generate(prompts, **options).new_tokens)
    with pytest.raises(AssertionError):
        check_history(run(3, 0, bug=bug))


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_drafts_are_point_masses_without_saying_so(rule: str) -> None:
    inputs = decoder(3, rule=rule).stages["insert_verify"].inputs
    assert "history" in inputs and not {"point_mass", "draft_logits"} & set(inputs)


def repetitive(lengths: tuple[int, ...]) -> list[Tensor]:
    """Prompts that repeat themselves, with three tokens in between."""
    return [torch.cat([p, p[:3].flip(0), p])[: 2 * len(p)] for p in ragged_prompts(lengths)]


@pytest.mark.parametrize("temperature", [0.0, [0.3, 0.0, 1.0, 0.2]], ids=["greedy", "seeded"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_decoding_emits_what_the_model_alone_does(k: int, temperature: float | list[float]) -> None:
    prompts = [*repetitive((4, 17, 8)), torch.tensor([5])]
    options: dict[str, Any] = {"max_new_tokens": 40, "eos_token_id": [], "temperature": temperature}
    options["seed"] = [1, -2, 3, 1 << 40]
    out = decoder(k, "eager").generate(prompts, **options)
    assert_same_tokens(target(), prompts, out.new_tokens, plain().generate(prompts, **options).new_tokens)
    assert out.stats.acceptance_length > 1.0


def test_the_defaults_are_those_of_the_preset() -> None:
    draft: Any = load_config("suffix").draft
    assert (draft.max_match, draft.max_spec_factor, draft.max_spec_offset, draft.min_token_prob) == (24, 8.0, 0.0, 0.1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_match": 0}, "draft.min_match and draft.max_match must hold 1 <= min_match <= max_match <= 127, got 0"),
        ({"max_match": 128}, "draft.min_match and draft.max_match must hold 1 <= min_match <= max_match <= 127, got 1"),
        ({"max_spec_factor": -1.0}, "draft.max_spec_factor must be from 0 to 1e6 and draft.max_spec_offset from -1e6"),
        ({"min_token_prob": 1.5}, "draft.min_token_prob is a probability from 0 to 1, got 1.5."),
        ({"max_ngram": 4, "max_mach": 3}, "Unknown configuration key 'draft.max_mach'"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config({"draft": {"kind": "suffix", **options}})
    assert str(caught.value).startswith(message)
