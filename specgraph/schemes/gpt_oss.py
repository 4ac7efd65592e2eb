"""The layout of gpt-oss's checkpoints: stacks of experts in mxfp4, and all else as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.kernels.packed.mxfp4 import MXFP4
from specgraph.schemes.layout import Layout


@dataclass(frozen=True)
class GptOss(Layout):
    """All stacks of experts. ``ignore`` is what ``modules_to_not_convert`` says, which names no experts."""

    method: ClassVar[str] = "mxfp4"

    ignore: tuple[str, ...] = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")

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
        """No stack of experts is left out."""
        return False
