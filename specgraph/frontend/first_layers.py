"""A copy of a model with its first layers alone, which runs where the whole model does not fit."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from specgraph.ir.exporting import own_copy


def first_layers(model: PreTrainedModel, device: torch.device) -> PreTrainedModel | None:
    """``model`` with so many of its first layers that there is one of every kind, two at least; weights on ``device``.

    Layers are of one kind if they consist of the same classes, and if the configuration's lists, such as
    ``layer_types``, say the same of them. The model itself stays as it is. None if its layers are not found, which are
    a list of as many modules as the configuration says, or if all of them are needed.
    """
    made = own_copy(model)
    found, config = find_layers(made), made.config.get_text_config()
    if found is None:
        return None
    owner, name, layers = found
    by_layer = {
        key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == len(layers)
    }
    kinds = [
        (tuple(map(type, layer.modules())), repr([value[index] for value in by_layer.values()]))
        for index, layer in enumerate(layers)
    ]
    count = max(2, 1 + max(map(kinds.index, kinds)))
    if count >= len(layers):
        return None
    setattr(owner, name, layers[:count])
    config.num_hidden_layers = count
    for key, value in by_layer.items():
        setattr(config, key, value[:count])
    moved: PreTrainedModel = cast(Any, own_copy(made, shared=())).to(device)  # it has tensors of its own then
    return moved


def find_layers(model: PreTrainedModel) -> tuple[nn.Module, str, nn.ModuleList] | None:
    """The list of a model's layers, with the module that holds it and its name there."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [(owner, name, each) for owner in model.modules() for name, each in owner.named_children()
             if isinstance(each, nn.ModuleList) and len(each) == count]  # fmt: skip
    return lists[0] if len(lists) == 1 else None
