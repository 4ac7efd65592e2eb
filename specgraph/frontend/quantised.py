"""How linear layers with packed weights are traced: as one op of their scheme, whatever their forward computes."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from specgraph.ir.linear import scheme_of


def hook_quantised(model: nn.Module) -> None:
    """Let every linear layer of a scheme that needs it call the scheme's op while it is traced."""
    for module in model.modules():
        if scheme_of(module) is not None:
            layer: Any = module
            layer.forward = MethodType(_forward, layer)


def _forward(self: nn.Module, x: Tensor) -> Tensor:
    found = scheme_of(self)
    assert found is not None, f"{type(self).__name__} is of no scheme any more"
    scheme, weight = found
    return scheme.traced(x, *scheme.operands(weight), getattr(self, "bias", None), **scheme.options)
