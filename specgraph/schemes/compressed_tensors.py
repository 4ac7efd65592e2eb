"""The layouts of the package compressed-tensors: weights of four bits in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.int4 import INT4
from specgraph.kernels.packed.mxfp4 import GROUP, MXFP4
from specgraph.schemes.layout import Layout, check_stated
from specgraph.schemes.targets import matches, targeted

FORMATS: dict[str, tuple[Format, dict[str, Any]]] = {
    "pack-quantized": (INT4, {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}),
    "mxfp4-pack-quantized": (
        MXFP4, {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP},
    ),
}  # fmt: skip
"""What ``format`` says, the format of the weights, and what each of their properties has to be."""
_NONE = ("input_activations", "output_activations")
"""What would be quantised beside weights."""


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """Linear layers that ``targets`` names and ``ignore`` does not.

    Attributes:
        targets: names or classes of layers, or expressions behind ``re:``.
        ignore: the same for layers that stay as they are, whatever ``targets`` says.
    """

    method: ClassVar[str] = "compressed-tensors"

    ignore: tuple[str, ...] = ("lm_head",)
    targets: tuple[str, ...] = ("Linear",)

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> CompressedTensors:
        """The layout that a ``quantization_config`` states: one group of one of :data:`FORMATS`."""
        name = stated.get("format")
        if name not in FORMATS:
            allowed = ", ".join(map(repr, FORMATS))
            raise UnsupportedModelError(f"format of quantization_config is {name!r}; allowed is {allowed}.")
        form, wanted = FORMATS[name]
        check_stated("kv_cache_scheme", stated.get("kv_cache_scheme"), None)
        label, group = _only_group(stated.get("config_groups"))
        check_stated(f"{label}.format", group.get("format") or name, name)
        for key in _NONE:
            check_stated(f"{label}.{key}", group.get(key), None)
        weights = group["weights"]
        for key, allowed in wanted.items():
            check_stated(f"{label}.weights.{key}", weights.get(key), allowed)
        size = weights.get("group_size")
        if not isinstance(size, int) or size < 1:
            raise UnsupportedModelError(
                f"{label}.weights.group_size of quantization_config is {size!r}; it must be 1 or more."
            )
        return cls(form, size, tuple(stated.get("ignore") or ()), tuple(group.get("targets") or ()))

    def stated(self) -> dict[str, Any]:
        """One group of linear layers."""
        name, (_, weights) = next((name, known) for name, known in FORMATS.items() if known[0] is self.form)
        group = {
            "targets": [*self.targets], "weights": {**weights, "group_size": self.group_size, "dynamic": False},
            **dict.fromkeys(_NONE), "format": name,
        }  # fmt: skip
        return {
            "quant_method": self.method, "format": name, "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}, "ignore": [*self.ignore],
        }  # fmt: skip

    def linears(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Linear]:
        """Those that ``targets`` matches and ``ignore`` does not."""
        return targeted(model, self.targets, self.ignore, layers)

    def ignores(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether an entry of ``ignore`` matches."""
        return matches(name, kind, self.ignore)

    def packs(self, name: str) -> bool:
        """Whether ``targets`` matches, too: files have a linear layer where a model has a matrix of a stack."""
        return matches(name, nn.Linear, self.targets) and super().packs(name)


def _only_group(groups: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise UnsupportedModelError(f"quantization_config has {count} config_groups; exactly one group is allowed.")
    ((name, group),) = groups.items()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise UnsupportedModelError(f"{name} of quantization_config has no weights; it must say how those are stored.")
    return name, group
