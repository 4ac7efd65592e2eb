"""EAGLE-3 heads: how their checkpoints are recognised and loaded, and how they draft.

A head is a small decoder. Its row ``t`` takes the embedding of token ``t + 1`` and ``h_t``, which is a projection of
several hidden states of the target at ``t``, and predicts token ``t + 2``. Further drafts take the head's own last
hidden state in the place of ``h_t``. A head with a ``mask_hidden`` drafts in parallel (P-EAGLE): the row of a token
that is not drafted yet takes a mask token and that hidden state.

Source: Li et al. 2025 (arXiv 2503.01840); parallel drafting: P-EAGLE (Amazon, 2026), the ``peagle`` of speculators.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint, architectures
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.head_options import HeadOptions
from specgraph.checkpoints.layers import read_layers
from specgraph.checkpoints.loading import IGNORED, HeadLoader
from specgraph.checkpoints.reading import Reader
from specgraph.config.drafters import Eagle3DraftConfig
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3_module import Eagle3, Eagle3Config
from specgraph.drafters.plan import HeadPlan
from specgraph.drafters.shifted import ShiftedDrafter
from specgraph.drafters.speculators import speculators_config
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo

USUAL: dict[str, tuple[Any, ...]] = {
    "next_layer_regular": (None, True), "use_mtp_layernorm": (None, False), "parallel_draft_step": (None, 0, 1),
}  # fmt: skip
"""Keys of ModelOpt's variants that have another forward pass, and the values that mean none of that."""
DEFAULT_SOURCE = "default: 2, L // 2, L - 3"
"""The source that ``inspect`` shows for hidden states from :func:`default_features`."""
RANDOM_VOCAB = 32000
"""How many tokens a random head can draft, which is the number of published EAGLE-3 heads for Llama. With a smaller
vocabulary, it can draft all tokens."""


class Eagle3Drafter(ShiftedDrafter):
    """Runs an EAGLE-3 head, as a chain of calls or in parallel."""

    Config = Eagle3DraftConfig
    reads = "EAGLE-3 and P-EAGLE heads (EAGLE, SpecForge, NVIDIA and speculators layouts)"
    head = Eagle3
    what = "an EAGLE-3 head"
    saved_config = staticmethod(speculators_config)

    @classmethod
    def called(cls, parallel: bool) -> str:
        """``peagle`` for a head that drafts in parallel, else ``eagle3``."""
        return "peagle" if parallel else cls.kind

    @classmethod
    def recognise(cls, files: Files) -> Checkpoint | None:
        """Recognise heads of speculators and SpecForge by their configuration, others by the names of their tensors."""
        names, classes = files.tensors, architectures(files.config)
        declared = files.config.get("speculators_model_type")
        if declared not in (None, "eagle3", "peagle") or "Eagle3DeepseekV2ForCausalLM" in classes:
            return None
        named, midlayer = any(name.endswith("Eagle3") for name in classes), _has_midlayer(names)
        if declared is None and not (named or midlayer or "layers.0.hidden_norm.weight" in names):
            return None
        parallel = "mask_hidden" in names if declared is None else declared == "peagle"
        layout = "speculators" if declared else "nvidia" if not midlayer else "specforge" if named else "eagle"
        return Checkpoint.of(files, cls.kind, layout, "peagle" if parallel else "eagle3", parallel=parallel)

    @classmethod
    def read_options(cls, checkpoint: Checkpoint, overrides: Any, target_layers: int | None = None) -> HeadOptions:
        """Collect the options of the head. Variants with another forward pass are refused."""
        names = {layer_name(name) for name in checkpoint.tensors}
        reader = Reader(checkpoint)
        reader.refuse_variants(USUAL, "EAGLE-3")
        layers = read_layers(reader, names, overrides.rope_theta)
        fc = reader.flag("use_aux_hidden_state", True)
        if fc or overrides.feature_layers is not None:
            features = reader.features(overrides.feature_layers, target_layers, default_features, DEFAULT_SOURCE)
        else:
            last = None if target_layers is None else (target_layers,)
            features = reader.checked(last, target_layers, "use_aux_hidden_state=false: the last hidden state")
        settings = {
            "fc": fc,
            "input_norm": reader.flag("use_input_layernorm_in_first_layer", True),
            "last_norm": reader.flag("use_last_layernorm", True),
            "norm_before_residual": reader.flag("norm_before_residual", False, overrides.norm_before_residual),
            "norm_before_fc": reader.flag("norm_before_fc", "input_norm.weight" in names),
            "fc_norm": reader.flag("fc_norm", any(name.startswith("fc_norm.") for name in names)),
            "norm_output": reader.flag("norm_output", False, overrides.norm_output),
        }
        mask = _mask_token(reader, overrides, "mask_hidden" in names)
        return HeadOptions(layers, features, mask, settings, reader.sources)

    @classmethod
    def loader(cls, checkpoint: Checkpoint, model: PreTrainedModel, info: ModelInfo) -> HeadLoader:
        """Reads the tensors by their names in the speculators layout."""
        stored = {layer_name(name): tensor for name, tensor in checkpoint.tensors.items()}
        mask = stored.get("mask_hidden")
        if mask is not None and mask.shape[:-1] in ((1, 1), (1,)):  # layouts differ in its leading dimensions
            stored["mask_hidden"] = replace(mask, shape=mask.shape[-1:])
        old = _has_midlayer(checkpoint.tensors)
        return HeadLoader(
            checkpoint, stored, model, info, cls.what, IGNORED,
            lambda name: re.sub(r"^layers\.0\.", "midlayer.", name) if old else name,
        )  # fmt: skip

    @classmethod
    def make_module(cls, loader: HeadLoader, settings: Mapping[str, Any]) -> Eagle3:
        """A head with a ``mask_hidden`` if the checkpoint has one, or needs one because it drafts in parallel."""
        config, info = Eagle3Config(**settings), loader.info
        if not config.fc and config.layers.hidden_size != info.hidden_size:
            raise loader.unfit(
                f"it has no fc and the hidden size {config.layers.hidden_size}", f"has {info.hidden_size}"
            )
        return Eagle3(config, parallel=loader.checkpoint.parallel or "mask_hidden" in loader.stored)

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
        module.borrow(plan)
        if module.mask_hidden is not None:
            nn.init.normal_(module.mask_hidden)  # at zero, the norm that reads it would have a huge gradient
        return DraftHead(module, plan.features, plan.mask_token_id if parallel else None, parallel)

    @classmethod
    def plan_random(cls, model: PreTrainedModel, options: Any) -> HeadPlan:
        """A plan for a head that drafts a random part of a large vocabulary; published heads draft a part, too."""
        plan = super().plan_random(model, options)
        full = len(plan.projection)
        kept = torch.randperm(full)[:RANDOM_VOCAB].sort().values if full > RANDOM_VOCAB else None
        return replace(plan, vocabulary=kept, mask_token_id=len(plan.embedding) - 1)

    @classmethod
    def saved_tensors(cls, head: DraftHead) -> dict[str, Tensor]:
        """The tensors of the speculators layout, with ``t2d`` beside ``d2t``."""
        found, module = super().saved_tensors(head), head.module
        if module.mask_hidden is not None:
            found["mask_hidden"] = module.mask_hidden.view(1, 1, -1)
        if module.draft_to_target is not None:
            rows = torch.zeros(module.config.layers.vocab_size, dtype=torch.bool)
            found["t2d"] = rows.index_fill(0, module.draft_to_target.cpu(), True)
        return found


def _has_midlayer(names: Iterable[str]) -> bool:
    """Whether the first decoder layer has the name of EAGLE's own layout."""
    return any(name.startswith("midlayer.") for name in names)


def default_features(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that EAGLE-3 reads by default: near the bottom, in the middle and near the top of the target.

    They do not exist or are out of order if the target has only a few layers.
    """
    return 2, num_layers // 2, num_layers - 3


def layer_name(name: str) -> str:
    """The name of a tensor in the speculators layout."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def _mask_token(reader: Reader, overrides: Eagle3DraftConfig, has_hidden: bool) -> int | None:
    """The mask token of a head that can draft in parallel, or None for a head that cannot."""
    path = reader.checkpoint.path
    if has_hidden:
        token = reader.mask_token(overrides.mask_token_id)
        if token is None:
            raise ConfigError(f"{path} names no mask token for its mask_hidden; set draft.mask_token_id.")
        return token
    for name in ("mask_token_id", "parallel"):
        if getattr(overrides, name):
            raise ConfigError(
                f"draft.{name} is set, but {path} has no mask_hidden, so it cannot draft in parallel; leave "
                f"draft.{name} out or give a P-EAGLE head."
            )
    return None
