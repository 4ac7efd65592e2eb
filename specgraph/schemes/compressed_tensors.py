"""The layouts of the package compressed-tensors: weights of four bits in groups, and of eight bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from specgraph.checkpoints.files import Files, StoredTensor
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.eights import EightBits
from specgraph.kernels.packed.format import Format
from specgraph.kernels.packed.int4 import INT4, WHOLE_ROW
from specgraph.kernels.packed.int4_zeros import INT4_ACT_ORDER, INT4_ZEROS
from specgraph.kernels.packed.mxfp4 import GROUP, MXFP4
from specgraph.kernels.packed.nvfp4 import GROUP as NV_GROUP
from specgraph.kernels.packed.nvfp4 import NVFP4, NVFP4_ROWS
from specgraph.schemes.eight_bits import EIGHTS, read_eights, state_eights, unpacked
from specgraph.schemes.layout import Layout, check_one_of, check_stated
from specgraph.schemes.targets import matches, targeted

FORMATS: dict[str, tuple[Format, dict[str, Any]]] = {
    "pack-quantized": (INT4, {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}),
    "mxfp4-pack-quantized": (
        MXFP4, {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": GROUP},
    ),
    "nvfp4-pack-quantized": (
        NVFP4, {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": NV_GROUP},
    ),
}  # fmt: skip
"""What ``format`` says, the format of the weights, and what each of their properties has to be."""
INTEGERS: dict[tuple[bool, bool], Format] = {
    (True, False): INT4, (False, False): INT4_ZEROS, (True, True): INT4_ACT_ORDER, (False, True): INT4_ACT_ORDER,
}  # fmt: skip
"""The formats of integers: by whether they are symmetric, and whether files say which inputs are a group.

The last one counts for saving: integers in groups of any inputs have zero points here, all in the middle if files have
none.
"""
MIDDLE = -(2**31) + 0x08888888
"""Eight zero points in the middle, in an int32."""
_NONE = ("input_activations", "output_activations")
"""What would be quantised beside weights."""


@dataclass(frozen=True)
class CompressedTensors(Layout):
    """Linear layers that ``targets`` names and ``ignore`` does not.

    Attributes:
        targets: names or classes of layers, or expressions behind ``re:``.
        ignore: the same for layers that stay as they are, whatever ``targets`` says.
        per_tensor: whether the files that are read have one scale for each matrix.
        words: whether their numbers of eight bits stand in int32.
        middle: whether files have no zero points, and the format has: all in the middle.
    """

    method: ClassVar[str] = "compressed-tensors"

    ignore: tuple[str, ...] = ("lm_head",)
    targets: tuple[str, ...] = ("Linear",)
    per_tensor: bool = False
    words: bool = False
    middle: bool = False

    @classmethod
    def read(cls, stated: Mapping[str, Any]) -> CompressedTensors:
        """The layout that a ``quantization_config`` states: one group of one of :data:`FORMATS` or of eight bits."""
        name = stated.get("format")
        check_one_of("format", name, {**FORMATS, **EIGHTS})
        assert isinstance(name, str), "as all that are allowed"
        check_stated("kv_cache_scheme", stated.get("kv_cache_scheme"), None)
        label, group = _only_group(stated.get("config_groups"))
        check_stated(f"{label}.format", group.get("format") or name, name)
        patterns = tuple(stated.get("ignore") or ()), tuple(group.get("targets") or ())
        words = name == "pack-quantized"
        if name in EIGHTS and not (words and group["weights"].get("num_bits") != 8):
            check_stated(f"{label}.output_activations", group.get("output_activations"), None)
            eights, per_tensor = read_eights(name, label, group)
            return cls(eights, None, *patterns, per_tensor, words)
        form, wanted = FORMATS[name]
        weights, rows = group["weights"], group.get("input_activations")
        if form is NVFP4 and isinstance(rows, Mapping):
            form, group = NVFP4_ROWS, {**group, "input_activations": None}
            for key, allowed in {**wanted, "dynamic": "local"}.items():
                check_stated(f"{label}.input_activations.{key}", rows.get(key), allowed)
        for key in _NONE:
            check_stated(f"{label}.{key}", group.get(key), None)
        if form is INT4:
            form, wanted, weights = _integers(weights, wanted)
        for key, allowed in wanted.items():
            check_stated(f"{label}.weights.{key}", weights.get(key), allowed)
        size = weights.get("group_size")
        if not isinstance(size, int) or (size < 1 and size != WHOLE_ROW):
            raise UnsupportedModelError(
                f"{label}.weights.group_size of quantization_config is {size!r}; it must be 1 or more."
            )
        middle = form is INT4_ACT_ORDER and weights.get("symmetric") is not False
        return cls(form, size, *patterns, middle=middle)

    def stated(self) -> dict[str, Any]:
        """One group of linear layers."""
        if isinstance(self.form, EightBits):
            name, parts = state_eights(self.form)
        else:
            name, weights = self._stated_weights()
            parts = {"weights": weights, **dict.fromkeys(_NONE)}
            if self.form is NVFP4_ROWS:
                parts["input_activations"] = {**weights, "dynamic": "local"}
        group = {"targets": [*self.targets], **parts, "format": name}
        return {
            "quant_method": self.method, "format": name, "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"group_0": group}, "ignore": [*self.ignore],
        }  # fmt: skip

    def _stated_weights(self) -> tuple[str, dict[str, Any]]:
        """What ``format`` says, and what is stated about weights of four bits."""
        of_integers = {form: _stated_of(*of, self.group_size) for of, form in INTEGERS.items()}
        listed = INT4 if self.form in of_integers else NVFP4 if self.form is NVFP4_ROWS else self.form
        name, (_, weights) = next((name, known) for name, known in FORMATS.items() if known[0] is listed)
        return name, {**weights, **of_integers.get(self.form, {"group_size": self.group_size}), "dynamic": False}

    def adapted(self, files: Files, known: Container[str]) -> tuple[CompressedTensors, Files]:
        """Words become integers, one scale of a matrix that of each of its outputs, so that these can be joined, and
        layers get the zero points that they lack.
        """
        single = (*self.form.of_matrix, *(("weight_scale",) if self.per_tensor else ()))
        tensors = unpacked(files.tensors) if self.words else dict(files.tensors)
        for name, scale in files.tensors.items():
            layer, _, leaf = name.rpartition(".")
            numbers = tensors.get(f"{layer}.{self.form.parts[0]}")
            if leaf in single and numbers is not None:
                tensors[name] = _repeated(name, scale, numbers.shape[0])
            elif leaf == "input_scale" and scale.shape == ():
                tensors[name] = scale.converted((1,), lambda value: value.reshape(1))
            elif leaf == "weight_scale" and self.middle and len(scale.shape) == 2:
                tensors[f"{layer}.weight_zero_point"] = _in_the_middle(scale, files, layer)
        return self, dataclasses.replace(files, tensors=tensors)

    def kept(self, stated: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
        """What was written anew while it was read is saved as it is held."""
        return self.stated() if self.per_tensor or self.words or self.middle else stated

    def linears(self, model: nn.Module, layers: Mapping[str, Sequence[str]]) -> dict[str, nn.Linear]:
        """Those that ``targets`` matches and ``ignore`` does not."""
        return targeted(model, self.targets, self.ignore, layers)

    def ignores(self, name: str, kind: type[nn.Module]) -> bool:
        """Whether an entry of ``ignore`` matches."""
        return matches(name, kind, self.ignore)

    def packs(self, name: str) -> bool:
        """Whether ``targets`` matches, too: files have a linear layer where a model has a matrix of a stack."""
        return matches(name, nn.Linear, self.targets) and super().packs(name)


def _repeated(name: str, scale: StoredTensor, outputs: int) -> StoredTensor:
    if scale.shape not in ((), (1,)):
        raise UnsupportedModelError(
            f"{name} of {scale.file} has the shape {list(scale.shape)}, and config.json needs [1]; one of them is of "
            "another model."
        )
    return scale.converted((outputs, 1), lambda value: value.expand(outputs, 1))


def _in_the_middle(scale: StoredTensor, files: Files, layer: str) -> StoredTensor:
    """The zero points of a layer of symmetric integers with these scales ``[O, I / G]``."""
    if f"{layer}.weight_zero_point" in files.tensors:
        raise UnsupportedModelError(
            f"{scale.file} holds the tensor {layer}.weight_zero_point, and quantization_config says that integers are "
            "symmetric; remove the tensor, or correct the configuration."
        )
    shape = -(-scale.shape[0] // 8), scale.shape[1]
    return StoredTensor(shape, torch.int32, scale.file, lambda: torch.full(shape, MIDDLE, dtype=torch.int32))


def _integers(
    weights: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[Format, dict[str, Any], Mapping[str, Any]]:
    """The format of integers, what has to be stated for it, and what is stated, with the size of a group.

    Integers are symmetric or not, in groups of neighbouring inputs or of any, and have several groups in a row or one.
    """
    symmetric, act_order = weights.get("symmetric") is not False, weights.get("actorder") == "group"
    form, own = INTEGERS[symmetric, act_order], {"symmetric": symmetric}
    if weights.get("strategy") == "channel":
        return form, {**wanted, **own, "strategy": "channel"}, {**weights, "group_size": WHOLE_ROW}
    return form, {**wanted, **own}, weights


def _stated_of(symmetric: bool, act_order: bool, group_size: int | None) -> dict[str, Any]:
    whole = group_size == WHOLE_ROW
    stated = {"symmetric": symmetric, "strategy": "channel" if whole else "group"}
    return {**stated, "group_size": None if whole else group_size, **({"actorder": "group"} if act_order else {})}


def _only_group(groups: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(groups, Mapping) or len(groups) != 1:
        count = len(groups) if isinstance(groups, Mapping) else "no"
        raise UnsupportedModelError(f"quantization_config has {count} config_groups; exactly one group is allowed.")
    ((name, group),) = groups.items()
    if not isinstance(group, Mapping) or not isinstance(group.get("weights"), Mapping):
        raise UnsupportedModelError(f"{name} of quantization_config has no weights; it must say how those are stored.")
    return name, group
