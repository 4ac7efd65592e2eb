"""The part of a ``config.json`` that says how weights are quantised, in the layout of compressed-tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specgraph.errors import UnsupportedModelError

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
"""What each property of the weights has to be."""
_NONE = ("input_activations", "output_activations")
"""What would be quantised beside weights."""


@dataclass(frozen=True)
class Layout:
    """Weights of four bits in groups: of which layers, and in groups of how many inputs.

    Attributes:
        group_size: how many inputs have one scale.
        targets: names or classes of layers, or expressions behind ``re:``.
        ignore: the same for layers that stay as they are, whatever ``targets`` says.
    """

    group_size: int
    targets: tuple[str, ...] = ("Linear",)
    ignore: tuple[str, ...] = ("lm_head",)

    def stated(self) -> dict[str, Any]:
        """What ``config.json`` has as ``quantization_config``."""
        weights = {**_WEIGHTS, "group_size": self.group_size}
        group = {
            "targets": [*self.targets], "weights": {**weights, "dynamic": False}, **dict.fromkeys(_NONE),
            "format": FORMAT,
        }  # fmt: skip
        return {
            "quant_method": METHOD, "format": FORMAT, "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}, "ignore": [*self.ignore],
        }  # fmt: skip


def read_layout(stated: Mapping[str, Any]) -> Layout:
    """The layout that a ``quantization_config`` states.

    Raises:
        UnsupportedModelError: it states something else than weights of four bits in groups, or several groups.
    """
    _check("quant_method", stated.get("quant_method"), METHOD)
    _check("format", stated.get("format"), FORMAT)
    _check("kv_cache_scheme", stated.get("kv_cache_scheme"), None)
    groups = stated.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise UnsupportedModelError(f"quantization_config has {count} config_groups; exactly one group is allowed.")
    ((name, group),) = groups.items()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise UnsupportedModelError(f"{name} of quantization_config has no weights; it must say how those are stored.")
    weights = group["weights"]
    _check(f"{name}.format", group.get("format") or FORMAT, FORMAT)
    for key in _NONE:
        _check(f"{name}.{key}", group.get(key), None)
    for key, allowed in _WEIGHTS.items():
        _check(f"{name}.weights.{key}", weights.get(key), allowed)
    size = weights.get("group_size")
    if not isinstance(size, int) or size < 1:
        raise UnsupportedModelError(
            f"{name}.weights.group_size of quantization_config is {size!r}; it must be 1 or more."
        )
    return Layout(size, tuple(group.get("targets") or ()), tuple(stated.get("ignore") or ()))


def _check(name: str, found: object, allowed: object) -> None:
    if found != allowed:
        raise UnsupportedModelError(f"{name} of quantization_config is {found!r}; allowed is {allowed!r}.")
