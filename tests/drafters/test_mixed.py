"""A drafter from outside of the package that proposes looked-up tokens where it finds some, and drawn ones elsewhere.

Some sequences of a batch have point masses then, and the others a distribution that verification must divide by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph.config.drafters import NGramConfig
from specgraph.drafters.base import Draft, Target
from specgraph.drafters.draft_model import DraftModelConfig, DraftModelDrafter
from specgraph.drafters.ngram import NGramDrafter
from specgraph.drafters.step import DraftStep
from specgraph.kernels.state import Buffer
from tests.decoding import CONFIG, assert_same_tokens, compiled
from tests.models import make_model, ragged_prompts
from tests.runtime.test_decoder import noisy_copy
from tests.runtime.test_distribution import LENGTH, PROMPT, VOCAB, exact_joint, model, opposite, p_value

BATCH, RUNS = 4096, 6


def prefer(looked: Tensor, *drawn: Tensor) -> Tensor:
    """The looked-up tokens ``[B, K]`` of the sequences that have any, and the drawn ones of the others."""
    return torch.where(looked[:, :1] >= 0, looked, torch.cat(drawn, dim=1))


def found(looked: Tensor) -> Tensor:
    return looked[:, 0] >= 0


@dataclass(frozen=True, eq=False)
class Mixed(DraftModelDrafter):
    """Prompt lookup and a draft model."""

    kind: ClassVar[str] = f"{__name__}.Mixed"
    Config: ClassVar[type[Any]] = DraftModelConfig

    @classmethod
    def make(cls, options: Any, target: Target, given: Any) -> Draft:
        made = super().make(options, target, given)
        drafter = made.drafter
        return Draft(cls(drafter.num_speculative_tokens, drafter.modules, drafter.models), made.model, made.traced)

    def build(self, step: DraftStep) -> int:
        """Draft in both ways, and choose per sequence."""
        lookup = NGramDrafter(self.num_speculative_tokens, options=NGramConfig(max_ngram=3))
        calls = lookup.build(step) + super().build(step)
        looked, *drawn = step.take_drafts()
        step.propose(prefer, looked, *drawn, name="chosen")
        self.say_which(step, step.call(found, looked, name="found"))
        return calls

    def say_which(self, step: DraftStep, chosen: Any) -> None:
        step.keep_point_mass(chosen)


class Silent(Mixed):
    """A planted bug: all drafts pass for drawn ones."""

    kind: ClassVar[str] = f"{__name__}.Silent"

    def say_which(self, step: DraftStep, chosen: Any) -> None:
        step.state("point_mass", Buffer(("B",), torch.bool))


def mixed(target: Any, draft: Any, rule: str, k: int = 3, kind: type[Mixed] = Mixed) -> specgraph.SpeculativeDecoder:
    own = {"_target_": kind.kind, "num_speculative_tokens": k}
    config = {**CONFIG, "draft": own, "verify": {"rule": rule}, "max_batch_size": BATCH}
    return specgraph.compile_speculative(target, config, draft=draft)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_strict_decoding_emits_what_the_model_alone_does(temperature: float) -> None:
    target, prompts = make_model("llama", dtype=torch.float64), ragged_prompts((3, 17, 8, 1))
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "eos_token_id": [],
        "temperature": temperature,
        "seed": [1, 2, 3, 4],
    }
    plain = compiled(target, "none").generate(prompts, **options).new_tokens
    out = mixed(target, noisy_copy(), "strict").generate(prompts, **options)
    assert_same_tokens(target, prompts, out.new_tokens, plain)
    assert out.stats.acceptance_length > 1.2


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_whether_drafts_are_point_masses_is_state_only_where_it_is_asked(rule: str) -> None:
    program = mixed(make_model("llama", dtype=torch.float64), noisy_copy(), rule)._program
    compared = rule != "strict"
    assert (program.inputs.get("point_mass") == Buffer(("B",), torch.bool)) == compared
    (verify,) = (node for node in program.graph.nodes if node.name == "verification")
    assert ("point_mass" in verify.kwargs) == compared
    assert [node.name for node in program.with_role("drafts")] == ["chosen"]


@pytest.mark.parametrize(("kind", "right"), [(Mixed, True), (Silent, False)], ids=["mixed", "planted bug"])
def test_the_joint_distribution_is_the_targets(kind: type[Mixed], right: bool) -> None:
    decoder = mixed(model(0), opposite(), "probabilistic", 2, kind)
    counts = torch.zeros(VOCAB**LENGTH, dtype=torch.float64)
    weights = torch.tensor([VOCAB ** (LENGTH - 1 - i) for i in range(LENGTH)])
    for run in range(RUNS):
        out = decoder.generate(
            PROMPT.expand(BATCH, -1), max_new_tokens=LENGTH, temperature=1.0, seed=run, eos_token_id=[]
        )
        counts += torch.bincount((torch.stack(out.new_tokens) * weights).sum(1), minlength=VOCAB**LENGTH)
    value = p_value(counts, exact_joint(1.0, 0))
    assert value > 1e-3 if right else value < 1e-9
