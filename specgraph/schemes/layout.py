"""Which weights of a model are packed, and how: what the ``quantization_config`` of a ``config.json`` states.

There is a file for every tool that states it in its own way: :mod:`specgraph.schemes.compressed_tensors`,
:mod:`specgraph.schemes.fine_grained` (fp8) and :mod:`specgraph.schemes.gpt_oss` (mxfp4).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.format import Format
from specgraph.schemes.layers import stack_features, stacks


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

    @abstractmethod
    def linears(self, model: nn.Module) -> dict[str, nn.Linear]:
        """The linear layers that are packed, by their names.

        Raises:
            UnsupportedModelError: one of them cannot be packed by itself.
        """

    def experts(self, model: nn.Module) -> dict[str, nn.Module]:
        """The mixtures of experts whose stacks are packed, by their names."""
        return {name: module for name, module in model.named_modules() if any(stacks(module))}

    def features(self, model: nn.Module) -> dict[str, tuple[int, int]]:
        """The outputs and the inputs of every matrix that is packed, or of each of a stack, by its name."""
        found = {name: (layer.out_features, layer.in_features) for name, layer in self.linears(model).items()}
        return found | {
            f"{name}.{stack}": stack_features(module, stack)
            for name, module in self.experts(model).items() for stack in stacks(module)
        }  # fmt: skip


def check_stated(name: str, found: object, allowed: object) -> None:
    """Raise UnsupportedModelError unless an entry of a ``quantization_config`` is the one that is allowed."""
    if found != allowed:
        raise UnsupportedModelError(f"{name} of quantization_config is {found!r}; allowed is {allowed!r}.")
