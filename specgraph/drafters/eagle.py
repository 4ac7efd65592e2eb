"""EAGLE-1 and EAGLE-2 as a chain: a decoder layer over the token that followed and the target's last hidden state.

Row ``t`` takes the embedding of token ``t + 1`` and ``h_t``, what the target's vocabulary projection reads at ``t``,
side by side through one projection ``fc``, and predicts token ``t + 2`` with the target's own vocabulary projection.
Its output is a guess of ``h_{t+1}``, which is fed on as it is. EAGLE-2 has the same weights and drafts a tree with
them.

Source: Li et al. 2024, EAGLE (arXiv 2401.15077) and EAGLE-2 (arXiv 2406.16858); names and shapes of SafeAILab/EAGLE.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, Choice
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.layers import LayerShape, layer_config
from specgraph.checkpoints.loading import HeadLoader, shared_notes
from specgraph.checkpoints.reading import Reader
from specgraph.checkpoints.target import EMBEDDING, PROJECTION, TargetTensors
from specgraph.checkpoints.writing import without_shared, write_checkpoint
from specgraph.config import DraftConfig
from specgraph.drafters.base import Draft, DraftHead, Target, check_place
from specgraph.drafters.chain import BODY, ChainDrafter
from specgraph.drafters.plan import HeadPlan, random_plan
from specgraph.drafters.shifted import LAYERS, ShiftedHead, body_info, export_shifted
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq$")
"""Tensors that are computed anew."""


@dataclass
class EagleDraftConfig(DraftConfig):
    """Keys of ``draft`` that overrule an EAGLE checkpoint; null leaves it as it is."""

    kind: str = "eagle"
    rope_theta: float | None = None
    """the base of the rotary embedding; null: as the checkpoint says, else 10000."""

    trains: ClassVar[tuple[str, ...]] = ("eagle",)


class Eagle(ShiftedHead):
    """The head. Names of parameters are those of the files."""

    def __init__(self, layers: PretrainedConfig) -> None:
        super().__init__()
        # An unset implementation would run eager attention, which without a mask is not causal.
        layers = copy.deepcopy(layers)
        layers._attn_implementation = "sdpa"
        plain, rotary, _ = LAYERS[layers.model_type]
        size = layers.hidden_size
        self.config = layers
        self.num_features, self.target_hidden_size = 1, size
        self.embed_tokens = nn.Embedding(layers.vocab_size, size)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(plain(layers, index) for index in range(layers.num_hidden_layers))
        self.layers[0].input_layernorm = nn.Identity()  # the first layer reads what ``fc`` gives as it is
        self.lm_head = nn.Linear(size, layers.vocab_size, bias=False)
        self.rotary = rotary(layers)
        self.mask_hidden = None
        self.draft_to_target: Tensor | None
        self.register_buffer("draft_to_target", None)

    def combine(self, *features: Tensor) -> Tensor:
        """The target's last hidden state, as it is."""
        (hidden,) = features
        return hidden

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Run rows: int64 ``[B, T]`` twice and ``[B, T, H]`` to ``[B, T, H]``, guesses of the next hidden state."""
        embedding = self.embed_tokens(tokens)
        options["position_embeddings"] = self.rotary(embedding, positions)
        options.setdefault("attention_mask", None)
        rows: Tensor = self.fc(torch.cat([embedding, hidden], dim=-1))
        for layer in self.layers:
            rows = layer(rows, **options)
        return rows

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, V]`` of rows of :meth:`forward`, and these rows: there is no norm in between."""
        return self.lm_head(hidden), hidden


@dataclass(frozen=True, eq=False)
class EagleDrafter(ChainDrafter):
    """Runs an EAGLE head as a chain."""

    kind: ClassVar[str] = "eagle"
    Config: ClassVar[type[DraftConfig]] = EagleDraftConfig
    reads: ClassVar[str | None] = "EAGLE-1 and EAGLE-2 heads"
    needs: ClassVar[str | None] = "head"
    head: ClassVar[type[nn.Module] | None] = Eagle

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """By the names of its tensors: its configuration is that of any Llama."""
        names = files.tensors
        ours = "fc.weight" in names and "layers.0.self_attn.q_proj.weight" in names
        others = ("hidden_norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight")
        if not ours or any(name in names for name in others) or "speculators_model_type" in files.config:
            return None
        return Checkpoint.of(files, cls.kind, "eagle", "eagle")

    @classmethod
    def choices(
        cls, checkpoint: Checkpoint, options: EagleDraftConfig, target_layers: int | None
    ) -> tuple[Choice, ...]:
        """Layers, biases and the rotary base."""
        reader = Reader(checkpoint)
        _shape(reader, options)
        return tuple(reader.sources)

    @classmethod
    def check_fit(
        cls, checkpoint: Checkpoint, options: EagleDraftConfig, model: PreTrainedModel, info: ModelInfo
    ) -> None:
        """Make it, on whatever device the target is."""
        load_head(checkpoint, options, model, info)

    @classmethod
    def make(cls, options: EagleDraftConfig, target: Target, given: Any) -> Draft:
        """From a head, loaded or as a checkpoint."""
        notes: tuple[str, ...] = ()
        if isinstance(given, Checkpoint):
            checkpoint, given = given, load_head(given, options, target.model, target.info)
            notes = (checkpoint.about, *shared_notes(checkpoint, given.module, target.model))
        check_place(given, given.module.lm_head.weight, target.info)
        return Draft(cls.bind(given, options.num_speculative_tokens), notes=notes)

    @classmethod
    @torch.no_grad()
    def bind(cls, head: DraftHead, num_speculative_tokens: int) -> EagleDrafter:
        """The drafter that runs a loaded head."""
        models = {BODY: body_info(head.module, "Eagle")}
        return cls(num_speculative_tokens, export_shifted(head.module), models, head.features)

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head whose embedding and vocabulary projection are the target's own frozen tensors."""
        if plan.vocabulary is not None:
            raise ConfigError("An EAGLE head drafts the whole vocabulary; leave head.draft_vocab_size out.")
        module = Eagle(plan.layers).to(plan.embedding.device)
        module.embed_tokens.weight = nn.Parameter(plan.embedding.detach(), requires_grad=False)
        module.lm_head.weight = nn.Parameter(plan.projection.detach(), requires_grad=False)
        return DraftHead(module, plan.features)

    @classmethod
    def random(cls, model: PreTrainedModel, options: EagleDraftConfig) -> DraftHead:
        """One layer as wide as the target's."""
        text: Any = model.config.get_text_config()
        head = cls.new_head(cls.kind, random_plan(model, cls.feature_layers(text.num_hidden_layers), 1))
        head.module.eval().requires_grad_(False)
        return head

    @classmethod
    def save_head(
        cls, head: DraftHead, folder: str | Path, *, target_name: str, algorithm: str, num_speculative_tokens: int,
        shared: Iterable[Tensor] = (), target_architectures: Sequence[str] = (),
    ) -> Path:  # fmt: skip
        """As SafeAILab's files are; the embedding is left out if it is the target's."""
        layers: PretrainedConfig = head.module.config
        tensors = dict(head.module.named_parameters(remove_duplicate=False))
        del tensors[PROJECTION]
        theta = (getattr(layers, "rope_parameters", None) or {}).get("rope_theta")
        config = {
            **layers.to_diff_dict(),
            "architectures": ["LlamaForCausalLM"],
            "model_type": layers.model_type,
            "rope_theta": theta,
            "bias": head.module.fc.bias is not None,
            "base_model_name_or_path": target_name,
        }
        return write_checkpoint(folder, config, without_shared(tensors, shared))


def load_head(checkpoint: Checkpoint, options: EagleDraftConfig, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
    """Build the head on the target's device and in its dtype; its vocabulary projection is the target's own.

    Raises:
        ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found shape.
    """
    reader = Reader(checkpoint)
    shape = _shape(reader, options)
    loader = HeadLoader(checkpoint, checkpoint.tensors, TargetTensors.of(model, info), "an EAGLE head",
                        (EMBEDDING, PROJECTION), IGNORED)  # fmt: skip
    layers = layer_config(checkpoint, shape, loader.target.own[PROJECTION].shape[0])
    if layers.hidden_size != info.hidden_size:
        raise loader.unfit(f"it has the hidden size {layers.hidden_size}", f"has {info.hidden_size}")
    with torch.device("meta"):
        module = Eagle(layers)
    loader.add_biases(module, without=("lm_head",))
    loader.check(module)
    with torch.device("cpu"):
        module.rotary = type(module.rotary)(layers).to(info.device)
    loader.fill(module)
    return DraftHead(module.eval(), (info.num_layers,))


def _shape(reader: Reader, options: EagleDraftConfig) -> LayerShape:
    """How many layers there are, and their rotary embedding; notes where that is from."""
    names = reader.checkpoint.tensors
    indices = [int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))]
    reader.note("embed_tokens", "its own" if EMBEDDING in names else "the target's", "tensors")
    reader.note("biases", any(name.endswith(".bias") for name in names), "tensors")
    normed = "layers.0.self_attn.q_norm.weight" in names
    return LayerShape(
        layer_type=reader.note("layer_type", "qwen3" if normed else "llama", "tensors"),
        num_layers=reader.note("num_layers", max(indices, default=0) + 1, "tensors"),
        rope=reader.rope(options.rope_theta),
    )
