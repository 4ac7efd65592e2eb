"""Compares the tensors of files with those that a model with packed weights needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgraph.checkpoints.files import Files, StoredTensor
from specgraph.checkpoints.modules import is_of_module
from specgraph.errors import UnsupportedModelError
from specgraph.ir.packed import STACKS
from specgraph.kernels.packed.chunks import in_chunks
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import format_of
from specgraph.schemes.layers import PackedExperts, PackedLinear
from specgraph.schemes.names import Piece, is_ragged


@dataclass(frozen=True)
class Part:
    """A tensor of a packed weight.

    Attributes:
        form: the format of the weight.
        kind: one of :attr:`~specgraph.kernels.packed.format.Format.kinds`, or ``shape`` for two numbers beside them.
        dtypes: the dtypes in which a file may hold it.
        shape: the shape in a file.
    """

    form: Format
    kind: str
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int, ...]


def parts_of(model: nn.Module) -> dict[str, Part]:
    """The tensors of packed weights by their names in the model."""
    found: dict[str, Part] = {}
    for path, module in model.named_modules():
        if isinstance(module, PackedLinear):
            form = format_of(module.format)
            names = [*zip(form.parts, form.kinds, strict=True), *((name, "shape") for name in form.beside)]
        elif isinstance(module, PackedExperts):
            form = format_of(module.format)
            kinds = [*zip(form.stack_parts, form.kinds, strict=True)]
            held = {name for name, _ in module.named_parameters(recurse=False)}
            names = [(f"{stack}{part}", kind) for stack in STACKS for part, kind in kinds if f"{stack}{part}" in held]
        else:
            continue
        for name, kind in names:
            found[f"{path}.{name}"] = _part(form, kind, getattr(module, name), isinstance(module, PackedExperts))
    return found


def _part(form: Format, kind: str, tensor: Tensor, stacked: bool) -> Part:
    other = {"scale": form.scale_dtypes, "shape": (torch.int64, torch.int32)}
    dtypes = other.get(kind.rpartition(" ")[2], (form.stored,))
    shape = tuple(tensor.shape)
    return Part(form, kind, dtypes, form.stacked_shape(shape) if stacked and kind == "numbers" else shape)


def by_tensor(model: PreTrainedModel, files: Files, pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """The tensors of the files by the tensor of the model that they make, or by the stack whose shapes they state.

    Raises:
        UnsupportedModelError: transformers converts one of them in a way that is not known.
    """
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.unknown is not None and not _is_unread(model, files, piece):
            raise UnsupportedModelError(
                f"{files.path} holds the tensor {piece.name}, which transformers converts by {piece.unknown} for a "
                f"{type(model).__name__}; only tensors that it renames and matrices that it stacks are read here."
            )
        found.setdefault(piece.tensor or piece.weight, []).append(piece)
    return found


def check_names(
    model: PreTrainedModel, files: Files, parts: Mapping[str, Part], found: Mapping[str, Sequence[Piece]]
) -> dict[str, str]:
    """Compare the names, shapes and dtypes of the files' tensors with those of the model.

    Returns:
        For every tensor of the model that is another one under a second name, and that is not read: the other's name.

    Raises:
        UnsupportedModelError: one is missing, or does not fit.
    """
    wanted, tied = model.state_dict(), dict(model.all_tied_weights_keys)
    aliases: dict[str, str] = {}
    for target, source in tied.items():
        kept, alias = (target, source) if source not in found else (source, target)
        if alias in wanted:
            aliases[alias] = kept
    for name, tensor in wanted.items():
        if name in found:
            _check_pieces(name, found[name], files, model)
            for piece in found[name]:
                _check_tensor(piece, files.tensors[piece.name], tensor, model, parts.get(name))
        elif name not in aliases:
            raise UnsupportedModelError(
                f"{files.path} has no tensor {name}, which a {type(model).__name__} with its configuration needs; the "
                "checkpoint is incomplete, or its files name tensors in another way than transformers."
            )
    stacks = {
        f"{path}.{stack}" for path, module in model.named_modules() if isinstance(module, PackedExperts)
        for stack in STACKS
    }  # fmt: skip
    for piece in (piece for name, pieces in found.items() if name not in wanted for piece in pieces):
        _check_unwanted(piece, files, model, stacks)
    return aliases


def owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _check_pieces(name: str, pieces: Sequence[Piece], files: Files, model: nn.Module) -> None:
    """A tensor is one of the files, or a stack has one for each matrix of each expert, all of them in one dtype."""
    first, *others = pieces
    places: dict[tuple[int | None, int], Piece] = {}
    for piece in pieces:
        alone = piece.expert is None or first.expert is None
        twin = first if alone and places else places.get((piece.expert, piece.index))
        if twin is not None:
            raise UnsupportedModelError(
                f"{files.path} holds {twin.name} and {piece.name}, and both are {name}; remove the wrong one."
            )
        places[piece.expert, piece.index] = piece
    if first.expert is None:
        return
    owner, leaf = owner_of(model, name)
    wanted = {(expert, index) for expert in range(len(getattr(owner, leaf))) for index in range(first.count)}
    for expert, index in sorted(wanted - places.keys()):
        raise UnsupportedModelError(
            f"{files.path} has no tensor for expert {expert} of {name}{_like(pieces, index)}; the checkpoint is "
            "incomplete, or config.json is of another model."
        )
    for place in sorted(places.keys() - wanted):
        raise UnsupportedModelError(
            f"{files.path} holds the tensor {places[place].name}, and config.json has fewer experts; one of them is of "
            "another model."
        )
    dtype = files.tensors[first.name].dtype
    for piece in others:
        if files.tensors[piece.name].dtype != dtype:
            raise UnsupportedModelError(
                f"{piece.name} of {files.tensors[piece.name].file} is {files.tensors[piece.name].dtype}, and "
                f"{first.name} is {dtype}; all matrices of a stack must be of one dtype."
            )


def _like(pieces: Sequence[Piece], index: int) -> str:
    like = next((piece for piece in pieces if piece.index == index), None)
    return "" if like is None else f", as {like.name} is for expert {like.expert}"


def _check_tensor(piece: Piece, stored: StoredTensor, wanted: Tensor, model: nn.Module, part: Part | None) -> None:
    if piece.expert is None:
        shape = part.shape if part else tuple(wanted.shape)
    else:
        owner, leaf = owner_of(model, str(piece.tensor))
        shape = piece.shape_in(tuple(getattr(owner, leaf).shape))
        if part and part.kind == part.form.shared and is_ragged(owner, piece.weight.rpartition(".")[2], piece.count):
            raise UnsupportedModelError(
                f"{piece.name} of {stored.file} cannot be joined with the {part.kind}s of the other matrices in "
                f"{piece.tensor}: the last block of {part.form.name} is not full, and its {part.kind} would be of both."
            )
    if stored.shape != shape:
        raise UnsupportedModelError(
            f"{piece.name} of {stored.file} has the shape {list(stored.shape)}, and config.json needs {list(shape)}; "
            "one of them is of another model."
        )
    allowed = part.dtypes if part else None
    fits = stored.dtype in allowed if allowed else _kind(stored.dtype) == _kind(wanted.dtype)
    if not fits:
        of = ", ".join(map(str, allowed)) if allowed else f"{wanted.dtype} or one of its kind"
        raise UnsupportedModelError(f"{piece.name} of {stored.file} is {stored.dtype}; it must be {of}.")


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    """Whether a dtype is one of floating-point numbers, and of those of fewer than 16 bits, which need scales."""
    return dtype.is_floating_point, dtype.is_floating_point and dtype.itemsize < 2


def _check_unwanted(piece: Piece, files: Files, model: PreTrainedModel, stacks: Container[str]) -> None:
    """A tensor without a place in the model states the shape of a matrix in a stack, or is not read by transformers."""
    if piece.tensor is None and piece.weight in stacks:
        _check_stated_shape(piece, files, model)
    elif not _is_unread(model, files, piece):
        raise UnsupportedModelError(
            f"{files.path} holds the tensor {piece.name}, which a {type(model).__name__} with its configuration does "
            "not have; remove the tensor, or correct the configuration."
        )


def _is_unread(model: PreTrainedModel, files: Files, piece: Piece) -> bool:
    """Whether transformers does not read it either: buffers that old files hold, what the model's class names, and the
    tensors of MTP modules, which a drafter reads.
    """
    if is_of_module(piece.own, files.config):
        return True
    patterns = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$", *(model._keys_to_ignore_on_load_unexpected or ()))
    return any(re.search(pattern, name) for pattern in patterns for name in (piece.own, piece.weight))


def check_values(piece: Piece, value: Tensor, part: Part, owner: nn.Module, file: Path) -> None:
    """Raise UnsupportedModelError if scales, groups of inputs or a stated shape that were read cannot be right."""
    if part.kind == "shape":
        _check_shape(piece.name, value, [owner.out_features, owner.in_features])  # type: ignore[list-item]
    elif part.kind == "scale":
        _check_scales(piece.name, value, lambda stored: part.form.scales(stored, torch.float32), file)
    elif part.kind.endswith(" scale"):
        _check_scales(piece.name, value, Tensor.float, file)
    elif part.kind == "group index":
        _check_groups(piece.name, value, len(getattr(owner, part.form.parts[1])[0]), file)


def _check_stated_shape(piece: Piece, files: Files, model: nn.Module) -> None:
    """A stack has no tensor for the shapes of its matrices, so that they are read for this alone."""
    owner, stack = owner_of(model, piece.weight)
    form = format_of(owner.format)  # type: ignore[arg-type]
    numbers = getattr(owner, f"{stack}{form.stack_parts[0]}")
    rows, words = piece.shape_in(tuple(numbers.shape))[-2:]
    _check_shape(piece.name, files.tensors[piece.name].read(), [rows, words * form.per_element])


def _check_shape(name: str, value: Tensor, wanted: list[int]) -> None:
    if value.tolist() != wanted:
        raise UnsupportedModelError(
            f"{name} is {value.tolist()}, and config.json needs {wanted}; one of them is of another model."
        )


def _check_scales(name: str, stored: Tensor, meaning: Callable[[Tensor], Tensor], file: Path) -> None:
    """Scales in float32 take several times the bytes that are stored, so they are made chunk by chunk."""
    chunks = in_chunks(stored) if stored.dim() else [stored]
    if not any(bool(_is_wrong(meaning(chunk)).any()) for chunk in chunks):
        return
    scales = meaning(stored)
    place = _is_wrong(scales).nonzero()[0].tolist()
    raise UnsupportedModelError(
        f"{name} of {file} is {float(scales[tuple(place)])} at {place}; scales must be finite and other than 0, so "
        "the file is damaged."
    )


def _is_wrong(scales: Tensor) -> Tensor:
    return ~(scales.isfinite() & (scales != 0))


def _check_groups(name: str, value: Tensor, groups: int, file: Path) -> None:
    bad = (value < 0) | (value >= groups)
    if bool(bad.any()):
        place = int(bad.nonzero()[0])
        raise UnsupportedModelError(
            f"{name} of {file} is {int(value[place])} at [{place}]; it must be from 0 to {groups - 1}, so the file is "
            "damaged."
        )
