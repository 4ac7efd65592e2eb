"""The configuration of a training run. It is made of plain dataclasses, which ``OmegaConf.structured`` accepts."""

import os
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any

from specgraph.errors import ConfigError
from specgraph.training.config import check_numbers, check_output


@dataclass
class TokenizerConfig:
    """Byte-level BPE in which each digit is one token. ``vocab_size`` includes the 256 bytes and two special tokens."""

    vocab_size: int = 3072
    """The number of tokens, with the 256 bytes and two special tokens among them."""


@dataclass
class ModelConfig:
    """The shape of a causal LM with tied embeddings, of any architecture of transformers."""

    model_type: str = "llama"
    """The architecture, as transformers names it: llama, qwen3, qwen3_5_text and so on."""
    hidden_size: int = 256
    """The width of the hidden states."""
    num_hidden_layers: int = 8
    """The number of decoder layers."""
    num_attention_heads: int = 4
    """The number of query heads."""
    num_key_value_heads: int = 2
    """The number of key-value heads, a divisor of the number of query heads."""
    head_dim: int = 64
    """The width of one attention head."""
    intermediate_size: int = 768
    """The width of the MLP."""
    max_position_embeddings: int = 1024
    """The longest sequence that the model can decode."""
    rope_theta: float = 10000.0
    """The base of the rotary embeddings."""
    attention_dropout: float = 0.0
    """The share of attention weights that are dropped in training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further settings of the architecture's configuration, such as {linear_num_value_heads: 4}."""


@dataclass
class OptimConfig:
    """AdamW with a linear warm-up, and then a cosine down to ``final_lr_ratio``. ``batch_size`` counts documents."""

    steps: int = 2000
    """The number of updates."""
    batch_size: int = 64
    """How many documents an update uses."""
    learning_rate: float = 2e-3
    """The learning rate at the end of the warm-up."""
    warmup_steps: int = 100
    """The number of updates of the warm-up."""
    final_lr_ratio: float = 0.05
    """The share of the learning rate that is left at the end."""
    weight_decay: float = 1.0
    """The weight decay, which applies to matrices only."""
    grad_clip: float = 1.0
    """The largest norm of a gradient; larger ones are clipped."""
    eval_every: int = 100
    """The number of updates between two measurements on held-out documents."""


@dataclass
class RolloutConfig:
    """Text that the target writes and from which the draft learns, since decoding asks it to continue such text.

    ``sampled_questions`` documents are sampled at ``question_temperature``, including their questions. These questions
    and those of the training data are then answered greedily and, once more, at ``answer_temperature``.
    """

    sampled_questions: int = 16384
    """How many documents the target invents, with their questions."""
    question_temperature: float = 1.0
    """The temperature at which the target invents documents."""
    answer_temperature: float = 0.8
    """The temperature of the second answer to a question; the first is greedy."""
    max_new_tokens: int = 320
    """The most tokens of an answer."""
    batch_size: int = 4096
    """How many answers are written together."""


@dataclass
class TargetConfig:
    """The model to be decoded, trained on the documents by next-token cross-entropy.

    ``input_noise`` is the share of input tokens that are replaced by random ones in training. On 7.2k documents of
    GSM8K, a share of 0.1 improved the best held-out loss from 1.76 to 1.66 nats per token (with a weight decay of 1 for
    both). ``checkpoint`` is the folder of an earlier run's target, with its tokenizer; then only a draft is trained.
    Keep ``data``, ``heldout`` and ``seed`` of that run, because they choose the documents that are held out.
    """

    checkpoint: str = ""
    """The folder of an earlier run's target, with its tokenizer; then only a draft is trained. Empty trains a
    target."""
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    input_noise: float = 0.15
    """The share of input tokens that are replaced by random ones in training."""


def _draft_model() -> ModelConfig:
    return ModelConfig(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=384
    )


def _draft_optim() -> OptimConfig:
    return OptimConfig(
        steps=5000, batch_size=256, learning_rate=3e-3, warmup_steps=200, weight_decay=0.01, eval_every=500
    )


@dataclass
class DraftConfig:
    """The small model that is distilled from the target. ``question_weight`` scales the loss of question tokens."""

    enabled: bool = True
    """Whether a draft is trained; without one, only the target is written, for heads to be trained with."""
    model: ModelConfig = field(default_factory=_draft_model)
    optim: OptimConfig = field(default_factory=_draft_optim)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    question_weight: float = 0.1
    """The factor on the loss of question tokens."""


@dataclass
class AcceptanceConfig:
    """How acceptance is measured at the end: greedy decoding with ``num_speculative_tokens`` drafts per step."""

    num_speculative_tokens: int = 4
    """K, the number of drafts per step."""
    max_new_tokens: int = 256
    """The most tokens of an answer."""
    max_questions: int = 200
    """How many questions are answered."""


@dataclass
class TrainConfig:
    """One run, which trains a tokenizer, a target and a draft, and measures them.

    ``data`` is a jsonl file with the fields ``question`` and ``answer``. ``heldout`` of its documents are not used for
    training. Acceptance is measured on ``eval_data``, a file of the same form; if it is empty, on the held-out
    documents.
    """

    data: str = ""
    """The documents: a .jsonl file with the fields question and answer."""
    eval_data: str = ""
    """A file of the same form, on which acceptance is measured; empty takes the held-out documents."""
    output: str = "outputs/tiny-math"
    """The folder for the tokenizer, both models and the report."""
    heldout: int = 256
    """How many documents are used for measurements only, and not for training."""
    max_length: int = 640
    """The most tokens of a document; longer ones are cut."""
    seed: int = 0
    """The seed of everything random."""
    device: str = "auto"
    """cpu or cuda; auto takes a GPU if there is one."""
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)


_NOT_IN_ALL = {"model_type", "rope_theta", "attention_dropout", "options"}
"""Fields of :class:`ModelConfig` that a configuration need not have by these names."""
_MAY_BE_ZERO = {"seed", "heldout", "warmup_steps", "final_lr_ratio", "weight_decay", "question_weight",
                "sampled_questions", "attention_dropout", "input_noise"}  # fmt: skip


def check_config(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` for the first value that is out of range, with its key and the allowed values."""
    if not cfg.data:
        raise ConfigError("data is not set: give data=path/to/file.jsonl, one question and answer per line.")
    if cfg.tokenizer.vocab_size < 258:
        raise ConfigError(
            f"tokenizer.vocab_size={cfg.tokenizer.vocab_size} is too small: 256 bytes and 2 special tokens need at "
            "least 258; try tokenizer.vocab_size=3072."
        )
    check_numbers(cfg, _MAY_BE_ZERO)
    if cfg.target.checkpoint and not cfg.draft.enabled:
        raise ConfigError(
            f"draft.enabled=false and target.checkpoint={cfg.target.checkpoint} leave nothing to train: leave out one "
            "of them."
        )
    for name, model in (("target", cfg.target.model), ("draft", cfg.draft.model)):
        _check_model(name, model, cfg.max_length)


def check_paths(cfg: TrainConfig) -> None:
    """Raise ``ConfigError`` for a target that does not exist, or an output that cannot become a folder."""
    checkpoint = cfg.target.checkpoint
    if checkpoint and not os.path.isfile(os.path.join(checkpoint, "config.json")):
        raise ConfigError(
            f"target.checkpoint={checkpoint}: there is no config.json; give the folder of a trained target, or leave "
            "it empty to train one."
        )
    check_output(cfg.output)


def _check_model(name: str, model: ModelConfig, max_length: int) -> None:
    where = f"{name}.model"
    _check_architecture(where, model)
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"{where}: hidden_size={model.hidden_size} must be a multiple of "
            f"num_attention_heads={model.num_attention_heads}; change one of them."
        )
    if model.num_attention_heads % model.num_key_value_heads:
        raise ConfigError(
            f"{where}: num_attention_heads={model.num_attention_heads} must be a multiple of "
            f"num_key_value_heads={model.num_key_value_heads}; change one of them."
        )
    if model.max_position_embeddings < max_length:
        raise ConfigError(
            f"{where}.max_position_embeddings={model.max_position_embeddings} is less than max_length={max_length}: "
            "raise the one or lower the other."
        )


def _check_architecture(where: str, model: ModelConfig) -> None:
    """Refuse what transformers has no causal LM for, and settings that its configuration does not have."""
    from transformers import AutoConfig  # which takes seconds, and is not needed to print help
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known, kind = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES), model.model_type
    if kind not in known:
        close = get_close_matches(kind, known, 3) or ["llama", "qwen3"]
        raise ConfigError(f"{where}.model_type={kind!r} is no causal LM of transformers: use {' or '.join(close)}.")
    config = AutoConfig.for_model(kind)
    own = [item.name for item in fields(model) if item.name not in _NOT_IN_ALL]
    for name, key in [*((name, name) for name in own), *((name, f"options.{name}") for name in model.options)]:
        if not hasattr(config, name):
            close = get_close_matches(name, config.to_dict(), 3)
            hint = f"did you mean {' or '.join(close)}?" if name in model.options and close else "use another one."
            raise ConfigError(f"{where}.{key} is no setting of model_type={kind}; {hint}")
