"""Makes an EAGLE-3 head from a checkpoint, for one target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgraph.checkpoints.checkpoint import Checkpoint
from specgraph.checkpoints.files import StoredTensor
from specgraph.checkpoints.layers import layer_config, read_size
from specgraph.checkpoints.options import HeadOptions, Overrides, layer_name, read_options
from specgraph.drafters.eagle3 import DraftHead, Eagle3, Eagle3Config
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.tensors import equal_tensors

BORROWED = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that are the target's where the checkpoint has none."""
HARMLESS = re.compile(r"t2d$|d2t$|mask_hidden$|(.*\.)?rotary_emb\.inv_freq$|verifier_(lm_head|norm)\.weight$")
"""Tensors that are read apart, that are computed anew, or that only training needs."""


def load_head(checkpoint: Checkpoint, overrides: Overrides, model: PreTrainedModel, info: ModelInfo) -> DraftHead:
    """Build the head on the target's device and in its dtype.

    A missing ``embed_tokens`` or ``lm_head`` is the target's own tensor, not a copy; so is one that equals it, which is
    compared in parts and never brought to the target's device. :func:`read_options` says how the options are chosen,
    :func:`shared_notes` what came to be the target's.

    Args:
        checkpoint: of the kind ``eagle3``.
        overrides: the configuration's ``draft``.
        model: the target.
        info: facts about it.

    Raises:
        ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found shape.
    """
    if checkpoint.kind != "eagle3":
        raise ConfigError(f"{checkpoint.path} is a {checkpoint.algorithm}, a model of its own, not an EAGLE-3 head.")
    options = read_options(checkpoint, overrides, info.num_layers)
    return _Loader(checkpoint, options, _Target.of(model, info)).load()


def shared_notes(checkpoint: Checkpoint, head: DraftHead, model: PreTrainedModel) -> tuple[str, ...]:
    """A line for the report on every tensor of a loaded head that is the target's own."""
    owned = {id(parameter): name for name, parameter in model.named_parameters()}
    stored = {layer_name(name) for name in checkpoint.tensors}
    notes = []
    for name, parameter in head.module.named_parameters(remove_duplicate=False):
        if id(parameter) in owned:
            why = "" if name in stored else " (the checkpoint has none)"
            size = f"{parameter.nbytes:,} bytes{why}"
            notes.append(f"shared while loading: draft.{name} is target.{owned[id(parameter)]}, {size}")
    return tuple(notes)


@dataclass(frozen=True, eq=False)
class _Target:
    """What a head can need of its target."""

    info: ModelInfo
    embed_tokens: nn.Parameter
    lm_head: nn.Parameter

    @staticmethod
    def of(model: PreTrainedModel, info: ModelInfo) -> _Target:
        embeddings: Any = model.get_input_embeddings()
        head: Any = model.get_output_embeddings()
        return _Target(info, embeddings.weight, head.weight)

    def own(self, name: str) -> nn.Parameter:
        return self.embed_tokens if name == "embed_tokens.weight" else self.lm_head


@dataclass(frozen=True, eq=False)
class _Loader:
    checkpoint: Checkpoint
    options: HeadOptions
    target: _Target

    def load(self) -> DraftHead:
        """Check every tensor by its shape, and only then read them."""
        features = self.options.features
        if features is None:
            raise ConfigError(
                f"{self.checkpoint.path} does not say which hidden states it reads; set draft.feature_layers."
            )
        stored = {layer_name(name): tensor for name, tensor in self.checkpoint.tensors.items()}
        parallel = "mask_hidden" in stored
        config = self._config(stored, features)
        with torch.device("meta"):
            module = Eagle3(config, parallel=parallel)
        self._add_biases(module, stored)
        self._check(module, stored)
        with torch.device("cpu"):
            module.rotary = type(module.rotary)(config.layers).to(self.target.info.device)
        for name, expected in list(module.named_parameters()):
            _assign(module, name, self._parameter(name, expected, stored))
        module.register_buffer("draft_to_target", self._vocabulary(stored, config.draft_vocab_size))
        module.eval()
        return DraftHead(module, features, self.options.mask_token_id, self.checkpoint.parallel)

    def _config(self, stored: Mapping[str, StoredTensor], features: tuple[int, ...]) -> Eagle3Config:
        options, config, info = self.options, self.checkpoint.config, self.target.info
        declared = config.get("target_hidden_size")
        if declared is not None and declared != info.hidden_size:
            raise self._unfit(f"it was made for a target with hidden size {declared}", f"has {info.hidden_size}")
        head, embedding = stored.get("lm_head.weight"), stored.get("embed_tokens.weight")
        # A longer embedding than the target's has room for a mask token; a shorter one is found by its shape.
        rows = self.target.embed_tokens.shape[0] if embedding is None else max(*embedding.shape[:1], info.vocab_size)
        layers = layer_config(self.checkpoint, options, rows)
        if not options.fc and layers.hidden_size != info.hidden_size:
            raise self._unfit(f"it has no fc and the hidden size {layers.hidden_size}", f"has {info.hidden_size}")
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

    def _add_biases(self, module: Eagle3, stored: Mapping[str, StoredTensor]) -> None:
        """Biases are where the file has them, whatever its configuration says."""
        for name in stored:
            owner = dict(module.named_modules()).get(name.removesuffix(".bias"))
            if name.endswith(".bias") and isinstance(owner, nn.Linear) and owner is not module.lm_head:
                owner.bias = nn.Parameter(torch.empty(owner.out_features, device="meta"), requires_grad=False)

    def _check(self, module: Eagle3, stored: Mapping[str, StoredTensor]) -> None:
        expected = {name: tuple(p.shape) for name, p in module.named_parameters() if name != "mask_hidden"}
        missing = [name for name in expected if name not in stored and name not in BORROWED]
        if missing:
            raise ConfigError(
                f"{self.checkpoint.path} lacks {self._listed(missing)}; download it again or correct its config.json."
            )
        for name, shape in expected.items():
            if name in stored:
                self._check_tensor(name, stored[name], shape)
            else:
                self._check_borrowed(name, shape)
        unused = [name for name in stored if name not in expected and not HARMLESS.match(name)]
        if unused:
            raise ConfigError(
                f"{self.checkpoint.path} holds {self._listed(unused)}, which an EAGLE-3 head with its configuration "
                "does not use; correct the configuration or remove them."
            )
        self._check_mask(module, stored)

    def _check_tensor(self, name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> None:
        if tensor.shape != shape:
            raise self._unfit(
                f"{self._shown(name)} has the shape {list(tensor.shape)}", f"and config.json need {list(shape)}"
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise ConfigError(
                f"{self._shown(name)} of {self.checkpoint.path} is {tensor.dtype}; convert it to bfloat16 or float32."
            )

    def _check_borrowed(self, name: str, shape: tuple[int, ...]) -> None:
        own = self.target.own(name)
        if tuple(own.shape) != shape:
            raise self._unfit(f"it has no {name}, needs {list(shape)}", f"has {list(own.shape)}")

    def _check_mask(self, module: Eagle3, stored: Mapping[str, StoredTensor]) -> None:
        width, found = module.config.feature_size, stored.get("mask_hidden")
        if found is None:
            if self.checkpoint.algorithm == "peagle":
                raise ConfigError(
                    f"{self.checkpoint.path} lacks mask_hidden, of shape {[1, 1, width]}; P-EAGLE needs it."
                )
            return
        if found.shape not in ((1, 1, width), (1, width), (width,)):
            raise self._unfit(f"mask_hidden has the shape {list(found.shape)}", f"needs {[1, 1, width]}")
        mask, rows = self.options.mask_token_id, module.embed_tokens.num_embeddings
        if mask is None or not 0 <= mask < rows:
            raise ConfigError(
                f"The mask token of {self.checkpoint.path} is {mask}, outside its vocabulary of {rows}; "
                f"set draft.mask_token_id to an id from 0 to {rows - 1}."
            )

    def _parameter(self, name: str, expected: Tensor, stored: Mapping[str, StoredTensor]) -> nn.Parameter:
        if name not in stored:
            return self.target.own(name)
        info = self.target.info
        read = stored[name].read().reshape(expected.shape).to(info.dtype)
        if name in BORROWED and equal_tensors(read, self.target.own(name)):
            return self.target.own(name)
        return nn.Parameter(read.to(info.device).contiguous(), requires_grad=False)

    def _vocabulary(self, stored: Mapping[str, StoredTensor], size: int) -> Tensor | None:
        """int64 ``[Vd]``, the target id of every draft id, or None if they are the same."""
        vocab, path = self.target.info.vocab_size, self.checkpoint.path
        if "d2t" not in stored:
            if size != vocab:
                raise self._unfit(f"it has no d2t and a draft vocabulary of {size}", f"has a vocabulary of {vocab}")
            return None
        offsets = stored["d2t"]
        if offsets.shape != (size,) or offsets.dtype.is_floating_point or offsets.dtype == torch.bool:
            raise ConfigError(f"d2t of {path} is {offsets.dtype} {list(offsets.shape)}; it is int64 {[size]}.")
        ids = torch.arange(size) + offsets.read().to(torch.int64)
        outside = ids[(ids < 0) | (ids >= vocab)]
        if len(outside):
            raise ConfigError(
                f"d2t of {path} names the target id {int(outside[0])}, outside the target's vocabulary of {vocab}; "
                "the head was made for another target."
            )
        if len(set(ids.tolist())) != size:
            raise ConfigError(f"d2t of {path} gives two draft ids the same target id; the file is damaged.")
        self._cross_check(stored, ids)
        return None if size == vocab and not offsets.read().any() else ids.to(self.target.info.device)

    def _cross_check(self, stored: Mapping[str, StoredTensor], ids: Tensor) -> None:
        """``t2d``, where there is one, must mark exactly the ids that ``d2t`` names."""
        if "t2d" in stored:
            marked = stored["t2d"].read().flatten().to(torch.bool).nonzero().flatten()
            if not torch.equal(marked, ids.sort().values):
                raise ConfigError(
                    f"t2d and d2t of {self.checkpoint.path} name different target ids; the file is damaged."
                )

    def _shown(self, name: str) -> str:
        """A name as the file spells it."""
        old = any(stored.startswith("midlayer.") for stored in self.checkpoint.tensors)
        return re.sub(r"^layers\.0\.", "midlayer.", name) if old else name

    def _listed(self, names: list[str]) -> str:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(self._shown(name) for name in names[:3]) + more

    def _unfit(self, found: str, needed: str) -> ConfigError:
        name = self.target.info.name
        return ConfigError(f"{self.checkpoint.path} does not fit: {found}, but the target {name} {needed}.")


def _assign(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(owner), leaf, parameter)
