"""Which weights of a model are packed, and how: what the ``quantization_config`` of a ``config.json`` states.

There is a file for every tool that states it in its own way: :mod:`specgraph.schemes.compressed_tensors`,
:mod:`specgraph.schemes.fine_grained` (fp8), :mod:`specgraph.schemes.gpt_oss` (mxfp4), :mod:`specgraph.schemes.awq` and
:mod:`specgraph.schemes.gptq`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.checkpoints.files import Files
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.format import Format
from specgraph.schemes.layers import stack_features, stacks
from specgraph.schemes.targets import targeted


@dataclass(frozen=True)
class Layout(ABC):
    """Which weights of a model are packed, and how.

    Attributes:
        form: the format.
        group_size: how many inputs have one scale; None if the format says it.
        ignore: names or patterns of modules that stay as they are.
    """

    method: ClassVar[str]
    """The ``quant_method`` of the tool."""

    form: Format
    group_size: int | None = None
    ignore: tuple[str, ...] = ()

    @classmethod
    @abstractmethod
    def read(cls, stated: Mapping[str, Any]) -> Layout:
        """The layout that a ``quantization_config`` of this tool states.

        Raises:
            UnsupportedModelError: it states something else than a format that is known.
        """

    @abstractmethod
    def stated(self) -> dict[str, Any]:
        """What ``config.json`` has as ``quantization_config``."""

    @property
    def renamed(self) -> Mapping[str, str]:
        """The parts of the format by the names that files give them, where these are others."""
        return {}

    def adapted(self, files: Files, known: Container[str]) -> tuple[Layout, Files]:
        """The layout and the files, whose tensors are converted as they are read if the format holds them otherwise.

        Args:
            files: the files of a checkpoint.
            known: the names of the tensors of the model, with dense weights.

        Raises:
            UnsupportedModelError: tensors of a layer do not belong together.
        """
        return self, files

    def kept(self, stated: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
        """The ``quantization_config`` that a loaded model is saved with: the one it had, unless overridden."""
        return stated

    @abstractmethod
    def linears(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Linear]:
        """The linear layers that are packed, by their names.

        Args:
            model: the model.
            layers: for weights of the model, the names that files give their layers.

        Raises:
            UnsupportedModelError: one of them cannot be packed by itself.
        """

    @abstractmethod
    def ignores(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether ``ignore`` names a module of a class ``kind``."""

    def packs(self, name: str) -> bool:
        """Whether the linear layer of an expert is packed that files hold under this name."""
        return not self.ignores(name, nn.Linear)

    def experts(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Module]:
        """The mixtures of experts whose stacks are packed, by their names. The arguments are those of :meth:`linears`.

        Raises:
            UnsupportedModelError: some matrices of a mixture would be packed and others not.
        """
        return experts_that(model, layers, self.packs, self.form, self.ignores)

    def features(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, int]]:
        """The outputs and the inputs of every matrix that is packed, or of each of a stack, by its name."""
        found = {name: (layer.out_features, layer.in_features) for name, layer in self.linears(model, layers).items()}
        return found | {
            f"{name}.{stack}": stack_features(module, stack)
            for name, module in self.experts(model, layers).items() for stack in stacks(module)
        }  # fmt: skip


def linears_that(model: nn.Module, layers: Mapping[str, Sequence[str]], packed: Container[str]) -> dict[str, nn.Linear]:
    """The linear layers of which files hold one of the layers ``packed``, by their names.

    Raises:
        UnsupportedModelError: one of them cannot be packed by itself.
    """
    names = [
        name for name, _ in model.named_modules()
        if any(layer in packed for layer in (name, *layers.get(f"{name}.weight", ())))
    ]  # fmt: skip
    return targeted(model, names, (), {})


def experts_that(
    model: nn.Module, layers: Mapping[str, Sequence[str]], packs: Callable[[str], bool], form: Format,
    ignores: Callable[[str, type[nn.Module]], bool] = lambda name, kind: False,
) -> dict[str, nn.Module]:  # fmt: skip
    """The mixtures of experts whose stacks are packed, by their names.

    Args:
        model: the model.
        layers: for weights of the model, the names that files give their layers.
        packs: whether the linear layer of an expert is packed that files hold under a name.
        form: the format.
        ignores: whether a mixture of this name and class stays as it is.

    Raises:
        UnsupportedModelError: some matrices of a mixture would be packed and others not.
    """
    found = {}
    for name, module in model.named_modules():
        held = [f"{name}.{stack}" for stack in stacks(module)]
        if not held or ignores(name, type(module)):
            continue
        of = [layer for weight in held for layer in layers.get(weight) or (weight,)]
        packed = [layer for layer in of if packs(layer)]
        if packed:
            _check_all(of, packed, name)
            _check_inputs(form, packed[0], name)
            found[name] = module
    return found


def _check_all(layers: Sequence[str], packed: Sequence[str], name: str) -> None:
    if len(packed) < len(layers):
        dense = next(layer for layer in layers if layer not in packed)
        raise UnsupportedModelError(
            f"{packed[0]} is packed and {dense} is not, and both are in the stacks of {name}; all of them must be "
            "packed, or none."
        )


def _check_inputs(form: Format, layer: str, name: str) -> None:
    if form.own_inputs:
        raise UnsupportedModelError(
            f"{layer} says by itself {form.own_inputs}, and it is in a stack of {name}, whose matrices would all have "
            f"to say the same; use a checkpoint of a scheme without {form.parts[-1]}."
        )


def check_stated(name: str, found: object, allowed: object) -> None:
    """Raise UnsupportedModelError unless an entry of a ``quantization_config`` is the one that is allowed."""
    if found != allowed:
        raise UnsupportedModelError(f"{name} of quantization_config is {found!r}; allowed is {allowed!r}.")


def check_one_of(name: str, found: object, allowed: Iterable[str]) -> None:
    """The same for an entry of which several are allowed."""
    names = tuple(allowed)
    if found not in names:
        raise UnsupportedModelError(
            f"{name} of quantization_config is {found!r}; allowed is {', '.join(map(repr, names))}."
        )
