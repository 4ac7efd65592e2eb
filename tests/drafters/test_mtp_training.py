"""Training of MTP modules: the rows that are trained are those of decoding, and what is saved is what is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from specgraph.bench.models import random_head
from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.training.config import ChainConfig, HeadConfig, HeadTrainConfig
from tests.decoding import compiled
from tests.drafters.mtp_formula import CHAINED, FED, OTHER, definition, modules, target
from tests.drafters.training_contract import Trained, TrainingContract, run_of
from tests.harness import Options, Run, fresh_start
from tests.models import make_model, ragged_prompts


@torch.no_grad()
@pytest.mark.parametrize("options", [CHAINED, FED, OTHER])
def test_what_is_trained_is_what_is_drafted(options: Any) -> None:
    """The logits of every step and position are those behind the same text, where all drafts before were right."""
    head, text = modules("llama", 3, options), ragged_prompts((12,), seed=7)[0]
    features = target()(text[None], output_hidden_states=True, use_cache=False).hidden_states[-1]
    expected, ids = definition("llama", head), text.tolist()
    for step, rows in enumerate(head.module.unroll(text[None], (features,), 6, None)):
        for row in range(len(ids) - 2 - step):
            found: Tensor = head.module.step_logits(rows[0, row], step)
            known = expected([ids[: row + 2]], [ids[row + 2 : row + 2 + step]])[0]
            torch.testing.assert_close(found, known, rtol=0.0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {"attention": "eager"}), ("gpt_oss", {}), ("mistral", {"sliding_window": 5})],
)
def test_rows_that_are_trained_see_what_rows_that_are_drafted_see(architecture: str, options: dict[str, Any]) -> None:
    """Also where attention is eager, which adds its mask to the scores, or has a sliding window."""
    model = make_model(architecture, dtype=torch.float64, **options)
    head = random_head(model, MtpDraftConfig(num_modules=2))
    tested = compiled(model, "mtp", 4, head, pipeline={"verify": False})
    run = Run(tested.stages["insert_draft"], [64], torch.zeros(1, 1), Options((0.0,), (0,), (0,)))
    for length in (3, 8, 12):
        prefix = ragged_prompts((length,), seed=length)[0]
        drafts = fresh_start(run, 0, prefix.tolist())[1]
        text = torch.cat([prefix, drafts, prefix[:2]])  # of which every draft behind the prefix is right
        features = model(text[None], output_hidden_states=True, use_cache=False).hidden_states[-1]
        for step, rows in enumerate(head.module.unroll(text[None], (features,), 4, None)):
            assert int(head.module.step_logits(rows[0, length - 2], step).argmax()) == int(drafts[step])


class TestChained(TrainingContract):
    KIND, DRAFTER, LAYOUT, FAMILY = "mtp", MtpDrafter, "speculators", "chained"
    CHOICES: ClassVar = {"num_modules": 2, "family": FAMILY}
    REFUSED = (
        ({"draft_vocab_size": 20}, "MTP modules draft the whole vocabulary; leave head.draft_vocab_size out."),
        ({"feature_layers": [1]}, "read the target's last hidden state, hs[2]; leave head.feature_layers out."),
        ({"intermediate_size": 8}, "have the target's own layers; leave head.intermediate_size=8 out."),
        ({"family": "both"}, "head.family='both' is not known: use chained or target."),
    )

    @classmethod
    def settings(cls, folder: Path) -> HeadTrainConfig:
        head = HeadConfig(layers=2, family=cls.FAMILY)
        return replace(run_of(folder, "mtp"), head=head, eval_drafts=3, chain=ChainConfig(steps=3))

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        choices = MtpDrafter.choices(trained.checkpoint, MtpDraftConfig(), 2)
        assert {c.name: c.source for c in choices}["family"] == "mtp_options"


class TestFedByTheTarget(TestChained):
    FAMILY = "target"
    CHOICES: ClassVar = {"num_modules": 2, "family": FAMILY}
    REFUSED = (({"family": "both"}, "head.family='both' is not known: use chained or target."),)
