"""The layout of DeepSeek's and Qwen's checkpoints in fp8: blocks of 128 x 128, and activations quantised by row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.kernels.packed.fp8 import BLOCK, FP8_BLOCKS
from specgraph.schemes.layout import Layout, check_stated
from specgraph.schemes.targets import named, targeted


@dataclass(frozen=True)
class FineGrained(Layout):
    """All linear layers and stacks of experts but those that ``modules_to_not_convert``, here ``ignore``, names.

    What stands there is the name of a module or of one that holds it, an expression for such a name, or the end of one,
    as transformers reads it.
    """

    method: ClassVar[str] = "fp8"

    ignore: tuple[str, ...] = ("lm_head",)

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> FineGrained:
        """The layout that a ``quantization_config`` states."""
        size = stated.get("weight_block_size")
        check_stated("weight_block_size", [*size] if isinstance(size, (list, tuple)) else size, [BLOCK, BLOCK])
        check_stated("activation_scheme", stated.get("activation_scheme", "dynamic"), "dynamic")
        check_stated("scale_fmt", stated.get("scale_fmt") or "float", "float")
        check_stated("fmt", stated.get("fmt") or "e4m3", "e4m3")
        return cls(FP8_BLOCKS, None, tuple(stated.get("modules_to_not_convert") or ()))

    def stated(self) -> dict[str, Any]:
        """The method, the size of blocks, and the modules that are not packed."""
        return {
            "quant_method": self.method, "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": [*self.ignore],
        }  # fmt: skip

    def linears(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Linear]:
        """Those that ``ignore`` does not name. The head of the model is never packed."""
        head = getattr(model, "get_output_embeddings", lambda: None)()
        kept = {
            name for name, module in model.named_modules()
            if module is head or any(self.ignores(x, type(module)) for x in (name, *layers.get(f"{name}.weight", ())))
        }  # fmt: skip
        return targeted(model, ("Linear",), kept, {})

    def ignores(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether an entry of ``ignore`` is the name or a part of it, as transformers reads it."""
        return named(name, self.ignore)
