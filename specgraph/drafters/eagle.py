"""EAGLE-1 and EAGLE-2 heads, run as a chain.

A head is a small decoder. Its row ``t`` concatenates the embedding of token ``t + 1`` with ``h_t``, the hidden state
that the target's vocabulary projection reads at ``t``, and applies the projection ``fc``. The decoder layers turn the
result into an estimate of ``h_{t+1}``, from which the target's own vocabulary projection predicts token ``t + 2``. The
next draft reads that estimate in the place of the target's hidden state. EAGLE-2 drafts a tree with the same weights;
here, both draft a chain.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858); names and shapes of SafeAILab/EAGLE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specgraph.checkpoints.checkpoint import EMBEDDING, Checkpoint, Choice
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.layers import LayerShape, layer_config, read_layers
from specgraph.checkpoints.loading import HeadLoader
from specgraph.checkpoints.reading import Reader
from specgraph.config import DraftConfig
from specgraph.config.drafters import EagleDraftConfig
from specgraph.drafters.base import DraftHead
from specgraph.drafters.heads import Record
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.shifted import LAYERS, ShiftedDrafter, ShiftedHead, borrow, causal_layers, fill_head
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

OTHERS = ("hidden_norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
"""Norms that DFlash heads, EAGLE-3 heads and whole decoders have. An EAGLE head has no norm before its first layer."""


class Eagle(ShiftedHead):
    """An EAGLE head. Its parameters have the names that they have in the files."""

    def __init__(self, config: PretrainedConfig) -> None:
        """Make the layers from ``config``, Llama's or Qwen3's configuration, with the ``vocab_size`` of the target."""
        super().__init__()
        self.config = causal_layers(config)
        plain, rotary, _ = LAYERS[config.model_type]
        size = config.hidden_size
        self.num_features, self.target_hidden_size = 1, size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(plain(self.config, index) for index in range(config.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()  # the first layer has no norm before it
        self.lm_head = nn.Linear(size, config.vocab_size, bias=False)
        self.rotary = rotary(self.config)
        self.mask_hidden = None
        self.register_buffer("draft_to_target", None)

    def combine(self, *features: Tensor) -> Tensor:
        """The target's last hidden state, unchanged."""
        (hidden,) = features
        return hidden

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Estimates ``[B, T, H]`` of the next hidden states, from int64 ``[B, T]`` twice and ``[B, T, H]``."""
        embedding = self.embed_tokens(tokens)
        options["position_embeddings"] = self.rotary(embedding, positions)
        options.setdefault("attention_mask", None)
        rows: Tensor = self.fc(torch.cat([embedding, hidden], dim=-1))
        for layer in self.layers:
            rows = layer(rows, **options)
        return rows

    @torch.no_grad()
    def start_from_hidden(self) -> None:
        """Initialise ``fc`` so that it passes the hidden state on unchanged, which has the right scale.

        After 100 training steps on tiny-math, the held-out loss was 3.12 nats per token. It was 3.26 with a random
        ``fc``.
        """
        size = self.fc.out_features
        self.fc.weight[:, size:].copy_(torch.eye(size))

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, V]`` of rows that :meth:`forward` gave, and these rows, since there is no last norm."""
        return self.lm_head(hidden), hidden


@dataclass(frozen=True, eq=False)
class EagleDrafter(ShiftedDrafter):
    """Runs an EAGLE head as a chain."""

    kind: ClassVar[str] = "eagle"
    Config: ClassVar[type[DraftConfig]] = EagleDraftConfig
    reads: ClassVar[str | None] = "EAGLE-1 and EAGLE-2 heads"
    head: ClassVar[type[nn.Module] | None] = Eagle

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise an EAGLE head by the names of its tensors, because its configuration is that of any Llama.

        The sign is a first decoder layer without a norm before it. A head that lacks its ``fc``, or that has a last
        norm, is still recognised, so that the error can say what is wrong with it. If both hold, the tensors are those
        of a causal LM whose layers norm only their outputs, and not of a head.
        """
        names = files.tensors
        layer = "layers.0.self_attn.q_proj.weight" in names and not any(name in names for name in OTHERS)
        if not layer or "speculators_model_type" in files.config:
            return None
        whole = "norm.weight" in names and "fc.weight" not in names
        return None if whole else Checkpoint.of(files, cls.kind, "eagle", "eagle")

    @classmethod
    def choices(
        cls, checkpoint: Checkpoint, options: EagleDraftConfig, target_layers: int | None
    ) -> tuple[Choice, ...]:
        """The options of the decoder layers, and the base of the rotary embedding."""
        reader = Reader(checkpoint)
        _shape(reader, options)
        return tuple(reader.sources)

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, options: EagleDraftConfig, model: PreTrainedModel, info: ModelInfo
    ) -> DraftHead:
        """Load a head. A checkpoint may lack the embedding and the projection, which are then the target's own."""
        loader = HeadLoader(checkpoint, checkpoint.tensors, model, info, "an EAGLE head")
        layers = layer_config(checkpoint, _shape(Reader(checkpoint), options), len(loader.own[EMBEDDING]))
        if layers.hidden_size != info.hidden_size:
            raise loader.unfit(f"it has the hidden size {layers.hidden_size}", f"has {info.hidden_size}")
        with torch.device("meta"):
            module = Eagle(layers)
        loader.add_biases(module, without=("lm_head",))
        loader.check(module)
        fill_head(loader, module, layers)
        return DraftHead(module.eval(), cls.feature_layers(info.num_layers))

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head whose embedding and vocabulary projection are the target's own frozen tensors."""
        cls.check_plan(plan, "An EAGLE head reads", "An EAGLE head drafts")
        if plan.norm_before_residual:
            raise ConfigError("An EAGLE head has no norm of its hidden state; leave head.norm_before_residual out.")
        module = Eagle(plan.layers).to(plan.embedding.device)
        borrow(module, plan)
        module.start_from_hidden()
        return DraftHead(module, plan.features)

    @classmethod
    def saved_config(cls, head: DraftHead, record: Record) -> dict[str, Any]:
        """The configuration of SafeAILab's layout."""
        layers: Any = head.module.config
        return {
            **layers.to_diff_dict(),
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": layers.rope_parameters["rope_theta"],
            "bias": head.module.fc.bias is not None,
            "base_model_name_or_path": record.target_name,
        }


def _shape(reader: Reader, options: EagleDraftConfig) -> LayerShape:
    """The decoder layers of a head and their rotary embedding; ``reader`` notes where both were found."""
    names = reader.checkpoint.tensors
    reader.note("biases", any(name.endswith(".bias") for name in names), "tensors")
    return read_layers(reader, names, options.rope_theta)
