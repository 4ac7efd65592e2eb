"""Files of packed models: changed ones, what is read of them, and the models that they make."""

from __future__ import annotations

import dataclasses
import json
import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from specgraph.checkpoints.files import Files, StoredTensor, open_files
from specgraph.schemes import load as load_module
from tests.models import saved

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
"""Changes the tensors of a file and its configuration."""


def changed(model: PreTrainedModel, folder: Path, change: Change) -> Path:
    """The files of a model, changed."""
    saved(model, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors, stated = load_file(weights), json.loads(config.read_text())
    change(tensors, stated)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, {"format": "pt"})
    config.write_text(json.dumps(stated))
    return folder


def drop(*names: str) -> Change:
    return lambda tensors, _: [tensors.pop(name) for name in names].clear()


def put(name: str, tensor: Tensor) -> Change:
    return lambda tensors, _: tensors.__setitem__(name, tensor)


def state(key: str, value: Any) -> Change:
    return lambda _, config: config["quantization_config"].__setitem__(key, value)


def input_scales(names: Iterable[str], *, equal: bool) -> dict[str, Tensor]:
    """A scale for the inputs of each layer, by which some of their entries are too large.

    It is equal for layers of one input, or different for every layer.
    """
    layers = sorted(name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale"))
    inputs = [re.sub("[kv]_proj$", "q_proj", name).replace("up_proj", "gate_proj") for name in layers]
    places = inputs if equal else layers
    return {
        f"{layer}.input_scale": torch.tensor([0.002 + sorted(set(places)).index(place) / 5000])
        for layer, place in zip(layers, places, strict=True)
    }


def static(tensors: dict[str, Tensor], config: dict[str, Any], *, equal: bool = False) -> None:
    tensors |= input_scales(tensors, equal=equal)
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"].update({"strategy": "tensor", "dynamic": False})


def watched_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors that ``load`` has read are still alive, at each read from now on."""
    read: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def opened(path: Path) -> Files:
        files = open_files(path)
        return dataclasses.replace(files, tensors={n: watched(stored) for n, stored in files.tensors.items()})

    def watched(stored: StoredTensor) -> StoredTensor:
        def watch() -> Tensor:
            alive.append(sum(reference() is not None for reference in read))
            tensor = stored.read()
            read.append(weakref.ref(tensor))
            return tensor

        return dataclasses.replace(stored, read=watch)

    monkeypatch.setattr(load_module, "open_files", opened)
    return alive


def bytes_of(model: PreTrainedModel) -> int:
    """The memory of all tensors of a model that files hold."""
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in model.state_dict().values()}
    return sum(sizes.values())


def assert_equal_models(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """All tensors are the same, those that no file holds, too, and so are the types of all modules."""
    assert {n: type(m) for n, m in found.named_modules()} == {n: type(m) for n, m in expected.named_modules()}
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (found, expected))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name].device, ours[name].dtype) == (tensor.device, tensor.dtype), name
            assert torch.equal(ours[name], tensor), name
            assert ours[name].requires_grad <= tensor.requires_grad
