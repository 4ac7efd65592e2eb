"""Small models in every scheme, and what they are compared with: models with dense weights."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import specgraph
from specgraph.ir.packed import STACKS
from specgraph.kernels.packed.formats import format_of
from specgraph.schemes.layers import PackedExperts, PackedLinear
from tests.kernels.packed.definition import matrix, rounded_rows
from tests.models import make_model
from tests.once import once

SCHEMES: dict[str, dict[str, Any]] = {"int4": {"group_size": 8}, "mxfp4": {}, "fp8": {}}
"""Every scheme with its options for the small models."""
FORMATS = {"int4": "int4", "mxfp4": "mxfp4", "fp8": "fp8_blocks"}
"""The format of each scheme."""
_MOE = {"intermediate_size": 64, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_FULL_GROUPS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_MOE, "kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 8},
    "qwen3_moe": _MOE, "qwen3_next": _MOE,
}  # fmt: skip
"""Sizes whose inputs are all multiples of 32, as mxfp4 needs them."""


def sizes(architecture: str, scheme: str) -> dict[str, Any]:
    return _FULL_GROUPS.get(architecture, {"intermediate_size": 64}) if scheme in ("mxfp4", "nvfp4") else {}


@once
def _quantised(
    architecture: str, scheme: str, dtype: torch.dtype, seed: int, layers: int | None, group_size: int | None
) -> PreTrainedModel:
    overrides: dict[str, Any] = {} if layers is None else {"num_hidden_layers": layers}
    model = make_model(architecture, seed=seed, dtype=dtype, **sizes(architecture, scheme), **overrides)
    options = SCHEMES.get(scheme, {}) if group_size is None else {"group_size": group_size}
    return specgraph.quantise(model, scheme, **options)


def quantised(
    architecture: str = "llama", scheme: str = "int4", dtype: torch.dtype = torch.float64, *, seed: int = 3,
    layers: int | None = None, group_size: int | None = None,
) -> PreTrainedModel:  # fmt: skip
    """A model of its own, whose linear layers and experts are packed."""
    return copy.deepcopy(_quantised(architecture, scheme, dtype, seed, layers, group_size))


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def packed_experts(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedExperts)}


# The model with dense weights


class RoundedLinear(nn.Linear):
    """A dense layer that rounds its rows as fp8 does."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(rounded_rows("fp8_blocks", x).to(x.dtype), self.weight, self.bias)


def oracle(model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The same model with dense weights, which a loop over the entries of the packed ones gives.

    They have the model's dtype, which is that of its first parameter, unless another one is given.
    """
    model, dtype = copy.deepcopy(model), dtype or model.dtype
    for name, layer in packed_layers(model).items():
        kind = RoundedLinear if layer.format.startswith("fp8") else nn.Linear
        dense = kind(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=dtype)
        dense.weight.data = matrix(layer.format, layer.weight_parts, dtype)
        if layer.bias is not None:
            dense.bias.data = layer.bias.data
        model.set_submodule(name, dense)
    for experts in packed_experts(model).values():
        _restore_stacks(experts, dtype)
    del model.config.quantization_config
    return model


def _restore_stacks(experts: Any, dtype: torch.dtype) -> None:
    form, experts.__class__ = format_of(experts.format), type(experts).__bases__[1]
    for stack in STACKS:
        names = [f"{stack}{part}" for part in form.stack_parts]
        if not all(name in experts._parameters for name in names):
            continue
        weight = matrix(form.name, [experts.get_parameter(name) for name in names], dtype)
        for name in names:
            delattr(experts, name)
        transposed = getattr(experts, "is_transposed", False)
        setattr(experts, stack, nn.Parameter(weight.mT.contiguous() if transposed else weight, requires_grad=False))
    if form.name == "fp8_blocks":
        experts.forward = MethodType(_rounded_experts, experts)


def _rounded_experts(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """A mixture of experts that rounds rows as fp8 does, one row and one expert at a time."""
    has_bias, transposed = getattr(experts, "has_bias", False), getattr(experts, "is_transposed", False)

    def product(row: Tensor, stack: str, expert: int) -> Tensor:
        weight = getattr(experts, stack)[expert]
        bias = getattr(experts, f"{stack}_bias")[expert] if has_bias else None
        row = rounded_rows("fp8_blocks", row).to(row.dtype)
        return functional.linear(row, weight.mT if transposed else weight, bias)

    out = torch.zeros_like(hidden)
    for place, row in enumerate(hidden):
        for expert, share in zip(chosen[place].tolist(), shares[place], strict=True):
            inner = experts._apply_gate(product(row[None], "gate_up_proj", expert))
            out[place] += product(inner, "down_proj", expert)[0] * share
    return out
