"""Random operations on a session; the oracle is plain decoding of each request alone.

Hypothesis chooses the operations, and shortens a failing list of them to the few that matter. Requests have different
options, begin with what earlier ones have left in the cache, wait for state rows and pages, and are cancelled; weights
change between steps; and calls of ``stream`` run beside the session.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transformers import PreTrainedModel

from specgraph import Event, SpeculativeDecoder
from specgraph.runtime.memory.pages import PagePool
from tests.decoding import CONFIG, compiled
from tests.models import make_model, ragged_prompts
from tests.runtime.test_decoder import noisy_copy

STATE_ROWS, LONGEST, POOL = 3, 48, 80
"""Sequences that run together, their tokens at most, and the tokens of all pages, which two long sequences fill."""
BEGINNINGS = [prompt.tolist() for prompt in ragged_prompts((16, 9, 1))]
"""What prompts begin with, so that many of them share pages."""
VERSIONS = 2
"""The weights are negated and negated back, so there are two versions of the model."""

OPTIONS = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(0, 12),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "eos_token_id": st.sampled_from([[], [7, 9, 11, 40, 60]]),
    },
    optional={
        "top_k": st.just(20),
        "repetition_penalty": st.just(1.3),
        "sequence_bias": st.just({(5,): 4.0}),
    },
)
PROMPTS = st.builds(
    lambda beginning, length, tail: BEGINNINGS[beginning][:length] + tail,
    st.integers(0, len(BEGINNINGS) - 1),
    st.integers(1, 16),
    st.lists(st.integers(3, 6), max_size=6),
)


@functools.cache
def model() -> PreTrainedModel:
    return make_model("llama", dtype=torch.float64)


@functools.cache
def plain() -> SpeculativeDecoder:
    return compiled(model(), "none", max_length=LONGEST)


@functools.cache
def drafted() -> SpeculativeDecoder:
    cache = {**CONFIG["cache"], "reuse_prefixes": True, "pool_tokens": POOL}
    return compiled(model(), "draft_model", 3, noisy_copy(), max_batch_size=STATE_ROWS, max_length=LONGEST, cache=cache)


def negate_weights() -> None:
    """Every key and value of the first layer changes."""
    attention: Any = model().base_model.layers[0].self_attn
    with torch.no_grad():
        for linear in (attention.k_proj, attention.v_proj):
            linear.weight.neg_()


@dataclass
class Submitted:
    """A request and what has come of it. ``expected`` is None where the weights changed while it was under way."""

    expected: tuple[list[int], str] | None
    most: int
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    cancelled: bool = False


class Sessions(RuleBasedStateMachine):
    """A session, and what every request that was submitted to it must give."""

    answers: dict[str, tuple[list[int], str]] = {}  # noqa: RUF012  (what plain decoding has given in any example)

    def __init__(self) -> None:
        super().__init__()
        self.session = drafted().session()
        self.version = 0
        self.requests: dict[int, Submitted] = {}

    def alone(self, prompt: list[int], options: dict[str, Any]) -> tuple[list[int], str]:
        """The tokens of plain decoding, and why they end."""
        key = repr((self.version, prompt, options))
        if key not in self.answers:
            out = plain().generate([prompt], **{**options, "seed": [options["seed"]]})
            self.answers[key] = out.new_tokens[0].tolist(), out.finish_reasons[0]
        return self.answers[key]

    @property
    def under_way(self) -> list[int]:
        return [number for number, request in self.requests.items() if request.finish_reason is None]

    @rule(prompt=PROMPTS, options=OPTIONS)
    def submit(self, prompt: list[int], options: dict[str, Any]) -> None:
        number = self.session.submit(prompt, **options)
        self.requests[number] = Submitted(self.alone(prompt, options), options["max_new_tokens"])

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.read(self.session.step())

    @precondition(lambda self: self.under_way)
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        number = self.under_way[which % len(self.under_way)]
        self.session.cancel(number)
        self.requests[number].cancelled = True

    @rule()
    def change_weights(self) -> None:
        negate_weights()
        self.version = (self.version + 1) % VERSIONS
        for number in self.under_way:
            self.requests[number].expected = None

    @rule(prompt=PROMPTS, options=OPTIONS)
    def stream_beside_it(self, prompt: list[int], options: dict[str, Any]) -> None:
        chunks = list(drafted().stream([prompt], **{**options, "seed": [options["seed"]]}))
        tokens = [token for chunk in chunks for token in chunk.tokens[0]]
        expected, reason = self.alone(prompt, options)
        assert tokens == expected
        assert not chunks or chunks[-1].finish_reasons == [reason]

    def read(self, events: list[Event]) -> None:
        for event in events:
            request = self.requests[event.id]
            assert request.finish_reason is None and event.error is None
            request.tokens += event.tokens
            request.finish_reason = event.finish_reason

    @invariant()
    def what_came_is_what_comes_alone(self) -> None:
        for request in self.requests.values():
            assert len(request.tokens) <= request.most
            if request.expected is None:
                continue
            tokens, reason = request.expected
            assert request.tokens == tokens[: len(request.tokens)]
            if request.finish_reason not in (None, "cancelled"):
                assert (request.tokens, request.finish_reason) == (tokens, reason)
            assert request.finish_reason != "cancelled" or request.cancelled

    @invariant()
    def state_rows_and_pages_are_owned_by_requests_under_way(self) -> None:
        capacity = self.session.capacity
        if not self.under_way:
            assert (capacity.free_rows, capacity.free_pages) == (STATE_ROWS, POOL // CONFIG["cache"]["block_size"])

    def teardown(self) -> None:
        """Every request ends."""
        try:
            while events := self.session.step():
                self.read(events)
            assert not self.under_way
            self.what_came_is_what_comes_alone()
            self.state_rows_and_pages_are_owned_by_requests_under_way()
        finally:
            self.session.close()
            if self.version:
                negate_weights()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


def test_pages_of_other_weights_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations in an order that finds a pool whose pages outlive the weights."""
    options = {"max_new_tokens": 6, "temperature": 0.0, "seed": 0, "eos_token_id": []}

    def run() -> None:
        machine = Sessions()
        try:
            for _ in range(2):
                machine.submit(BEGINNINGS[0], options)
                machine.step(12)
                machine.what_came_is_what_comes_alone()
                machine.change_weights()
            machine.submit(BEGINNINGS[0], options)
        finally:
            machine.teardown()

    run()
    monkeypatch.setattr(PagePool, "check_weights", lambda self: None)
    with pytest.raises(AssertionError):
        run()
