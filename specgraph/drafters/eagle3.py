"""EAGLE-3: a small decoder that reads hidden states of the target and the token that followed them.

Row ``t`` takes the embedding of token ``t + 1`` and ``h_t``, the target's features at ``t`` behind one projection, and
predicts token ``t + 2``; further drafts take the head's own last hidden state in the place of ``h_t``. With a
``mask_hidden`` it drafts in parallel (P-EAGLE): a row for a token that is not drafted yet takes a mask token and that
hidden state.

Source: Li et al. 2025 (arXiv 2503.01840); parallel drafting: P-EAGLE (Amazon, 2026), the ``peagle`` of speculators.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, Choice, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.layers import LayerShape, layer_config, read_size
from specgraph.checkpoints.loading import HeadLoader, shared_notes
from specgraph.checkpoints.reading import Reader
from specgraph.checkpoints.target import EMBEDDING, PROJECTION, TargetTensors
from specgraph.checkpoints.vocabulary import read_vocabulary
from specgraph.config import DraftConfig, ParallelDraftConfig
from specgraph.drafters.base import Draft, DraftHead, Mask, Target, check_place
from specgraph.drafters.chain import BODY, ChainDrafter
from specgraph.drafters.plan import HeadPlan, plain_layer
from specgraph.drafters.shifted import LAYERS, ShiftedHead, body_info, export_shifted
from specgraph.drafters.speculators import save_head
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

IGNORED = re.compile(r"t2d$|d2t$|mask_hidden$|(.*\.)?rotary_emb\.inv_freq$|verifier_(lm_head|norm)\.weight$")
"""Tensors that are read apart, that are computed anew, or that only training needs."""

RANDOM_VOCAB = 32000
"""Tokens that a random head drafts, as published EAGLE-3 heads for Llama do, or all of a smaller vocabulary."""


@dataclass
class Eagle3DraftConfig(ParallelDraftConfig):
    """Keys of ``draft`` that overrule an EAGLE-3 checkpoint; null leaves it as it is."""

    kind: str = "eagle3"
    feature_layers: list[int] | None = None
    """the indices k of the target's hidden states hs[k] it reads; null takes those of the checkpoint."""
    norm_before_residual: bool | None = None
    """the first layer's residual is the normed hidden state; null: as the checkpoint says, else false."""
    norm_output: bool | None = None
    """what is fed on has gone through the last norm; null: as the checkpoint says, else false."""
    rope_theta: float | None = None
    """the base of the rotary embedding; null: as the checkpoint says, else 10000."""

    trains: ClassVar[tuple[str, ...]] = ("eagle3", "peagle")


@dataclass(frozen=True)
class Eagle3Config:
    """The shape of an EAGLE-3 head.

    Attributes:
        layers: transformers' configuration of its decoder layers, of a ``model_type`` in :data:`LAYERS`;
            ``vocab_size`` is what its embedding takes.
        target_hidden_size: width of one target feature.
        num_features: how many it reads.
        draft_vocab_size: width of its logits.
        norm_before_residual: the first layer's residual is the normed hidden state instead of the hidden state itself.
        norm_before_fc: one norm of the concatenated features in front of the projection.
        fc_norm: a norm of every single feature in front of the projection.
        norm_output: what is fed on in the chain has gone through the last norm.
        fc: project the features; without it there is one feature of the head's own width.
        input_norm: norm the embedding in the first layer.
        last_norm: norm in front of the vocabulary projection.
    """

    layers: PretrainedConfig
    target_hidden_size: int
    num_features: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc: bool = True
    input_norm: bool = True
    last_norm: bool = True

    @property
    def feature_size(self) -> int:
        """Width of the concatenated features."""
        return self.num_features * self.target_hidden_size


class FirstLayer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        plain, norm = LAYERS[config.layers.model_type][0], LAYERS[config.layers.model_type][2]
        layer: Any = plain(config.layers, 0)
        size, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = layer.input_layernorm if config.input_norm else nn.Identity()
        self.hidden_norm = norm(size, eps=eps)
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow: nn.Linear = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, embedding: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """``[B, T, H]`` twice to ``[B, T, H]``; ``options`` go to the attention of transformers."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        hidden = residual + self.self_attn(hidden_states=joined, **options)[0]
        mixed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return mixed


class Eagle3(ShiftedHead):
    """The head. Names of parameters are those of the speculators layout.

    Buffers: ``draft_to_target`` int64 ``[Vd]`` or None; ``mask_hidden`` ``[A * Ht]`` is a parameter, or None.
    """

    def __init__(self, config: Eagle3Config, *, parallel: bool = False) -> None:
        super().__init__()
        # An unset implementation would run eager attention, which without a mask is not causal.
        layers = copy.deepcopy(config.layers)
        layers._attn_implementation = "sdpa"
        config = replace(config, layers=layers)
        width = config.feature_size
        plain, rotary, norm = LAYERS[layers.model_type]
        size, eps = layers.hidden_size, layers.rms_norm_eps
        self.config = config
        self.num_features, self.target_hidden_size = config.num_features, config.target_hidden_size
        self.embed_tokens = nn.Embedding(layers.vocab_size, size)
        self.input_norm = norm(width, eps=eps) if config.norm_before_fc else nn.Identity()
        each = config.num_features if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(norm(config.target_hidden_size, eps=eps) for _ in range(each))
        self.fc: nn.Module = nn.Linear(width, size, bias=False) if config.fc else nn.Identity()
        self.layers = nn.ModuleList(
            [FirstLayer(config), *(plain(layers, index) for index in range(1, layers.num_hidden_layers))]
        )
        self.norm = norm(size, eps=eps) if config.last_norm else nn.Identity()
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = rotary(layers)
        self.mask_hidden = nn.Parameter(torch.zeros(width)) if parallel else None
        self.register_buffer("draft_to_target", None)

    def combine(self, *features: Tensor) -> Tensor:
        """What the first layer reads of the target: ``[B, T, Ht]`` for each feature to ``[B, T, H]``."""
        if self.config.fc_norm:
            features = tuple(norm(feature) for norm, feature in zip(self.fc_norm, features, strict=True))
        combined: Tensor = self.fc(self.input_norm(torch.cat(features, dim=-1)))
        return combined

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor, **options: Any) -> Tensor:
        """Run rows: int64 ``[B, T]`` twice and ``[B, T, H]`` to ``[B, T, H]``, before the last norm.

        ``options`` go to the attention layers of transformers: a mask, a cache.
        """
        embedding = self.embed_tokens(tokens)
        options["position_embeddings"] = self.rotary(embedding, positions)
        options.setdefault("attention_mask", None)
        first, *others = self.layers
        hidden = first(embedding, hidden, **options)
        for layer in others:
            hidden = layer(hidden, **options)
        return hidden

    def predict(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits ``[B, R, Vd]`` and the hidden state ``[B, R, H]`` that is fed on, of rows of :meth:`forward`."""
        normed = self.norm(hidden)
        return self.lm_head(normed), normed if self.config.norm_output else hidden

    def feed_on(self, hidden: Tensor) -> Tensor:
        """The hidden state before or after the last norm."""
        normed: Tensor = self.norm(hidden) if self.config.norm_output else hidden
        return normed

    @torch.no_grad()
    def match_scale(self, hidden: Tensor) -> None:
        """Start the last norm at the scale of what the target's vocabulary projection reads, channel by channel.

        From ones, a learning rate of 1e-3 would take thousands of steps to get there.
        """
        self.norm.get_parameter("weight").copy_(hidden.float().flatten(0, 1).square().mean(0).sqrt())


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(ChainDrafter):
    """Runs an EAGLE-3 head, chained or in parallel."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[DraftConfig]] = Eagle3DraftConfig
    reads: ClassVar[str | None] = "EAGLE-3 and P-EAGLE heads (EAGLE, SpecForge, NVIDIA and speculators layouts)"
    needs: ClassVar[str | None] = "head"
    head: ClassVar[type[nn.Module] | None] = Eagle3

    @classmethod
    def called(cls, parallel: bool) -> str:
        """P-EAGLE is a way to draft with such a head."""
        return "peagle" if parallel else cls.kind

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Speculators' and SpecForge's by their configuration, others by the names of their tensors."""
        config, names = files.config, files.tensors
        declared, classes = config.get("speculators_model_type"), architectures(config)
        other = declared is not None and declared not in ("eagle3", "peagle")
        if other or "Eagle3DeepseekV2ForCausalLM" in classes:
            return None
        parallel = declared == "peagle" if declared is not None else "mask_hidden" in names
        if declared is not None:
            layout = "speculators"
        elif any(name.endswith("Eagle3") for name in classes) or _has_names(names):
            layout = _layout(classes, names)
        else:
            return None
        return Checkpoint.of(files, cls.kind, layout, "peagle" if parallel else "eagle3", parallel=parallel)

    @classmethod
    def choices(
        cls, checkpoint: Checkpoint, options: Eagle3DraftConfig, target_layers: int | None
    ) -> tuple[Choice, ...]:
        """Every option of the head."""
        return read_options(checkpoint, options, target_layers).sources

    @classmethod
    def check_fit(
        cls, checkpoint: Checkpoint, options: Eagle3DraftConfig, model: PreTrainedModel, info: ModelInfo
    ) -> None:
        """Make it, on whatever device the target is."""
        load_head(checkpoint, options, model, info)

    @classmethod
    def make(cls, options: Eagle3DraftConfig, target: Target, given: Any) -> Draft:
        """From a head, loaded or as a checkpoint."""
        notes: tuple[str, ...] = ()
        if isinstance(given, Checkpoint):
            checkpoint, given = given, load_head(given, options, target.model, target.info)
            notes = (checkpoint.about, *shared_notes(checkpoint, given.module, target.model))
        check_place(given, given.module.lm_head.weight, target.info)
        return Draft(cls.bind(given, options.num_speculative_tokens), notes=notes)

    @classmethod
    def feature_layers(cls, num_layers: int) -> tuple[int, ...]:
        """EAGLE-3's, as far as the target has them."""
        return tuple(sorted({min(max(k, 0), num_layers) for k in default_features(num_layers)}))

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head whose embedding is the target's own frozen tensor.

        So is its vocabulary projection, unless it drafts only a part of the vocabulary: then it is a frozen
        copy of rows.
        """
        parallel, embedding, projection = algorithm == "peagle", plan.embedding, plan.projection
        config = Eagle3Config(
            layers=plan.layers,
            target_hidden_size=embedding.shape[1],
            num_features=len(plan.features),
            draft_vocab_size=len(projection),
            norm_before_residual=plan.norm_before_residual,
        )
        module = Eagle3(config, parallel=parallel).to(embedding.device)
        if plan.vocabulary is not None:
            module.register_buffer("draft_to_target", plan.vocabulary.to(embedding.device))
        module.embed_tokens.weight = nn.Parameter(embedding.detach(), requires_grad=False)
        module.lm_head.weight = nn.Parameter(projection.detach(), requires_grad=False)
        if module.mask_hidden is not None:
            nn.init.normal_(module.mask_hidden)  # at zero, the norm behind it would blow its gradient up
        return DraftHead(module, plan.features, plan.mask_token_id if parallel else None, parallel)

    @classmethod
    def random(cls, model: PreTrainedModel, options: Eagle3DraftConfig) -> DraftHead:
        """One layer as wide as the target's. It drafts a random part of a large vocabulary, as published heads do."""
        text: Any = model.config.get_text_config()
        embedding, projection = (m.weight for m in (model.get_input_embeddings(), model.get_output_embeddings()))
        vocab = min(RANDOM_VOCAB, len(projection))
        features = cls.feature_layers(text.num_hidden_layers)
        config = Eagle3Config(plain_layer(text, len(embedding)), text.hidden_size, len(features), vocab)
        head = Eagle3(config, parallel=bool(options.parallel))
        if head.mask_hidden is not None:
            nn.init.normal_(head.mask_hidden)
        if vocab < len(projection):
            head.draft_to_target = torch.randperm(len(projection))[:vocab].sort().values
        head.embed_tokens.weight = nn.Parameter(embedding.detach(), requires_grad=False)
        mask = len(embedding) - 1 if options.parallel else None
        return DraftHead(head.eval().requires_grad_(False), features, mask, bool(options.parallel))

    @classmethod
    def save_head(cls, head: DraftHead, folder: str | Path, **record: Any) -> Path:
        """In the speculators layout."""
        return save_head(head, folder, **record)

    @classmethod
    @torch.no_grad()
    def bind(cls, head: DraftHead, num_speculative_tokens: int) -> Eagle3Drafter:
        """The drafter that runs a loaded head."""
        module: Eagle3 = head.module
        mask = None
        if head.mask_token_id is not None and module.mask_hidden is not None:
            # Projected here, once, and not in every step.
            parts = torch.split(module.mask_hidden.view(1, 1, -1), module.target_hidden_size, dim=-1)
            mask = Mask(head.mask_token_id, module.combine(*parts).flatten())
        return cls(num_speculative_tokens, export_shifted(module), {BODY: body_info(module, "Eagle3")}, head.features,
                   module.draft_to_target, mask, head.parallel)  # fmt: skip


def _has_names(names: Mapping[str, Any]) -> bool:
    return any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names


def _layout(classes: list[str], names: Mapping[str, Any]) -> str:
    if not any(name.startswith("midlayer.") for name in names):
        return "nvidia"
    return "specforge" if any(name.endswith("Eagle3") for name in classes) else "eagle"


@dataclass(frozen=True)
class HeadOptions(LayerShape):
    """How the tensors of a checkpoint are used.

    Attributes:
        features: the k of the hidden states hs[k] it reads; None if that depends on a target that is not known.
        sources: everything above and below, and where it is from.
    """

    features: tuple[int, ...] | None
    fc: bool
    input_norm: bool
    last_norm: bool
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    mask_token_id: int | None
    sources: tuple[Choice, ...]


def default_features(num_layers: int) -> tuple[int, int, int]:
    """EAGLE-3's: one hidden state near the bottom, the middle one, one near the top; no such for a few layers."""
    return 2, num_layers // 2, num_layers - 3


def layer_name(name: str) -> str:
    """A tensor's name in the speculators layout."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def read_options(checkpoint: Checkpoint, overrides: Eagle3DraftConfig, target_layers: int | None = None) -> HeadOptions:
    """Collect the options of an EAGLE-3 checkpoint; ``target_layers`` is L, if the target is known.

    Raises:
        ConfigError: the head needs something that is not supported, or an option that nothing says.
    """
    names = {layer_name(name) for name in checkpoint.tensors}
    reader = Reader(checkpoint, default_features=default_features, default_source="default: 2, L // 2, L - 3")
    _refuse_variants(reader)
    indices = [int(found[1]) for name in names if (found := re.match(r"layers\.(\d+)\.", name))]
    for name in ("embed_tokens", "lm_head"):
        reader.note(name, "its own" if f"{name}.weight" in names else "the target's", "tensors")
    fc = reader.flag("use_aux_hidden_state", True)
    return HeadOptions(
        layer_type=reader.note(
            "layer_type", "qwen3" if "layers.0.self_attn.q_norm.weight" in names else "llama", "tensors"
        ),
        num_layers=reader.note("num_layers", max(indices, default=0) + 1, "tensors"),
        features=reader.features(overrides.feature_layers, target_layers, fc),
        rope=reader.rope(overrides.rope_theta),
        fc=fc,
        input_norm=reader.flag("use_input_layernorm_in_first_layer", True),
        last_norm=reader.flag("use_last_layernorm", True),
        norm_before_residual=reader.flag("norm_before_residual", False, overrides.norm_before_residual),
        norm_before_fc=reader.flag("norm_before_fc", "input_norm.weight" in names),
        fc_norm=reader.flag("fc_norm", any(name.startswith("fc_norm.") for name in names)),
        norm_output=reader.flag("norm_output", False, overrides.norm_output),
        mask_token_id=reader.mask(overrides, "mask_hidden" in names),
        sources=tuple(reader.sources),
    )


def _refuse_variants(reader: Reader) -> None:
    """Variants of ModelOpt whose forward pass is another one."""
    for name, usual in (("next_layer_regular", True), ("use_mtp_layernorm", False)):
        if reader.nested.get(name, usual) is not usual:
            raise ConfigError(
                f"{reader.checkpoint.path} has {name}={str(reader.nested[name]).lower()}, a variant that specgraph "
                f"does not run; it runs heads with {name}={str(usual).lower()}."
            )
    if (reader.nested.get("parallel_draft_step") or 1) != 1:
        raise ConfigError(
            f"{reader.checkpoint.path} has parallel_draft_step={reader.nested['parallel_draft_step']}, extra heads "
            "that specgraph does not run; it drafts in parallel by heads with a mask_hidden (P-EAGLE)."
        )


def load_head(
    checkpoint: Checkpoint, overrides: Eagle3DraftConfig, model: PreTrainedModel, info: ModelInfo
) -> DraftHead:
    """Build the head on the target's device and in its dtype.

    A missing ``embed_tokens`` or ``lm_head`` is the target's own tensor, not a copy; so is one that equals it, which is
    compared in parts and never brought to the target's device. :func:`read_options` says how the options are chosen.

    Raises:
        ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found shape.
    """
    if checkpoint.kind != "eagle3":
        raise ConfigError(f"{checkpoint.path} is a {checkpoint.algorithm}, a model of its own, not an EAGLE-3 head.")
    options = read_options(checkpoint, overrides, info.num_layers)
    stored = {layer_name(name): tensor for name, tensor in checkpoint.tensors.items()}
    old = any(name.startswith("midlayer.") for name in checkpoint.tensors)
    loader = HeadLoader(
        checkpoint, stored, TargetTensors.of(model, info), "an EAGLE-3 head", (EMBEDDING, PROJECTION), IGNORED,
        lambda name: re.sub(r"^layers\.0\.", "midlayer.", name) if old else name,
    )  # fmt: skip
    return _Eagle3Loader(checkpoint, options, loader).load()


@dataclass(frozen=True, eq=False)
class _Eagle3Loader:
    """What is EAGLE-3's alone while a head is loaded."""

    checkpoint: Checkpoint
    options: HeadOptions
    loader: HeadLoader

    def load(self) -> DraftHead:
        """Check every tensor by its shape, and only then read them."""
        features = self.options.features
        if features is None:
            raise ConfigError(
                f"{self.checkpoint.path} does not say which hidden states it reads; set draft.feature_layers."
            )
        config = self._config(features)
        with torch.device("meta"):
            module = Eagle3(config, parallel="mask_hidden" in self.loader.stored)
        self.loader.add_biases(module, without=("lm_head",))
        self.loader.check(module, apart=("mask_hidden",))
        self._check_mask(module)
        with torch.device("cpu"):
            module.rotary = type(module.rotary)(config.layers).to(self.loader.target.info.device)
        self.loader.fill(module)
        module.register_buffer("draft_to_target", read_vocabulary(self.loader, config.draft_vocab_size))
        return DraftHead(module.eval(), features, self.options.mask_token_id, self.checkpoint.parallel)

    def _config(self, features: tuple[int, ...]) -> Eagle3Config:
        options, config = self.options, self.checkpoint.config
        info, stored = self.loader.target.info, self.loader.stored
        declared = config.get("target_hidden_size")
        if declared is not None and declared != info.hidden_size:
            raise self.loader.unfit(f"it was made for a target with hidden size {declared}", f"has {info.hidden_size}")
        head, embedding = stored.get("lm_head.weight"), stored.get("embed_tokens.weight")
        # A longer embedding than the target's has room for a mask token; a shorter one is found by its shape.
        own = self.loader.target.own[EMBEDDING].shape[0]
        rows = own if embedding is None else max(*embedding.shape[:1], info.vocab_size)
        layers = layer_config(self.checkpoint, options, rows)
        if not options.fc and layers.hidden_size != info.hidden_size:
            raise self.loader.unfit(f"it has no fc and the hidden size {layers.hidden_size}", f"has {info.hidden_size}")
        counted = head.shape[0] if head is not None and head.shape else info.vocab_size
        draft_vocab = (
            counted if config.get("draft_vocab_size") is None else read_size(self.checkpoint, "draft_vocab_size")
        )
        return Eagle3Config(
            layers=layers,
            target_hidden_size=info.hidden_size,
            num_features=len(features),
            draft_vocab_size=draft_vocab,
            norm_before_residual=options.norm_before_residual,
            norm_before_fc=options.norm_before_fc,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            fc=options.fc,
            input_norm=options.input_norm,
            last_norm=options.last_norm,
        )

    def _check_mask(self, module: Eagle3) -> None:
        width, found = module.config.feature_size, self.loader.stored.get("mask_hidden")
        if found is None:
            if self.checkpoint.algorithm == "peagle":
                raise ConfigError(
                    f"{self.checkpoint.path} lacks mask_hidden, of shape {[1, 1, width]}; P-EAGLE needs it."
                )
            return
        if found.shape not in ((1, 1, width), (1, width), (width,)):
            raise self.loader.unfit(f"mask_hidden has the shape {list(found.shape)}", f"needs {[1, 1, width]}")
        mask, rows = self.options.mask_token_id, module.embed_tokens.num_embeddings
        if mask is None or not 0 <= mask < rows:
            raise ConfigError(
                f"The mask token of {self.checkpoint.path} is {mask}, outside its vocabulary of {rows}; "
                f"set draft.mask_token_id to an id from 0 to {rows - 1}."
            )
