"""Training of DFlash2 heads: as of DFlash heads, with the text's token before each draft and candidates among all."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash2 import DFlash2Drafter
from specgraph.training.config import ChainConfig, HeadConfig, HeadTrainConfig
from specgraph.training.head import build_head
from tests.drafters.dflash2_formula import WALKED, walked
from tests.drafters.dflash_formula import MASK, all_rows, target
from tests.drafters.test_dflash2 import head
from tests.drafters.test_dflash_training import TEXTS, features
from tests.drafters.training_contract import Trained, TrainingContract, run_of, small_target


@functools.cache
def known() -> tuple[torch.Tensor, ...]:
    return features(target(), TEXTS, (1, 3))


@torch.no_grad()
@pytest.mark.parametrize("name", WALKED)
def test_what_is_trained_is_the_published_formula(name: str) -> None:
    """For every position of a text, the logits of candidates are those of a block behind the text up to there."""
    module, drafts = head(name).module, 4
    unrolled = list(module.unroll(TEXTS, known(), drafts, MASK))
    for row in range(TEXTS.shape[1] - 1 - drafts):
        context = torch.cat([feature[1, : row + 1] for feature in known()], dim=-1)
        before = TEXTS[1, row + 1 : row + 1 + drafts].tolist()
        expected = walked(name, all_rows(WALKED[name], context, before[0], drafts), before)
        found = torch.stack([module.step_logits(rows[1, row], step) for step, rows in enumerate(unrolled)])
        candidates = expected > -torch.inf
        torch.testing.assert_close(found[candidates], expected[candidates], rtol=0.0, atol=1e-12)
        plain = module.predict(torch.stack([rows[1, row, : module.fc.out_features] for rows in unrolled]))
        torch.testing.assert_close(found[~candidates], plain[~candidates], rtol=0.0, atol=1e-12)


def test_a_new_head_drafts_as_a_dflash_head_does(tmp_path: Path) -> None:
    """Its convolutions are the identity and its selector adds nothing, and both learn from the first update on."""
    made = build_head(small_target(), TestTraining.settings(tmp_path), 1, [])
    bare, given = copy.deepcopy(made.module), features(small_target(), TEXTS % 40, made.features)
    bare.candidate_selector, bare.config = None, replace(bare.config, selector_rank=0)
    for layer in bare.layers:
        layer.around = lambda name, sublayer, x, residual: residual + sublayer(x)
    found, expected = (
        [module.step_logits(rows, step) for step, rows in enumerate(module.unroll(TEXTS % 40, given, 4, 1))]
        for module in (made.module, bare)
    )
    torch.testing.assert_close(torch.stack(found), torch.stack(expected))
    torch.stack(found).logsumexp(-1).sum().backward()
    first = made.module.layers[0]
    assert all(conv.kernel_projection.weight.grad.any() for conv in (first.attention_conv, first.mlp_conv))
    assert made.module.candidate_selector.successor_codebook.grad.any()


class TestTraining(TrainingContract):
    KIND, DRAFTER, LAYOUT = "dflash2", DFlash2Drafter, "z-lab"
    CHOICES: ClassVar = {"block_size": 5, "selector_rank": 8, "selector_top_k": 16, "conv_kernel_size": 2}
    REFUSED = (
        ({"draft_vocab_size": 20}, "DFlash2 heads draft the whole vocabulary; leave head.draft_vocab_size out."),
    )

    @classmethod
    def settings(cls, folder: Path) -> HeadTrainConfig:
        head = HeadConfig(layers=1, model_type="qwen3", markov_rank=8)
        return replace(run_of(folder, "dflash2"), head=head, chain=ChainConfig(steps=4))

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        assert loaded.module.candidate_selector.successor_codebook.any(), "it begins with zeros"
        assert loaded.module.layers[0].mlp_conv.kernel_projection.weight.any()
