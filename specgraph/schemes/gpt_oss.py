"""The layout of gpt-oss's checkpoints: stacks of experts in mxfp4, and all else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.kernels.packed.mxfp4 import MXFP4
from specgraph.schemes.layout import Layout
from specgraph.schemes.targets import named

NO_EXPERTS = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
"""What published checkpoints name, and what is no mixture of experts."""


@dataclass(frozen=True)
class GptOss(Layout):
    """Stacks of experts. ``ignore`` is what ``modules_to_not_convert`` says, which may name a mixture."""

    method: ClassVar[str] = "mxfp4"

    ignore: tuple[str, ...] = ()

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> GptOss:
        """The layout that a ``quantization_config`` states. There is nothing to choose."""
        return cls(MXFP4, None, tuple(stated.get("modules_to_not_convert") or ()))

    def stated(self) -> dict[str, Any]:
        """The method, and the modules that are not packed."""
        return {"quant_method": self.method, "modules_to_not_convert": [*self.ignore]}

    def linears(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Linear]:
        """None."""
        return {}

    def ignores(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether an entry of ``ignore`` is the name or a part of it, as transformers reads it."""
        return named(name, self.ignore)
