"""``draft.max_context``: behind it sequences have no drafts, and no token and no cache that others use tells of it."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph import Session, SpeculativeDecoder
from specgraph.config import CacheConfig, load_config
from specgraph.errors import ConfigError
from specgraph.ir.verifier import verify_program
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.schedule.policy import Policy
from specgraph.runtime.schedule.recent_acceptance import RecentAcceptance, SharedAcceptance
from specgraph.runtime.schedule.sequences import ActiveSequence
from specgraph.runtime.schedule.step_costs import TypicalCosts
from specgraph.specialise import specialise_step
from specgraph.specialise.mode import Mode
from tests.capturing import captured
from tests.decoding import CONFIG, compiled
from tests.drafters.test_lookup_first import LOOKUPS, p_value_of, small
from tests.drafters.test_matrix import DRAFTERS, MATCH, PROMPTS, VOCAB, draft, heads_exported_once, model
from tests.models import ragged_prompts
from tests.runtime.test_k_by_load import EACH, KINDS, SIBLINGS, in_a_session
from tests.runtime.test_k_by_load import plain as tokens_without_drafts
from tests.runtime.test_prefixes import REUSING, drafts_of

__all__ = ["heads_exported_once"]

K, LIMIT = 5, 16
"""Six sequences have 15 to 35 tokens at their ends, and prompts of 3 to 9."""
OPTIONS: list[dict[str, Any]] = [{}, {"adaptive": True}, {"num_speculative_tokens": {1: 5, 3: 2, 5: 0}}]


def limited(drafter: str, first: str | None = None, rule: str = "strict", **options: Any) -> SpeculativeDecoder:
    own = {"num_speculative_tokens": K, "max_context": LIMIT, "first": first, "first_match": MATCH, **options}
    config = {**CONFIG, "draft": {**DRAFTERS[drafter], **own}, "verify": {"rule": rule}, "max_length": 64}
    return specgraph.compile_speculative(model("llama"), config, draft=draft(drafter, "llama"))


@functools.cache
def log_probabilities() -> list[list[float]]:
    out = compiled(model("llama"), "none", max_length=64).generate(
        PROMPTS, eos_token_id=[], return_logprobs=True, **EACH
    )
    return [said.tolist() for said in out.logprobs or []]


@pytest.mark.parametrize(("drafter", "first"), [kind for kind in KINDS if kind[0] not in SIBLINGS])
def test_no_token_and_no_log_probability_changes_where_a_sequence_crosses_the_limit(
    drafter: str, first: str | None
) -> None:
    """Read at once, and one step behind, while others arrive that are below it."""
    tested = limited(drafter, first, **OPTIONS[KINDS.index((drafter, first)) % len(OPTIONS)])
    out = tested.generate(PROMPTS, eos_token_id=[], return_logprobs=True, **EACH)
    assert [own.tolist() for own in out.new_tokens] == tokens_without_drafts()
    assert [said.tolist() for said in out.logprobs or []] == log_probabilities()
    tokens, widths = in_a_session(captured(tested))
    assert tokens == tokens_without_drafts() and {0, K} <= widths | {K}
    assert {True, False} == {mode.plain for mode in tested._step_cache.steps}
    assert any(mode.drafts != 0 for mode in tested._step_cache.steps if mode.plain) == (first is not None)
    but = "" if first is None else f" but those of {first}"
    assert f"a sequence of more than {LIMIT} tokens has no drafts{but}\n" in tested.report()


def verified_by_length(tested: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> dict[int, set[int]]:
    """How many drafts decode steps verify of sequences, by the number of tokens that are known of these."""
    found: dict[int, set[int]] = {}
    decode = Runner.decode

    def observed(self: Runner, rows: list[int], *more: Any) -> Any:
        lengths, counts = (self.state[name][torch.tensor(rows)].tolist() for name in ("start", "num_rows"))
        for start, count in zip(lengths, counts, strict=True):
            if count:
                found.setdefault(start + 1, set()).add(count - 1)
        return decode(self, rows, *more)

    monkeypatch.setattr(Runner, "decode", observed)
    tested.generate(PROMPTS, max_new_tokens=30, eos_token_id=[])
    return found


def test_each_sequence_has_drafts_up_to_the_limit_and_none_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(tested: SpeculativeDecoder) -> None:
        found = verified_by_length(tested, monkeypatch)
        assert all(count == {K} for length, count in found.items() if length <= LIMIT)
        assert all(count == {0} for length, count in found.items() if length > LIMIT)
        assert {LIMIT - 1, LIMIT, LIMIT + 1} & found.keys() and max(found) > LIMIT + 5

    check(limited("eagle3"))
    for wrong in (LIMIT - 1, LIMIT + 1):
        with pytest.raises(AssertionError):
            check(limited("eagle3", max_context=wrong))


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "mtp, 3 chained", "dspark"])
def test_a_step_of_long_sequences_alone_calls_no_drafter(drafter: str) -> None:
    steps, called = limited(drafter)._step_cache, []
    for mode in (Mode(drafts=0), Mode(drafts=0, plain=True)):
        program = steps._make([*steps._passes(mode)])
        verify_program(program)
        called.append({str(node.target) for node in program.graph.find_nodes(op="call_module")})
    assert called[1] == {"target", "lm_head"} < called[0]


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize(
    ("drafter", "first"), [("draft_model", "ngram"), ("mtp, 3 chained", "suffix"), ("dspark", "ngram")]
)
def test_a_lookup_goes_on_alone(drafter: str, first: str, rule: str) -> None:
    """With all of its drafts or fewer, and with what says of them that they were drawn from nothing."""
    steps = limited(drafter, first, rule)._step_cache
    for drafts in (None, 2, 0):
        program = steps._make([*steps._passes(Mode(drafts=drafts, plain=True))])
        verify_program(program)
        assert {node.target for node in program.graph.find_nodes(op="call_module")} <= {
            "target",
            "lm_head",
            "target_to_draft",
        }
        names = {getattr(node.target, "__name__", "") for node in program.graph.nodes}
        assert not {"prefer_found", "propose_", "keep_confidence_"} & names and "record_accepted_" in names
        looked_up = {f"{first}_lookup", *(["keep_point_mass_"] if rule == "block" else [])}
        assert looked_up & names == (looked_up if drafts != 0 else set())


@pytest.mark.parametrize(("drafter", "first", "adaptive"), [("eagle3", "ngram", None), ("draft_model", "suffix", True)])
def test_behind_the_limit_drafts_are_those_of_the_lookup(drafter: str, first: str, adaptive: bool | None) -> None:
    """In steps in which others are in front of it, and in steps without the drafter; also where chains end early."""

    def check(tested: SpeculativeDecoder) -> None:
        out, untraced = (tested.generate(PROMPTS, max_new_tokens=30, eos_token_id=[], trace=on) for on in (True, False))
        assert out.stats.emitted_per_step == untraced.stats.emitted_per_step
        own, found_behind = set(), 0
        for step in out.trace or ():
            text = [*PROMPTS[step.sequence].tolist(), *out.new_tokens[step.sequence].tolist()]
            found = [token for token in LOOKUPS[first](text[: step.position], K) if token >= 0]
            drafts = [draft.token for draft in step.drafts]
            if not step.prompt and drafts != found[: len(text) - step.position - 1]:
                own.add(step.position)
            elif step.position > LIMIT:
                found_behind += bool(drafts)
        assert max(own) == LIMIT and found_behind > 10

    check(limited(drafter, first, adaptive=adaptive))
    for wrong in (LIMIT - 1, LIMIT + 1):
        with pytest.raises(AssertionError):
            check(limited(drafter, first, adaptive=adaptive, max_context=wrong))


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_behind_the_limit_tokens_have_the_distribution_of_the_target(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sequences cross it with their first token. The state then says that drafts were drawn until steps without the
    drafter say that theirs were not."""
    assert p_value_of(small(rule, max_context=3, first_match=2)) > 1e-3
    sweep = specialise_step._sweep
    monkeypatch.setattr(
        specialise_step, "_sweep", lambda program, count, _: sweep(program, count, specialise_step.ABOUT_DRAFTS)
    )
    assert p_value_of(small(rule, max_context=3, first_match=2), 2) < 1e-9


# What long sequences leave to others


def emitted(session: Session, prompt: Tensor, count: int) -> Tensor:
    """A prompt and what a session gives behind it."""
    session.submit(prompt, max_new_tokens=count, eos_token_id=[])
    return torch.tensor([*prompt.tolist(), *(token for event in session for token in event.tokens)])


@pytest.mark.parametrize(("drafter", "first"), [("draft_model", None), ("mtp, 3 chained", "suffix"), ("dflash", None)])
def test_shorter_sequences_share_what_longer_ones_have_cached(
    drafter: str, first: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have crossed the limit, and those that began behind it."""
    decoder, long = limited(drafter, first, "probabilistic"), ragged_prompts((30,), vocab=VOCAB)[0]
    with decoder.session() as session:
        crossed = emitted(session, long[:10], 24)
        expected = [drafts_of(session, whole[:LIMIT]) for whole in (crossed, long)]

    def check() -> None:
        decoder._runners.cache = CacheConfig(**REUSING)
        decoder.forget_prefixes()
        with decoder.session() as session:
            assert torch.equal(emitted(session, long[:10], 24), crossed)
            emitted(session, long, 4)
            for whole, own in zip((crossed, long), expected, strict=True):
                torch.testing.assert_close(drafts_of(session, whole[:LIMIT]), own, rtol=0, atol=1e-9)
            assert session.stats.reused_tokens >= 2 * (LIMIT - 6)

    check()
    monkeypatch.setattr(Policy, "too_long", lambda self, sequence: too_long_too_early(sequence))
    with pytest.raises(AssertionError):
        check()


def too_long_too_early(sequence: ActiveSequence) -> bool:
    return sequence.request.prompt.numel() + len(sequence.new_tokens) > LIMIT - 6


def test_a_sequence_without_drafts_teaches_nothing_about_drafts() -> None:
    """Two sequences, the first of which is too long, beside the second alone."""
    rates = []
    for rows in ([0, 1], [1]):
        shared = SharedAcceptance(K)
        worth = RecentAcceptance(2, shared, TypicalCosts(), Counter())
        worth.begin([0, 1])
        for _ in range(9):
            worth.stop([0])
            step = worth.enqueued("kind", rows, 0, K)
            worth.read(step, [{0: 1, 1: 4}[row] for row in rows], 1.0)
        rates.append(shared.rates.tolist())
        assert not worth._own[0].any() and worth._own[1].all()
    assert rates[0] == rates[1]


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"draft.max_context=9 says .* the drafter none makes none. Leave it out"):
        specgraph.compile_speculative(model("llama"), {"draft": {"kind": "none", "max_context": 9}})
    with pytest.raises(ConfigError, match=r"draft.max_context must be at least 1, got 0"):
        load_config({"draft.max_context": 0})


@pytest.mark.parametrize("drafter", ["eagle3", "draft_model"])
def test_a_trace_shows_that_there_are_no_drafts(drafter: str) -> None:
    """Beside a sequence that has some all the time."""
    out = limited(drafter).generate(PROMPTS[:2], max_new_tokens=[30, 5], eos_token_id=[], trace=True)
    steps = [step for step in out.trace or () if step.sequence == 0 and not step.prompt]
    assert [bool(step.drafts) for step in steps] == [step.position <= LIMIT for step in steps]
    assert steps[-1].position > LIMIT and out.new_tokens[0].tolist() == tokens_behind(PROMPTS[0], 30)


def tokens_behind(prompt: Tensor, count: int) -> list[int]:
    out = compiled(model("llama"), "none").generate([prompt], max_new_tokens=count, eos_token_id=[])
    tokens: list[int] = out.new_tokens[0].tolist()
    return tokens
