"""A drafter from outside of the package that keeps a small and a large buffer between steps.

It proposes the ids behind the sum of the accepted ones and the one that was accepted most often. Of the planted bugs,
equal tokens find none, and the fresh start finds both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specgraph import SpeculativeDecoder
from specgraph.config import DraftConfig
from specgraph.drafters.base import Draft, Drafter, Target
from specgraph.drafters.step import DraftStep
from specgraph.kernels.state import Buffer
from specgraph.kernels.step import writes
from tests.decoding import assert_same_tokens, compiled
from tests.detectors import NextLogits, caught_by, check_fresh_start, check_oracle, check_slots
from tests.harness import BUGS, drafting_stage, forced_run, real_run
from tests.models import VOCAB, double_model, ragged_prompts

PROMPTS, LIMITS = ragged_prompts((3, 9, 5)), (48, 41, 23)


@dataclass(frozen=True, eq=False)
class Sums(Drafter):
    """Keeps the sum of the accepted ids, and how often each was accepted."""

    kind: ClassVar[str] = f"{__name__}.Sums"
    Config: ClassVar[type[DraftConfig]] = DraftConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        return Draft(cls(options.num_speculative_tokens))

    def build(self, step: DraftStep) -> int:
        total = step.state("total", Buffer(("B",)))
        counts = step.state("counts", Buffer(("B", VOCAB), indexed=True))
        step.call(add_, total, step.emitted, name="add_")
        step.call(count_, counts, step.emitted, step.rows, name="count_")
        step.propose(behind, total, counts, step.rows, count=self.num_speculative_tokens, name="proposals")
        return 0


@writes("total", final=False)
def add_(total: Tensor, emitted: Tensor) -> None:
    total += emitted.clamp_min(0).sum(1)


@writes("counts", final=False)
def count_(counts: Tensor, emitted: Tensor, rows: Tensor) -> None:
    index = rows.clamp_min(0).unsqueeze(1).expand_as(emitted), emitted.clamp_min(0)
    counts.index_put_(index, (emitted >= 0).to(counts.dtype), accumulate=True)


def behind(total: Tensor, counts: Tensor, rows: Tensor, *, count: int) -> Tensor:
    first = total + counts[rows.clamp_min(0)].argmax(1)
    return (first.unsqueeze(1) + torch.arange(count, device=first.device)) % VOCAB


def add_padding_(total: Tensor, emitted: Tensor) -> None:
    add_(total, emitted.abs())


def count_padding_(counts: Tensor, emitted: Tensor, rows: Tensor) -> None:
    count_(counts, emitted.clamp_min(0), rows)


def decoder(bug: str | None = None) -> SpeculativeDecoder:
    order = ["insert_kv_cache", "insert_draft", *["plant_bug"] * (bug is not None), "insert_verify"]
    passes = {} if bug is None else {"passes": {"plant_bug": {"_target_": "tests.harness.PlantBug", "bug": bug}}}
    return compiled(double_model("llama", 0), Sums.kind, 4, pipeline={"order": order, "verify": bug is None}, **passes)


def certain(token: Tensor) -> Tensor:
    """Logits ``[N, V]`` of drafts that have no distribution."""
    return torch.full((len(token), VOCAB), -torch.inf, dtype=torch.float64).scatter(1, token.unsqueeze(1), 0.0)


def oracle() -> NextLogits:
    def next_logits(accepted: Any, drafted: Any) -> Tensor:
        seen = [torch.bincount(torch.tensor(tokens[1:]), minlength=VOCAB) for tokens in accepted]
        first = [sum(tokens[1:]) + int(counts.argmax()) for tokens, counts in zip(accepted, seen, strict=True)]
        return certain(torch.tensor([(f + len(d)) % VOCAB for f, d in zip(first, drafted, strict=True)]))

    return next_logits


@pytest.mark.parametrize("forced", [True, False])
def test_the_detectors(forced: bool) -> None:
    tested = decoder()
    run = forced_run(drafting_stage(tested), PROMPTS, LIMITS, seed=0) if forced else real_run(tested, PROMPTS, LIMITS)
    assert set(run.steps[0].kept) == {"total", "counts"}
    check_fresh_start(run)
    check_oracle(run, oracle(), "strict")
    check_slots(run)


@pytest.mark.parametrize(("right", "wrong"), [(add_, add_padding_), (count_, count_padding_)], ids=["small", "large"])
def test_planted_bugs(right: Any, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUGS, "padding counts", lambda program: replaced(program, right, wrong))
    writes("total" if right is add_ else "counts", final=False)(wrong)
    broken = decoder("padding counts")
    caught = caught_by(forced_run(drafting_stage(broken), PROMPTS, LIMITS, seed=0), oracle(), "strict")
    assert caught >= {"fresh start", "oracle"}
    assert_plain(broken)


def replaced(program: Any, right: Any, wrong: Any) -> int:
    nodes = program.graph.find_nodes(op="call_function", target=right)
    for node in nodes:
        node.target = wrong
    return len(nodes)


def test_tokens_are_those_of_the_model_alone() -> None:
    assert_plain(decoder())


def assert_plain(tested: SpeculativeDecoder) -> None:
    target, options = double_model("llama", 0), {"max_new_tokens": 12, "eos_token_id": []}
    plain = compiled(target, "none").generate(PROMPTS, **options).new_tokens
    assert_same_tokens(target, PROMPTS, tested.generate(PROMPTS, **options).new_tokens, plain)
