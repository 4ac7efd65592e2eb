"""K by load: steps make and verify fewer drafts while many sequences decode, and no token changes under ``strict``."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
from torch import Tensor

from specgraph import SpeculativeDecoder
from specgraph.ir.linear import linears
from specgraph.ir.verifier import verify_program
from specgraph.runtime.execution.runner import Runner
from specgraph.runtime.schedule.policy import Policy
from specgraph.runtime.schedule.prompt_shapes import Overhead
from specgraph.specialise.mode import Mode
from tests import harness
from tests.capturing import captured
from tests.decoding import compiled
from tests.detectors import check_fresh_start
from tests.drafters.test_matrix import NEW_TOKENS, PROMPTS, decoder, heads_exported_once, model
from tests.harness import Options, Run, drafting_stage
from tests.models import shared_model
from tests.runtime.test_runner import idle

__all__ = ["heads_exported_once"]

K, TABLE = 5, {1: 5, 2: 3, 4: 0, 5: 2}
"""Six sequences cross all borders, up and down."""
OPTIONS: list[dict[str, Any]] = [
    {
        "max_new_tokens": NEW_TOKENS + 7 * (index % 3),
        "temperature": (0.0, 1.0)[index % 2],
        "seed": 40 + index,
        "eos_token_id": [],
    }
    for index in range(len(PROMPTS))
]
EACH = {name: [options[name] for options in OPTIONS] for name in ("max_new_tokens", "temperature", "seed")}
"""The same for a call with all of them."""
KINDS = [
    ("ngram", None),
    ("suffix", None),
    ("draft_model", None),
    ("pard", None),
    ("eagle3", None),
    ("peagle", "ngram"),
    ("medusa", None),
    ("mtp, 3 chained", None),
    ("mtp, 3 target-fed", "ngram"),
    ("dflash", None),
    ("dspark", "suffix"),
]


def made(
    drafter: str, first: str | None = None, rule: str = "strict", table: dict[int, int] = TABLE, **extra: Any
) -> SpeculativeDecoder:
    return decoder(drafter, first, "llama", rule, table, max_length=64, **extra)


@functools.cache
def plain() -> list[list[int]]:
    """What each sequence gives by itself without drafts."""
    tested, found = compiled(model("llama"), "none", max_length=64), []
    for prompt, options in zip(PROMPTS, OPTIONS, strict=True):
        out = tested.generate([prompt], **{**options, "seed": [options["seed"]]})
        found.append(out.new_tokens[0].tolist())
    return found


def in_a_session(tested: SpeculativeDecoder, seed: int = 0) -> tuple[list[list[int]], set[int]]:
    """The sequences after random arrivals, and the values of K of the steps in which they decoded."""
    dice, left = random.Random(seed), list(range(len(PROMPTS)))
    with tested.session() as session:
        names: dict[int, int] = {}
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        widths = set()
        while left or not session._engine.idle:
            for _ in range(min(len(left), dice.choice((0, 0, 1, 2, 3)))):
                index = left.pop()
                names[session.submit(PROMPTS[index], **OPTIONS[index])] = index
            for event in session.step():
                tokens[names[event.id]] += event.tokens
            widths.add(session._engine._runner.width - 1)
    return tokens, widths


SIBLINGS = ("suffix", "pard", "mtp, 3 target-fed", "dflash")
"""What gives verification the same as another one of the list; their drafts are compared below."""


@pytest.mark.parametrize(("drafter", "first"), [kind for kind in KINDS if kind[0] not in SIBLINGS])
def test_under_strict_no_token_changes(drafter: str, first: str | None) -> None:
    """A session, whose steps are replayed, ends with a single sequence; those of the call before are not.

    ``tests/drafters/test_matrix.py`` has one alone, with a fixed K.
    """
    expected, tested = plain(), made(drafter, first)
    out = tested.generate(PROMPTS, eos_token_id=[], **EACH)
    assert [tokens.tolist() for tokens in out.new_tokens] == expected
    tokens, drafts = in_a_session(captured(tested))
    assert tokens == expected
    assert drafts == {*TABLE.values()}


def test_each_k_is_captured_once() -> None:
    tested = captured(made("eagle3"))
    in_a_session(tested)
    space = idle(tested)
    decode = [(shape.mode.drafts, shape.entries) for shape in space.shapes if shape.width is None]
    assert {drafts for drafts, _ in decode} == {None, 3, 0, 2}
    assert {*decode} <= {(None, 1), (3, 2), (3, 4), (0, 4), (2, 8)} and len(decode) == len({*decode})
    # A step that runs prompts alone makes all drafts, and one in which others decode as many as a decode step would.
    assert None in {shape.mode.drafts for shape in space.shapes if shape.width is not None} <= {None, 3, 0, 2}
    before = space.shapes
    in_a_session(tested)
    assert idle(tested) is space and space.shapes == before


def test_without_drafts_a_drafter_computes_what_it_writes_alone() -> None:
    """Its cache is brought to the accepted tokens, which takes nothing behind the last keys and values."""
    steps, products = made("eagle3")._step_cache, []
    for drafts in (None, 2, 0):
        program = steps._make([*steps._passes(Mode(drafts=drafts))])
        verify_program(program)
        products.append(len(list(linears(program.modules.unchanged["draft"].graph))))
    assert products == [8, 8, 3]  # queries, keys and values, of which attention writes some


def test_no_row_of_a_window_is_real_beyond_its_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where K goes down, the last steps have made more drafts than the next one verifies."""
    tested, cut = made("eagle3"), 0
    call, use = Runner._call, Runner.use

    def checked(self: Runner, rows: Tensor, window: Tensor, *more: Any) -> Tensor:
        assert bool((self.state["num_rows"][rows[rows >= 0]] <= window.shape[1]).all())
        return call(self, rows, window, *more)

    def counted(self: Runner, mode: Mode, step: Any) -> None:
        nonlocal cut
        before = self.state["num_rows"].clone()
        use(self, mode, step)
        cut += int((self.state["num_rows"] < before).sum())

    monkeypatch.setattr(Runner, "_call", checked)
    monkeypatch.setattr(Runner, "use", counted)
    in_a_session(tested)
    assert cut > 2


@pytest.mark.parametrize(
    ("drafter", "first", "rule"),
    [(*kind, ("probabilistic", "strict")[index % 2]) for index, kind in enumerate(KINDS)],
)
def test_drafts_after_a_time_with_fewer_are_those_of_a_fresh_start(drafter: str, first: str | None, rule: str) -> None:
    """Nor do its caches, and whatever else the drafter keeps, show that the step had made fewer or none."""
    tested, options = made(drafter, first, rule, {1: K, 2: 2, 3: 0}), Options((1.0,), (0,), (77,))
    with tested.session() as session:
        runner, prompt, phases = session._engine._runner, PROMPTS[1], [0] * (K + 1)
        names = [session.submit(prompt, max_new_tokens=40, temperature=1.0, seed=77, eos_token_id=[])]
        tokens = prompt.tolist()
        for at in range(26):
            if at == 3:
                names += [session.submit(PROMPTS[0], max_new_tokens=count, eos_token_id=[]) for count in (5, 9)]
            tokens += [token for event in session.step() if event.id == names[0] for token in event.tokens]
            phases[runner.width - 1] += 1
            if at > 3 and len(session._engine._running) == 1:
                break
        assert phases[0] > 1 and phases[2] > 1 and phases[K] > 2
        tokens += [token for event in session.step() for token in event.tokens]
        assert int(runner.state["start"][0]) == len(tokens) - 1
        limit = int(runner.state["max_length"][0])
        run = Run(drafting_stage(tested), [limit], runner.state["block_table"][:1], options, state=runner.state)
        drafts = harness._next_drafts(runner.state)[:1]
        assert run.usable(0, len(tokens)) == K == runner.width - 1
        run.steps.append(harness._record(run, (1, [0], [0], [1]), [tokens], drafts, {}))
    check_fresh_start(run, times=1)


def test_statistics_count_what_each_step_verified() -> None:
    tested = made("dspark", table={1: 4, 2: 2, 4: 0})
    assert tested.config.draft.num_speculative_tokens == 4
    stats = tested.generate(PROMPTS, eos_token_id=[], **EACH).stats
    assert stats.num_speculative_tokens == 4 and len(stats.acceptance_per_position) == 4
    lengths = {len(step) for steps in stats.confidence for step in steps}
    assert lengths >= {0, 2} and lengths <= {0, 2, 4}
    for emitted, confidence in zip(stats.emitted_per_step, stats.confidence, strict=True):
        assert len(emitted) == len(confidence)
        assert all(count <= len(step) + 1 for count, step in zip(emitted, confidence, strict=True))
    assert len(stats.confidence_per_position) == 4
    both = [step for steps in stats.confidence for step in steps]
    assert stats.confidence_per_position[0] == pytest.approx(sum(step[0] for step in both if step) / len(both))


def test_the_number_of_sequences_chooses_k() -> None:
    policy = Policy(8, True, Overhead(1, 1), drafts={1: None, 8: 5, 32: 2, 64: 0})
    found = {count: policy.drafts_of(count) for count in (0, 1, 7, 8, 31, 32, 63, 64, 500)}
    assert found == {0: None, 1: None, 7: None, 8: 5, 31: 5, 32: 2, 63: 2, 64: 0, 500: 0}
    assert Policy(8, True, Overhead(1, 1)).drafts_of(3) is None


def test_a_table_is_nothing_to_a_decoder_without_drafts() -> None:
    tested = compiled(shared_model("llama"), "none", TABLE)
    assert len(tested.generate(PROMPTS[:3], max_new_tokens=4, eos_token_id=[]).new_tokens) == 3
    assert {mode.drafts for mode in tested._step_cache.steps} == {None}
