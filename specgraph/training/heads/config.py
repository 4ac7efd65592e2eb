"""What ``python -m specgraph train draft=HEAD`` can be told."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specgraph.config.draft import trained_by
from specgraph.errors import ConfigError

from ..config import OptimConfig, RolloutConfig, check_numbers, check_output

if TYPE_CHECKING:
    from specgraph.drafters.base import Drafter

MODEL_TYPES = ("llama", "qwen3")


@dataclass
class HeadConfig:
    """The head. Its width, embedding and vocabulary projection are the target's; null takes the target's value."""

    layers: int = 1
    """Decoder layers; of medusa, residual blocks of every head."""
    model_type: str = "llama"
    """Their kind, llama or qwen3 (with norms of queries and keys)."""
    intermediate_size: int | None = None
    """Width of the MLP."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key-value heads."""
    head_dim: int | None = None
    """Width of one attention head."""
    feature_layers: list[int] = field(default_factory=list)
    """Indices k of the target's hidden states hs[k] that it reads, ascending; [] takes hs[2], hs[L//2],
    hs[L-3], or the last one for a head that reads one."""
    norm_before_residual: bool = False
    """The first layer's residual is the normed hidden state."""
    draft_vocab_size: int | None = None
    """Draft only the tokens that are most frequent in the target's answers; null is the whole vocabulary."""
    init: str | None = None
    """Start from a trained head in this folder, as `train` saves it; what it lacks starts as in a new head."""
    mask_token_id: int | None = None
    """peagle: what stands for a token that is not drafted yet, an id that text does not use; null is the PAD token."""


@dataclass
class ChainConfig:
    """The chain of drafts behind every token that is trained on."""

    steps: int = 7
    """Drafts in a chain; of medusa, heads."""
    decay: float = 0.8
    """Draft i weighs decay^i in the loss."""
    keep: float = 1.0
    """peagle: draft i learns from a share max(keep^i, keep_least) of the tokens, drawn for every batch."""
    keep_least: float = 0.2
    """See keep."""


@dataclass
class HeadRolloutConfig(RolloutConfig):
    """The text that the head learns from, which the target writes itself: it answers every question greedily and once
    more at answer_temperature."""

    file: str | None = None
    """Answers to read if the file exists, or else to write for the next head; null is output/rollouts.jsonl."""
    sampled_questions: int = 0
    """More questions, which the target invents."""
    question_temperature: float = 1.0
    """At which it does."""
    answer_temperature: float = 0.8
    """Of the second answer."""
    max_new_tokens: int = 256
    """Longest answer."""
    batch_size: int = 256
    """Answers written together."""


@dataclass
class HeadOptimConfig(OptimConfig):
    """AdamW, a linear warm-up, then a cosine down to ``final_lr_ratio``."""

    steps: int = 4000
    """Updates."""
    batch_size: int = 64
    """Answers in an update."""
    learning_rate: float = 2e-3
    """At the end of the warm-up."""
    warmup_steps: int = 100
    """Updates of the warm-up."""
    final_lr_ratio: float = 0.02
    """Share of the learning rate that is left at the end."""
    weight_decay: float = 0.01
    """Of matrices."""
    grad_clip: float = 1.0
    """Largest norm of a gradient."""
    eval_every: int = 200
    """Updates between two measurements on held-out questions."""
    checkpoint_every: int = 200
    """Updates between two checkpoints; a run that was killed goes on from its last one."""
    max_seconds: float | None = None
    """Stop after this time; the cosine ends with it. A run with a time limit does not repeat exactly."""


@dataclass
class HeadTrainConfig:
    """One run: a head for a frozen target, learning from the target's own answers."""

    model: str = ""
    """The target: a folder or a name for AutoModelForCausalLM."""
    dtype: str = "auto"
    """Of the target: float32, bfloat16, float16 or float64; auto is float32 on a CPU, the checkpoint's own elsewhere.
    The head is trained in float32 (bfloat16 autocast on a GPU) and saved in bfloat16."""
    device: str = "auto"
    """cpu or cuda; auto takes a GPU if there is one."""
    algorithm: str = "eagle3"
    """What draft= chose: the head that is trained."""
    data: str = ""
    """Questions: a .jsonl file with the fields question and answer."""
    output: str = "outputs/head"
    """The folder for the head, its report and its loss curve."""
    heldout: int = 256
    """Questions that are measured on, never trained on."""
    max_length: int = 512
    """Tokens of a question and its answer; what is longer is cut."""
    eval_drafts: int = 5
    """K of the acceptance length that is estimated."""
    seed: int = 0
    """Of everything that is drawn."""
    head: HeadConfig = field(default_factory=HeadConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    rollout: HeadRolloutConfig = field(default_factory=HeadRolloutConfig)
    optim: HeadOptimConfig = field(default_factory=HeadOptimConfig)

    def drafter(self) -> type[Drafter]:
        """The drafter whose head this run trains."""
        from specgraph.drafters.registry import drafter_class

        return drafter_class(trained_by()[self.algorithm])

    @property
    def rollout_file(self) -> str:
        """Where the target's answers are kept."""
        return self.rollout.file or os.path.join(self.output, "rollouts.jsonl")


_MAY_BE_ZERO = {"seed", "warmup_steps", "final_lr_ratio", "weight_decay", "sampled_questions", "keep_least",
                "mask_token_id"}  # fmt: skip


def check_head_config(cfg: HeadTrainConfig) -> None:
    """Raise ``ConfigError`` for the first value out of range, with its key and what is allowed."""
    for key, example in (("model", "PATH, the folder or name of a causal LM"), ("data", "path/to/questions.jsonl")):
        if not getattr(cfg, key):
            raise ConfigError(f"{key} is not set: give {key}={example}.")
    if cfg.algorithm not in trained_by():
        raise ConfigError(f"draft={cfg.algorithm} cannot be trained: use draft={' or draft='.join(trained_by())}.")
    if cfg.head.model_type not in MODEL_TYPES:
        raise ConfigError(f"head.model_type={cfg.head.model_type!r} is not known: use {' or '.join(MODEL_TYPES)}.")
    check_numbers(cfg, _MAY_BE_ZERO)
    for key in ("decay", "keep", "keep_least"):
        if getattr(cfg.chain, key) > 1:
            raise ConfigError(f"chain.{key}={getattr(cfg.chain, key)} is out of range: it must be 1 or less.")
    if cfg.eval_drafts > cfg.chain.steps:
        raise ConfigError(
            f"eval_drafts={cfg.eval_drafts} is more than chain.steps={cfg.chain.steps}: the head is not trained for "
            "that many drafts; lower the one or raise the other."
        )
    check_output(cfg.output)
