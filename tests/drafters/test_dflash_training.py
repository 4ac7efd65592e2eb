"""Training of DFlash heads: the rows that are trained are those of decoding, and what is saved is what is loaded."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph.drafters.base import DraftHead
from specgraph.drafters.dflash import DFlashDraftConfig, DFlashDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.training.chain import ChainLoss, counted_rows
from specgraph.training.config import ChainConfig, HeadConfig, HeadTrainConfig
from specgraph.training.data import Encoded, collate
from specgraph.training.head import build_head, start_from
from specgraph.training.teacher import Teacher
from tests.checkpoints.running import info
from tests.decoding import CONFIG
from tests.drafters.dflash_formula import BLOCK, GIVEN, MASK, formula, target
from tests.drafters.test_dflash import head
from tests.drafters.training_contract import Trained, TrainingContract, run_of, small_target
from tests.harness import Options, Run, fresh_start
from tests.models import exact_norms, ragged_prompts

TEXTS = torch.stack(ragged_prompts((11, 11), seed=7))
DRAWN = Options((1.0,), (0,), (3,))
"""Drafts are drawn at temperature 1, so that what they are drawn from are the logits themselves."""


@torch.no_grad()
def features(model: PreTrainedModel, texts: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, ...]:
    known = model(input_ids=texts, use_cache=False, output_hidden_states=True).hidden_states
    return tuple(known[k] for k in layers)


@functools.cache
def known() -> tuple[Tensor, ...]:
    return features(target(), TEXTS, (1, 3))


@torch.no_grad()
@pytest.mark.parametrize("name", GIVEN)
def test_what_is_trained_is_the_published_formula(name: str) -> None:
    """For every position of a text, the logits are those of a block behind the text up to there."""
    module, drafts = head(name).module, 4
    unrolled = list(module.unroll(TEXTS, known(), drafts, MASK))
    for row in range(TEXTS.shape[1] - 1):
        before = torch.cat([feature[1, : row + 1] for feature in known()], dim=-1)
        expected = formula(name, before, int(TEXTS[1, row + 1]), drafts)
        found = torch.stack([module.step_logits(rows[1, row], step) for step, rows in enumerate(unrolled)])
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)


def assert_drafted(model: PreTrainedModel, given: DraftHead, kind: str, drafts: int) -> None:
    """Behind every token of a text, decoding draws its drafts from the logits that training computes for them."""
    config = {**CONFIG, "draft": {"kind": kind, "num_speculative_tokens": drafts},
              "verify": {"rule": "probabilistic"}, "pipeline": {"verify": False}}  # fmt: skip
    run = Run(specgraph.compile_speculative(model, config, draft=given).stages["insert_draft"], [64],
              torch.zeros(1, 1), DRAWN)  # fmt: skip
    text = TEXTS[0] % model.config.vocab_size
    for row in range(len(text) - 1):
        known = text[: row + 2]
        drawn, logits = fresh_start(run, 0, known.tolist())[1:3]
        behind = torch.cat([known, drawn])[None]
        with torch.no_grad():
            rows = given.module.unroll(behind, features(model, behind, given.features), drafts, given.mask_token_id)
            found = [given.module.step_logits(out[0, row], step) for step, out in enumerate(rows)]
        torch.testing.assert_close(logits, torch.stack(found), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("name", ["mask embedding", "causal", "windows everywhere", "speculators, sliding"])
def test_what_is_trained_is_what_is_drafted(name: str) -> None:
    assert_drafted(target(), head(name), "dflash", BLOCK - 1)


def test_rows_that_are_not_used_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are chosen have the values and gradients that they have among all rows."""
    module = head("sliding").module
    chosen = [torch.tensor([2, 5, 13]), torch.tensor([5]), torch.tensor([], dtype=torch.int64)]
    parameters = [module.fc.weight, module.layers[1].self_attn.v_proj.weight, module.layers[0].mlp.up_proj.weight]
    grads, values, sizes = [], [], []
    embed = type(module).embed
    monkeypatch.setattr(
        type(module), "embed", lambda self, tokens: sizes.append(tokens.shape) or embed(self, tokens)
    )  # fmt: skip
    for rows in (chosen, None):
        for parameter in parameters:
            parameter.requires_grad_(True)
        unrolled = list(module.unroll(TEXTS, known(), 3, MASK, rows))
        values.append([out.flatten(0, 1)[wanted] for out, wanted in zip(unrolled, chosen, strict=True)])
        total = torch.stack([value.square().sum() for value in values[-1]]).sum()
        grads.append(torch.autograd.grad(total, parameters))
        if rows is not None:
            assert not unrolled[0][0, [0, 1, 3, 4]].any() and unrolled[0][0, [2, 5]].any()
    for parameter in parameters:
        parameter.requires_grad_(False)
    assert sizes == [(4, 4), (22, 4)], "two blocks for each text, and then all"
    for some, every in zip([*values[0], *grads[0]], [*values[1], *grads[1]], strict=True):
        torch.testing.assert_close(some, every, rtol=1e-9, atol=1e-12)


def test_drawn_anchors_are_tokens_of_answers() -> None:
    texts = [Encoded([5, 9, 14, 7, 3, 8, 21, 6, 0], 4), Encoded([11, 2, 30, 4, 17, 9, 12], 2)]
    batch = collate(texts, pad_id=1, question_weight=0.0)
    cfg, width = ChainConfig(steps=3, anchors=0.5), batch.tokens.shape[1]
    assert [len(rows) for rows in counted_rows(batch.weights, cfg)] == [10, 9, 8], "measurements take all"
    seen = set()
    for seed in range(30):
        rows = counted_rows(batch.weights, cfg, torch.Generator().manual_seed(seed))
        assert len(rows[0]) == 4 and all(set(rows[i].tolist()) <= set(rows[0].tolist()) for i in (1, 2))
        seen |= {(int(row) // width, int(row) % width + 1) for row in rows[0]}
    assert seen == {(0, anchor) for anchor in range(4, 8)} | {(1, anchor) for anchor in range(2, 6)}


def settings(folder: Path, **head_options: Any) -> HeadTrainConfig:
    chain, options = ChainConfig(steps=4, anchors=0.5), HeadConfig(model_type="qwen3", **head_options)
    return replace(run_of(folder, "dflash"), head=options, chain=chain)


class TestTraining(TrainingContract):
    KIND, DRAFTER, LAYOUT = "dflash", DFlashDrafter, "z-lab"
    CHOICES: ClassVar = {"block_size": 5, "num_layers": 2, "layer_type": "qwen3"}
    REFUSED = (
        ({"feature_layers": [0, 1]}, "head.feature_layers=[0, 1]: heads of this kind read outputs of layers;"),
    )  # fmt: skip

    @classmethod
    def settings(cls, folder: Path) -> HeadTrainConfig:
        return settings(folder, layers=2)

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        """The saved head also drafts as it was trained, and training goes on from it."""
        model, embedding = small_target(), trained.saved.module.mask_embedding
        assert (loaded.features, loaded.mask_token_id) == ((1, 2), 1)
        assert torch.equal(loaded.module.mask_embedding, embedding.to(loaded.module.mask_embedding.dtype))
        continued = build_head(model, trained.config, 1, [])
        start_from(continued.module, str(trained.folder))
        assert torch.equal(continued.module.mask_embedding, embedding.float())
        exact = copy.deepcopy(model).double()
        exact_norms(exact)
        found = DFlashDrafter.load(trained.checkpoint, DFlashDraftConfig(), exact, info(exact))
        exact_norms(found.module)
        assert_drafted(exact, found, "dflash", 4)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
def test_only_drafts_of_a_causal_head_do_not_depend_on_their_number(causal: bool, tmp_path: Path) -> None:
    model = small_target()
    made = build_head(model, settings(tmp_path, layers=2, causal=causal), 1, [])
    read, texts = features(model, TEXTS % 40, made.features), TEXTS % 40
    few, many = (list(made.module.unroll(texts, read, count, 1)) for count in (2, 4))
    apart = [float((a - b)[:, :-1].abs().max()) for a, b in zip(few, many, strict=False)]
    assert (max(apart) < 1e-5) is causal
    folder = DFlashDrafter.save_head(made, tmp_path / "head", target_name="", algorithm="dflash",
                                     num_speculative_tokens=4, shared=model.parameters())  # fmt: skip
    again = DFlashDrafter.load(open_checkpoint(folder), DFlashDraftConfig(), model, info(model))
    assert [mask.causal for mask in again.module.config.masks] == [causal] * 2


def test_a_new_head() -> None:
    """It has the published number of layers, reads no embeddings, and drafts a part of the vocabulary if asked to."""
    model, config = small_target(), HeadTrainConfig(model="target", data="x", draft="dflash")
    made = build_head(model, replace(config, chain=ChainConfig(steps=6)), 1, [])
    assert (len(made.module.layers), made.module.config.block_size, made.features) == (5, 7, (1, 2))
    std = model.get_input_embeddings().weight.std()
    assert 0.6 * std < made.module.mask_embedding.std() < 1.4 * std
    frozen = {name for name, parameter in made.module.named_parameters() if not parameter.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}
    reduced = replace(config, head=HeadConfig(draft_vocab_size=20, layers=1))
    texts = [Encoded([5, 9, 14, 7, 3, 8, 21, 6, 0], 4)]
    made = build_head(model, reduced, 1, texts)
    assert made.module.lm_head.weight.shape[0] == len(made.module.draft_to_target) == 20
    batch, steps = collate(texts, 1, 0.0), 2
    rows = counted_rows(batch.weights, ChainConfig(steps=steps))
    losses = ChainLoss(made, steps)(batch.tokens, Teacher(model, made.features)(batch.tokens), rows)
    assert losses.isfinite().all()
