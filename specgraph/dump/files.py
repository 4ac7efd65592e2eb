"""Writes all stages of a compilation to a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, fx

from specgraph.errors import ConfigError
from specgraph.ir.graphs import get_attribute
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import Program
from specgraph.ir.source import listing, render
from specgraph.ir.summaries import summaries
from specgraph.ir.tensors import view_of
from specgraph.kernels.state import Buffer, Input, map_input

FORMAT = 3
"""The version of the layout of the files. Files of another version are refused when they are loaded."""
MARKER = "dump.json"
WEIGHTS = "weights.safetensors"
NODES = "nodes.json"
RECORD = "compilation.json"
SAVED_UNASKED = 256 * 2**20
"""Weights of at most this many bytes are saved unless the user says otherwise."""


def dump(stages: Mapping[str, Program], folder: str | Path, *, report: str, record: Mapping[str, Any] | None = None,
         weights: bool | None = None) -> Path:  # fmt: skip
    """Write all stages, the report and (up to 256 MB, or if ``weights`` is true) the weights to ``folder``.

    An earlier dump is replaced file by file. A folder that holds other files but no dump is refused, and no file that a
    dump has not written is overwritten. All files are first written to a folder beside it, so that a failure does not
    change what was there.

    Args:
        stages: programs by stage name, in order.
        folder: the folder to write to, which is made if it does not exist.
        report: Markdown for ``report.md``, to which a line about the weights is added.
        record: the report as plain values for ``compilation.json``, which then names the folder of every stage as well.
        weights: whether to save the weights; None saves them up to 256 MB.

    Returns:
        ``folder``.

    Raises:
        ConfigError: the folder holds files that no dump wrote, or it cannot be written.
    """
    if not isinstance(folder, str | Path):
        raise ConfigError(f"A dump goes to a folder, which is given by its path, not by {type(folder).__name__}.")
    if weights is not None and not isinstance(weights, bool):
        raise ConfigError(f"weights is True, False or None, not {weights!r}.")
    folder = Path(folder)
    target = folder.expanduser().resolve()
    earlier = _files_of(target)
    tensors, names = _collect(stages)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    saved = size <= SAVED_UNASKED if weights is None else weights
    try:
        with _sibling(target) as temporary:
            for index, (stage, program) in enumerate(stages.items()):
                _write_stage(temporary / stage_folder(index, stage), stage, program, names[stage], tensors)
            folders = {stage: stage_folder(index, stage) for index, stage in enumerate(stages)}
            about = {"stages": folders, "functions": summaries(_nodes(stages.values())), **(record or {})}
            _write(temporary / RECORD, _json({"format": FORMAT, **about}))
            if saved and tensors:
                save_file(_separate(tensors), temporary / WEIGHTS)
            _write(
                temporary / "report.md", f"{report.rstrip()}\n\n{_about_weights(saved, size, len(tensors), stages)}\n"
            )
            _install(temporary, target, earlier)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"The graphs cannot be written to {folder}: {error}. Choose another folder.") from error
    return folder


def check_folder(folder: str | Path) -> None:
    """Refuse a folder that :func:`dump` would refuse, before anything takes long.

    Raises:
        ConfigError: as :func:`dump`.
    """
    target = Path(folder).expanduser().resolve()
    _files_of(target)
    above = next(path for path in target.parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ConfigError(
            f"The graphs cannot be written to {folder}: {above} is no folder that can be written to. Choose another "
            "folder."
        )


def weights_of(program: Program) -> dict[str, Tensor]:
    """The tensors that a program's modules name, by module and dotted name. ``load_stage`` takes them."""
    found = {}
    for name, module in program.modules.unchanged.items():
        for node in module.graph.nodes:
            value = get_attribute(module, node.target) if node.op == "get_attr" else None
            if isinstance(value, Tensor):
                found[f"{name}.{node.target}"] = value
    return found


def stage_folder(index: int, stage: str) -> str:
    """The name of a stage's folder, such as ``02_insert_kv_cache``."""
    name = re.sub(r"[^\w-]", "_", stage)
    return f"{index:02d}_{name}"


def _nodes(programs: Iterable[Program]) -> Iterator[fx.Node]:
    for program in programs:
        for graph in (program.graph, *(module.graph for module in program.modules.unchanged.values())):
            yield from graph.nodes


def _about_weights(saved: bool, size: int, count: int, stages: Mapping[str, Program]) -> str:
    amount = f"{size / 1e6:,.1f} MB in {count} tensors"
    if saved:
        return f"The weights, {amount}, are in `{WEIGHTS}`; `specgraph.load_dump(folder)` loads a stage with them."
    last = list(stages)[-1]
    return (
        f"The weights, {amount}, were left out; load a stage with those of the live model, "
        f"`specgraph.load_dump(folder, tensors=specgraph.dump.weights_of(decoder.stages[{last!r}]))`."
    )


def _collect(stages: Mapping[str, Program]) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
    """Every tensor of all stages once, under its first name; and for each stage, the key of the tensor of each name."""
    tensors: dict[str, Tensor] = {}
    keys: dict[tuple[object, ...], str] = {}
    names: dict[str, dict[str, str]] = {}
    for stage, program in stages.items():
        names[stage] = {}
        for name, tensor in weights_of(program).items():
            view = view_of(tensor)
            if view not in keys:
                keys[view] = name if name not in tensors else f"{name}@{stage}"
                tensors[keys[view]] = tensor
            names[stage][name] = keys[view]
    return tensors, names


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that are contiguous and share no memory with each other, as safetensors requires."""
    seen: set[int] = set()
    result = {}
    for key, tensor in tensors.items():
        value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        pointer = value.untyped_storage().data_ptr()
        result[key] = value.clone() if pointer in seen else value
        seen.add(pointer)
    return result


def _write_stage(
    folder: Path, stage: str, program: Program, names: Mapping[str, str], tensors: Mapping[str, Tensor]
) -> None:
    folder.mkdir(parents=True)
    for name in ("step", *program.modules):
        _write(folder / f"{name}.py", render(program, name))
    _write(folder / NODES, _listings({name: listing(program, name) for name in ("step", *program.modules)}))
    _write(folder / "inputs.json", _json(_facts(stage, program)))
    used = {key: _layout(tensors[key]) for key in dict.fromkeys(names.values())}
    _write(folder / "weights.json", _json({"names": dict(names), "tensors": used}))


def _facts(stage: str, program: Program) -> dict[str, Any]:
    """The content of ``inputs.json``: what is needed to allocate the state of a stage, and facts about the stage."""
    drafter = program.drafter
    return {
        "format": FORMAT,
        "stage": stage,
        "device": str(program.target.device),
        "modules": list(program.modules),
        "inputs": {name: _encode(spec) for name, spec in program.inputs.items()},
        "drafter": {
            "name": drafter.name,
            "num_speculative_tokens": drafter.num_speculative_tokens,
            "features": list(drafter.features),
        },
        "target": _model(program.target),
        "drafts": {name: _model(info) for name, info in drafter.models.items()},
        "facts": sorted(program.facts),
        "compiled": sorted(program.compiled),
    }


def _model(info: ModelInfo) -> dict[str, Any]:
    return {name: value if _is_plain(value) else str(value) for name, value in asdict(info).items()}


def _is_plain(value: Any) -> bool:
    """Whether JSON can hold the value. Others are left out; the buffers of caches, for example, are in ``inputs``."""
    return value is None or isinstance(value, bool | int | float | str)


def _encode(spec: Input) -> Any:
    return map_input(lambda b: asdict(b) | {"shape": list(b.shape), "dtype": _dtype(b.dtype)}, spec)


def _decode(spec: Any) -> Input:
    if isinstance(spec, list):
        return tuple(map(_decode, spec))
    return Buffer(**{**spec, "shape": tuple(spec["shape"]), "dtype": getattr(torch, spec["dtype"])})


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(tensor: Tensor) -> dict[str, Any]:
    """The shape, dtype and bytes of a tensor; if it is not contiguous, its strides, as kernels may depend on them."""
    size = tensor.numel() * tensor.element_size()
    layout = {"shape": list(tensor.shape), "dtype": _dtype(tensor.dtype), "bytes": size}
    return layout if tensor.is_contiguous() else {**layout, "stride": list(tensor.stride())}


def _json(value: Mapping[str, Any], depth: int = 2) -> str:
    """JSON in which every entry of the first ``depth`` levels has its own line."""
    indent = " " * (2 * (3 - depth))
    lines = [
        f"{indent}{json.dumps(k)}: {_json(v, depth - 1) if depth > 1 and v and isinstance(v, dict) else json.dumps(v)}"
        for k, v in value.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n" + indent[2:] + "}" + ("\n" if depth == 2 else "")


def _listings(graphs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """JSON in which every node has its own line."""
    parts = []
    for name, nodes in graphs.items():
        lines = ",\n".join(f"    {json.dumps(node)}" for node in nodes)
        parts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def _sibling(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target``, which is removed in any case."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.writing"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files_of(folder: Path) -> list[str]:
    """The files of the dump in ``folder``, or none if it is empty or missing. Any other folder is refused."""
    advice = "Nothing was written: choose a new or empty folder, or one that holds an earlier dump."
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file. {advice}")
    if not folder.exists() or not any(folder.iterdir()):
        return []
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = [str(name) for name in marker["files"]] if marker["written_by"] == "specgraph" else None
    except (OSError, ValueError, KeyError, TypeError):
        files = None
    if files is None or any(Path(name).is_absolute() or ".." in Path(name).parts for name in files):
        raise ConfigError(f"{folder} is not empty and holds no dump of specgraph. {advice}")
    return files


def _install(temporary: Path, target: Path, earlier: Sequence[str]) -> None:
    """Replace the files of an earlier dump by those in ``temporary``, and list them in ``dump.json``."""
    new = sorted(path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file())
    foreign = [name for name in new if name not in earlier and (target / name).exists()]
    if foreign:
        raise ConfigError(f"{target / foreign[0]} is in the way and was not written by a dump; move it elsewhere.")
    _mark(temporary, [*new, MARKER])
    if not target.exists():
        temporary.rename(target)
        return
    # If this is interrupted, the folder still counts as a dump, with all of these files.
    _mark(target, sorted({*earlier, *new, MARKER}))
    for name in set(earlier) - {*new, MARKER}:
        (target / name).unlink(missing_ok=True)
    for name in [*new, MARKER]:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(temporary / name, target / name)
    for left in {(target / name).parent for name in earlier} - {target}:
        if left.is_dir() and not any(left.iterdir()):
            left.rmdir()


def _mark(folder: Path, files: Sequence[str]) -> None:
    _write(folder / MARKER, json.dumps({"written_by": "specgraph", "format": FORMAT, "files": files}, indent=2) + "\n")
