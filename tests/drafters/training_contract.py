"""What training of every head has to hold: the loss falls, and what is saved is what was trained and decodes."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import specgraph
from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.drafters.base import DraftHead
from specgraph.drafters.heads import HeadDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.training import HeadTrainConfig, HeadTrainReport, train_head
from specgraph.training import run as training_run
from specgraph.training.config import ChainConfig, HeadConfig, OptimConfig, RolloutConfig, check_head_config
from specgraph.training.head import bf16_copy, build_head
from specgraph.training.loop import HeadLoop
from specgraph.training.teacher import Teacher
from tests.checkpoints.running import info
from tests.decoding import CONFIG, assert_same_tokens, reference_greedy
from tests.drafters.contract import Contract
from tests.models import make_model

WORDS = ["<eos>", "<pad>", "<unk>", "Ann", "has", "apples", "and", "buys", "more", *map(str, range(2, 40))]


@functools.cache
def small_target(architecture: str = "llama") -> PreTrainedModel:
    """A random target whose vocabulary are ``WORDS``."""
    return make_model(architecture, vocab_size=len(WORDS), eos_token_id=0, pad_token_id=1, bos_token_id=None)


@functools.cache
def tokenizer() -> Any:
    """One that knows ``WORDS``."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def run_of(folder: Path, draft: str = "eagle") -> HeadTrainConfig:
    """A run of six updates on twelve questions, whose files go to ``folder``."""
    texts = [{"question": f"Ann has {n} apples and buys {n + 9} more", "answer": "3"} for n in range(2, 14)]
    (folder / "data.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    optim = OptimConfig(steps=6, batch_size=4, learning_rate=0.01, warmup_steps=1, eval_every=2,
                            checkpoint_every=2)  # fmt: skip
    return HeadTrainConfig(
        model="target", draft=draft, data=str(folder / "data.jsonl"), output=str(folder / "head"), heldout=2,
        eval_drafts=2, max_length=64, chain=ChainConfig(steps=2), optim=optim,
        rollout=RolloutConfig(max_new_tokens=8, file=str(folder / "answers")),
    )  # fmt: skip


@dataclass
class Trained:
    """A whole run, the head as it was saved last, and the files."""

    config: HeadTrainConfig
    report: HeadTrainReport
    saved: DraftHead
    checkpoint: Checkpoint

    @property
    def folder(self) -> Path:
        """Where the head is."""
        return Path(self.config.output)


class TrainingContract(Contract):
    """Training of a head by a whole run, which all tests of a class share."""

    ARGUMENTS: ClassVar[Mapping[str, str]] = {"refused": "REFUSED"}

    KIND: ClassVar[str]
    DRAFTER: ClassVar[type[HeadDrafter]]
    LAYOUT: ClassVar[str]
    """The layout in which heads are saved."""
    CHOICES: ClassVar[Mapping[str, Any]]
    """Options of the saved head, with their values."""
    K: ClassVar[int] = 4
    """How many drafts the trained head makes in the decoder."""
    REFUSED: ClassVar[Sequence[tuple[dict[str, Any], str]]]
    """Settings of the group ``head`` that this kind of head does not have, and a part of the sentence that says so."""

    @classmethod
    def settings(cls, folder: Path) -> HeadTrainConfig:
        """The run."""
        return run_of(folder, cls.KIND)

    def check_trained(self, trained: Trained, loaded: DraftHead) -> None:
        """What else must be true of the head as it was saved, and of the same head by its files."""

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        """The run, with the target's traced graphs made once."""
        model, saved = small_target(), []
        before = {name: tensor.clone() for name, tensor in _tensors(model).items()}
        config = cls.settings(tmp_path_factory.mktemp(cls.KIND))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(training_run, "Teacher", TEACHER)
            patch.setattr(training_run, "bf16_copy", lambda given: saved.append(bf16_copy(given)) or saved[-1])
            report = train_head(model, tokenizer(), config)
        for name, tensor in _tensors(model).items():
            assert torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype, f"{name} of the target"
        return Trained(config, report, saved[-1], open_checkpoint(Path(config.output)))

    def test_training_lowers_the_loss_and_the_saved_head_is_the_trained_one(self, trained: Trained) -> None:
        """In bfloat16, without what is the target's."""
        losses = [loss for _, loss in trained.report.progress.losses]
        assert losses[-1] < losses[0]
        assert {path.name for path in trained.folder.iterdir()} >= {"config.json", "training_report.json"}
        checkpoint = trained.checkpoint
        assert (checkpoint.kind, checkpoint.layout) == (self.KIND, self.LAYOUT)
        assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {torch.bfloat16}
        assert not any("embed" in name or "lm_head" in name for name in checkpoint.tensors), "the target has them"
        options, model = self.DRAFTER.Config(), small_target()
        choices = {c.name: c.value for c in self.DRAFTER.choices(checkpoint, options, model.config.num_hidden_layers)}
        assert {name: choices[name] for name in self.CHOICES} == self.CHOICES
        loaded = self.DRAFTER.load(checkpoint, options, model, info(model))
        written = dict(trained.saved.module.named_parameters())
        for name, own in loaded.module.named_parameters():
            assert torch.equal(own, written[name].to(own.dtype)), name
        self.check_trained(trained, loaded)

    def test_a_trained_head_decodes(self, trained: Trained) -> None:
        """By its folder alone."""
        model, prompts = small_target(), [torch.tensor([3, 4, 9, 5]), torch.tensor([6])]
        config = {**CONFIG, "draft": {"num_speculative_tokens": self.K}}
        tested = specgraph.compile_speculative(model, config, draft=trained.folder)
        found = tested.generate(prompts, max_new_tokens=9).new_tokens
        assert_same_tokens(model, prompts, found, reference_greedy(model, prompts, 9))

    def test_a_killed_run_ends_like_an_uninterrupted_one(
        self, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Bit for bit, with the answers that the first run has written."""
        original = HeadLoop._update
        monkeypatch.setattr(training_run, "Teacher", TEACHER)

        def killed(loop: HeadLoop, batch: Any) -> Any:
            if loop.progress.step == 5:
                raise KeyboardInterrupt
            return original(loop, batch)

        again = replace(trained.config, output=str(tmp_path / "again"))
        with monkeypatch.context() as patch:
            patch.setattr(HeadLoop, "_update", killed)
            with pytest.raises(KeyboardInterrupt):
                train_head(small_target(), tokenizer(), again)
        report = train_head(small_target(), tokenizer(), again)
        assert report.progress.losses == trained.report.progress.losses
        weights = [(folder / "model.safetensors").read_bytes() for folder in (trained.folder, tmp_path / "again")]
        assert weights[0] == weights[1]

    def test_settings_that_a_head_does_not_have_are_refused(
        self, refused: tuple[dict[str, Any], str], tmp_path: Path
    ) -> None:
        """By the name of the setting."""
        changes, words = refused
        config = replace(self.settings(tmp_path), head=HeadConfig(**changes))
        with pytest.raises(ConfigError) as raised:
            check_head_config(config)
            build_head(small_target(), config, 1, [])
        assert words in str(raised.value)


TEACHER = functools.cache(Teacher)
"""Traced graphs of a target, made once: tracing is most of a short run."""


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
