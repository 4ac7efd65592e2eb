"""What a trace says of drafts: against transformers' own forward pass, and against what was emitted."""

from __future__ import annotations

import copy
import json
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper

from specgraph import InputError
from specgraph.runtime.execution.results import TracedRow
from specgraph.runtime.outputs.trace import Trace, TracedDraft, TracedStep, own_standing
from tests.decoding import compiled
from tests.drafters.test_matrix import DRAFTERS, PROMPTS, SIBLINGS, decoder, heads_exported_once
from tests.models import ragged_prompts, shared_model
from tests.runtime.test_decoder import noisy_copy
from tests.runtime.test_runner import replaying

__all__ = ["heads_exported_once"]
SHORT = ragged_prompts((3, 17, 8, 1))
OPTIONS: dict[str, Any] = {
    "temperature": [0.0, 1.0, 0.7, 0.0], "top_k": [0, 0, 5, 0], "seed": [1, 2, 3, 4], "eos_token_id": [],
    "max_new_tokens": 14,
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def draft() -> Any:
    return noisy_copy()


def next_logits(model: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([tokens])).logits[:, -1]
    return logits


def rank(model: Any, tokens: list[int], token: int) -> int:
    """The place of the next token by transformers' own logits."""
    return next_logits(model, tokens)[0].argsort(descending=True, stable=True).tolist().index(token) + 1


def probabilities(model: Any, tokens: list[int], sequence: int) -> Tensor:
    """What the next token is drawn from by transformers' own classes; at temperature 1 for a greedy sequence."""
    logits = next_logits(model, tokens)
    if (temperature := OPTIONS["temperature"][sequence]) > 0:
        logits = TemperatureLogitsWarper(temperature)(None, logits)
    if OPTIONS["top_k"][sequence]:
        logits = TopKLogitsWarper(OPTIONS["top_k"][sequence])(None, logits)
    return logits.softmax(-1)[0]


@pytest.mark.parametrize("rule", ["strict", "probabilistic"])
def test_probabilities_are_those_of_the_models_themselves(rule: str, model: Any, draft: Any) -> None:
    tested = compiled(model, "draft_model", 3, draft=draft, verify={"rule": rule})
    out = tested.generate(SHORT, trace=True, **OPTIONS)
    assert out.trace is not None and sum(len(step.drafts) for step in out.trace) > 60
    tokens = [prompt.tolist() for prompt in SHORT]
    for step in out.trace:
        assert step.position == len(tokens[step.sequence])
        known = list(tokens[step.sequence])
        for place, traced in enumerate(step.drafts):
            target, own = (float(probabilities(m, known, step.sequence)[traced.token]) for m in (model, draft))
            assert traced.target_probability == pytest.approx(target, rel=1e-5, abs=1e-9), (step, place)
            assert traced.draft_probability == pytest.approx(own, rel=1e-5, abs=1e-9), (step, place)
            assert traced.target_rank == rank(model, known, traced.token), (step, place)
            known.append(traced.token)
        known = [*tokens[step.sequence], *step.tokens]
        assert step.own_token == known.pop() and step.own_probability == pytest.approx(
            float(probabilities(model, known, step.sequence)[step.own_token]), rel=1e-5, abs=1e-9
        )
        assert step.own_rank == rank(model, known, step.own_token)
        assert OPTIONS["temperature"][step.sequence] > 0 or step.own_rank == 1
        tokens[step.sequence] += step.tokens
    ranks = {draft.target_rank for step in out.trace for draft in step.drafts}
    assert 1 in ranks and len(ranks) > 9
    assert tokens == [[*a.tolist(), *b.tolist()] for a, b in zip(SHORT, out.new_tokens, strict=True)]


def check(out: Any, prompts: list[Any]) -> Trace:
    """The trace tells the same story as the tokens and the statistics."""
    trace: Trace = out.trace
    for step in trace:
        own = step.own_probability
        assert (own is None) == (step.own_token is None) and (own is None or 0 < own <= 1 + 1e-6)
        assert (own is None) == (step.own_rank is None) and (step.own_rank is None or step.own_rank > 0)
        assert all(draft.target_rank > 0 for draft in step.drafts)
    for number, (prompt, new) in enumerate(zip(prompts, out.new_tokens, strict=True)):
        steps = trace.of(number)
        assert [token for step in steps for token in step.tokens] == new.tolist()
        assert steps[0].prompt and steps[0].position == len(prompt) and not steps[0].drafts
        decoded = [step for step in steps if not step.prompt]
        assert [len(step.tokens) for step in decoded] == out.stats.emitted_per_step[number]
        for step in decoded:
            accepted = [draft.token for draft in step.drafts if draft.accepted]
            assert accepted == [*step.tokens[: len(accepted)]] and len(step.tokens) - len(accepted) in (0, 1)
            assert [draft.accepted for draft in step.drafts] == sorted((d.accepted for d in step.drafts), reverse=True)
            assert all(0 <= draft.target_probability <= 1 + 1e-6 for draft in step.drafts) and step.seconds > 0
    assert [step.step for step in trace] == sorted(step.step for step in trace)
    return trace


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name not in SIBLINGS])
def test_every_drafter_is_traced_and_emits_the_same(name: str) -> None:
    tested = decoder(name, None, "llama", "strict", 3, max_length=64)
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 5, "eos_token_id": []}
    plain = tested.generate(PROMPTS, **options)
    out = tested.generate(PROMPTS, trace=True, **options)
    assert plain.trace is None and all(map(torch.equal, out.new_tokens, plain.new_tokens))
    trace = check(out, PROMPTS)
    found = [draft.draft_probability for step in trace for draft in step.drafts]
    lookup = name in ("ngram", "suffix")
    assert found and all((probability is None) == lookup for probability in found)
    known = {"target": "LlamaForCausalLM", "rule": "strict", "num_speculative_tokens": 3}
    assert trace.about == {"drafter": trace.about["drafter"], **known, "temperatures": [1.0] * len(PROMPTS)}


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block", "typical"])
def test_every_rule_is_traced(rule: str) -> None:
    tested = decoder("eagle3", None, "llama", rule, 3, max_length=64)
    trace = check(tested.generate(PROMPTS, trace=True, max_new_tokens=12, temperature=1.0, seed=5), PROMPTS)
    rejected = [step.rejected for step in trace if step.rejected is not None]
    if rule == "probabilistic":  # it rejects only what the target thinks less probable than the drafter does
        assert rejected and all(r.target_probability < r.draft_probability for r in rejected)  # type: ignore[operator]
    if rule == "strict":  # a greedy target's own token is the most probable one
        greedy = check(tested.generate(PROMPTS, trace=True, max_new_tokens=12), PROMPTS)
        instead = [(step.own_probability, step.rejected) for step in greedy if step.rejected is not None]
        assert instead and all(own is not None and own >= draft.target_probability for own, draft in instead)
        assert all(step.own_rank in (1, None) for step in greedy)
        assert all((draft.target_rank == 1) == draft.accepted for step in greedy for draft in step.drafts[:1])


def test_drafts_that_were_looked_up_were_not_drawn(model: Any, draft: Any) -> None:
    tested = compiled(
        model, "draft_model", 3, draft=draft, max_length=96, **{"draft.first": "ngram", "draft.first_match": 1}
    )
    prompts = ragged_prompts((9, 30))
    trace = check(tested.generate(prompts, trace=True, max_new_tokens=24, eos_token_id=[]), prompts)
    known = {draft.draft_probability is None for step in trace for draft in step.drafts}
    assert known == {False, True}


@pytest.mark.parametrize("k", [{1: 3, 3: 1, 4: 0}, 3])
def test_replayed_steps_tell_the_same(k: Any, model: Any, draft: Any) -> None:
    """One step is enqueued ahead there, and prompts run beside sequences that decode."""
    options = {**OPTIONS, "max_new_tokens": [14, 9, 20, 5], "trace": True}
    tested = replaying("draft_model", k=k, draft=draft)
    found = check(tested.generate(SHORT, **options), SHORT)
    again = check(tested.generate(SHORT, **options), SHORT)
    assert _story(found) == _story(again)
    if k == 3:
        plain = check(compiled(model, "draft_model", 3, draft=draft).generate(SHORT, **options), SHORT)
        assert _story(found) == _story(plain)


def _story(trace: Trace) -> list[Any]:
    return sorted(
        (step.sequence, step.position, step.tokens,
         tuple((d.token, d.accepted, round(d.target_probability, 6)) for d in step.drafts))
        for step in trace
    )  # fmt: skip


def test_an_eos_among_the_drafts_ends_the_trace(model: Any) -> None:
    """The target drafts for itself, so the EOS is an accepted draft, and nothing of the target's own follows."""
    tested = compiled(model, "draft_model", 3, draft=model)
    free = tested.generate(SHORT[:1], max_new_tokens=14, eos_token_id=[]).new_tokens[0].tolist()
    place = next(place for place in range(2, 14) if free[place] not in free[:place] and place % 4 in (1, 2, 3))
    out = tested.generate(SHORT[:1], max_new_tokens=14, eos_token_id=free[place], trace=True)
    last = check(out, SHORT[:1])[-1]
    assert out.finish_reasons == ["eos"] and last.own_token is None and last.num_accepted == len(last.tokens)


def test_steps_that_wait_for_the_host_are_traced(model: Any, draft: Any) -> None:
    def forbid(_: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        scores[:, ::2] = -torch.inf
        return scores

    tested = compiled(model, "draft_model", 3, draft=draft)
    out = tested.generate(SHORT, trace=True, max_new_tokens=9, logits_processor=[forbid], eos_token_id=[])
    trace = check(out, SHORT)
    even = [draft for step in trace for draft in step.drafts if draft.token % 2 == 0]
    assert even and all(draft.target_probability == 0 and not draft.accepted for draft in even)
    chosen = [step for step in trace if step.own_token is not None]
    assert all(step.own_token % 2 and step.own_probability > 0 for step in chosen)  # type: ignore[operator]


class Words:
    """A tokenizer of which every token is a word."""

    def decode(self, tokens: Any) -> str:
        return "".join(f" w{int(token)}" for token in tokens)


def test_lines_say_all_of_it(model: Any, draft: Any, tmp_path: Path) -> None:
    out = compiled(model, "draft_model", 3, draft=draft).generate(SHORT, trace=True, **OPTIONS)
    lines = out.trace.save(tmp_path / "trace.jsonl", Words()).read_text().splitlines()
    about, *steps = map(json.loads, lines)
    assert about["trace"] == 1 and about["prompts"] == [prompt.tolist() for prompt in SHORT]
    assert about["texts"][3] == f" w{int(SHORT[3][0])}" and len(steps) == len(out.trace)
    for line, step in zip(steps, out.trace, strict=True):
        assert (line["sequence"], line["tokens"]) == (step.sequence, [*step.tokens])
        assert line["texts"] == [f" w{token}" for token in step.tokens]
        assert [d["accepted"] for d in line["drafts"]] == [d.accepted for d in step.drafts]
        assert [d["rank"] for d in line["drafts"]] == [d.target_rank for d in step.drafts]
        assert (line["own"], line["own_rank"]) == (step.own_probability, step.own_rank)
    assert all(json.dumps(line) for line in steps) and "NaN" not in "".join(lines)
    kept = pickle.loads(pickle.dumps(out)).trace
    assert [*kept] == [*out.trace]


def test_text_shows_accepted_and_rejected_drafts(model: Any, draft: Any) -> None:
    out = compiled(model, "draft_model", 3, draft=draft).generate(SHORT[:2], trace=True, max_new_tokens=9)
    step = next(step for step in out.trace if step.rejected and step.num_accepted)
    plain, colored = out.trace.text(Words(), color=False), out.trace.text(Words(), color=True)
    assert out.trace.text(Words()) == plain  # since standard output is no terminal here
    accepted, rejected = step.drafts[0], step.rejected
    assert rejected is not None and rejected.draft_probability is not None
    assert f"[·w{accepted.token}]" in plain and f"\033[32m·w{accepted.token}\033[0m" in colored
    target = f"target {rejected.target_probability:.2g}, rank {rejected.target_rank}"
    why = f"({target}, draft {rejected.draft_probability:.2g})"
    instead = f"·w{step.own_token} (target {step.own_probability:.2g}, rank {step.own_rank})"
    assert instead in plain and instead in colored and plain.count("(target") == 2 * plain.count("~ (target")
    assert f"~·w{rejected.token}~ {why}" in plain and f"\033[31;9m·w{rejected.token}\033[0m {why}" in colored
    assert plain.startswith("sequence 0\n") and "\nsequence 1\n" in plain and "\033" not in plain
    assert str(out.trace).startswith(f"Trace({len(out.trace)} steps of 2 sequences")


def test_streams_are_traced_as_they_go(model: Any, draft: Any) -> None:
    tested = compiled(model, "draft_model", 3, draft=draft)
    stream = tested.stream(SHORT, trace=True, **OPTIONS)
    assert stream.trace is not None
    sizes = [len(stream.trace) for _ in stream]
    assert sizes == sorted(sizes) and sizes[0] >= 1
    assert _story(stream.trace) == _story(tested.generate(SHORT, trace=True, **OPTIONS).trace)
    assert tested.stream(SHORT, max_new_tokens=1).trace is None


def test_a_copy_of_a_trace_has_what_was_known_then(model: Any, draft: Any) -> None:
    stream = compiled(model, "draft_model", 3, draft=draft).stream(SHORT, trace=True, **OPTIONS)
    for _ in range(4):
        next(stream)
    copies = [copy.copy(stream.trace), copy.deepcopy(stream.trace), pickle.loads(pickle.dumps(stream.trace))]
    known = len(stream.trace)  # type: ignore[arg-type]
    for _ in stream:
        pass
    assert 0 < known < len(stream.trace)  # type: ignore[arg-type]
    assert all([*each] == stream.trace[:known] for each in copies)  # type: ignore[index]


def test_what_a_criterion_cuts_off_is_not_in_the_trace(model: Any, draft: Any) -> None:
    longest = max(map(len, SHORT)) + 6
    out = compiled(model, "draft_model", 3, draft=draft).generate(
        SHORT, trace=True, stopping_criteria=[lambda tokens, scores: tokens.shape[1] >= longest], **OPTIONS
    )
    assert "stop" in out.finish_reasons
    for number, new in enumerate(out.new_tokens):
        assert [token for step in out.trace.of(number) for token in step.tokens] == new.tolist()


def test_what_is_no_flag_is_refused(model: Any) -> None:
    with pytest.raises(InputError, match="trace"):
        compiled(model, "none").generate(SHORT, trace="yes")


def test_a_step_without_drafts_says_nothing_of_drafts() -> None:
    step = TracedStep(0, 0, 3, (), (7,), 0.1)
    assert step.rejected is None and step.num_accepted == 0 and step.own_token == 7 and step.own_probability is None


@pytest.mark.parametrize(("cut", "own"), [((5, 6, 8), 0.9), ((5, 6), 0.25), ((5,), None)])
def test_the_standing_of_a_token_that_the_host_has_cut_off_is_not_taken(cut: tuple[int, ...], own: Any) -> None:
    """The step emitted 5, 6 and 8. At its limit of tokens, the host may take fewer."""
    drafts = tuple(TracedDraft(token, place < 1, 0.25, None, 4) for place, token in enumerate((5, 6)))
    if len(cut) == 3:
        drafts = tuple(replace(draft, accepted=True) for draft in drafts)
    found = own_standing(drafts, cut, TracedRow([], [], [], math.log(0.9), [], 2))
    assert found == {None: (None, None), 0.25: (0.25, 4), 0.9: (pytest.approx(0.9), 2)}[own]
