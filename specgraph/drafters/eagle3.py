"""EAGLE-3 heads: how their checkpoints are recognised and loaded, and how they draft.

A head is a small decoder. Its row ``t`` takes the embedding of token ``t + 1`` and ``h_t``, which is a projection of
several hidden states of the target at ``t``, and predicts token ``t + 2``. Further drafts take the head's own last
hidden state in the place of ``h_t``. A head with a ``mask_hidden`` drafts in parallel (P-EAGLE): the row of a token
that is not drafted yet takes a mask token and that hidden state.

Source: Li et al. 2025 (arXiv 2503.01840); parallel drafting: P-EAGLE (Amazon, 2026), the ``peagle`` of speculators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, Choice, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.layers import LayerShape, layer_config, read_layers, read_size
from specgraph.checkpoints.loading import HeadLoader, check_size
from specgraph.checkpoints.reading import Reader
from specgraph.checkpoints.target import EMBEDDING, PROJECTION, TargetTensors
from specgraph.checkpoints.vocabulary import read_vocabulary
from specgraph.config import DraftConfig
from specgraph.config.drafters import Eagle3DraftConfig
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3_module import Eagle3, Eagle3Config
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.shifted import ShiftedDrafter, borrow, fill_head
from specgraph.drafters.speculators import save_head
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

IGNORED = re.compile(r"t2d$|d2t$|mask_hidden$|(.*\.)?rotary_emb\.inv_freq$|verifier_(lm_head|norm)\.weight$")
"""Tensors that are not parameters of the module: others read them, they are computed, or only training needs them."""

RANDOM_VOCAB = 32000
"""How many tokens a random head can draft, which is the number of published EAGLE-3 heads for Llama. With a smaller
vocabulary, it can draft all tokens."""


@dataclass(frozen=True, eq=False)
class Eagle3Drafter(ShiftedDrafter):
    """Runs an EAGLE-3 head, as a chain of calls or in parallel."""

    kind: ClassVar[str] = "eagle3"
    Config: ClassVar[type[DraftConfig]] = Eagle3DraftConfig
    reads: ClassVar[str | None] = "EAGLE-3 and P-EAGLE heads (EAGLE, SpecForge, NVIDIA and speculators layouts)"
    head: ClassVar[type[nn.Module] | None] = Eagle3

    @classmethod
    def called(cls, parallel: bool) -> str:
        """``peagle`` for a head that drafts in parallel, else ``eagle3``."""
        return "peagle" if parallel else cls.kind

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise heads of speculators and SpecForge by their configuration, others by the names of their tensors."""
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
        """All options of the head."""
        return read_options(checkpoint, options, target_layers).sources

    @classmethod
    def load(
        cls, checkpoint: Checkpoint, options: Eagle3DraftConfig, model: PreTrainedModel, info: ModelInfo
    ) -> DraftHead:
        """Load a head; see :func:`load_head`."""
        return load_head(checkpoint, options, model, info)

    @classmethod
    def feature_layers(cls, num_layers: int) -> tuple[int, ...]:
        """The three that EAGLE-3 reads by default, limited to those that the target has."""
        return tuple(sorted({min(max(k, 0), num_layers) for k in default_features(num_layers)}))

    @classmethod
    def new_head(cls, algorithm: str, plan: HeadPlan) -> DraftHead:
        """A head whose embedding is the target's own frozen tensor.

        Its vocabulary projection is the target's, too. If it drafts only a part of the vocabulary, the projection is a
        frozen copy of the rows for that part.
        """
        parallel, full = algorithm == "peagle", len(plan.projection)
        config = Eagle3Config(
            layers=plan.layers,
            target_hidden_size=plan.embedding.shape[1],
            num_features=len(plan.features),
            draft_vocab_size=full,
            norm_before_residual=plan.norm_before_residual,
        )
        module = Eagle3(config, parallel=parallel).to(plan.embedding.device)
        borrow(module, plan)
        if module.mask_hidden is not None:
            nn.init.normal_(module.mask_hidden)  # at zero, the norm that reads it would have a huge gradient
        return DraftHead(module, plan.features, plan.mask_token_id if parallel else None, parallel)

    @classmethod
    def plan_random(cls, model: PreTrainedModel) -> HeadPlan:
        """A plan for a head that drafts a random part of a large vocabulary; published heads draft a part, too."""
        plan = super().plan_random(model)
        full = len(plan.projection)
        kept = torch.randperm(full)[:RANDOM_VOCAB].sort().values if full > RANDOM_VOCAB else None
        return replace(plan, vocabulary=kept, mask_token_id=len(plan.embedding) - 1)

    @classmethod
    def save_head(cls, head: DraftHead, folder: str | Path, **record: Any) -> Path:
        """Write the head in the speculators layout."""
        return save_head(head, folder, **record)


def _has_names(names: Mapping[str, Any]) -> bool:
    return any(name.startswith("midlayer.") for name in names) or "layers.0.hidden_norm.weight" in names


def _layout(classes: list[str], names: Mapping[str, Any]) -> str:
    if not any(name.startswith("midlayer.") for name in names):
        return "nvidia"
    return "specforge" if any(name.endswith("Eagle3") for name in classes) else "eagle"


@dataclass(frozen=True)
class HeadOptions(LayerShape):
    """How the tensors of a checkpoint are used. :class:`~specgraph.drafters.eagle3_module.Eagle3Config` says what the
    options mean.

    Attributes:
        features: the indices k of the hidden states hs[k] that the head reads; None if they depend on the target and
            the target is not known.
        sources: every option with its value and the place from which the value was taken.
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
    """The hidden states that EAGLE-3 reads by default: near the bottom, in the middle and near the top of the target.

    They do not exist or are out of order if the target has only a few layers.
    """
    return 2, num_layers // 2, num_layers - 3


def layer_name(name: str) -> str:
    """The name of a tensor in the speculators layout."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def read_options(checkpoint: Checkpoint, overrides: Eagle3DraftConfig, target_layers: int | None = None) -> HeadOptions:
    """Collect the options of an EAGLE-3 checkpoint. ``target_layers`` is the number of layers of the target, or None.

    Raises:
        ConfigError: the head needs something that is not supported, or nothing gives the value of an option.
    """
    names = {layer_name(name) for name in checkpoint.tensors}
    reader = Reader(checkpoint, default_features=default_features, default_source="default: 2, L // 2, L - 3")
    _refuse_variants(reader)
    shape = read_layers(reader, names, overrides.rope_theta)
    fc = reader.flag("use_aux_hidden_state", True)
    return HeadOptions(
        **vars(shape),
        features=reader.features(overrides.feature_layers, target_layers, fc),
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
    """Refuse variants of ModelOpt that have another forward pass."""
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

    If the checkpoint lacks ``embed_tokens`` or ``lm_head``, or has one that equals the target's, the head uses the
    target's own tensor and not a copy. The comparison goes part by part, so it needs little memory on the target's
    device. :func:`read_options` chooses the options.

    Raises:
        ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found shape.
    """
    if checkpoint.kind != "eagle3":
        raise ConfigError(f"{checkpoint.path} is a {checkpoint.algorithm}, a model of its own, not an EAGLE-3 head.")
    check_size(checkpoint, info)
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
    """Loads an EAGLE-3 head: the steps that heads of other kinds do not have."""

    checkpoint: Checkpoint
    options: HeadOptions
    loader: HeadLoader

    def load(self) -> DraftHead:
        """Check the shapes of all tensors before reading any of them."""
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
        fill_head(self.loader, module, config.layers)
        module.register_buffer("draft_to_target", read_vocabulary(self.loader, config.draft_vocab_size))
        return DraftHead(module.eval(), features, self.options.mask_token_id, self.checkpoint.parallel)

    def _config(self, features: tuple[int, ...]) -> Eagle3Config:
        options, config = self.options, self.checkpoint.config
        info, stored = self.loader.target.info, self.loader.stored
        head, embedding = stored.get("lm_head.weight"), stored.get("embed_tokens.weight")
        # An embedding may be longer than the target's, to have a row for a mask token. A shorter one fails the check of
        # shapes.
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
