"""Loads a model whose weights are stored in a scheme: packed tensors are read as they are in the files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specgraph.checkpoints.causal_lm import DAMAGED, load_by_transformers, not_loaded
from specgraph.checkpoints.files import Files, StoredTensor, open_files, read_json
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.ir.packed import STACKS
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import format_of
from specgraph.schemes.layers import PackedExperts, PackedLinear, empty_experts, stack_features, stacks
from specgraph.schemes.layout import Layout
from specgraph.schemes.layouts import LAYOUTS, read_layout


@dataclass(frozen=True)
class Part:
    """A tensor of a packed weight.

    Attributes:
        form: the format of the weight.
        kind: ``numbers``, ``scale``, or ``shape`` for two numbers beside them.
        dtypes: the dtypes in which a file may hold it.
        shape: the shape in a file.
    """

    form: Format
    kind: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]


def load(
    folder: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> PreTrainedModel:
    """A causal LM from the folder of a checkpoint, in evaluation mode, with packed weights if it has such.

    If its ``config.json`` says that weights are quantised, it has to be in a layout that is known: that of
    compressed-tensors for numbers of four bits (``pack-quantized``, ``mxfp4-pack-quantized``), that of gpt-oss
    (``mxfp4``), or that of DeepSeek's and Qwen's models in fp8 with blocks of 128 x 128. Models that
    :func:`specgraph.quantise` made are in one of them. Weights are not dequantised, and no quantiser's package is
    needed. A model whose files hold other names than its modules, such as a matrix for each expert where transformers
    has one stack, is not read in this way. Another checkpoint is loaded by transformers.

    Args:
        folder: with ``config.json`` and safetensors, in one file or several that an index names.
        device: where the weights come; the CPU by default.
        dtype: that of all weights that are not quantised; by default the one that ``config.json`` states. The scales of
            quantised weights stay in the dtype in which they are stored.

    Raises:
        ConfigError: there are no such files, they are damaged, or transformers has no causal LM of this kind.
        UnsupportedModelError: weights are quantised in another way, or a tensor is missing, has another shape or dtype,
            or is there though the model has none of that name, or a scale is 0 or not finite.
    """
    path = Path(folder).expanduser()
    stated = read_json(path / "config.json").get("quantization_config")
    if stated is None:
        model = load_by_transformers(path, dtype or "auto", f"folder={str(folder)!r}")
        return model.to(device) if device is not None else model
    layout, files, place = read_layout(stated), open_files(path), torch.device(device or "cpu")
    model = _empty_model(path, layout, dtype)
    parts = _parts(model)
    aliases = _check_names(model, files, parts)
    _fill(model, files, aliases, parts, place)
    model.tie_weights(missing_keys=set(aliases), recompute_mapping=False)
    make_buffers(model, place)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.config.quantization_config = stated
    return model.eval()


def load_causal_lm(
    name: str | Path, dtype: torch.dtype | str, what: str, trust_remote_code: bool = False
) -> PreTrainedModel:  # fmt: skip
    """A causal LM in evaluation mode, on the CPU: by :func:`load` if ``name`` is a folder with packed weights, else by
    transformers. The arguments are those of :func:`~specgraph.checkpoints.causal_lm.load_by_transformers`.

    Raises:
        ConfigError: it cannot be loaded, or its files lack a tensor, which transformers would fill at random.
        UnsupportedModelError: its weights are quantised in a way that :func:`load` does not read.
    """
    folder = Path(name).expanduser()
    if not _is_packed(folder):
        return load_by_transformers(name, dtype, what, trust_remote_code)
    if isinstance(dtype, str):
        return load(folder, dtype=None if dtype == "auto" else getattr(torch, dtype))
    return load(folder, dtype=dtype)


def _is_packed(folder: Path) -> bool:
    try:
        stated = read_json(folder / "config.json").get("quantization_config")
    except ConfigError:  # transformers knows models by names, too, and says what is wrong with a file
        return False
    return isinstance(stated, Mapping) and stated.get("quant_method") in LAYOUTS


def _empty_model(path: Path, layout: Layout, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model on ``meta``, with packed weights where the layout says so."""
    try:
        config = AutoConfig.from_pretrained(path)
        del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype or config.dtype or torch.float32)
    except DAMAGED as error:
        raise not_loaded(f"folder={str(path)!r}", path, error) from error
    with torch.device("meta"):
        for name, layer in layout.linears(model).items():
            _check_fits(name, layout, *layer.weight.shape)
            model.set_submodule(name, PackedLinear.empty_as(layer, layout.form, layout.group_size))
        for name, module in layout.experts(model).items():
            for stack in stacks(module):
                _check_fits(f"{name}.{stack}", layout, *stack_features(module, stack))
            empty_experts(module, layout.form, layout.group_size)
    return model


def _check_fits(name: str, layout: Layout, outputs: int, inputs: int) -> None:
    reason = layout.form.why_not(outputs, inputs, layout.group_size)
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be stored as quantization_config states: {reason}. It is of another model."
        )


def _parts(model: nn.Module) -> dict[str, Part]:
    """The tensors of packed weights by their names in the model."""
    found: dict[str, Part] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            form, numbers, *others = format_of(module.format), *format_of(module.format).parts
            names = [(numbers, "numbers"), *((other, "scale") for other in others)]
            names += [(name, "shape") for name in form.beside]
        elif isinstance(module, PackedExperts):
            form = format_of(module.format)
            kinds = [*zip(form.stack_parts, ("numbers", "scale"), strict=True)]
            held = {name for name, _ in module.named_parameters(recurse=False)}
            names = [(f"{stack}{part}", kind) for stack in STACKS for part, kind in kinds if f"{stack}{part}" in held]
        else:
            continue
        for name, kind in names:
            found[f"{path}.{name}"] = _part(form, kind, getattr(module, name), isinstance(module, PackedExperts))
    return found


def _part(form: Format, kind: str, tensor: Tensor, stacked: bool) -> Part:
    dtypes = {"numbers": (form.stored,), "scale": form.scale_dtypes, "shape": (torch.int64, torch.int32)}[kind]
    shape = tuple(tensor.shape)
    return Part(form, kind, dtypes, form.stacked_shape(shape) if stacked and kind == "numbers" else shape)


def _check_names(model: PreTrainedModel, files: Files, parts: Mapping[str, Part]) -> dict[str, str]:
    """Compare the names, shapes and dtypes of the files' tensors with those of the model.

    Returns:
        For every tensor of the model that is another one under a second name, and that is not read: the other's name.
    """
    wanted, tied = model.state_dict(), dict(model.all_tied_weights_keys)
    unread = _patterns(model._keys_to_ignore_on_load_unexpected)
    aliases: dict[str, str] = {}
    for target, source in tied.items():
        kept, alias = (target, source) if source not in files.tensors else (source, target)
        if alias in wanted:
            aliases[alias] = kept
    for name, tensor in wanted.items():
        if name in files.tensors:
            _check_tensor(name, files.tensors[name], tensor, parts.get(name))
        elif name not in aliases:
            raise UnsupportedModelError(
                f"{files.path} has no tensor {name}, which a {type(model).__name__} with its configuration needs; the "
                "checkpoint is incomplete, or its files name tensors in another way than transformers' modules."
            )
    for name in files.tensors:
        if name not in wanted and not any(pattern.search(name) for pattern in unread):
            raise UnsupportedModelError(
                f"{files.path} holds the tensor {name}, which a {type(model).__name__} with its configuration does not "
                "have; remove the tensor, or correct the configuration."
            )
    return aliases


def _patterns(more: Iterable[str] | None) -> list[re.Pattern[str]]:
    """What transformers does not read either: buffers that old files hold, and what the model's class names."""
    return [re.compile(text) for text in (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(more or ()))]


def _check_tensor(name: str, stored: StoredTensor, wanted: Tensor, part: Part | None) -> None:
    shape, allowed = (part.shape, part.dtypes) if part else (tuple(wanted.shape), None)
    if stored.shape != shape:
        raise UnsupportedModelError(
            f"{name} of {stored.file} has the shape {list(stored.shape)}, and config.json needs {list(shape)}; "
            "one of them is of another model."
        )
    fits = stored.dtype in allowed if allowed else stored.dtype.is_floating_point == wanted.dtype.is_floating_point
    if not fits:
        of = ", ".join(map(str, allowed)) if allowed else f"{wanted.dtype} or one of its kind"
        raise UnsupportedModelError(f"{name} of {stored.file} is {stored.dtype}; it must be {of}.")


@torch.no_grad()
def _fill(
    model: PreTrainedModel, files: Files, aliases: Mapping[str, str], parts: Mapping[str, Part], device: torch.device
) -> None:
    """Read the tensors of the files, one at a time, into the model."""
    single = _patterns_of_float32(model)
    for name, empty in model.state_dict(keep_vars=True).items():
        if name in aliases:
            _check_alias(name, aliases[name], files)
            continue
        value, part = files.tensors[name].read(), parts.get(name)
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        if part is not None:
            _check_values(name, value, part, owner, files.tensors[name].file)
            value = value.view(getattr(owner, leaf).shape)
        elif value.is_floating_point():
            value = value.to(torch.float32 if any(p.search(name) for p in single) else empty.dtype)
        # A mapped file aligns no tensor, and operands that are not aligned may be rounded in another way.
        value = value.to(device, copy=True).contiguous()
        is_parameter = leaf in owner._parameters
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _patterns_of_float32(model: PreTrainedModel) -> list[re.Pattern[str]]:
    """The names of parameters that stay in float32 in a model of 16 bits, as transformers has it."""
    always = model._keep_in_fp32_modules_strict or ()
    names = {
        torch.bfloat16: always,
        torch.float16: (*always, *(model._keep_in_fp32_modules or ())),
    }.get(model.dtype, ())
    return [re.compile(rf"((^|\.){name}($|\.))") for name in names]


def _check_alias(name: str, kept: str, files: Files) -> None:
    """A tensor that is tied to another one equals it, if the files hold both."""
    if name in files.tensors and not torch.equal(files.tensors[name].read(), files.tensors[kept].read()):
        raise UnsupportedModelError(
            f"{files.path} holds {name} and {kept} with different values, and config.json says that they are one; set "
            "tie_word_embeddings to false there if both are meant."
        )


def _check_values(name: str, value: Tensor, part: Part, owner: nn.Module, file: Path) -> None:
    if part.kind == "shape":
        _check_stated_shape(name, value, owner)
    elif part.kind == "scale":
        _check_scales(name, value, part.form, file)


def _check_stated_shape(name: str, value: Tensor, layer: Any) -> None:
    if value.tolist() != [layer.out_features, layer.in_features]:
        raise UnsupportedModelError(
            f"{name} is {value.tolist()}, and config.json needs {[layer.out_features, layer.in_features]}; one of them "
            "is of another model."
        )


def _check_scales(name: str, value: Tensor, form: Format, file: Path) -> None:
    scales = form.scales(value, torch.float32)
    bad = ~(scales.isfinite() & (scales != 0))
    if bool(bad.any()):
        place = bad.nonzero()[0].tolist()
        raise UnsupportedModelError(
            f"{name} of {file} is {float(scales[tuple(place)])} at {place}; scales must be finite and other than 0, so "
            "the file is damaged."
        )


@torch.no_grad()
def make_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Make the buffers that no file holds, such as the frequencies of rotary embeddings.

    That is what ``_init_weights`` of a model does in transformers, which loads models in this way, too. It leaves alone
    what is marked as initialised. A buffer that it has not written is refused.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    made: dict[str, tuple[nn.Module, str, Tensor]] = {}
    for owner, module in model.named_modules():
        leaves = [leaf for leaf in module._non_persistent_buffers_set if module._buffers.get(leaf) is not None]
        module._is_hf_initialized = not leaves
        for leaf in leaves:
            module._buffers[leaf] = empty = torch.empty_like(module._buffers[leaf], device=device)
            made[f"{owner}.{leaf}"] = module, leaf, empty
    versions = {name: empty._version for name, (_, _, empty) in made.items()}
    model.initialize_weights()
    for name, (module, leaf, empty) in made.items():
        found = module._buffers[leaf]
        if found is empty and empty._version == versions[name] and empty.numel():
            raise UnsupportedModelError(
                f"{type(model).__name__} has a buffer {name} that no file holds and that transformers does not make "
                "again, so its quantised weights cannot be loaded."
            )
