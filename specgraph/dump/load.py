"""Loads a dumped stage and runs it."""

from __future__ import annotations

import ast
import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from specgraph.config.paths import did_you_mean_path
from specgraph.dump.files import FORMAT, WEIGHTS, _decode, _dtype
from specgraph.errors import ConfigError
from specgraph.ir.source import class_name
from specgraph.ir.state import State, allocate
from specgraph.kernels import catalogue  # noqa: F401  (registers the ops that stages call)
from specgraph.kernels.state import Input


class Module(nn.Module):
    """The base class of dumped classes. It holds weights under their dotted names, and the modules that a step calls.

    A number in a name is written as an index: ``self.model.layers[0].mlp.up_proj.weight``.
    """

    def __init__(
        self, weights: Mapping[str, Tensor] | None = None, modules: Mapping[str, nn.Module] | None = None
    ) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self.add_module(name, module)
        for name, tensor in (weights or {}).items():
            *path, leaf = name.split(".")
            holder: nn.Module = self
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, Module())
                holder = cast(nn.Module, holder._modules[part])
            holder.register_buffer(leaf, tensor)
        self.eval()

    def __getitem__(self, name: int | str) -> Any:
        return getattr(self, str(name))


@dataclass(frozen=True)
class LoadedStage:
    """One stage of a dump, which can be run.

    Attributes:
        name: the name of the stage, such as ``insert_kv_cache``.
        inputs: the state that the step takes, described as by :attr:`Program.inputs`.
        device: the device of its weights, on which constants are made, too.
        info: the content of ``inputs.json``, which includes facts about the target and the drafter.
        module: the step, whose submodules are the modules of the program.
    """

    name: str
    inputs: dict[str, Input]
    device: torch.device
    info: dict[str, Any]
    module: Module

    def step(self) -> Module:
        """The step, which takes the state as keyword arguments. It runs eagerly, like :meth:`Program.step`."""
        return self.module

    def __call__(self, **state: Any) -> Any:
        """Run one step without recording gradients. State is written in place."""
        with torch.no_grad():
            return self.module(**state)

    def allocate(self, sizes: Mapping[str, int], device: torch.device | str | None = None) -> State:
        """New tensors for every input except ``window``; ``sizes`` gives numbers for the letters of :class:`Buffer`."""
        return allocate(self, sizes, torch.device(device or self.device))


Watch = Callable[[str, str, Any], None]
"""A function that is called with every value that a line computes: the graph, the variable, the value."""


def load_stage(
    folder: str | Path, *, tensors: Mapping[str, Tensor] | None = None, watch: Watch | None = None
) -> LoadedStage:
    """Load one stage of a dump. This runs the Python files in ``folder``.

    Args:
        folder: the folder of a stage, such as ``graphs/02_insert_kv_cache``.
        tensors: the weights by module and dotted name, as :func:`weights_of` gives them; None reads those of the dump.
        watch: is called after every line that has run, for each variable that the line has set.

    Raises:
        ConfigError: the folder is not that of a stage, weights are missing or have the wrong shape, or a file cannot be
            imported.
    """
    if not isinstance(folder, str | os.PathLike):
        raise ConfigError(f"A dumped stage is given by the path of its folder, not by {type(folder).__name__}.")
    folder = Path(folder)
    info = _read_info(folder)
    layout = json.loads((folder / "weights.json").read_text(encoding="utf-8"))
    device = torch.device(info["device"])
    if tensors is None:
        values = _read_weights(folder, layout["tensors"], device)
        weights = {name: values[key] for name, key in layout["names"].items()}
    else:
        weights = _pick(folder, tensors, layout)
    modules = {}
    for name in info["modules"]:
        own = {full[len(name) + 1 :]: value for full, value in weights.items() if full.startswith(f"{name}.")}
        modules[name] = _class(folder, name, watch)(weights=own)
    inputs = {name: _decode(spec) for name, spec in info["inputs"].items()}
    step = _class(folder, "step", watch)(modules=modules)
    return LoadedStage(info["stage"], inputs, device, info, step)


def _read_info(folder: Path) -> dict[str, Any]:
    """The content of a stage's ``inputs.json``. If there is none, the error says which folder to give."""
    if not (folder / "inputs.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/inputs.json")) if folder.is_dir() else []
        example = (
            f"one of its stages, such as {folder / inside[-1]}" if inside else "a folder below one decoder.dump wrote"
        )
        if not folder.exists():
            raise ConfigError(f"There is no folder {folder}{did_you_mean_path(folder)}; give {example}.")
        raise ConfigError(f"{folder} is not a dumped stage (it has no inputs.json); give {example}.")
    info: dict[str, Any] = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    if info.get("format") != FORMAT:
        found = info.get("format")
        raise ConfigError(f"{folder} has format {found}, this version reads {FORMAT}; write the dump again.")
    return info


def _read_weights(folder: Path, wanted: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The tensors of the dump's file that a stage needs, each read once, with the strides that they had."""
    path = folder.resolve().parent / WEIGHTS
    advice = "pass tensors=specgraph.dump.weights_of(program) of the live model, or dump again with weights=True"
    if not wanted:
        return {}
    if not path.is_file():
        raise ConfigError(f"{folder} was dumped without weights: {advice}.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"{folder} was dumped from {device}, which this machine lacks; load it on one that has it.")
    with safe_open(path, "pt") as file:
        stored = set(file.keys())
        missing = sorted(wanted.keys() - stored)
        if missing:
            raise ConfigError(f"{path} lacks {missing[0]} ({len(missing)} missing): {advice}.")
        return {key: _restore(file.get_tensor(key), layout, device) for key, layout in wanted.items()}


def _restore(tensor: Tensor, layout: Mapping[str, Any], device: torch.device) -> Tensor:
    # A CPU may round a matrix product differently when operands are not aligned, and a mapped file aligns none. So the
    # tensors are copied.
    tensor = tensor.to(device, copy=True)
    stride = layout.get("stride")
    if stride is None or 0 in stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device).copy_(tensor)


def _pick(folder: Path, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that a stage needs, out of the given ones, after a check of their shapes."""
    weights = {}
    for name, key in layout["names"].items():
        tensor = tensors.get(name, tensors.get(key))
        wanted = layout["tensors"][key]
        if tensor is None:
            raise ConfigError(f"tensors lacks {name}, which {folder} needs; pass weights_of the same stage.")
        if [*tensor.shape] != wanted["shape"] or _dtype(tensor.dtype) != wanted["dtype"]:
            found = f"{_dtype(tensor.dtype)} {[*tensor.shape]}"
            raise ConfigError(
                f"tensors[{name!r}] is {found}, {folder} needs {wanted['dtype']} {wanted['shape']}; "
                "pass the weights of the model that was dumped."
            )
        weights[name] = tensor.detach()
    return weights


def _class(folder: Path, name: str, watch: Watch | None) -> Callable[..., Module]:
    """The class that a file of a stage defines. It is compiled each time, since cached bytecode may be out of date."""
    path = folder / f"{name}.py"
    namespace: dict[str, Any] = {"__name__": f"{folder.name}.{name}", "__file__": str(path)}
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        if watch is not None:
            namespace[_WATCH] = functools.partial(watch, name)
            tree = ast.fix_missing_locations(_Watched().visit(tree))
        exec(compile(tree, str(path), "exec"), namespace)
        return cast(Callable[..., Module], namespace[class_name(name)])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} cannot be loaded ({reason}); mend the file or write the dump again.") from error


_WATCH = "__watch__"


class _Watched(ast.NodeTransformer):
    """Adds a call behind every assignment, for each variable that it sets."""

    def visit_Assign(self, node: ast.Assign) -> list[ast.stmt]:
        """The assignment, and a call of ``watch`` for each of its variables."""
        names = [n.id for target in node.targets for n in ast.walk(target) if isinstance(n, ast.Name)]
        told = [ast.parse(f"{_WATCH}({name!r}, {name})").body[0] for name in names if name != "_"]
        return [node, *told]
