"""The configuration of ``python -m specgraph train draft=HEAD``."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, cast

from specgraph.config.drafters import trained_by
from specgraph.config.errors import did_you_mean
from specgraph.errors import ConfigError

if TYPE_CHECKING:
    from specgraph.drafters.heads import HeadDrafter

KINDS = {"model_type": ("llama", "qwen3"), "family": ("chained", "target"), "markov_kind": ("vanilla", "gated", "rnn")}
"""The allowed values of some fields of :class:`HeadConfig`."""


@dataclass
class HeadConfig:
    """The head. Its width, embedding and vocabulary projection are the target's; null takes the target's value."""

    layers: int | None = None
    """The number of decoder layers; for medusa, of residual blocks in every head; for mtp, of modules; null is 1, and
    for dflash, dflash2 and dspark 5."""
    family: str = "chained"
    """mtp: the hidden state that further modules read, chained (the output of the module before) or target."""
    model_type: str = "llama"
    """The kind of decoder layers, llama or qwen3 (which norms queries and keys)."""
    intermediate_size: int | None = None
    """The width of the MLP."""
    num_attention_heads: int | None = None
    """The number of query heads."""
    num_key_value_heads: int | None = None
    """The number of key-value heads."""
    head_dim: int | None = None
    """The width of one attention head."""
    feature_layers: list[int] = field(default_factory=list)
    """The indices k, ascending, of the target's hidden states hs[k] that the head reads; [] takes hs[2], hs[L//2],
    hs[L-3]; for dflash, dflash2 and dspark five from hs[2] to hs[L-2]; for a head that reads only one the last."""
    causal: bool = False
    """dflash, dflash2, dspark: whether rows of a block see no later rows of it, so that a draft does not depend on how
    many there are behind it."""
    markov_rank: int = 256
    """dspark: the rank of the Markov head, dflash2: of the selector, which corrects logits by the token before; 0 is
    none."""
    markov_kind: str = "vanilla"
    """dspark: the kind of Markov head, vanilla, gated or rnn."""
    confidence: bool = True
    """dspark: whether the head learns to estimate which drafts are accepted, which changes no draft."""
    norm_before_residual: bool = False
    """Whether the first layer's residual is the normed hidden state."""
    draft_vocab_size: int | None = None
    """Draft only this many tokens, those most frequent in the target's answers; null is the whole vocabulary."""
    init: str | None = None
    """The folder of a trained head, as `train` saves it, to start from; layers that it lacks start as in a new head."""
    mask_token_id: int | None = None
    """peagle, dflash, dflash2, dspark: the id in the place of a token not drafted yet, which text does not use; null is
    the PAD token."""


@dataclass
class ChainConfig:
    """The chain of drafts behind every token that is trained on."""

    steps: int = 7
    """The number of drafts in a chain; for medusa, of heads."""
    decay: float = 0.8
    """Draft i has the weight decay^i in the loss."""
    overlap: float = 0.0
    """The share of the loss that is the probability of a rejection at temperature 1; the rest is the cross-entropy.
    DeepSpec trains dspark with 0.95."""
    anchors: float = 1.0
    """The share of the answers' tokens behind which drafts are learned, drawn for every batch. For dflash, dflash2
    and dspark, a batch costs as much less."""
    keep: float = 1.0
    """Draft i learns from a share max(keep^i, keep_least) of these tokens, drawn for every batch."""
    keep_least: float = 0.2
    """The least share of tokens, see keep."""


@dataclass
class RolloutConfig:
    """The text from which the head learns. The target writes it: it answers every question greedily, and once more at
    answer_temperature."""

    file: str | None = None
    """The file of the target's answers: read if it exists, else written; null is output/rollouts.jsonl."""
    sampled_questions: int = 0
    """How many additional questions the target invents."""
    question_temperature: float = 1.0
    """The temperature at which the target invents questions."""
    answer_temperature: float = 0.8
    """The temperature of the second answer to a question."""
    max_new_tokens: int = 256
    """The most tokens of an answer."""
    batch_size: int = 256
    """How many answers are written together."""
    chat: bool = False
    """Ask each question as a chat of one turn, by the tokenizer's template, instead of as Question: ... Answer:."""


@dataclass
class OptimConfig:
    """AdamW with a linear warm-up, and then a cosine down to ``final_lr_ratio``."""

    steps: int = 4000
    """The number of updates."""
    batch_size: int = 64
    """How many answers an update uses."""
    learning_rate: float = 2e-3
    """The learning rate at the end of the warm-up."""
    warmup_steps: int = 100
    """The number of updates of the warm-up."""
    final_lr_ratio: float = 0.02
    """The share of the learning rate that is left at the end."""
    weight_decay: float = 0.01
    """The weight decay, which applies to matrices only."""
    grad_clip: float = 1.0
    """The largest norm of a gradient; larger ones are clipped."""
    eval_every: int = 200
    """The number of updates between two measurements on held-out questions."""
    checkpoint_every: int = 200
    """The number of updates between two checkpoints; a run that was killed continues from its last one."""
    max_seconds: float | None = None
    """Stop after this many seconds; the cosine then ends with them, and the run does not repeat exactly."""


@dataclass
class HeadTrainConfig:
    """One run, which trains a head for a frozen target on the target's own answers."""

    model: str = ""
    """The target: a folder or a name for AutoModelForCausalLM."""
    dtype: str = "auto"
    """The target's dtype: float32, bfloat16, float16 or float64, on a CPU one of the first two; auto is float32 on a
    CPU and the checkpoint's own elsewhere. The head is trained in float32, with bfloat16 autocast on a GPU or beside a
    target in bfloat16, and saved in bfloat16."""
    device: str = "auto"
    """cpu or cuda; auto takes a GPU if there is one."""
    trust_remote_code: bool = False
    """Run the code of a model or tokenizer that is not transformers' own."""
    draft: str = "eagle3"
    """The kind of head that is trained."""
    data: str = ""
    """The questions: a .jsonl file with the fields question and answer."""
    output: str = "outputs/head"
    """The folder for the head, its report and its loss curve."""
    heldout: int = 256
    """How many questions are used for measurements only, and not for training."""
    max_length: int = 512
    """The most tokens of a question with its answer; longer texts are cut."""
    eval_drafts: int = 5
    """The K for which the acceptance length is estimated."""
    seed: int = 0
    """The seed of everything random."""
    head: HeadConfig = field(default_factory=HeadConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    def drafter(self) -> type[HeadDrafter]:
        """The class of the drafter whose head this run trains."""
        from specgraph.drafters.registry import drafter_class

        return cast("type[HeadDrafter]", drafter_class(trained_by()[self.draft]))

    @property
    def rollout_file(self) -> str:
        """The file in which the target's answers are kept."""
        return self.rollout.file or os.path.join(self.output, "rollouts.jsonl")


_MAY_BE_ZERO = {"seed", "warmup_steps", "final_lr_ratio", "weight_decay", "sampled_questions", "keep_least",
                "mask_token_id", "markov_rank", "overlap"}  # fmt: skip


def check_dtype(device: str, dtype: str) -> None:
    """Raise ``ConfigError`` if a head cannot use the tensors of a target in this dtype on this kind of device."""
    if device == "cpu" and dtype not in ("float32", "bfloat16"):
        raise ConfigError(
            f"dtype={dtype}: on a CPU, a head is trained beside a target in float32 or bfloat16; give one of them."
        )


def check_head_config(cfg: HeadTrainConfig) -> None:
    """Raise ``ConfigError`` for the first value that is out of range, with its key and the allowed values."""
    if cfg.draft not in trained_by():
        *others, last = trained_by()
        raise ConfigError(
            f"There is no draft={cfg.draft} to train{did_you_mean(cfg.draft, trained_by())}; draft is "
            f"{', '.join(others)} or {last}, a head for the target in model=PATH."
        )
    for key, example in (("model", "PATH, the folder or name of a causal LM"), ("data", "path/to/questions.jsonl")):
        if not getattr(cfg, key):
            raise ConfigError(f"{key} is not set: give {key}={example}.")
    for key, (*others, last) in KINDS.items():
        if (given := getattr(cfg.head, key)) not in (*others, last):
            raise ConfigError(f"head.{key}={given!r} is not known: use {', '.join(others)} or {last}.")
    check_numbers(cfg, _MAY_BE_ZERO)
    for key in ("decay", "overlap", "anchors", "keep", "keep_least"):
        if getattr(cfg.chain, key) > 1:
            raise ConfigError(f"chain.{key}={getattr(cfg.chain, key)} is out of range: it must be 1 or less.")
    if cfg.eval_drafts > cfg.chain.steps:
        raise ConfigError(
            f"eval_drafts={cfg.eval_drafts} is more than chain.steps={cfg.chain.steps}: the head is not trained for "
            "that many drafts; lower the one or raise the other."
        )
    check_output(cfg.output)


def check_output(path: str) -> None:
    """Raise ``ConfigError`` for an output that cannot become a folder."""
    if os.path.exists(path) and not os.path.isdir(path):
        raise ConfigError(f"output={path} is a file: give output=path/of/a/folder.")


def check_numbers(node: object, may_be_zero: Collection[str], path: str = "") -> None:
    """Raise ``ConfigError`` unless every number of a tree of dataclasses is positive and finite.

    Fields named in ``may_be_zero`` may be zero.
    """
    for item in fields(node):  # type: ignore[arg-type]
        value, where = getattr(node, item.name), f"{path}{item.name}"
        if is_dataclass(value):
            check_numbers(value, may_be_zero, f"{where}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            zero = item.name in may_be_zero
            if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
                least = "0 or more" if zero else "more than 0"
                raise ConfigError(f"{where}={value} is out of range: it must be {least}.")
