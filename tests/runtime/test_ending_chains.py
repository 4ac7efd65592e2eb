"""Chains of drafts that end early: a draft model on a CPU drafts for as long as it is sure of its tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters import draft_model
from specgraph.drafters.draft_model import least_survival
from specgraph.errors import PassError
from specgraph.ir.graphs import calls
from specgraph.kernels import step
from specgraph.kernels.step.finalize import StepUpdate
from specgraph.specialise import step_cache
from specgraph.specialise.end_chains import EndingStep, ending_chains
from specgraph.specialise.pause_step import PausedStep
from tests.decoding import CONFIG, compiled, in_a_stream_and_a_session
from tests.detectors import check_fresh_start, check_slots
from tests.drafters.test_draft_model import draft, oracle, target
from tests.harness import Options, Run, drafting_stage, forced_run, real_run
from tests.models import double_model, ragged_prompts

K, LEAST = 5, 0.2
"""The models are random, and hardly sure of anything."""
PROMPTS = ragged_prompts((3, 9, 5, 2))
NEW_TOKENS = 24


@pytest.fixture(autouse=True)
def never_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_model, "least_survival", lambda *models: LEAST)


def decoder_of(rule: str = "strict", name: str = "near", **keys: Any) -> SpeculativeDecoder:
    return made({"num_speculative_tokens": K, "adaptive": True, **keys}, rule, draft(name))


def made(
    keys: dict[str, Any], rule: str = "strict", model: Any = None, target_model: Any = None, **extra: Any
) -> SpeculativeDecoder:
    drafting = {"kind": "draft_model", **keys}
    config = {**CONFIG, "draft": drafting, "verify": {"rule": rule}, "lowering": {"name": "eager"}, **extra}
    return specgraph.compile_speculative(target_model or target(), config, draft=model or draft("near"))


@functools.cache
def plain() -> SpeculativeDecoder:
    return compiled(target(), "none", lowering={"name": "eager"})


# When a chain ends


def test_a_chain_ends_sooner_if_the_draft_costs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threshold follows from the bytes of both models, and the step compares with it."""
    monkeypatch.undo()
    small, large = torch.nn.Linear(4, 9, bias=False), torch.nn.Linear(12, 12, bias=False)
    assert least_survival(small, large) == 0.5 and least_survival(small.double(), large) == 0.5**0.5
    assert least_survival(large, small) == 1.0
    small.register_buffer("packed", torch.zeros(108))  # as weights of another scheme are held
    assert least_survival(small, large) == 1.0
    report = made({"adaptive": True}).report()
    assert f"with a probability of {least_survival(draft('near'), target()):.2g}" in report


# What is drafted


def ends(k: int, accepted: list[int], drafts: list[int]) -> int:
    """How many drafts there are, by the draft model without a cache."""
    survival = 1.0
    for count in range(1, k):
        logits = oracle(draft("near"))([accepted], [drafts[: count - 1]])
        survival *= float(logits.softmax(-1).max())
        if survival < LEAST:
            return count
    return k


def check_ends(run: Run) -> set[int]:
    """Chains end where the draft model says so, and not elsewhere. Returns the lengths that occurred."""
    found = set()
    for step_run in run.steps:
        for row, count in enumerate(step_run.num_emitted):
            accepted = step_run.accepted[row]
            goes_on = len(accepted) <= len(PROMPTS[row])  # the prompt does
            if count > 0 and not goes_on and run.usable(row, len(accepted)) == run.k:
                drafts = step_run.drafts[row].tolist()
                length = ends(run.k, accepted, drafts)
                assert [token >= 0 for token in drafts] == [place < length for place in range(run.k)]
                found.add(length)
    return found


@pytest.mark.parametrize("rule", ["strict", "probabilistic"])
def test_a_chain_ends_where_the_draft_model_is_not_sure(rule: str) -> None:
    """The detectors see no trace of a history, and the cache is caught up behind chains that ended early."""
    options = Options((0.0, 0.8, 1.3), (0,) * 3, (11, -5, 7))
    forced = forced_run(drafting_stage(decoder_of(rule)), PROMPTS[:3], (48, 41, 23), seed=0, options=options)
    real = real_run(decoder_of(rule), PROMPTS[:3], (30, 41, 23), options=options)
    for run in (forced, real):
        assert len(check_ends(run)) > 2
        check_fresh_start(run)
    check_slots(forced)


@pytest.mark.parametrize("bug", [lambda rows: rows - 1, lambda rows: rows.clamp(max=1)], ids=["late", "one row"])
def test_a_cache_that_is_not_caught_up_is_found(bug: Any) -> None:
    stage = drafting_stage(decoder_of()).copy()

    def wrong(*given: Any, **options: Any) -> StepUpdate:
        update = StepUpdate(*step.finalize_step(*given, **options))
        return update._replace(num_rows=bug(update.num_rows))

    for node in calls(stage.graph, step.finalize_step):
        node.target = wrong
    with pytest.raises(AssertionError):
        check_fresh_start(forced_run(stage, PROMPTS[:3], (48, 41, 23), seed=0))


@pytest.mark.parametrize("name", ["lfm2", "mamba", "qwen3_next"])
def test_a_recurrent_state_is_caught_up_behind_chains_of_any_length(name: str) -> None:
    """A draft that is the target has all its drafts accepted, unless its state has missed a token or kept a draft."""
    model = double_model(name, 0)
    decoder = made({"num_speculative_tokens": K, "adaptive": True}, model=model, target_model=model)
    for prompt in ragged_prompts((2, 40)):
        stats = decoder.generate([prompt], max_new_tokens=NEW_TOKENS, eos_token_id=[]).stats
        assert len(stats.steps_by_drafts) > 1
        assert sum(stats.emitted_per_step[0]) == sum((k + 1) * count for k, count in stats.steps_by_drafts.items())


# What is emitted

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": [*range(len(PROMPTS))]},
    {"repetition_penalty": 1.2, "return_logprobs": True},
    {"trace": True},
    {"logits_processor": [lambda ids, logits: logits.index_fill(1, torch.tensor([3]), -torch.inf)]},
]


@pytest.mark.parametrize(
    ("options", "first"), [*zip(OPTIONS, (None, "ngram", None, "ngram", "ngram"), strict=True), (OPTIONS[3], None)],
    ids=lambda o: "+".join(o or ["alone"]) if isinstance(o, dict) or not o else o,
)  # fmt: skip
def test_tokens_are_those_of_plain_decoding(options: dict[str, Any], first: str | None) -> None:
    common = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], **options}
    expected = plain().generate(PROMPTS, **common)
    decoder = decoder_of(first=first)
    out = decoder.generate(PROMPTS, **common)
    assert all(map(torch.equal, out.new_tokens, expected.new_tokens))
    assert out.stats.steps < expected.stats.steps
    assert "trace" in options or len(out.stats.steps_by_drafts) > 1


def test_a_sequence_does_not_depend_on_those_beside_it() -> None:
    """Its drafts are the same in a batch, whatever the longest chain there is: seeds hold under other rules, too."""
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], "temperature": 1.0}
    decoder = decoder_of("probabilistic")
    together = decoder.generate(PROMPTS, seed=[*range(len(PROMPTS))], **options)
    for row, prompt in enumerate(PROMPTS):
        alone = decoder.generate([prompt], seed=[row], **options)
        assert torch.equal(alone.new_tokens[0], together.new_tokens[row])
        assert alone.stats.emitted_per_step[0] == together.stats.emitted_per_step[row]


def test_a_stream_and_a_session_end_chains_too() -> None:
    common = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
    expected = [tokens.tolist() for tokens in plain().generate(PROMPTS, **common).new_tokens]
    streamed, found, stats = in_a_stream_and_a_session(decoder_of(), PROMPTS, **common)
    assert streamed == expected and found == expected
    assert len(stats.steps_by_drafts) > 2


# What is run


def links(variant: Any) -> list[torch.nn.Module]:
    whole = variant.after if isinstance(variant, PausedStep) else variant
    assert isinstance(whole, EndingStep)
    return [*whole.links]


def noted(decoder: SpeculativeDecoder) -> list[None]:
    """What gets an entry for every part of its steps that makes a further draft and is run."""
    ran: list[None] = []
    for variant in decoder._step_cache.steps.values():
        for link in links(variant):
            link.register_forward_hook(lambda *_: ran.append(None))
    return ran


@pytest.mark.parametrize("options", [{}, OPTIONS[-1]], ids=["whole", "paused"])
def test_calls_behind_the_end_are_left_out(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And with it, steps do what whole steps do."""
    common = {"max_new_tokens": NEW_TOKENS, "eos_token_id": [], **options}
    decoder, whole = decoder_of(), decoder_of()
    decoder.generate(PROMPTS[:1], **common)
    ran = noted(decoder)
    out = decoder.generate(PROMPTS[:1], **common)
    monkeypatch.setattr(step_cache, "ending_chains", lambda whole, **_: whole)
    expected = whole.generate(PROMPTS[:1], **common)
    assert torch.equal(out.new_tokens[0], expected.new_tokens[0])
    assert out.stats.steps_by_drafts == expected.stats.steps_by_drafts
    needed = sum(max(drafts - 1, 0) * count for drafts, count in out.stats.steps_by_drafts.items())
    assert needed <= len(ran) < (K - 1) * out.stats.steps


def test_no_draft_is_made_that_no_step_verifies() -> None:
    """Not behind an EOS, nor where the longest sequence has no room, nor for a prompt that goes on."""
    (tokens,) = plain().generate(PROMPTS[:1], max_new_tokens=NEW_TOKENS, eos_token_id=[]).new_tokens
    for most, eos in ((NEW_TOKENS, int(tokens[9])), (9, [])):
        decoder = decoder_of(name="itself", num_speculative_tokens=16)
        decoder.generate([PROMPTS[1]], max_new_tokens=most, eos_token_id=eos)
        ran = noted(decoder)
        out = decoder.generate([PROMPTS[1]], max_new_tokens=most, eos_token_id=eos)
        assert len(ran) < len(out.new_tokens[0])


def test_a_step_whose_chain_is_read_elsewhere_cannot_be_cut() -> None:
    whole = decoder_of()._program.executable()
    assert isinstance(ending_chains(whole), EndingStep)
    (*_, survival) = calls(whole.graph, step.survival)
    results: Any = whole.graph.output_node()
    results.args = ((*results.args[0], survival.args[0]),)
    with pytest.raises(PassError, match=r"A chain of drafts ends only if nothing else is read of it, and .* is"):
        ending_chains(fx.GraphModule(whole, whole.graph))


# Where it is done


def test_a_number_that_is_given_holds_for_every_step() -> None:
    fixed = compiled(target(), "draft_model", K, draft("near"), lowering={"name": "eager"})
    off = decoder_of(adaptive=False)
    for decoder in (fixed, off):
        assert not decoder._engines.adapts and "K is chosen" not in decoder.report()
        out = decoder.generate(PROMPTS[:1], max_new_tokens=9, eos_token_id=[])
        assert {*out.stats.steps_by_drafts} == {K}


def test_a_table_holds_beside_adaptive() -> None:
    decoder = made({"num_speculative_tokens": {1: 3, 2: 1}, "adaptive": True})
    assert not decoder._engines.adapts
    for count, drafts in ((1, 3), (2, 1)):
        out = decoder.generate(PROMPTS[:count], max_new_tokens=9, eos_token_id=[])
        assert drafts in out.stats.steps_by_drafts and max(out.stats.steps_by_drafts) <= 3


def test_where_chains_cannot_end_k_follows_from_what_was_accepted_or_the_error_says_what_is_missing() -> None:
    assert "by how many drafts were accepted lately" in made({"adaptive": True}, "typical").report()
    enabled = {"parallel_draft": {"enabled": True}}
    with pytest.raises(PassError, match=r"the chain of this draft_model ends early, .*set draft\.parallel=true, or"):
        made({"mask_token_id": 3}, passes=enabled)
    chosen = made({"mask_token_id": 3, "adaptive": False}, passes=enabled)
    out = chosen.generate(PROMPTS, max_new_tokens=9, eos_token_id=[])
    expected = plain().generate(PROMPTS, max_new_tokens=9, eos_token_id=[])
    assert all(map(torch.equal, out.new_tokens, expected.new_tokens))


def test_without_a_number_a_draft_model_drafts_up_to_sixteen_tokens() -> None:
    for rule, most in (("strict", 16), ("probabilistic", 4)):
        decoder = made({}, rule)
        assert decoder._program.drafter.num_speculative_tokens == most
        assert decoder._engines.adapts == (rule == "strict")
    line = f"K is chosen for each step, while all drafts are right with a probability of {LEAST}, as the draft sees it"
    assert line in made({}).report()


def test_a_longest_sequence_that_is_shorter_is_no_error() -> None:
    common: dict[str, Any] = {"max_new_tokens": 7, "eos_token_id": []}
    prompt = torch.tensor([3, 1])
    short = made({}, max_length=9)
    assert short._program.drafter.num_speculative_tokens == 8
    (expected,) = plain().generate([prompt], **common).new_tokens
    assert torch.equal(short.generate([prompt], **common).new_tokens[0], expected)


def test_survival_is_a_product_that_ends_at_the_least() -> None:
    logits = torch.tensor([[0.6, 0.4], [0.9, 0.1], [1.0, 0.0]]).log().unsqueeze(1)
    wanted = torch.tensor([9, 9, 1])

    def product(before: Tensor | None) -> list[float]:
        return [round(x, 4) for x in step.survival(logits, wanted, before, row=0, least=0.5).tolist()]

    assert product(None) == [0.6, 0.9, 0.0]
    assert product(torch.tensor([0.6, 0.9, 1.0])) == [0.0, 0.81, 0.0]
    assert step.survival(logits * torch.nan, wanted, None, row=0, least=0.5).tolist() == [0.0] * 3
    drafts = step.where_surviving(torch.tensor([[7], [8], [9]]), torch.tensor([0.0, 0.81, 0.5]))
    assert drafts.tolist() == [[-1], [8], [9]]
