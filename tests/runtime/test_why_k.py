"""Why a step has its K: in a trace, in its file, and on the explorer's page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specgraph.errors import ConfigError
from specgraph.explore.trace_file import read_trace
from specgraph.runtime.schedule.num_drafts import Promise
from specgraph.runtime.schedule.recent_acceptance import GAIN, GAIN_UNTRIED
from tests.drafters.test_matrix import PROMPTS, heads_exported_once
from tests.runtime.test_recent_acceptance import MOST, K, Machine, adaptive, h200
from tests.runtime.test_trace import check

__all__ = ["heads_exported_once"]


@pytest.fixture(scope="module")
def out() -> Any:
    return adaptive("eagle3", max_length=96).generate(
        PROMPTS, trace=True, max_new_tokens=60, eos_token_id=[], temperature=1.0, seed=3
    )


def test_a_step_has_the_k_that_promises_most(out: Any) -> None:
    check(out, PROMPTS)
    decoded = {step.step: step.why for step in out.trace if not step.prompt}
    assert all(step.why is None for step in out.trace if step.prompt and step.step not in decoded)
    chosen = [why for why in decoded.values() if why.promises]
    assert chosen and next(iter(decoded.values())).promises == ()  # what the first steps take is not known
    for why in chosen:
        best, other = why.promises
        assert best.worth >= other.worth and best[:2] != other[:2]
        assert {best.margin, other.margin} <= {1.0, GAIN, GAIN_UNTRIED} and best.seconds > 0
        assert [*why.survival] == sorted(why.survival, reverse=True) and len(why.survival) == K
    for step in out.trace:
        if not step.prompt and step.why.promises:
            assert len(step.drafts) <= step.why.promises[0].drafts


def test_the_file_of_a_trace_says_it_and_the_explorer_in_words(out: Any, tmp_path: Path) -> None:
    path = out.trace.save(tmp_path / "trace.jsonl")
    said = [step["why"] for step in read_trace(path).steps]
    assert said == [None if step.why is None else str(step.why) for step in out.trace]
    text = next(str(step.why) for step in out.trace if step.why is not None and step.why.promises)
    assert text.startswith("K = ") and "; K = " in text and "are accepted with a probability of 0." in text
    assert any(why and why.startswith("K is tried") for why in said)
    lines = path.read_text().splitlines()
    broken = next(json.loads(line) for line in lines[1:] if '"margin"' in line)
    del broken["why"]["promises"][0]["tokens"]
    path.write_text(f"{lines[0]}\n{json.dumps(broken)}\n")
    with pytest.raises(ConfigError, match="is damaged"):
        read_trace(path)


def test_what_is_promised_comes() -> None:
    machine = Machine([0.8] * 8, h200)
    machine.tokens_per_second(3000)
    choice = machine.worth.choose("kind", machine._sequences, ())
    assert choice.why is not None
    best, other = choice.why.promises
    assert best.drafts == (MOST if choice.drafts is None else choice.drafts) and best.margin == 1 < other.margin
    assert best.seconds == pytest.approx(h200(8 * (best.drafts + 1), best.drafts), rel=0.05)
    assert best.tokens == pytest.approx(machine.of_fixed(best.drafts) * best.seconds, rel=0.1)
    assert choice.why.survival == pytest.approx([0.8 ** (place + 1) for place in range(MOST)], abs=0.1)


def test_a_promise_counts_by_its_margin() -> None:
    promise = Promise(3, 128, 9.0, 0.005, 1.08)
    assert promise.worth == 9.0 / 0.005 / 1.08
    assert str(promise) == (
        "K = 3 over 128 rows promises 9.00 tokens in 5.00 ms (1800 per second, which counts as 1667, since a change "
        "has to pay)"
    )
