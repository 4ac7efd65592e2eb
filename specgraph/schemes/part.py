"""Fills a part of a model, such as the decoder layer of an MTP module, from files in which weights may be packed.

Which weights are packed is what the files hold: a layer is packed if they have its scales. What a configuration says
about names of layers is of the whole model, and tools disagree about how it names layers that transformers leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from specgraph.checkpoints.files import Files
from specgraph.errors import UnsupportedModelError
from specgraph.schemes.checks import Part, by_tensor, check_names, parts_of
from specgraph.schemes.layers import stacks
from specgraph.schemes.layout import Layout, experts_that, linears_that
from specgraph.schemes.layouts import read_layout
from specgraph.schemes.load import fill, pack
from specgraph.schemes.names import Names, Piece, layers_of


@dataclass(frozen=True, eq=False)
class PackedPart:
    """A part of a model on ``meta``, whose packed weights are in place, and the files that fit it.

    Attributes:
        part: a model.
        files: the files, whose tensors are converted as they are read.
        parts: the tensors of packed weights.
        found: the tensors of the files by those of the part.
    """

    part: PreTrainedModel
    files: Files
    parts: Mapping[str, Part]
    found: Mapping[str, Sequence[Piece]]

    def fill(self, device: torch.device) -> None:
        """Read the tensors of the files, one at a time."""
        fill(self.part, self.files, {}, self.parts, self.found, device)


def pack_part(part: PreTrainedModel, files: Files, own: Callable[[str], str], config: Path) -> PackedPart:
    """Give a part packed weights where files have such, and compare all names, shapes and dtypes.

    Args:
        part: a model on ``meta`` with dense weights, in which no tensor is tied to another one.
        files: the tensors of the part alone, and a configuration with ``quantization_config``.
        own: the name that transformers would read in files of the part alone, for one of the files.
        config: where the configuration stands.

    Raises:
        UnsupportedModelError: weights are quantised in a way that is not known, or a tensor is missing, has another
            shape or dtype, or belongs nowhere.
    """
    try:
        layout = read_layout(files.config["quantization_config"])
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{config}: {error}") from None
    here = {own(name): name for name in files.tensors}
    layout, files = layout.adapted(files, {here.get(name, name) for name in part.state_dict()})
    pieces = Names(part, layout.form, layout.renamed, own).pieces(files.tensors)
    layers, packed = layers_of(pieces), _packed(part, layout, pieces)
    experts = experts_that(part, layers, packed.__contains__, layout.form)
    pack(part, layout, linears_that(part, layers, packed), experts)
    parts, found = parts_of(part), by_tensor(part, files, pieces)
    check_names(part, files, parts, found)
    return PackedPart(part, files, parts, found)


def _packed(part: PreTrainedModel, layout: Layout, pieces: Sequence[Piece]) -> frozenset[str]:
    """The names of the layers, as files of the part alone name them, of which files hold more than one tensor."""
    held = {piece.weight for piece in pieces}
    whole = (f"{name}.{stack}" for name, module in part.named_modules() for stack in stacks(module))
    stacked = {stack for stack in whole if f"{stack}{layout.form.stack_parts[1]}" in held}
    return frozenset(stacked | {piece.layer for piece in pieces if piece.tensor != piece.weight})
