"""Training of DSpark heads: as of DFlash heads, with the text's token before each draft, and with estimates."""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from specgraph.drafters.base import DraftHead
from specgraph.drafters.dspark import DSparkDrafter
from specgraph.training.chain import ChainLoss, StepOutput, acceptance, estimate_loss
from specgraph.training.config import ChainConfig, HeadConfig, HeadTrainConfig
from specgraph.training.head import build_head
from specgraph.training.teacher import Lesson
from tests.drafters.dflash_formula import target
from tests.drafters.test_dflash_training import TEXTS, assert_drafted, features
from tests.drafters.training_contract import Trained, TrainingContract, run_of
from tests.models import exact_norms


@functools.cache
def head(kind: str, rank: int = 6, steps: int = 5, confidence: bool = True) -> DraftHead:
    """A new head for the target of the tests with random weights, computing in float64 throughout."""
    options = HeadConfig(layers=2, model_type="qwen3", markov_rank=rank, markov_kind=kind, confidence=confidence)
    config = HeadTrainConfig(model="x", data="x", draft="dspark", head=options, chain=ChainConfig(steps=steps))
    torch.manual_seed(5)
    made = build_head(target(), config, 7, [])
    made.module.double()
    generator = torch.Generator().manual_seed(6)
    for parameter in made.module.parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = parameter + 0.3 * noise
    exact_norms(made.module)
    return made


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_what_is_trained_is_what_is_drafted(kind: str) -> None:
    assert_drafted(target(), head(kind), "dspark", 5)


def test_rows_behind_an_anchor_that_gives_no_draft() -> None:
    given = copy.deepcopy(head("rnn"))
    given.module.config = replace(given.module.config, sample_from_anchor=False, block_size=6)
    assert_drafted(target(), given, "dspark", 5)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_estimates_change_no_draft(kind: str) -> None:
    """The gradient of the estimates reaches the confidence head alone."""
    given = copy.deepcopy(head(kind))
    rows = list(given.module.unroll(TEXTS, features(target(), TEXTS, given.features), 3, 7))
    estimates = torch.stack([given.module.step_estimates(out.flatten(0, 1)) for out in rows])
    assert estimates.shape == (3, TEXTS.numel())
    estimates.sum().backward()
    assert {name for name, parameter in given.module.named_parameters() if parameter.grad is not None} == {
        "confidence_head.proj.weight", "confidence_head.proj.bias"
    }  # fmt: skip
    with torch.no_grad():  # what decoding calls
        normed, tokens = rows[1][..., :32], TEXTS.roll(-2, dims=1)
        torch.testing.assert_close(estimates[1].view_as(tokens), given.module.confidence_logits(normed, tokens))


def test_a_head_without_its_additions() -> None:
    plain, given = head("vanilla", rank=0, confidence=False), features(target(), TEXTS, head("vanilla").features)
    (rows,) = plain.module.unroll(TEXTS, given, 1, 7)
    assert rows.shape[-1] == 32 and plain.module.step_estimates(rows) is None
    torch.testing.assert_close(plain.module.step_logits(rows, 0), plain.module.lm_head(rows))
    alone = head("vanilla", rank=0)
    (rows,) = alone.module.unroll(TEXTS, given, 1, 7)
    assert alone.module.step_estimates(rows).shape == TEXTS.shape


def test_acceptance_is_what_rejection_sampling_accepts() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.1, 0.6, 0.3])
    assert float(acceptance(q.log()[None], p.log()[None], None)) == pytest.approx(0.1 + 0.3 + 0.2)
    kept = acceptance(q[:2].log()[None], p.log()[None], torch.tensor([0, 2]))
    assert float(kept) == pytest.approx(0.1 / 0.7 + 0.2), "the target's probabilities are those of the whole vocabulary"


def test_the_loss_of_the_estimates() -> None:
    """It has its minimum where the estimates are the acceptance."""
    accepted, rows = torch.tensor([0.25, 0.9]), torch.zeros(2, 3)

    def loss(*estimates: float) -> Tensor:
        return estimate_loss(StepOutput(rows, rows, rows[:, 0], torch.tensor(estimates).logit(), accepted))

    expected = [-a * math.log(e) - (1 - a) * math.log(1 - e) for a, e in ((0.25, 0.5), (0.9, 0.7))]
    assert float(loss(0.5, 0.7)) == pytest.approx(sum(expected) / 2, rel=1e-5)
    assert loss(0.25, 0.9) < min(loss(0.2, 0.9), loss(0.3, 0.9), loss(0.25, 0.95), loss(0.25, 0.85))
    assert float(estimate_loss(StepOutput(rows, rows, rows[:, 0]))) == 0.0


def test_the_loss_holds_that_of_the_estimates() -> None:
    given, plain = head("gated"), copy.deepcopy(head("gated"))
    plain.module.confidence_head = None
    known, rows = features(target(), TEXTS, given.features), [torch.tensor([3, 8, 14])] * 5
    lesson = Lesson(known, known[-1], target().lm_head, target().config.vocab_size)
    trained = ChainLoss(given, 5)
    outputs = [trained.output(piece, lesson) for pieces in trained.steps_of(TEXTS, lesson, rows) for piece in pieces]
    difference = ChainLoss(given, 5)(TEXTS, lesson, rows) - ChainLoss(plain, 5)(TEXTS, lesson, rows)
    torch.testing.assert_close(difference, torch.stack([estimate_loss(out) for out in outputs]))
    for out in outputs:
        assert out.accepted is not None and out.accepted.min() > 0 and out.accepted.max() < 1


def test_a_loss_may_be_the_probability_of_a_rejection() -> None:
    given = head("vanilla", confidence=False)
    known, rows = features(target(), TEXTS, given.features), [torch.tensor([3, 8, 14])] * 2
    lesson = Lesson(known, known[-1], target().lm_head, target().config.vocab_size)
    losses = {share: ChainLoss(given, 2, share)(TEXTS, lesson, rows) for share in (0.0, 0.25, 1.0)}
    hidden = next(given.module.unroll(TEXTS, known, 2, 7)).flatten(0, 1)[rows[0]]
    wanted = lesson.project(known[-1].flatten(0, 1)[rows[0] + 1])
    p, q = wanted.softmax(-1), given.module.step_logits(hidden, 0).softmax(-1)
    torch.testing.assert_close(losses[1.0][0], 0.5 * (p - q).abs().sum(-1).mean())
    torch.testing.assert_close(losses[0.25], 0.75 * losses[0.0] + 0.25 * losses[1.0])
    (grad,) = torch.autograd.grad(losses[1.0].sum(), [given.module.fc.weight])
    assert grad.any()


class TestTraining(TrainingContract):
    KIND, DRAFTER, LAYOUT = "dspark", DSparkDrafter, "deepspec"
    CHOICES: ClassVar = {"block_size": 4, "markov_rank": 8, "markov_head_type": "rnn"}
    REFUSED = (
        ({"markov_kind": "lstm"}, "head.markov_kind='lstm' is not known: use vanilla, gated or rnn."),
        ({"markov_rank": -1}, "head.markov_rank=-1 is out of range"),
    )

    @classmethod
    def settings(cls, folder: Path) -> HeadTrainConfig:
        head = HeadConfig(layers=1, model_type="qwen3", markov_rank=8, markov_kind="rnn")
        return replace(run_of(folder, "dspark"), head=head, chain=ChainConfig(steps=4))

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        assert loaded.module.markov_head.markov_w2.weight.any(), "it begins with zeros"
