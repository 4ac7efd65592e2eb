"""Training of MTP modules: the rows that are trained are those of decoding, and what is saved is what is loaded."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specgraph
from specgraph.bench.models import random_head
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.training import run as training_run
from specgraph.training import train_head
from specgraph.training.config import HeadConfig
from specgraph.training.head import bf16_copy
from specgraph.training.teacher import Teacher
from tests.checkpoints.running import info
from tests.decoding import CONFIG, assert_same_tokens, compiled, reference_greedy
from tests.drafters.mtp_formula import CHAINED, FED, OTHER, definition, modules, target
from tests.drafters.test_eagle import run_of, small_target, tokenizer
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


@pytest.mark.parametrize("family", ["chained", "target"])
def test_training_lowers_the_loss_and_the_saved_modules_are_the_trained_ones(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, saved = small_target(), []
    before = {name: (t.clone(), t.dtype) for name, t in model.state_dict(keep_vars=True).items()}
    buffers = {name: (t.clone(), t.dtype) for name, t in model.named_buffers()}
    monkeypatch.setattr(training_run, "Teacher", functools.cache(Teacher))
    monkeypatch.setattr(training_run, "bf16_copy", lambda given: saved.append(bf16_copy(given)) or saved[-1])
    config = replace(run_of(tmp_path), draft="mtp", head=HeadConfig(layers=2, family=family), eval_drafts=3)
    config.chain.steps = 3
    report = train_head(model, tokenizer(), config)
    losses = [loss for _, loss in report.progress.losses]
    assert losses[-1] < losses[0]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        known, dtype = (before | buffers)[name]
        assert torch.equal(tensor, known) and tensor.dtype == dtype, name
    checkpoint = open_checkpoint(tmp_path / "head")
    assert (checkpoint.kind, checkpoint.layout) == ("mtp", "speculators")
    assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.bfloat16}
    assert not any("embed" in name or "lm_head" in name for name in checkpoint.tensors)
    choices = {c.name: (c.value, c.source) for c in MtpDrafter.choices(checkpoint, MtpDraftConfig(), 2)}
    assert choices["num_modules"] == (2, "tensors") and choices["family"] == (family, "mtp_options")
    loaded = MtpDrafter.load(checkpoint, MtpDraftConfig(), model, info(model)).module
    for (name, own), (_, trained) in zip(loaded.named_parameters(), saved[-1].module.named_parameters(), strict=True):
        assert torch.equal(own, trained.to(own.dtype)), name
    tested = specgraph.compile_speculative(model, CONFIG, draft=tmp_path / "head")
    prompts = [torch.tensor([3, 4, 9, 5]), torch.tensor([6])]
    found = tested.generate(prompts, max_new_tokens=9).new_tokens
    assert_same_tokens(model, prompts, found, reference_greedy(model, prompts, 9))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab_size": 20}, "MTP modules draft the whole vocabulary; leave head.draft_vocab_size out."),
        ({"feature_layers": [1]}, "read the target's last hidden state, hs[2]; leave head.feature_layers out."),
        ({"intermediate_size": 8}, "have the target's own layers; leave head.intermediate_size=8 out."),
        ({"family": "both"}, "head.family='both' is not known: use chained or target."),
    ],
)
def test_settings_that_modules_do_not_have(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = replace(run_of(tmp_path), draft="mtp", head=HeadConfig(**changes))
    with pytest.raises(ConfigError) as raised:
        train_head(small_target(), tokenizer(), config)
    assert words in str(raised.value)
