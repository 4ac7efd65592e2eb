"""Loads a model whose weights are stored in a scheme: packed tensors are read as they are in the files."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from specgraph.checkpoints.causal_lm import DAMAGED, load_by_transformers, not_loaded
from specgraph.checkpoints.files import Files, StoredTensor, open_files, read_json
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.schemes.checks import Part, by_tensor, check_names, check_values, owner_of, parts_of
from specgraph.schemes.layers import PackedLinear, empty_experts, stack_features, stacks
from specgraph.schemes.layout import Layout
from specgraph.schemes.layouts import FOREIGN, LAYOUTS, read_layout
from specgraph.schemes.names import Names, Piece, layers_of
from specgraph.schemes.published import save_as_published


def load(
    folder: str | Path, device: torch.device | str | None = None, dtype: torch.dtype | None = None, *,
    trust_remote_code: bool = False,
) -> PreTrainedModel:  # fmt: skip
    """A causal LM from the folder of a checkpoint, in evaluation mode, with packed weights if it has such.

    If its ``config.json`` says that weights are quantised, it has to be in a layout that is known: that of
    compressed-tensors for numbers of four bits (``pack-quantized``, ``mxfp4-pack-quantized``, ``nvfp4-pack-quantized``)
    or for e4m3 and integers of eight bits with a scale for each output or matrix (``float-quantized``,
    ``int-quantized``, ``naive-quantized``, ``pack-quantized``; activations are quantised by row, by a scale of the
    layer or not at all), that of gpt-oss (``mxfp4``), that of DeepSeek's and Qwen's models in fp8 with blocks of
    128 x 128, that of AutoFP8 with static activations, or those of AWQ and GPTQ for four bits. The last three are saved
    in that of compressed-tensors. Models that :func:`specgraph.quantise` made are in one of them. Weights are not
    dequantised, and no quantiser's package is needed. Files may name tensors as transformers renames them while it
    loads, and hold a matrix for each expert where the model has a stack. Another checkpoint is loaded by transformers.

    Args:
        folder: with ``config.json`` and safetensors, in one file or several that an index names.
        device: where the weights come; the CPU by default.
        dtype: that of all weights that are not quantised; by default the one that ``config.json`` states. The scales of
            quantised weights stay in the dtype in which they are stored.
        trust_remote_code: whether to run code that comes with the model.

    Raises:
        ConfigError: there are no such files, they are damaged, or transformers has no causal LM of this kind.
        UnsupportedModelError: weights are quantised in another way, or a tensor is missing, has another shape or dtype,
            or is there though the model has none of that name, or a scale is 0 or not finite, or only some matrices of
            a stack are packed, or transformers does more to a tensor than to rename, stack and join it.
    """
    path = Path(folder).expanduser()
    stated = read_json(path / "config.json").get("quantization_config")
    if stated is None:
        model = load_by_transformers(path, dtype or "auto", f"folder={str(folder)!r}", trust_remote_code)
        return model.to(device) if device is not None else model
    try:
        layout = read_layout(stated)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path / 'config.json'}: {error}") from None
    files, place = open_files(path), torch.device(device or "cpu")
    model = _empty_model(path, dtype, trust_remote_code)
    layout, files = layout.adapted(files, model.state_dict().keys())
    names = Names(model, layout.form, layout.renamed)
    pieces = names.pieces(files.tensors)
    layers = layers_of(pieces)
    pack(model, layout, layout.linears(model, layers), layout.experts(model, layers))
    parts, found = parts_of(model), by_tensor(model, files, pieces)
    aliases = check_names(model, files, parts, found)
    fill(model, files, aliases, parts, found, place)
    model.tie_weights(missing_keys=set(aliases), recompute_mapping=False)
    make_buffers(model, place)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.config.quantization_config = layout.kept(stated, model)
    save_as_published(model, names.used())
    return model.eval()


def load_causal_lm(
    name: str | Path, dtype: torch.dtype | str, what: str, trust_remote_code: bool = False
) -> PreTrainedModel:  # fmt: skip
    """A causal LM in evaluation mode, on the CPU: by :func:`load` if ``name`` is a folder whose weights are packed by
    a tool that it knows, else by transformers. The arguments are those of
    :func:`~specgraph.checkpoints.causal_lm.load_by_transformers`.

    Raises:
        ConfigError: it cannot be loaded, or its files lack a tensor, which transformers would fill at random.
        UnsupportedModelError: its weights are quantised in a way that :func:`load` does not read.
    """
    folder = Path(name).expanduser()
    if not _is_packed(folder):
        return load_by_transformers(name, dtype, what, trust_remote_code)
    stated = (None if dtype == "auto" else getattr(torch, dtype)) if isinstance(dtype, str) else dtype
    return load(folder, dtype=stated, trust_remote_code=trust_remote_code)


def _is_packed(folder: Path) -> bool:
    try:
        stated = read_json(folder / "config.json").get("quantization_config")
    except ConfigError:  # transformers knows models by names, too, and says what is wrong with a file
        return False
    return isinstance(stated, Mapping) and stated.get("quant_method") in (*LAYOUTS, *FOREIGN)


def _empty_model(path: Path, dtype: torch.dtype | None, trust_remote_code: bool) -> PreTrainedModel:
    """The model on ``meta``, without packed weights."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        del config.quantization_config
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                config, dtype=dtype or config.dtype or torch.float32, trust_remote_code=trust_remote_code
            )
    except DAMAGED as error:
        raise not_loaded(f"folder={str(path)!r}", path, error) from error


def pack(
    model: PreTrainedModel, layout: Layout, linears: Mapping[str, nn.Linear], experts: Mapping[str, nn.Module]
) -> None:
    """Give a model packed weights, still on ``meta``: those linear layers and mixtures of experts, by their names.

    Raises:
        UnsupportedModelError: one of them does not fit the format.
    """
    with torch.device("meta"):
        for name, layer in linears.items():
            _check_fits(name, layout, *layer.weight.shape)
            model.set_submodule(name, PackedLinear.empty_as(layer, layout.form, layout.group_size))
        for name, module in experts.items():
            for stack in stacks(module):
                _check_fits(f"{name}.{stack}", layout, *stack_features(module, stack))
            empty_experts(module, layout.form, layout.group_size)


def _check_fits(name: str, layout: Layout, outputs: int, inputs: int) -> None:
    reason = layout.form.why_not(outputs, inputs, layout.group_size)
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be stored as quantization_config states: {reason}. It is of another model."
        )


@torch.no_grad()
def fill(
    model: PreTrainedModel, files: Files, aliases: Mapping[str, str], parts: Mapping[str, Part],
    found: Mapping[str, Sequence[Piece]], device: torch.device,
) -> None:  # fmt: skip
    """Read the tensors of the files, one at a time, into a model that is on ``meta``.

    Args:
        model: a model with packed weights.
        files: the files.
        aliases: what :func:`~specgraph.schemes.checks.check_names` returned.
        parts: the tensors of packed weights.
        found: the tensors of the files by those of the model.
        device: where the tensors come.
    """
    single = _patterns_of_float32(model, parts)
    for name, empty in model.state_dict(keep_vars=True).items():
        if name in aliases:
            _check_alias(name, aliases[name], files, found)
            continue
        part, (owner, leaf) = parts.get(name), owner_of(model, name)
        dtype = files.tensors[found[name][0].name].dtype
        if part is None and dtype.is_floating_point:
            dtype = torch.float32 if any(p.search(name) for p in single) else empty.dtype
        # Copied even if there is one piece: a mapped file aligns no tensor, and operands that are not aligned may be
        # rounded in another way.
        value = torch.empty(getattr(owner, leaf).shape, dtype=dtype, device=device)
        for piece in found[name]:
            _read(piece, files.tensors[piece.name], part, owner, piece.slot(value))
        is_parameter = leaf in owner._parameters
        setattr(owner, leaf, nn.Parameter(value, requires_grad=False) if is_parameter else value)


def _read(piece: Piece, stored: StoredTensor, part: Part | None, owner: nn.Module, slot: Tensor) -> None:
    """Read one tensor into its place. Nothing else holds it, so that it is freed before the next one is read."""
    value = stored.read()
    if part is not None:
        check_values(piece, value, part, owner, stored.file)
    slot.copy_(value.view(slot.shape))


def _patterns_of_float32(model: PreTrainedModel, packed: Container[str]) -> list[re.Pattern[str]]:
    """The names of parameters that stay in float32 in a model of 16 bits, as transformers has it."""
    dtypes = (p.dtype for name, p in model.named_parameters() if name not in packed and p.is_floating_point())
    always = model._keep_in_fp32_modules_strict or ()
    names = {
        torch.bfloat16: always,
        torch.float16: (*always, *(model._keep_in_fp32_modules or ())),
    }.get(next(dtypes, model.dtype), ())
    return [re.compile(rf"((^|\.){name}($|\.))") for name in names]


def _check_alias(name: str, kept: str, files: Files, found: Mapping[str, Sequence[Piece]]) -> None:
    """A tensor that is tied to another one equals it, if the files hold both."""
    if name not in found:
        return
    ours, theirs = (files.tensors[found[tied][0].name].read() for tied in (name, kept))
    if not torch.equal(ours, theirs):
        raise UnsupportedModelError(
            f"{files.path} holds {name} and {kept} with different values, and config.json says that they are one; set "
            "tie_word_embeddings to false there if both are meant."
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
