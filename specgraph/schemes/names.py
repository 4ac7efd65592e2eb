"""How files name the tensors of a model: transformers' own mapping, for the tensors of packed weights, too.

Files may hold a matrix for each expert where a model has a stack of them, or give modules other names. transformers
says so by renamings and by converters, which name plain weights only. A packed weight is several tensors, numbers and
scales, and each of them is renamed, stacked and joined as the plain weight would be. The other direction is
:mod:`specgraph.schemes.published`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

from specgraph.compat import dot_natural_key, get_model_conversion_mapping, rename_source_key
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.formats import format_of


@dataclass(frozen=True)
class Piece:
    """Where a tensor of the files belongs in a model.

    Attributes:
        name: its name in the files.
        own: the name that it would have in files of the model alone.
        layer: the name that files of the model alone give the layer that it is of.
        weight: the tensor of the model without packed weights to which it belongs.
        tensor: the tensor of the model with packed weights that it is or is a part of. None if a stack has no such
            tensor, as it is with the stated shape of an expert's matrix.
        expert: its place in a stack; None if it is all of the tensor.
        index: its place among the matrices of an expert that are joined along their outputs.
        count: how many these are.
        unknown: operations by which transformers converts it and that are not known here.
    """

    name: str
    own: str
    layer: str
    weight: str
    tensor: str | None
    expert: int | None = None
    index: int = 0
    count: int = 1
    unknown: str | None = None

    def shape_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Its shape, if the tensor of the model has the shape ``whole``."""
        return whole if self.expert is None else (whole[1] // self.count, *whole[2:])

    def slot(self, whole: Tensor) -> Tensor:
        """Its part of the tensor of the model."""
        if self.expert is None:
            return whole
        rows = whole.shape[1] // self.count
        return whole[self.expert].narrow(0, self.index * rows, rows)


class Names:
    """Maps the names of files to those of a model.

    Args:
        model: the model before its weights are packed.
        form: the format of the packed weights.
        renamed: the parts of the format by the names that files give them, where these are others.
        own: the name that a tensor of the files would have in files of the model alone.
    """

    def __init__(
        self, model: PreTrainedModel, form: Format, renamed: Mapping[str, str] | None = None,
        own: Callable[[str], str] = str,
    ) -> None:  # fmt: skip
        self.form, self.renamed, self.own = form, renamed or {}, own
        self.known = model.state_dict()
        self.prefix = model.base_model_prefix
        self.transforms: list[Any] = get_model_conversion_mapping(model)
        self.renamings = [entry for entry in self.transforms if isinstance(entry, WeightRenaming)]
        self.converters = [entry for entry in self.transforms if isinstance(entry, WeightConverter)]

    def pieces(self, names: Iterable[str]) -> list[Piece]:
        """Where the tensors of the files belong, in the order in which transformers takes them."""
        return [self._piece(name) for name in sorted(names, key=dot_natural_key)]

    def used(self) -> list[Any]:
        """The transformations that a name needed."""
        return [entry for entry in self.transforms if entry.was_used()]

    def _piece(self, name: str) -> Piece:
        own = self.own(name)
        stem, _, leaf = own.rpartition(".")
        leaf = self.renamed.get(leaf, leaf)
        part = leaf if leaf in (*self.form.parts, *self.form.beside) else None
        plain = f"{stem}.weight" if part else own
        layer = plain.removesuffix(".weight")
        weight, pattern = rename_source_key(plain, self.renamings, self.converters, self.prefix, self.known)
        if weight not in self.known and plain in self.known:  # files that have the names of the modules already
            weight, pattern = plain, None
        tensor = _packed_name(weight, part, self.form) if part else weight
        if pattern is None:
            return Piece(name, own, layer, weight, tensor)
        converter = next(entry for entry in self.converters if pattern in entry.source_patterns)
        # The converter was given the name that renamings had made.
        renamed, _ = rename_source_key(plain, self.renamings, [])
        place = re.search(pattern.replace("*.", r"(\d+)\.", 1), renamed) if "*." in pattern else None
        if place is None or not stacks_matrices(converter):
            return Piece(name, own, layer, weight, tensor, unknown=f"{converter.operations}")
        sources = converter.source_patterns
        return Piece(name, own, layer, weight, tensor, int(place[1]), sources.index(pattern), len(sources))


def _packed_name(weight: str, part: str, form: Format) -> str | None:
    """The name of a tensor of a packed weight in the model: of a linear layer, or of a stack."""
    if weight.endswith(".weight"):
        return f"{weight.removesuffix('weight')}{part}"
    return f"{weight}{form.stack_parts[form.parts.index(part)]}" if part in form.parts else None


def stacks_matrices(converter: Any) -> bool:
    """Whether a converter stacks the matrices of experts, and at most joins several of an expert along outputs."""
    kinds = [(type(operation), getattr(operation, "dim", None)) for operation in converter.operations]
    if len(converter.target_patterns) > 1 or kinds[:1] != [(MergeModulelist, 0)]:
        return False
    if len(kinds) == 1:
        return len(converter.source_patterns) == 1
    return kinds[1:] == [(Concatenate, 1)] and getattr(converter.operations[1], "num_shards_attribute", None) is None


def layers_of(pieces: Iterable[Piece]) -> dict[str, list[str]]:
    """The names that files give the layers of each weight of a model, in the order of the files."""
    found: dict[str, dict[str, None]] = {}
    for piece in pieces:
        found.setdefault(piece.weight, {})[piece.layer] = None
    return {weight: [*layers] for weight, layers in found.items()}


def is_ragged(module: nn.Module, stack: str, count: int) -> bool:
    """Whether a stack whose matrices are joined from ``count`` others has a scale that two of these share."""
    form = format_of(module.format)  # type: ignore[arg-type]
    weight = [getattr(module, f"{stack}{part}", None) for part in form.stack_parts]
    if count == 1 or weight[0] is None or weight[1] is None:
        return False
    block = form.outputs_together(weight[0].shape[-1] * form.per_element, weight[1])
    return weight[0].shape[1] % (count * block) > 0
