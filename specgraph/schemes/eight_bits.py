"""What compressed-tensors states about weights of eight bits with a scale for each output or each matrix.

Integers of ``pack-quantized`` stand in int32, four neighbouring inputs in each, the first in its lowest bits, and 128
is added to each. They are written anew as int8 while they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specgraph.checkpoints.files import StoredTensor
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.eights import (
    FP8_CHANNEL,
    FP8_STATIC,
    FP8_TOKEN,
    INT8_CHANNEL,
    INT8_STATIC,
    INT8_TOKEN,
    EightBits,
)
from specgraph.schemes.layout import check_one_of, check_stated

EIGHTS: dict[str, tuple[str, ...]] = {
    "float-quantized": ("float",), "int-quantized": ("int",), "naive-quantized": ("float", "int"),
    "pack-quantized": ("int",),
}  # fmt: skip
"""What ``format`` says, and which types of numbers weights then may have."""
_FORMS: dict[tuple[str, str | None], EightBits] = {
    ("float", None): FP8_CHANNEL, ("float", "token"): FP8_TOKEN, ("float", "tensor"): FP8_STATIC,
    ("int", None): INT8_CHANNEL, ("int", "token"): INT8_TOKEN, ("int", "tensor"): INT8_STATIC,
}  # fmt: skip
"""The formats by the type of their numbers and by what has a scale of activations, if these are quantised."""


def read_eights(name: str, label: str, group: Mapping[str, Any]) -> tuple[EightBits, bool]:
    """The format that a config group states, and whether files have one scale for each matrix.

    Raises:
        UnsupportedModelError: weights or activations are quantised in another way.
    """
    weights, rows = group["weights"], group.get("input_activations")
    kind = weights.get("type")
    check_one_of(f"{label}.weights.type", kind, EIGHTS[name])
    _check_symmetric(f"{label}.weights", weights)
    check_one_of(f"{label}.weights.strategy", weights.get("strategy"), ("channel", "tensor"))
    strategy = None if rows is None else _read_rows(f"{label}.input_activations", rows, kind)
    return _FORMS[kind, strategy], weights["strategy"] == "tensor"


def unpacked(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors of files, with int8 ``weight`` ``[O, I]`` in place of words ``weight_packed`` ``[O, ceil(I / 4)]``.

    Raises:
        UnsupportedModelError: words are missing, are not int32, or are not as many as the stated shape needs.
    """
    found = dict(tensors)
    for name in [name for name in tensors if name.endswith(".weight_shape")]:
        layer = name.removesuffix("_shape")
        words, shape = found.pop(f"{layer}_packed", None), found.pop(name).read().flatten().tolist()
        wanted = (shape[0], -(-shape[1] // 4)) if len(shape) == 2 else ()
        if words is None or words.dtype != torch.int32 or words.shape != wanted or not wanted:
            there = "missing" if words is None else f"{words.dtype} {list(words.shape)}"
            raise UnsupportedModelError(
                f"{layer}_packed of {tensors[name].file} is {there}; for {name} {shape} it must be torch.int32 "
                f"{list(wanted)}."
            )
        found[layer] = words.converted((shape[0], shape[1]), partial(_integers, inputs=shape[1]), torch.int8)
    return found


def _integers(words: Tensor, inputs: int) -> Tensor:
    # Adding 128 to a number flips the highest bit of its byte.
    return (words.contiguous().view(torch.uint8)[:, :inputs] ^ 128).view(torch.int8)


def _read_rows(label: str, rows: object, kind: str) -> str:
    """What has a scale of activations: each row, which is found anew, or the layer, which files hold."""
    if not isinstance(rows, Mapping):
        raise UnsupportedModelError(f"{label} of quantization_config is {rows!r}; it must be an object or null.")
    if rows.get("dynamic") is True and rows.get("strategy") == "tensor":
        raise UnsupportedModelError(
            f"{label}.strategy of quantization_config is 'tensor' with dynamic scales: the scale of a row would depend "
            "on the other rows of its batch, so tokens would, too; allowed is 'token'."
        )
    strategy = rows.get("strategy")
    check_one_of(f"{label}.strategy", strategy, ("token", "tensor"))
    check_stated(f"{label}.dynamic", rows.get("dynamic") or False, strategy == "token")
    check_stated(f"{label}.type", rows.get("type"), kind)
    _check_symmetric(label, rows)
    return str(strategy)


def _check_symmetric(label: str, stated: Mapping[str, Any]) -> None:
    check_stated(f"{label}.num_bits", stated.get("num_bits"), 8)
    check_stated(f"{label}.symmetric", stated.get("symmetric", True), True)


def state_eights(form: EightBits) -> tuple[str, dict[str, Any]]:
    """The ``format`` of a ``quantization_config``, and what its config group says about weights and activations."""
    kind, strategy = next(key for key, known in _FORMS.items() if known is form)
    shared = {"num_bits": 8, "type": kind, "symmetric": True}
    rows = {**shared, "strategy": strategy, "dynamic": strategy == "token"} if strategy else None
    return f"{kind}-quantized" if strategy else "naive-quantized", {
        "weights": {**shared, "strategy": "channel", "dynamic": False}, "input_activations": rows,
        "output_activations": None,
    }  # fmt: skip
