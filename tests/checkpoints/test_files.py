"""The containers a checkpoint may come in, and what is said of damaged ones."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specgraph.checkpoints.files import open_files
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from tests.checkpoints import layouts
from tests.checkpoints.running import load


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    return tensors


def _shards(folder: Path) -> None:
    tensors = _weights(folder)
    names = sorted(tensors)
    weight_map = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _renamed(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "head.safetensors")


def _zipped(folder: Path) -> None:
    torch.save(_weights(folder), folder / "pytorch_model.bin")
    torch.save({"lr": 1}, folder / "training_args.bin")


def _legacy(folder: Path) -> None:
    torch.save(_weights(folder), folder / "model.pt", _use_new_zipfile_serialization=False)


def _nested(folder: Path) -> None:
    parameters = {name: torch.nn.Parameter(t, t.is_floating_point()) for name, t in _weights(folder).items()}
    torch.save({"state_dict": parameters, "step": 3}, folder / "last.pt")


CONTAINERS = {"shards": _shards, "another name": _renamed, "zip": _zipped, "legacy": _legacy, "nested": _nested}


@pytest.mark.parametrize("container", CONTAINERS)
def test_every_container_holds_the_same_head(container: str, tmp_path: Path) -> None:
    plain = load(layouts.specforge().save(tmp_path / "plain"))
    CONTAINERS[container](layouts.specforge().save(tmp_path / "other"))
    other = load(tmp_path / "other")
    expected, found = (dict(head.module.named_parameters()) for head in (plain, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_one_file_beside_its_configuration(tmp_path: Path) -> None:
    folder = layouts.eagle().save(tmp_path / "head")
    assert open_checkpoint(folder / "model.safetensors").layout == "eagle"
    stored = open_files(folder).tensors["fc.weight"]
    assert (stored.shape, stored.dtype, stored.bytes) == ((32, 96), torch.float32, 32 * 96 * 4)


class _Code:
    """A pickle that would run a command when it is read."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("true",)


def _truncate(name: str, size: int = 300) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / name, size)


def _after(make: Callable[[Path], object], then: Callable[[Path], object]) -> Callable[[Path], object]:
    def both(folder: Path) -> None:
        make(folder)
        then(folder)

    return both


def _twice(folder: Path) -> None:
    (folder / "a.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (folder / "model.safetensors").rename(folder / "b.safetensors")


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated safetensors": (_truncate("model.safetensors"), "model.safetensors is truncated or damaged .* copy it"),
    "truncated data": (_truncate("model.safetensors", 9000), "model.safetensors is truncated or damaged"),
    "empty safetensors": (_truncate("model.safetensors", 0), "model.safetensors is truncated or damaged"),
    "truncated zip": (
        _after(_zipped, _truncate("pytorch_model.bin", 9000)),
        "pytorch_model.bin is truncated or damaged",
    ),
    "truncated legacy": (_after(_legacy, _truncate("model.pt", 9000)), "model.pt is truncated or damaged"),
    "empty pickle": (_after(_legacy, _truncate("model.pt", 0)), "model.pt is truncated or damaged"),
    "code": (
        lambda folder: (_weights(folder), torch.save({"fc.weight": _Code()}, folder / "model.pt")),
        "model.pt needs more than weights_only=True .*system.*save the tensors as safetensors",
    ),
    "not tensors": (
        lambda folder: torch.save({**_weights(folder), "step": 3}, folder / "model.pt"),
        "'step' of .*model.pt is a int, not a tensor; save the state_dict alone",
    ),
    "not by name": (
        lambda folder: torch.save(list(_weights(folder).values()), folder / "model.pt"),
        "model.pt holds a list, not tensors by name",
    ),
    "no configuration": (
        lambda folder: (folder / "config.json").unlink(),
        "no .*config.json; a checkpoint is the folder",
    ),
    "broken JSON": (_truncate("config.json", 40), "config.json is not JSON .*download or copy it again"),
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "config.json holds a list, not an object"),
    "no weights": (_weights, "has no weights .*; give the folder of a checkpoint"),
    "several pickles": (
        lambda folder: [torch.save(_weights(folder), folder / "a.pt"), torch.save({}, folder / "b.pt")],
        r"several weights files \(a.pt, b.pt\); give the path",
    ),
    "a missing shard": (
        _after(_shards, lambda folder: (folder / "model-1.safetensors").unlink()),
        "index.json names model-1.safetensors, which is not there",
    ),
    "an index elsewhere": (
        lambda folder: (
            _weights(folder),
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}'),
        ),
        "index.json has no weight_map",
    ),
    "twice": (_twice, "a.safetensors and .*b.safetensors both hold"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_get_one_sentence(case: str, tmp_path: Path) -> None:
    break_it, message = BROKEN[case]
    folder = layouts.specforge().save(tmp_path / "head")
    break_it(folder)
    with pytest.raises(ConfigError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_nothing_there_and_another_ending(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing at .*; give the folder of a checkpoint .* or one weights file"):
        open_checkpoint(tmp_path / "nowhere")
    folder = layouts.specforge().save(tmp_path / "head")
    with pytest.raises(ConfigError, match=r"config.json does not end in .safetensors, .bin, .pt, .pth; give"):
        open_checkpoint(folder / "config.json")
