"""Loads MTP modules from a checkpoint: all names and shapes are compared before any tensor is read.

The decoder layer of a module is loaded by transformers, which knows how published tensors of a model type become the
parameters of its classes (experts are stored one by one, for example). The rest has the same form in files as here.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import cached_file

from specgraph.checkpoints.checkpoint import EMBEDDING, Checkpoint
from specgraph.checkpoints.files import Files
from specgraph.checkpoints.loading import COMPUTED, HeadLoader
from specgraph.checkpoints.modules import declared_modules
from specgraph.drafters.mtp_layers import block_config, make_block
from specgraph.drafters.mtp_layouts import LAYOUTS, Layout, Modules, with_overrides
from specgraph.drafters.mtp_module import BLOCK, MtpModule, MtpOptions
from specgraph.errors import ConfigError
from specgraph.ir.model_info import ModelInfo
from specgraph.progress import progress_bars
from specgraph.schemes.layers import arrange_weights
from specgraph.schemes.load import make_buffers
from specgraph.schemes.part import PackedPart, pack_part


def own_folder(model: PreTrainedModel) -> Path:
    """The folder of the checkpoint that a model was loaded from, on this machine.

    Raises:
        ConfigError: there is none, or the model was made from a configuration.
    """
    name = model.name_or_path
    if name and Path(name).is_dir():
        return Path(name)
    try:
        # The configuration of a text model inside of a multimodal one does not have it.
        revision = getattr(model, "loaded_revision", None) or getattr(model.config, "_commit_hash", None)
        found = cached_file(name, "config.json", local_files_only=True, revision=revision) if name else None
    except OSError:
        found = None
    if found is None:
        raise ConfigError(
            f"draft=mtp takes the modules out of the target's own checkpoint, and there is no folder of the name "
            f"{name!r} on this machine; give the folder that holds them by draft=... or draft.model."
        )
    return Path(found).parent


def used_modules(checkpoint: Checkpoint, wanted: int | None) -> Modules:
    """The modules of a checkpoint that are used: all, or the first ``wanted``.

    Raises:
        ConfigError: there are fewer, or one is missing.
    """
    found = LAYOUTS[checkpoint.layout].find(checkpoint.config, checkpoint.tensors)
    count = max(max(found) + 1, declared_modules(checkpoint.config))
    used = range(count if wanted is None else min(wanted, count))
    missing = next((index for index in used if index not in found), None)
    if missing is not None:
        advice = f"download it again, or set draft.num_modules to {missing}" if missing else "download it again"
        raise ConfigError(f"{checkpoint.path} has no tensors of MTP module {missing + 1} of {count}; {advice}.")
    if wanted is not None and wanted > count:
        raise ConfigError(f"draft.num_modules is {wanted}, but {checkpoint.path} holds {count}; lower it.")
    return {index: found[index] for index in used}


def own_options(options: Any) -> dict[str, Any]:
    """The options of :class:`~specgraph.drafters.mtp_module.MtpOptions` that a user gave; None where not."""
    return {item.name: getattr(options, item.name) for item in fields(MtpOptions)}


def used_options(
    checkpoint: Checkpoint, options: Any, text: object, modules: Iterable[int]
) -> list[tuple[MtpOptions, dict[str, str]]]:
    """How each module of a checkpoint is used with a model of the configuration ``text``, and by which sources.

    ``options`` is the configuration of the drafter.
    """
    layout, given = LAYOUTS[checkpoint.layout], own_options(options)
    return [with_overrides(layout, checkpoint.config, text, given, index) for index in modules]


def check_modules(
    checkpoint: Checkpoint, options: Any, model: PreTrainedModel, info: ModelInfo
) -> list[tuple[HeadLoader, MtpOptions]]:
    """Compare the names and shapes of the modules' tensors with those that the target's own layer class needs.

    Returns the loader of each module that is used, and how the module is used.

    Raises:
        ConfigError: the checkpoint does not fit the target or itself; names the tensor, the expected and found shape.
    """
    modules, text = used_modules(checkpoint, options.num_modules), model.config.get_text_config()
    uses = [own for own, _ in used_options(checkpoint, options, text, modules)]
    like = {used: MtpModule(model, make_block(model, "meta", used), used, 0) for used in set(uses)}
    what, layout = "an MTP module of this layout", LAYOUTS[checkpoint.layout]
    loaders = [
        HeadLoader(checkpoint, stored, model, info, what, shown=partial(layout.shown, checkpoint.config, index))
        for index, stored in modules.items()
    ]
    for index, (loader, used) in enumerate(zip(loaders, uses, strict=True)):
        if _may_be_packed(checkpoint):
            _packed_block(loader, MtpModule(model, make_block(model, "meta", used), used, index), index)
        else:
            loader.check_shapes(_expected(like[used], loader.stored))
    return list(zip(loaders, uses, strict=True))


def _may_be_packed(checkpoint: Checkpoint) -> bool:
    return checkpoint.config.get("quantization_config") is not None


def _packed_block(loader: HeadLoader, module: MtpModule, index: int) -> PackedPart:
    """The decoder layer of module ``index``, which is on ``meta``, with packed weights where the files have such.

    Names, shapes and dtypes of all tensors of the module are compared.
    """
    checkpoint, layout = loader.checkpoint, LAYOUTS[loader.checkpoint.layout]
    apart = {name: stored for name, stored in loader.stored.items() if not name.startswith(BLOCK)}
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    replace(loader, stored=apart).check_shapes({n: shape for n, shape in shapes.items() if not n.startswith(BLOCK)})
    of_block = (name for name in loader.stored if name not in apart and not COMPUTED.match(name))
    files = Files(checkpoint.path, checkpoint.config, {loader.shown(name): loader.stored[name] for name in of_block})

    def name_in_block(file: str) -> str:
        return f"layers.0.{layout.own(checkpoint.config, index, file).removeprefix(BLOCK)}"

    return pack_part(module.block, files, name_in_block, checkpoint.path)


def _load_packed(loader: HeadLoader, options: MtpOptions, index: int) -> MtpModule:
    model = loader.model
    module = MtpModule(model, make_block(model, "meta", options), options, index)
    _packed_block(loader, module, index).fill(loader.info.device)
    rotary, module.block.rotary_emb = getattr(module.block, "rotary_emb", None), None  # the target's, which is made
    make_buffers(module.block, loader.info.device)
    module.block.rotary_emb = rotary
    loader.fill(module, apart=BLOCK)
    arrange_weights(module)
    module.block.requires_grad_(False)
    return module.eval()


def load_module(loader: HeadLoader, options: MtpOptions, index: int) -> MtpModule:
    """Read one module that :func:`check_modules` has passed, on the target's device and in its dtype.

    Weights of its decoder layer that are packed stay as they are.
    """
    if _may_be_packed(loader.checkpoint):
        return _load_packed(loader, options, index)
    model, info, stored = loader.model, loader.info, loader.stored
    base: Any = model.base_model
    tensors = {f"layers.0.{name.removeprefix(BLOCK)}": stored[name].read() for name in stored if name.startswith(BLOCK)}
    tensors = {name: tensor for name, tensor in tensors.items() if not COMPUTED.match(name)}
    # A base model needs these two. Neither remains: the norm is filled below, and the block gets no embedding.
    tensors |= {"norm.weight": stored["norm.weight"].read(), EMBEDDING: torch.zeros(1, info.hidden_size)}
    with progress_bars(False):
        block: Any = type(base).from_pretrained(
            None, config=block_config(model, options), state_dict=tensors, dtype=info.dtype
        )
    if hasattr(base, "rotary_emb"):
        block.rotary_emb = base.rotary_emb
    module = MtpModule(model, block.to(info.device).requires_grad_(False), options, index)
    loader.fill(module, apart=BLOCK)
    return module.eval()


def published(modules: Iterable[MtpModule], layout: Layout) -> dict[str, Tensor]:
    """The tensors of modules by the names of a layout."""
    found: dict[str, Tensor] = {}
    for index, module in enumerate(modules):
        own = {n: t for n, t in module.named_parameters(remove_duplicate=False) if not n.startswith(BLOCK)}
        found |= {layout.shown({}, index, name): t for name, t in (own | _published_block(module)).items()}
    return found


def _published_block(module: MtpModule, stored: Container[str] = ()) -> dict[str, Tensor]:
    """The tensors of a module's decoder layer as published checkpoints hold them.

    Some checkpoints of a model type hold experts one by one, and some hold them as transformers does, in one tensor. So
    a tensor that is among those ``stored`` by its name in transformers alone is taken as it is.
    """
    block: Any = module.block
    own = {name: tensor for name, tensor in block.state_dict().items() if name.startswith("layers.")}
    reverted: dict[str, Tensor] = revert_weight_conversion(block, own)
    kept = {name: own[name] for name in own if f"block.{name}" in stored and name not in reverted}
    if kept:
        reverted = revert_weight_conversion(block, {name: own[name] for name in own if name not in kept})
    return {f"block.{name}": tensor for name, tensor in (reverted | kept).items()}


def _expected(module: MtpModule, stored: Container[str]) -> dict[str, tuple[int, ...]]:
    """The names and shapes that a checkpoint must have for ``module``, if it has tensors of the names ``stored``."""
    expected = {name: tuple(tensor.shape) for name, tensor in _published_block(module, stored).items()}
    own = {name: tuple(p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: shape for name, shape in own.items() if not name.startswith(BLOCK)} | expected
