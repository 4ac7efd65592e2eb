"""The layout of DeepSeek's and Qwen's checkpoints in fp8: blocks of 128 x 128, and activations quantised by row.

AutoFP8 has the same ``quant_method`` for another one: a scale for each matrix, ``weight_scale``, and one for the inputs
of each layer, ``input_scale``. compressed-tensors has the same numbers in ``float-quantized``, in which such a model
is saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.kernels.packed.eights import FP8_STATIC
from specgraph.kernels.packed.fp8 import BLOCK, FP8_BLOCKS
from specgraph.schemes.compressed_tensors import CompressedTensors
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
    def read(cls, stated: Mapping[str, Any]) -> Layout:
        """The layout that a ``quantization_config`` states: this one, or that of AutoFP8 without blocks."""
        if stated.get("weight_block_size") is None and stated.get("activation_scheme") == "static":
            return _read_static(stated)
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


def _read_static(stated: Mapping[str, Any]) -> CompressedTensors:
    """What AutoFP8 states. It never packs the head of a model, and names layers by ``ignored_layers``."""
    check_stated("kv_cache_scheme", stated.get("kv_cache_scheme"), None)
    ignored = (r"re:(.*\.)?lm_head$", *(stated.get("ignored_layers") or ()))
    return CompressedTensors(FP8_STATIC, None, ignored, per_tensor=True)
