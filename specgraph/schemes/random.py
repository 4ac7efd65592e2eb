"""Fills a model that is on ``meta`` with random weights, packed where a layout says so."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specgraph.schemes.layers import PackedLinear, set_stack, stack_features, stacks
from specgraph.schemes.layout import Layout
from specgraph.schemes.load import make_buffers

STD = 0.02
"""The standard deviation of weights."""


@torch.no_grad()
def fill_packed(model: PreTrainedModel, layout: Layout, device: torch.device) -> None:
    """Give every parameter of ``model`` a random value on the device: norms ones, biases zeros, all others normal.

    Packed weights are rounded one matrix at a time.
    """
    for name, layer in layout.linears(model, {}).items():
        weight = layout.form.quantise(_normal(layer.weight.shape, layer.weight.dtype, device), layout.group_size)
        bias = None if layer.bias is None else torch.zeros_like(layer.bias, device=device)
        model.set_submodule(name, PackedLinear(layout.form, weight, bias))
    for module in layout.experts(model, {}).values():
        for name in [*stacks(module)]:
            stack, shape = module.get_parameter(name), stack_features(module, name)
            matrices = (_normal(shape, stack.dtype, device) for _ in range(len(stack)))
            set_stack(module, name, layout.form, (layout.form.quantise(x, layout.group_size) for x in matrices))
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(_dense(name, parameter, device)))
    model.tie_weights()
    make_buffers(model, device)
    model.config.quantization_config = layout.stated()


def _dense(name: str, parameter: Tensor, device: torch.device) -> Tensor:
    if name.endswith("bias"):
        return torch.zeros_like(parameter, device=device)
    if parameter.dim() == 1 and "norm" in name:
        return torch.ones_like(parameter, device=device)
    return _normal(parameter.shape, parameter.dtype, device)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(std=STD)
