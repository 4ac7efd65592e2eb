"""Quantises the weights of a model in place."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from specgraph.config.schemes import SCHEMES
from specgraph.errors import InputError, UnsupportedModelError
from specgraph.schemes.layers import PackedLinear, quantise_experts
from specgraph.schemes.layout import Layout
from specgraph.schemes.layouts import layout_for
from specgraph.schemes.published import published_layers, save_as_published

M = TypeVar("M", bound=PreTrainedModel)


@torch.no_grad()
def quantise(
    model: M, scheme: str = "int4", *, group_size: int | None = None, ignore: Sequence[str] = ("lm_head",)
) -> M:
    """Store the weights of a model's linear layers and stacks of experts in fewer bits, in place.

    Every weight is rounded to the nearest; nothing is calibrated. ``model.save_pretrained`` then writes a published
    layout, which :func:`specgraph.load` reads. Layers that are not of the class ``nn.Linear`` stay as they are.

    Args:
        model: a causal LM in float64, float32, bfloat16 or float16.
        scheme: ``int4``: symmetric integers with a scale for each group of inputs, and ``int4_zeros`` with a zero
            point, too. ``mxfp4``: floating-point numbers of four bits with a power of two for each 32 inputs; of
            gpt-oss only the experts, as its checkpoints have them. ``nvfp4``: the same numbers with a scale in e4m3 for
            each 16 inputs, and one of the matrix. ``fp8``: floating-point numbers of eight bits with a scale for each
            block of 128 x 128, with which activations are quantised, too. ``fp8_channel`` and ``int8_channel``:
            numbers of eight bits with a scale for each output. ``fp8_token`` and ``int8_token``: the same, and
            activations with a scale for each row. Kernels for GPUs expand ``int4``, ``mxfp4`` and ``fp8`` in registers,
            and the weights of other schemes are made in float32 for each product.
        group_size: how many inputs have one scale in ``int4`` and ``int4_zeros``: a multiple of 8 that divides the
            inputs of every layer, or -1 for all inputs of each; 128 by default.
        ignore: layers that are left as they are: their names or expressions behind ``re:``, which the beginning of a
            name has to match. For ``fp8``, and for gpt-oss in ``mxfp4``, these are expressions as transformers has them
            in ``modules_to_not_convert``. A mixture of experts is left out by its name, or by those that files give
            all of its matrices.

    Returns:
        The same model.

    Raises:
        InputError: the scheme is unknown, or the group size does not fit a layer. The model is as before.
        UnsupportedModelError: the model is quantised already, has nothing to quantise, or has a layer that cannot be
            quantised, or ``ignore`` names only some matrices of a mixture of experts. The model is as before.
    """
    if scheme not in SCHEMES:
        raise InputError(f"scheme is {scheme!r}; allowed is {', '.join(SCHEMES)}.")
    if isinstance(ignore, str):
        raise InputError(f"ignore is {ignore!r}; it must be a list of names, such as ({ignore!r},).")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a quantization_config already; load it without one to quantise it."
        )
    layout = layout_for(model, scheme, group_size, ignore)
    names = published_layers(model)
    layers, experts = layout.linears(model, names), layout.experts(model, names)
    if not layers and not experts:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layer but those of ignore, {list(ignore)}.")
    other = next((name for name, layer in layers.items() if type(layer.weight) is not torch.nn.Parameter), None)
    if other is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} is quantised already: {other}.weight is {type(layers[other].weight).__name__}; "
            "give specgraph.quantise the model before another tool has changed its weights."
        )
    _check_fits(layout, layout.features(model, names))
    for name, layer in layers.items():
        model.set_submodule(name, PackedLinear.quantised(layer, layout.form, layout.group_size))
    for module in experts.values():
        quantise_experts(module, layout.form, layout.group_size)
    save_as_published(model)
    model.config.quantization_config = layout.stated()
    return model


def _check_fits(layout: Layout, weights: dict[str, tuple[int, int]]) -> None:
    """Raise InputError unless every weight ``[O, I]`` can be stored."""
    reasons = {name: layout.form.why_not(*shape, layout.group_size) for name, shape in weights.items()}
    name = next((name for name, reason in reasons.items() if reason is not None), None)
    if name is None:
        return
    form, common = layout.form, math.gcd(*(inputs for _, inputs in weights.values()))
    sizes = [size for size in range(form.per_element, common + 1, form.per_element) if common % size == 0]
    fitting = [size for size in sizes if all(form.why_not(*shape, size) is None for shape in set(weights.values()))]
    hint = "leave group_size out" if form.why_not(*weights[name], None) is None else "add its name to ignore"
    if fitting:
        hint = f"all layers have groups of {', '.join(map(str, fitting))}"
    raise InputError(f"{name} cannot be stored in {form.name}: {reasons[name]}; {hint}.")
