"""A copy of a model with its first layers alone, which runs where the whole model does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    made = with_first_layers(model, _one_of_each)
    moved: Any = None if made is None else own_copy(made, shared=()).to(device)  # it has tensors of its own then
    return moved


def with_first_layers(model: PreTrainedModel, keep: int | Callable[[list[object]], int]) -> PreTrainedModel | None:
    """A copy of ``model`` that shares its tensors, with its first layers alone.

    ``keep`` says how many, or finds that in what kinds of layers there are. None as in :func:`first_layers`.
    """
    made = own_copy(model)
    config: Any = made.config.get_text_config()
    count = config.num_hidden_layers
    lists = [(owner, name, each) for owner in made.modules() for name, each in owner.named_children()
             if isinstance(each, nn.ModuleList) and len(each) == count]  # fmt: skip
    if len(lists) != 1:
        return None
    owner, name, layers = lists[0]
    by_layer = {key: value for key, value in vars(config).items() if isinstance(value, list) and len(value) == count}
    if not isinstance(keep, int):
        keep = keep([
            (tuple(map(type, layer.modules())), repr([value[index] for value in by_layer.values()]))
            for index, layer in enumerate(layers)
        ])  # fmt: skip
    if keep >= count:
        return None
    setattr(owner, name, layers[:keep])
    config.num_hidden_layers = keep
    for key, value in by_layer.items():
        setattr(config, key, value[:keep])
    return made


def _one_of_each(kinds: list[object]) -> int:
    return max(2, 1 + max(map(kinds.index, kinds)))
