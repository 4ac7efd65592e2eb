"""Layouts of tools that store integers of four bits with their outputs last. They are packed anew while they are read.

A layer has ``qweight``, the numbers; ``scales`` ``[I / G, O]``; and ``qzeros`` ``[I / G, O / 8]``, the zero points. The
formats of :mod:`specgraph.kernels.packed.int4_zeros` hold the same numbers with their outputs first, as the layout of
compressed-tensors does, in which such a model is saved. Which layers are packed is what the files hold.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from specgraph.checkpoints.files import Files, StoredTensor
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.int4 import WHOLE_ROW
from specgraph.schemes.compressed_tensors import CompressedTensors
from specgraph.schemes.layers import stacks
from specgraph.schemes.layout import Layout, check_stated, linears_that

PARTS = {"qweight": "weight_packed", "scales": "weight_scale", "qzeros": "weight_zero_point", "g_idx": "weight_g_idx"}
"""The parts of a format by the names that files give them."""
PER_WORD = 8
"""How many integers an int32 holds."""
R = TypeVar("R", bound="Repacked")


@dataclass(frozen=True)
class Layer:
    """The tensors of a packed layer.

    Attributes:
        name: the name that the files give the layer.
        tensors: its tensors, by the last part of their names.
        inputs: ``I``.
        outputs: ``O``.
    """

    name: str
    tensors: Mapping[str, StoredTensor]
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Repacked(Layout):
    """The linear layers and stacks of experts whose numbers the files hold.

    Attributes:
        packed: the names that the files give the layers that are packed.
    """

    packed: frozenset[str] = frozenset()

    @abstractmethod
    def numbers_of(self, qweight: Tensor) -> Tensor:
        """The numbers of a layer ``[O, I / 8]``, as the format stores them."""

    @abstractmethod
    def zero_points_of(self, qzeros: Tensor) -> Tensor:
        """The zero points of a layer ``[O / 8, I / G]``, as the format stores them."""

    @abstractmethod
    def features_of(self, qweight: tuple[int, ...]) -> tuple[int, int]:
        """The inputs and the outputs of a layer whose numbers have this shape in the files."""

    def formed(self: R, layers: Sequence[Layer]) -> R:
        """The layout with the format that the layers need."""
        return self

    @property
    def renamed(self) -> Mapping[str, str]:
        """The parts of the format by the names that files give them."""
        return {name: part for name, part in PARTS.items() if part in self.form.parts}

    def stated(self) -> dict[str, Any]:
        """What the layout of compressed-tensors states for the format."""
        return CompressedTensors(self.form, self.group_size, self.ignore).stated()

    def kept(self, stated: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
        """The layout of compressed-tensors, with all layers and stacks that are not packed in ``ignore``."""
        ignore = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) or any(stacks(m))]
        return CompressedTensors(self.form, self.group_size, tuple(ignore)).stated()

    def adapted(self: R, files: Files, known: Container[str]) -> tuple[R, Files]:
        """The layout of the layers that the files hold, and files whose tensors have the format's shapes."""
        layers = self._layers(files)
        layout = dataclasses.replace(self, packed=frozenset(layer.name for layer in layers)).formed(layers)
        tensors = dict(files.tensors)
        for layer in layers:
            for leaf in PARTS.keys() & layer.tensors.keys():
                del tensors[f"{layer.name}.{leaf}"]
            tensors |= {f"{layer.name}.{leaf}": stored for leaf, stored in layout._read_as(layer).items()}
            bias = f"{layer.name}.bias"
            if bias in tensors and bias not in known and not bool(tensors[bias].read().any()):
                del tensors[bias]  # older tools write zeros for layers that have none
        return layout, dataclasses.replace(files, tensors=tensors)

    def linears(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Linear]:
        """Those whose numbers the files hold."""
        return linears_that(model, layers, self.packed)

    def ignores(self, name: str, kind: type[nn.Module]) -> bool:
        """The files say all."""
        return False

    def packs(self, name: str) -> bool:
        """Whether the files hold its numbers."""
        return name in self.packed

    def _layers(self, files: Files) -> list[Layer]:
        held: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in files.tensors.items():
            layer, _, leaf = name.rpartition(".")
            if leaf in PARTS:
                held.setdefault(layer, {})[leaf] = stored
        return [self._layer(name, tensors) for name, tensors in held.items()]

    def _layer(self, name: str, tensors: Mapping[str, StoredTensor]) -> Layer:
        missing = [leaf for leaf in ("qweight", "scales", "qzeros") if leaf not in tensors]
        if missing:
            there = next(iter(tensors))
            raise UnsupportedModelError(
                f"{tensors[there].file} has {name}.{there}, and there is no {name}.{missing[0]}; the checkpoint is "
                "incomplete."
            )
        if self.named_dense(name):
            raise UnsupportedModelError(
                f"{tensors['qweight'].file} holds {name}.qweight, and modules_to_not_convert of quantization_config "
                f"names {name}; one of them is of another model."
            )
        shape = tensors["qweight"].shape
        inputs, outputs = self.features_of(shape) if len(shape) == 2 else (0, 0)
        size = inputs if self.group_size == WHOLE_ROW else self.group_size
        groups = inputs // size if size else 0
        wanted = {
            "scales": (groups, outputs), "qzeros": (groups, outputs // PER_WORD), "g_idx": (inputs,),
        }  # fmt: skip
        for leaf, needed in wanted.items():
            if leaf in tensors and tensors[leaf].shape != needed:
                raise UnsupportedModelError(
                    f"{name}.{leaf} of {tensors[leaf].file} has the shape {list(tensors[leaf].shape)}; for "
                    f"{name}.qweight {list(shape)} and groups of {size} inputs it must be {list(needed)}."
                )
        for leaf in ("qweight", "qzeros", "g_idx"):
            if leaf in tensors and tensors[leaf].dtype != torch.int32:
                raise UnsupportedModelError(
                    f"{name}.{leaf} of {tensors[leaf].file} is {tensors[leaf].dtype}; it must be torch.int32."
                )
        return Layer(name, tensors, inputs, outputs)

    def named_dense(self, name: str) -> bool:
        """Whether the configuration says that a layer is not packed."""
        return False

    def _read_as(self, layer: Layer) -> dict[str, StoredTensor]:
        """The tensors of a layer as the format has them, converted when they are read."""
        inputs, outputs, tensors = layer.inputs, layer.outputs, layer.tensors
        groups = tensors["scales"].shape[0]
        found = {
            "qweight": tensors["qweight"].converted((outputs, inputs // PER_WORD), self.numbers_of),
            "scales": tensors["scales"].converted((outputs, groups), _transposed),
            "qzeros": tensors["qzeros"].converted((outputs // PER_WORD, groups), self.zero_points_of),
        }
        if "g_idx" in tensors:
            found["g_idx"] = tensors["g_idx"]
        found = {leaf: stored for leaf, stored in found.items() if leaf in self.renamed}
        shape = StoredTensor((2,), torch.int64, tensors["qweight"].file, lambda: torch.tensor([outputs, inputs]))
        return found | {"weight_shape": shape}


def read_common(stated: Mapping[str, Any]) -> int:
    """What AWQ and GPTQ both state: numbers of four bits. Returns the size of a group."""
    check_stated("bits", stated.get("bits"), 4)
    size = stated.get("group_size")
    if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != WHOLE_ROW):
        raise UnsupportedModelError(
            f"group_size of quantization_config is {size!r}; it must be 1 or more, or {WHOLE_ROW} for a group of all "
            "inputs."
        )
    return size


def lower(stated: object) -> object:
    """A name, in whatever letters it stands."""
    return stated.lower() if isinstance(stated, str) else stated


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous()
