"""Opens the files of a checkpoint. Names and shapes are read at once, and each tensor only when it is asked for."""

from __future__ import annotations

import json
import math
import pickle
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specgraph.config.paths import did_you_mean_path
from specgraph.errors import ConfigError

PICKLES = (".bin", ".pt", ".pth")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "scaler", "rng_state", "mask_embedding")
"""Prefixes of pickles that hold no weights: files that training leaves, and the mask embedding of DFlash heads."""
ALLOWED = "the folder of a checkpoint (config.json beside *.safetensors, *.bin or *.pt) or one weights file in it"

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U16": torch.uint16,
    "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file. ``read`` loads it to the CPU, in the dtype in which it is stored."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path
    read: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def converted(
        self, shape: tuple[int, ...], convert: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None
    ) -> StoredTensor:
        """What ``convert`` makes of it when it is read, in the same dtype unless another one is given."""
        return StoredTensor(shape, dtype or self.dtype, self.file, lambda: convert(self.read()))


@dataclass(frozen=True, eq=False)
class Files:
    """The files of a checkpoint.

    Attributes:
        path: the path that was given.
        config: the content of its ``config.json``.
        tensors: the tensors of its weights files, by the names that the files give them.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]


def open_files(path: str | Path) -> Files:
    """Open a folder, or one weights file that has its ``config.json`` in the same folder.

    Raises:
        ConfigError: nothing is there, something is missing or damaged, or a pickle holds more than tensors.
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise ConfigError(f"There is nothing at {str(path)!r}{did_you_mean_path(path)}; give {ALLOWED}.")
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json")
    tensors: dict[str, StoredTensor] = {}
    for file in _weight_files(path) if path.is_dir() else [path]:
        found = _open(file)
        twice = sorted(tensors.keys() & found.keys())
        if twice:
            raise ConfigError(f"{tensors[twice[0]].file} and {file} both hold {twice[0]}; give the file that counts.")
        tensors |= found
    return Files(path, config, tensors)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint.

    Raises:
        ConfigError: it is missing or damaged, or holds something else.
    """
    if not path.is_file():
        raise ConfigError(f"There is no {path}; a checkpoint is {ALLOWED}.")
    try:
        loaded = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not JSON ({_reason(error)}); download or copy it again.") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not an object of keys and values; correct it.")
    return loaded


def _weight_files(folder: Path) -> list[Path]:
    """The files that hold the tensors. Safetensors are preferred to pickles, and the usual names to others."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
        others = sorted(file for file in folder.iterdir() if _is_like(file, name))
        if len(others) == 1 or (others and name.endswith(".safetensors")):
            return others
        if others:
            names = ", ".join(file.name for file in others)
            raise ConfigError(f"{folder} has several weights files ({names}); give the path of the one that counts.")
    raise ConfigError(
        f"{folder} has no weights (*.safetensors, {', '.join('*' + p for p in PICKLES)}); give {ALLOWED}."
    )


def _is_like(file: Path, name: str) -> bool:
    if name.endswith(".safetensors"):
        return file.suffix == ".safetensors"
    return file.suffix in PICKLES and not file.name.startswith(NOT_WEIGHTS)


def _shards(index: Path) -> list[Path]:
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(n, str) and Path(n).name == n for n in names.values()):
        raise ConfigError(f"{index} has no weight_map from tensors to files beside it; download or copy it again.")
    files = [index.parent / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{index} names {file.name}, which is not there; download or copy it again.")
    return files


def _open(file: Path) -> dict[str, StoredTensor]:
    if file.suffix == ".safetensors":
        return _open_safetensors(file)
    if file.suffix in PICKLES:
        return _open_pickle(file)
    endings = ", ".join((".safetensors", *PICKLES))
    raise ConfigError(f"{file} does not end in {endings}; give {ALLOWED}.")


def _open_safetensors(file: Path) -> dict[str, StoredTensor]:
    try:
        opened = cast(Any, safe_open)(file, "pt")
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError) as error:
        raise _damaged(file, _reason(error)) from None
    found = {}
    for name, view in slices.items():
        dtype = _DTYPES.get(view.get_dtype())
        if dtype is None:
            raise ConfigError(f"{name} of {file} is stored as {view.get_dtype()}; convert it to a dtype of PyTorch.")
        found[name] = StoredTensor(tuple(view.get_shape()), dtype, file, partial(opened.get_tensor, name))
    return found


def _open_pickle(file: Path) -> dict[str, StoredTensor]:
    loaded = load_pickle(file)
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict):
        raise ConfigError(f"{file} holds a {type(loaded).__name__}, not tensors by name; save the state_dict instead.")
    other = next((name for name, value in loaded.items() if not isinstance(value, Tensor)), None)
    if other is not None:
        kind = type(loaded[other]).__name__
        raise ConfigError(f"{other!r} of {file} is a {kind}, not a tensor; save the state_dict alone.")
    return {
        str(name): StoredTensor(tuple(tensor.shape), tensor.dtype, file, tensor.detach)
        for name, tensor in loaded.items()
    }


def load_pickle(file: Path) -> Any:
    """Read a pickle without running any code in it. The file is mapped into memory if its format allows that."""
    zipped = zipfile.is_zipfile(file)  # older files are one pickle, which cannot be mapped
    try:
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        if named is None:
            raise _damaged(file, "its pickle cannot be read") from None
        raise ConfigError(
            f"{file} needs more than weights_only=True to be read (it names {named[1]}), which could run code of its "
            "own; save the tensors as safetensors instead."
        ) from None
    except (RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _damaged(file, _reason(error)) from None


def _damaged(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"{file} is truncated or damaged ({reason}); download or copy it again.")


def _reason(error: Exception) -> str:
    """The first line of an error, as part of a sentence."""
    lines = str(error).strip().splitlines()
    return " ".join((lines or [type(error).__name__])[0].split()).rstrip(".:")
