"""What token equality cannot see: a drafter's state, its proposals and the slots it writes (DESIGN section 10).

Speculation is lossless even when the drafter is broken. Three detectors look at the drafter itself:

* fresh start: after any accept/reject history, its cache and its proposals equal those of a new start on the accepted
  tokens;
* oracle: its proposals equal those that the plain transformers model gives without any cache;
* slots: it writes exactly the slots of accepted tokens and of the chained drafts behind them.

Each planted bug, and what caught it here (``test_planted_bugs_are_caught`` asserts the hits):

=============================  ============  ===========  ======  ======
bug                            equal tokens  fresh start  oracle  slots
=============================  ============  ===========  ======  ======
noise off by one position      missed        missed       caught  missed
chained position off by one    missed        caught       caught  caught
catch-up skips the last row    missed        caught       caught  caught
chained rows not written       missed        missed       caught  caught
rejected rows written          missed        missed       missed  caught
inactive rows written          missed        caught       missed  caught
window instead of emitted      missed        caught       caught  missed
proposals from the row before  missed        missed       caught  missed
raw logits kept (drawn rules)  (biased)      missed       caught  missed
=============================  ============  ===========  ======  ======

Chained rows that are not written see nothing either, whatever came before them, and the catch-up runs every accepted
token again, so here the fresh start misses them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specgraph import SpeculativeDecoder
from specgraph.drafters.step import VERIFIED
from specgraph.runtime.outputs.output import GenerateOutput
from tests import harness
from tests.decoding import compiled
from tests.detectors import NextLogits, caught_by, check_fresh_start, check_oracle, check_slots
from tests.harness import Run, drafting_stage, forced_run, real_run, slots_of
from tests.models import VOCAB, double_model, ragged_prompts
from tests.pairwise import cover, product

PROMPTS = ragged_prompts((3, 9, 5))
LIMITS = (48, 41, 23)
"""Lengths at which the sequences end; the last one gets there within a history."""
NEW_TOKENS = 24


@functools.cache
def target() -> PreTrainedModel:
    return double_model("llama", 0)


def _near() -> PreTrainedModel:
    """The target, moved a little: some of its drafts are accepted and some are not."""
    model = double_model("llama", 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.03 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "near": _near,
    "qwen3": lambda: double_model("qwen3", 3, num_hidden_layers=1),
    "sliding window": lambda: double_model("mistral", 4),
    "learned positions": lambda: double_model("gpt2", 5),
    "padded vocabulary": lambda: double_model("llama", 6, num_hidden_layers=1, vocab_size=VOCAB + 11),
    "smaller vocabulary": lambda: double_model("llama", 7, num_hidden_layers=1, vocab_size=VOCAB - 6),
}


@functools.cache
def draft(name: str) -> PreTrainedModel:
    return target() if name == "itself" else MODELS[name]()


@functools.cache
def decoder(
    name: str, k: int, rule: str = "strict", bug: str | None = None, max_length: int | None = None, block_size: int = 4
) -> SpeculativeDecoder:
    """A decoder by the name of its draft: a key of ``MODELS``, ``itself``, ``ngram`` or ``none``."""
    order = ["insert_kv_cache", "insert_draft", *["plant_bug"] * (bug is not None), "insert_verify"]
    # Checking the graphs after every pass takes ten times as long as the passes; it has tests of its own.
    extra: dict[str, Any] = {"verify": {"rule": rule}, "pipeline": {"order": order, "verify": False}}
    extra |= {"max_length": max_length, "cache": {"prefill_chunk": 7, "block_size": block_size}}
    if bug is not None:
        extra |= {"passes": {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}}}
    if name in ("ngram", "none"):
        return compiled(target(), name, k, **extra)
    return compiled(target(), "draft_model", k, draft(name), **extra)


@functools.cache
def forced(name: str, k: int, rule: str = "strict", seed: int = 0, bug: str | None = None) -> Run:
    return forced_run(drafting_stage(decoder(name, k, rule, bug)), PROMPTS, LIMITS, seed=seed)


# The oracle


def oracle(model: PreTrainedModel) -> NextLogits:
    """Logits by the plain model without a cache, -inf for ids the target does not have.

    Padding on the right is not seen by a causal model. Tokens that the draft does not have become its last one.
    """
    vocab = model.config.vocab_size

    @torch.no_grad()
    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        sequences = [[*a, *d] for a, d in zip(accepted, drafted, strict=True)]
        width = max(map(len, sequences))
        ids = torch.tensor([[min(t, vocab - 1) for t in s] + [3] * (width - len(s)) for s in sequences])
        last = torch.tensor([len(s) - 1 for s in sequences])
        logits = model(input_ids=ids, use_cache=False).logits[torch.arange(len(sequences)), last]
        return logits.masked_fill(torch.arange(vocab) >= VOCAB, -torch.inf)

    return next_logits


# History independence, the oracle and the slots, over forced histories

AXES = {"name": (*MODELS,), "k": (1, 4, 7), "rule": ("strict", "probabilistic")}
drafts_and_rules = pytest.mark.parametrize([*AXES], cover(product(AXES), (0, 1)))


@drafts_and_rules
def test_draft_does_not_depend_on_history(name: str, k: int, rule: str) -> None:
    check_fresh_start(forced(name, k, rule))


@drafts_and_rules
def test_drafts_are_those_of_the_plain_model_without_a_cache(name: str, k: int, rule: str) -> None:
    check_oracle(forced(name, k, rule), oracle(draft(name)), rule)


@drafts_and_rules
def test_only_own_and_real_slots_are_written(name: str, k: int, rule: str) -> None:
    check_slots(forced(name, k, rule))


@pytest.mark.parametrize("k", [1, 4, 7])
def test_histories_hold_every_kind_of_step(k: int) -> None:
    run = forced("qwen3", k)
    assert {0, k} <= set(run.accept_counts)
    assert any(0 in step.num_emitted and any(step.num_emitted) for step in run.steps)
    assert len({step.width for step in run.steps}) > 2


def test_histories_reach_the_end_of_a_sequence() -> None:
    ends = [forced("qwen3", k).steps[-1].accepted for k in (1, 4, 7)]
    assert all(len(end[2]) == LIMITS[2] for end in ends[1:])


@pytest.mark.parametrize("name", MODELS)
def test_rejected_rows_are_never_read(name: str) -> None:
    run = forced_run(drafting_stage(decoder(name, 4)), PROMPTS, LIMITS, seed=0, poison=True)
    assert all(cache.isnan().any() for cache in run.steps[-1].caches)
    check_oracle(run, oracle(draft(name)), "strict")


@pytest.mark.parametrize("k", [1, 7])
def test_nothing_outside_the_sequences_is_touched(k: int) -> None:
    run = forced("near", k)
    owned = [slot for row, limit in enumerate(LIMITS) for slot in slots_of(run, row, range(limit))]
    for cache in (*run.state["target_caches"], *run.state["draft_caches"]):
        rows = cache.flatten(0, 1).clone()
        assert len(rows) > len(owned) and rows[owned].any()
        assert not rows.index_fill(0, torch.tensor(owned), 0).any()


def test_a_step_in_which_nobody_is_active_changes_nothing() -> None:
    run = forced_run(drafting_stage(decoder("qwen3", 4, "probabilistic")), PROMPTS, LIMITS, seed=1, steps=6)
    before = {name: _flat(value) for name, value in run.state.items() if name != "num_rows"}
    idle = torch.zeros(3, dtype=torch.int64)
    state = {**run.state, "num_rows": idle, VERIFIED: torch.full((3, 5), -1)}
    with torch.no_grad():
        run.program.step()(window=torch.ones(3, 5, dtype=torch.int64), **state)
    for name, value in before.items():
        assert torch.equal(_flat(run.state[name]), value), name


def _flat(value: Tensor | tuple[Tensor, ...]) -> Tensor:
    return torch.cat([t.flatten() for t in value]) if isinstance(value, tuple) else value.clone()


# The same detectors over real decoding


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize("name", ["near", "qwen3", "sliding window"])
def test_real_decoding_passes_every_detector(name: str, rule: str) -> None:
    run = real_run(decoder(name, 4, rule), ragged_prompts((3, 17, 8)), (30, 41, 23))
    assert [len(tokens) for tokens in run.steps[-1].accepted] == [30, 41, 23]
    assert caught_by(run, oracle(draft(name)), rule) == set()
    assert name != "near" or len(set(run.accept_counts)) > 3


# Planted bugs

PLANTED: dict[str, set[str]] = {
    "noise off by one position": {"oracle"},
    "chained position off by one": {"fresh start", "oracle", "slots"},
    "catch-up skips the last row": {"fresh start", "oracle", "slots"},
    "chained rows not written": {"oracle", "slots"},
    "rejected rows written": {"slots"},
    "inactive rows written": {"fresh start", "slots"},
    "window instead of emitted": {"fresh start", "oracle"},
    "proposals from the row before": {"oracle"},
}


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str) -> None:
    assert caught_by(forced("qwen3", 4, bug=bug), oracle(draft("qwen3")), "strict") >= PLANTED[bug]


@pytest.mark.parametrize("bug", ["noise off by one position", "raw logits kept"])
def test_planted_bugs_of_drawn_rules_are_caught(bug: str) -> None:
    run = forced("qwen3", 4, "probabilistic", bug=bug)
    assert caught_by(run, oracle(draft("qwen3")), "probabilistic") >= {"oracle"}


@pytest.mark.parametrize("bug", PLANTED)
def test_token_equality_misses_planted_bugs(bug: str) -> None:
    options = {**_options(3), "max_new_tokens": 18, "eos_token_id": []}
    assert _lists(decoder("near", 4, bug=bug).generate(PROMPTS, **options)) == _plain_tokens()


@functools.cache
def _plain_tokens() -> list[list[int]]:
    return _lists(decoder("none", 1).generate(PROMPTS, max_new_tokens=18, eos_token_id=[], **_options(3)))


# n-gram lookup


def looked_up(tokens: list[int], k: int, longest: int = 4) -> list[int]:
    """What followed the longest, then latest, earlier occurrence of the last n-gram; padded with -1."""
    for n in range(longest, 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                found = tokens[end : end + k]
                return found + [-1] * (k - len(found))
    return [-1] * k


@functools.cache
def ngram_run(k: int, seed: int, bug: str | None = None) -> Run:
    """A history over few tokens, so that n-grams repeat."""
    prompts = ragged_prompts((3, 9, 5), seed=seed, vocab=7)
    return forced_run(drafting_stage(decoder("ngram", k, bug=bug)), prompts, LIMITS, seed=seed, alphabet=7)


def check_ngram_history(run: Run) -> None:
    """The buffer holds accepted tokens and nothing else, after every step."""
    for step in run.steps:
        assert step.history is not None
        for row, tokens in enumerate(step.accepted):
            started = tokens if len(tokens) > 1 else []
            assert step.history[row].tolist() == started + [harness.UNWRITTEN] * (max(LIMITS) - len(started))


def check_ngram_drafts(run: Run) -> None:
    """Proposals are those of a plain search."""
    for step in run.steps:
        for row, count in enumerate(step.num_emitted):
            if count > 0:
                assert step.drafts[row].tolist() == looked_up(step.accepted[row], run.k)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_ngram_depends_on_accepted_tokens_alone(k: int, seed: int) -> None:
    run = ngram_run(k, seed)
    check_ngram_history(run)
    check_ngram_drafts(run)
    check_fresh_start(run, times=len(run.steps))
    check_slots(run)


@pytest.mark.parametrize("k", [1, 2, 4, 7])
def test_ngram_histories_accept_none_and_all(k: int) -> None:
    counts = {count for seed in range(3) for count in ngram_run(k, seed).accept_counts}
    assert {0, k} <= counts


@pytest.mark.parametrize("bug", ["catch-up skips the last row", "rejected rows written", "window instead of emitted"])
def test_planted_ngram_bugs_are_caught_but_not_by_tokens(bug: str) -> None:
    options = {**_options(3), "max_new_tokens": 18, "eos_token_id": []}
    assert _lists(decoder("ngram", 4, bug=bug).generate(PROMPTS, **options)) == _plain_tokens()
    with pytest.raises(AssertionError):
        check_ngram_history(ngram_run(4, 0, bug))


# Edge cases, through the public API


def same_tokens(tested: SpeculativeDecoder, prompts: Sequence[Tensor], **options: Any) -> GenerateOutput:
    """Decode with and without drafts and compare token by token; returns the former."""
    out = tested.generate(prompts, **options)
    assert _lists(out) == _lists(plain(tested).generate(prompts, **options))
    return out


def plain(tested: SpeculativeDecoder) -> SpeculativeDecoder:
    """The decoder without drafts of the same longest sequence."""
    return decoder("none", 1, max_length=tested.config.max_length)


def _lists(out: GenerateOutput) -> list[list[int]]:
    return [tokens.tolist() for tokens in out.new_tokens]


def _options(rows: int) -> dict[str, Any]:
    return {"temperature": [0.0, 0.8, 1.3][-rows:], "seed": [11, -5, 7][-rows:]}


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("lengths", [(1,), (9,), (1, 1, 1), (1, 12, 2)], ids=str)
def test_batches_of_one_and_prompts_of_one_token(lengths: tuple[int, ...], k: int) -> None:
    prompts = ragged_prompts(lengths)
    same_tokens(decoder("near", k), prompts, max_new_tokens=10, eos_token_id=[], **_options(len(prompts)))


@pytest.mark.parametrize("k", [1, 4, 7])
def test_prompts_up_to_the_longest_sequence(k: int) -> None:
    lengths = (23, 24, 21)
    out = same_tokens(decoder("near", k, max_length=24), ragged_prompts(lengths), max_new_tokens=10, eos_token_id=[],
                      **_options(3))  # fmt: skip
    assert [len(tokens) for tokens in out.new_tokens] == [24 - n for n in lengths]


@pytest.mark.parametrize("room", [1, 2, 3, 6])
def test_more_drafts_than_room(room: int) -> None:
    out = same_tokens(decoder("near", 7), PROMPTS, max_new_tokens=room, eos_token_id=[], **_options(3))
    assert [len(tokens) for tokens in out.new_tokens] == [room] * 3


@pytest.mark.parametrize("name", ["near", "ngram", "sliding window"])
def test_a_sequence_that_ends_leaves_the_others_alone(name: str) -> None:
    free = _lists(decoder("none", 1).generate(PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[], **_options(3)))
    ends = [free[0][4], free[2][9]]
    out = same_tokens(decoder(name, 4), PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=ends, **_options(3))
    assert len({len(tokens) for tokens in out.new_tokens}) > 1
    for tokens, all_tokens in zip(_lists(out), free, strict=True):
        assert tokens == all_tokens[: len(tokens)]


def test_eos_inside_an_accepted_prefix() -> None:
    greedy = _lists(decoder("none", 1).generate(PROMPTS[:1], max_new_tokens=12, eos_token_id=[]))[0]
    at = next(i for i in range(2, 5) if greedy[i] not in greedy[:i])
    out = same_tokens(decoder("itself", 7), PROMPTS[:1], max_new_tokens=12, eos_token_id=greedy[at])
    assert _lists(out) == [greedy[: at + 1]]
    assert out.stats.emitted_per_step == [[at]]


def test_seeds_differ_per_sequence() -> None:
    prompts = [PROMPTS[1]] * 3
    out = same_tokens(decoder("near", 4), prompts, max_new_tokens=NEW_TOKENS, eos_token_id=[], temperature=1.0,
                      seed=[1, 2, 1])  # fmt: skip
    tokens = _lists(out)
    assert tokens[0] == tokens[2] != tokens[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("k", [1, 4])
def test_a_draft_that_is_the_target_is_always_accepted(k: int, temperature: float) -> None:
    """At temperature 1, too: ``strict`` draws drafts with the target's noise."""
    out = same_tokens(decoder("itself", k), PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_id=[], seed=[1, 2, 3],
                      temperature=temperature)  # fmt: skip
    for counts in out.stats.emitted_per_step:
        assert set(counts[:-1]) == {k + 1}
        assert 1 + sum(counts) == NEW_TOKENS


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_pages_are_crossed_and_ends_are_kept(block_size: int) -> None:
    prompts, limits = ragged_prompts((4, 13, 8)), (5, 31, 12)
    run = real_run(decoder("near", 7, block_size=block_size), prompts, limits)
    assert [len(tokens) for tokens in run.steps[-1].accepted] == list(limits)
    assert caught_by(run, oracle(draft("near")), "strict") == set()
    options = {"temperature": run.options.temperature, "top_k": run.options.top_k, "seed": run.options.seeds}
    expected = decoder("none", 1).generate(prompts, max_new_tokens=27, eos_token_id=[], **options)
    for tokens, limit, prompt, new in zip(run.steps[-1].accepted, limits, prompts, _lists(expected), strict=True):
        assert tokens == [*prompt.tolist(), *new][:limit]
