"""Draft models with recurrent layers: a chain runs rows that are not settled, and keeps nothing of them.

The detectors are those of ``test_draft_model``. What a fresh start is compared in are also the states of the layers
and their settled rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.drafters.chain import BODY
from specgraph.drafters.draft_model import DraftModelDrafter
from specgraph.drafters.step import VERIFIED
from specgraph.errors import UnsupportedModelError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.recurrent import hooked_recurrence
from specgraph.frontend.tracing import trace
from specgraph.ir.verifier import verify_program
from specgraph.kernels.recurrent.arguments import CHUNK
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_recurrent_state import InsertRecurrentState
from specgraph.passes.pipeline import run_passes
from tests.decoding import CONFIG, compiled
from tests.detectors import NextLogits, caught_by, check_fresh_start, check_oracle, check_slots
from tests.drafters.test_draft_model import oracle
from tests.harness import Run, drafting_stage, forced_run, real_run
from tests.models import double_model, make_model, ragged_prompts
from tests.once import once
from tests.recurrent_drafts import DRAFT_STATES

LENGTHS = (2, 2 * CHUNK + 3, CHUNK - 1)
"""Prompts shorter than a convolution, longer than two chunks, and such that the first new token is the last one of a
chunk."""
PROMPTS = ragged_prompts(LENGTHS)
LIMITS = (3 * CHUNK, 4 * CHUNK + 5, 2 * CHUNK + 7)
EXACT = 1e-11
TOLERANCE = {"lfm2": EXACT, "mamba": EXACT, "mamba2": 1e-5, "falcon_h1": 1e-5, "qwen3_next": 1e-5, "qwen3_5_text": 1e-5}
"""By how much what is kept may differ: the gates and gated norms of some layers round to float32."""
CASES = [(name, 3) for name in TOLERANCE] + [(name, k) for name in ("lfm2", "mamba", "qwen3_5_text") for k in (1, 7)]
drafts = pytest.mark.parametrize(("name", "k"), CASES)


@functools.cache
def model(name: str, seed: int = 0) -> PreTrainedModel:
    return double_model(name, seed)


@once
def decoder(
    name: str, k: int, target: str = "llama", rule: str = "strict", bug: str | None = None
) -> SpeculativeDecoder:
    order = ["insert_kv_cache", "insert_recurrent_state", "insert_draft", *["plant_bug"] * (bug is not None),
             "insert_verify"]  # fmt: skip
    extra: dict[str, Any] = {"verify": {"rule": rule}, "pipeline": {"order": order, "verify": False}}
    if bug is not None:
        extra |= {"passes": {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}}}
    return compiled(model(target, 9), "draft_model", k, model(name), **extra)


@once
def forced(name: str, k: int, rule: str = "strict", bug: str | None = None) -> Run:
    return forced_run(drafting_stage(decoder(name, k, rule=rule, bug=bug)), PROMPTS, LIMITS, seed=k, steps=18)


def own_logits(name: str) -> NextLogits:
    """The model's own forward without a cache, whose recurrent functions are in float64."""
    plain = oracle(model(name))

    def next_logits(accepted: Sequence[list[int]], drafted: Sequence[list[int]]) -> Tensor:
        with hooked_recurrence(model(name)):
            return plain(accepted, drafted)

    return next_logits


@drafts
def test_what_is_kept_does_not_depend_on_history(name: str, k: int) -> None:
    run = forced(name, k)
    check_fresh_start(run, times=8, atol=TOLERANCE[name])
    assert any(key.startswith(DRAFT_STATES) for key in run.steps[-1].kept)
    settled = run.steps[-1].kept[f"{DRAFT_STATES}[0]"]
    assert settled.tolist() == [max(0, len(tokens) - 1) for tokens in run.steps[-1].accepted]


@drafts
def test_drafts_are_those_of_the_plain_model_without_a_cache(name: str, k: int) -> None:
    check_oracle(forced(name, k), own_logits(name), "strict")
    check_slots(forced(name, k))


@pytest.mark.parametrize("k", [3, 7])
def test_the_logits_that_drafts_are_drawn_from_are_those_of_the_plain_model(k: int) -> None:
    check_oracle(forced("lfm2", k, "probabilistic"), own_logits("lfm2"), "probabilistic")


@pytest.mark.parametrize("k", [1, 3, 7])
def test_histories_hold_every_kind_of_step(k: int) -> None:
    run = forced("lfm2", k)
    assert {0, k} <= set(run.accept_counts)
    assert any(0 in step.num_emitted and any(step.num_emitted) for step in run.steps)
    ends = [len(tokens) for step in run.steps for tokens in step.accepted]
    assert k == 1 or any(end // CHUNK < (end + k - 1) // CHUNK for end in ends)


@pytest.mark.parametrize("name", TOLERANCE)
def test_no_row_of_a_chain_is_read_in_the_next_step(name: str) -> None:
    """Before each step, all rows that are not settled are NaN."""
    run = forced_run(drafting_stage(decoder(name, 3)), PROMPTS, LIMITS, seed=0, poison=True)
    check_oracle(run, own_logits(name), "strict")


def test_a_step_in_which_nobody_is_active_changes_nothing() -> None:
    run = forced_run(drafting_stage(decoder("lfm2", 3)), PROMPTS, LIMITS, seed=1, steps=6)
    before = [buffer.clone() for buffer in run.state[DRAFT_STATES]]
    idle = torch.zeros(len(PROMPTS), dtype=torch.int64)
    state = {**run.state, "num_rows": idle, VERIFIED: torch.full((len(PROMPTS), 4), -1)}
    with torch.no_grad():
        run.program.step()(window=torch.ones(len(PROMPTS), 4, dtype=torch.int64), **state)
    assert all(torch.equal(*pair) for pair in zip(before, run.state[DRAFT_STATES], strict=True))


@pytest.mark.parametrize(("bug", "k"), [("chained rows are settled", 7), ("the newest token is settled", 1)])
def test_a_state_that_stands_behind_the_rows_of_a_call_is_noticed(bug: str, k: int) -> None:
    with pytest.raises(RuntimeError, match="upper bound and lower bound inconsistent"):
        forced("mamba", k, bug=bug)


def test_rows_of_a_chain_that_are_not_written_are_noticed() -> None:
    run = forced("mamba", 3, bug="chained rows not written")
    assert caught_by(run, own_logits("mamba"), "strict") >= {"oracle"}


# A whole decoder

TARGETS = {"qwen3_5_text": "lfm2", "mamba": "qwen3_next", "lfm2": "mamba2"}
"""Drafts, and recurrent targets that they draft for."""


@pytest.mark.parametrize("rule", ["strict", "probabilistic"])
@pytest.mark.parametrize("name", TARGETS)
def test_recurrent_targets_with_recurrent_drafts_pass_every_detector(name: str, rule: str) -> None:
    run = real_run(decoder(name, 3, TARGETS[name], rule), PROMPTS, LIMITS)
    assert tuple(len(tokens) for tokens in run.steps[-1].accepted) == LIMITS
    check_fresh_start(run, atol=TOLERANCE[name])
    if name == "lfm2" or rule == "strict":  # else the logits that drafts are drawn from are kept, with their rounding
        check_oracle(run, own_logits(name), rule)


def generated(decoder: SpeculativeDecoder, **options: Any) -> list[list[int]]:
    out = decoder.generate(PROMPTS, max_new_tokens=24, eos_token_id=[], temperature=[0.0, 0.8, 1.3], seed=7, **options)
    return [tokens.tolist() for tokens in out.new_tokens]


@functools.cache
def made(name: str, dtype: torch.dtype, seed: int = 0) -> PreTrainedModel:
    """In float64 one of the models above, whose export other tests have made."""
    return model(name, seed) if dtype == torch.float64 else make_model(name, dtype=dtype, seed=seed)


@functools.cache
def plain(target: str, dtype: torch.dtype) -> list[list[int]]:
    return generated(compiled(made(target, dtype), "none", 1))


@pytest.mark.parametrize(
    ("target", "name", "k", "dtype"),
    [("llama", "lfm2", 1, torch.float32), ("llama", "mamba2", 3, torch.float64),
     ("llama", "qwen3_5_text", 7, torch.float64), ("lfm2", "mamba2", 3, torch.float32),
     ("mamba", "lfm2", 1, torch.float64), ("lfm2", "qwen3_5_text", 7, torch.float64)],
)  # fmt: skip
def test_no_draft_changes_a_token(target: str, name: str, k: int, dtype: torch.dtype) -> None:
    tested = compiled(made(target, dtype), "draft_model", k, made(name, dtype, 1))
    assert generated(tested) == plain(target, dtype)


def test_every_stage_is_well_formed() -> None:
    for program in compiled(made("lfm2", torch.float64), "draft_model", 3, own_hybrid()).stages.values():
        verify_program(program)


@pytest.mark.parametrize(
    ("name", "k", "dtype"),
    [("qwen3_next", 3, torch.float64), ("qwen3_next", 1, torch.float64), ("lfm2", 7, torch.float32),
     ("falcon_h1", 1, torch.float64), ("jamba", 3, torch.float64)],
)  # fmt: skip
def test_every_draft_of_the_target_itself_is_accepted(name: str, k: int, dtype: torch.dtype) -> None:
    own = made(name, dtype)
    out = compiled(own, "draft_model", k, own).generate(PROMPTS, max_new_tokens=41, eos_token_id=[])
    assert all({*row[:-1]} == {k + 1} for row in out.stats.emitted_per_step)


def test_rows_that_are_used_again_begin_anew_and_share_no_pages() -> None:
    """The target attends, so its pages could be shared; the draft's state at their ends is not kept."""
    own = made("llama", torch.float64)
    config = {**CONFIG, "cache": {"block_size": 4, "prefill_chunk": 7}, "max_batch_size": 2,
              "draft": {"kind": "draft_model", "num_speculative_tokens": {1: 3, 2: 1}}}  # fmt: skip
    decoder = specgraph.compile_speculative(own, config, draft=own_hybrid())
    alone = [decoder.generate([prompt], max_new_tokens=20, eos_token_id=[]) for prompt in PROMPTS]
    with decoder.session() as session:
        numbers = [session.submit(prompt, max_new_tokens=20, eos_token_id=[]) for prompt in PROMPTS for _ in range(2)]
        begun = session.step()
        session.cancel(numbers[0])
        found: dict[int, list[int]] = {number: [] for number in numbers}
        for event in [*begun, *session]:
            found[event.id] += event.tokens
        wanted = [alone[place // 2].new_tokens[0].tolist() for place in range(len(numbers))]
        assert [found[number] for number in numbers[1:]] == wanted[1:]
        assert session.stats.reused_tokens == 0


def own_hybrid() -> PreTrainedModel:
    return made("lfm2", torch.float64, 1)


def test_what_a_recurrent_draft_cannot_do_is_refused_by_name() -> None:
    own, given = made("llama", torch.float64), own_hybrid()
    with pytest.raises(
        UnsupportedModelError, match=r"this draft_model has recurrent layers, .*set draft.parallel=false"
    ):
        compiled(own, "draft_model", 3, given, passes={"parallel_draft": {"enabled": True}})


@dataclass(frozen=True, eq=False)
class Unchained(DraftModelDrafter):
    """A drafter that does not say which rows are settled."""

    chained: ClassVar[bool] = False


def test_recurrent_layers_of_a_drafter_that_makes_no_chain_are_refused_by_name() -> None:
    traced = trace(own_hybrid())
    drafter = Unchained(3, {BODY: traced.body}, {BODY: traced.info})
    program = first_program(trace(made("llama", torch.float64)), drafter)
    with pytest.raises(UnsupportedModelError, match=r"draft_body has recurrent layers, .* draft_model does not; use"):
        run_passes(program, [InsertKVCache(), InsertRecurrentState()])
