"""Quantises the linear layers of a model in place."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from specgraph.errors import InputError, UnsupportedModelError
from specgraph.kernels.linear.int4 import PER_WORD
from specgraph.schemes.int4 import Int4Linear
from specgraph.schemes.layout import Layout
from specgraph.schemes.targets import targeted

SCHEMES = ("int4",)
"""The schemes in which a weight can be quantised."""

M = TypeVar("M", bound=PreTrainedModel)


@torch.no_grad()
def quantise(model: M, scheme: str = "int4", *, group_size: int = 128, ignore: Sequence[str] = ("lm_head",)) -> M:
    """Store the weights of a model's linear layers in fewer bits, in place.

    Every weight is rounded to the nearest; nothing is calibrated. ``model.save_pretrained`` then writes the layout that
    compressed-tensors calls ``pack-quantized``, which :func:`specgraph.load` reads. Stacks of experts and layers that
    are not of the class ``nn.Linear`` stay as they are.

    Args:
        model: a causal LM in float64, float32, bfloat16 or float16.
        scheme: ``int4``: symmetric numbers of four bits, with a scale for each group of inputs.
        group_size: how many inputs have one scale: a multiple of 8 that divides the inputs of every layer.
        ignore: layers that are left as they are: their names, or expressions behind ``re:``, which the beginning of a
            name has to match.

    Returns:
        The same model.

    Raises:
        InputError: the scheme is unknown, or the group size does not fit a layer. The model is as before.
        UnsupportedModelError: the model is quantised already, has no linear layers, or has one that cannot be
            quantised. The model is as before.
    """
    if scheme not in SCHEMES:
        raise InputError(f"scheme is {scheme!r}; allowed is {', '.join(SCHEMES)}.")
    if isinstance(ignore, str):
        raise InputError(f"ignore is {ignore!r}; it must be a list of names, such as ({ignore!r},).")
    if getattr(model.config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has a quantization_config already; load it without one to quantise it."
        )
    layout = Layout(group_size, ignore=tuple(ignore))
    layers = targeted(model, layout.targets, layout.ignore)
    if not layers:
        raise UnsupportedModelError(f"{type(model).__name__} has no linear layer but those of ignore, {list(ignore)}.")
    _check_groups(layers, group_size)
    for name, layer in layers.items():
        model.set_submodule(name, Int4Linear.quantised(layer, group_size))
    model.config.quantization_config = layout.stated()
    return model


def _check_groups(layers: Mapping[str, nn.Linear], group_size: int) -> None:
    """Raise InputError unless groups of this size, or some size, fit every layer."""
    for name, layer in layers.items():
        if layer.in_features % PER_WORD:
            raise InputError(
                f"{name} has {layer.in_features} inputs, which no group size divides that is a multiple of {PER_WORD}; "
                "add its name to ignore."
            )
    common = math.gcd(*(layer.in_features for layer in layers.values()))
    fitting = [size for size in range(PER_WORD, common + 1, PER_WORD) if common % size == 0]
    if group_size in fitting:
        return
    which = f"is no positive multiple of {PER_WORD}"
    if group_size > 0 and group_size % PER_WORD == 0:
        name, inputs = next((n, x.in_features) for n, x in layers.items() if x.in_features % group_size)
        which = f"does not divide the {inputs} inputs of {name}"
    sizes = ", ".join(map(str, fitting))
    raise InputError(f"group_size is {group_size}, which {which}; the inputs of all layers are divided by {sizes}.")
