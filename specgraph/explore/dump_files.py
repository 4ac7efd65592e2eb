"""Reads the files of a dump for the explorer, and runs none of its code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specgraph.config.paths import did_you_mean_path
from specgraph.dump import FORMAT, MARKER, NODES, RECORD
from specgraph.errors import ConfigError

AGAIN = "write the dump again with python -m specgraph dump"
PASS = {"stage": str, "before": str, "pass": str, "about": str, "seconds": float, "matches": int,
        "bytes_shared": int, "notes": list, "near_misses": list}  # fmt: skip
"""The values that the record has for every pass, with their types."""
COMPILATION = {"target": str, "vocab_size": int, "drafter": str, "num_speculative_tokens": int, "rule": str,
               "device": str, "reads": list, "notes": list}  # fmt: skip
"""The values that the record has for the whole compilation."""


@dataclass(frozen=True)
class Node:
    """A node of a graph, as ``nodes.json`` of a stage lists it.

    Attributes:
        name: unique in its graph.
        op: ``placeholder``, ``get_attr``, ``call_function``, ``call_module``, ``call_method`` or ``output``.
        calls: the function, module or weight.
        inputs: the names of the nodes that it reads.
        code: what stands for it in the stage's Python.
        shape: of its value, with letters for the sizes that only a request knows; None if it is not known.
        bytes: of its value, in the same letters; None if they are not known.
        made_by: the pass that made it.
        line: of the model's source, which it comes from; None if that is not known.
        items: the shapes of the items of a value that is a tuple; None for others.
        device: the number of the one device that runs it, if several share the target; None if each of them does.
    """

    name: str
    op: str
    calls: str
    inputs: tuple[str, ...]
    code: str
    shape: str | None
    bytes: str | None
    made_by: str | None
    line: str | None = None
    items: tuple[str, ...] | None = None
    device: int | None = None

    @staticmethod
    def of_record(record: Mapping[str, Any]) -> Node:
        """From the entry of a file.

        Raises:
            TypeError, KeyError: the entry lacks something, or a value has another type.
        """
        name, op, calls, code = (_is(str, record[key]) for key in ("name", "op", "calls", "code"))
        inputs = tuple(_is(str, name) for name in _is(list, record["inputs"]))
        shape, size, made_by = (_is(str | None, record[key]) for key in ("shape", "bytes", "pass"))
        line, items = _is(str | None, record.get("line")), _is(list | None, record.get("items"))
        items = None if items is None else tuple(_is(str, item) for item in items)
        device = _is(int | None, record.get("device"))
        return Node(name, op, calls, inputs, code, shape, size, made_by, line, items, device)


def _is(kind: Any, value: Any) -> Any:
    """The value, if it has a type."""
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {getattr(kind, '__name__', kind)}")
    return value


@dataclass(frozen=True)
class Tensor:
    """A tensor of a stage: the names that modules have for it (``module.dotted.name``), and its layout."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that use it."""
        return tuple(dict.fromkeys(name.partition(".")[0] for name in self.names))


@dataclass(frozen=True)
class Stage:
    """The program after one pass.

    Attributes:
        name: of the stage.
        graphs: the nodes of the step graph (``step``) and of every module.
        tensors: those that its modules name.
        made: what the report says of the pass that made it; empty for the first stage.
    """

    name: str
    graphs: dict[str, list[Node]]
    tensors: list[Tensor]
    made: dict[str, Any]

    @property
    def before(self) -> str | None:
        """The stage that the pass was given."""
        return self.made.get("before")


@dataclass(frozen=True)
class Dump:
    """A dump: the record of the compilation, its stages in order, and the folders of these by their names."""

    record: dict[str, Any]
    stages: list[Stage]
    folders: dict[str, Path] = field(default_factory=dict)


def read_dump(folder: str | Path) -> Dump:
    """Read a dump.

    Raises:
        ConfigError: there is none, it is of another version, or one of its files is missing or damaged.
    """
    folder = Path(folder).expanduser()
    _check(folder)
    path = folder / RECORD
    record = _mapping(path)
    try:
        made = {entry["stage"]: checked(entry, PASS) for entry in _is(list, record.get("passes", []))}
        stages = _is(dict, record["stages"])
        record = {key: value for key, value in record.items() if key not in ("passes", "stages")}
        checked(record, COMPILATION if made else {})
        record["functions"] = {name: _is(str, text) for name, text in _is(dict, record.get("functions", {})).items()}
        folders = {name: folder / _is(str, place) for name, place in stages.items()}
        found = [_stage(place, name, made.get(name, {})) for name, place in folders.items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, repr(error)) from None
    if not found:
        raise _damaged(path, "it names no stages")
    return Dump(record, found, folders)


def checked(entry: dict[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The entry, if it has everything that ``kinds`` names, with these types."""
    for key, kind in kinds.items():
        _is(kind, entry[key])
    for miss in entry.get("near_misses", []):
        _is(str, miss["where"]), _is(str, miss["reason"])
    return entry


def _check(folder: Path) -> None:
    """Refuse what is no dump of this version, and say what it is instead."""
    if not folder.exists():
        near = did_you_mean_path(folder)
        raise ConfigError(f"{folder}: there is no such folder{near}; give one that python -m specgraph dump wrote.")
    if (folder / "inputs.json").is_file():
        raise ConfigError(f"{folder} is one stage of a dump; give the folder above it.")
    if not (folder / MARKER).is_file():
        raise ConfigError(f"{folder} is no dump (it has no {MARKER}); give a folder python -m specgraph dump wrote.")
    marker = _mapping(folder / MARKER)
    if marker.get("written_by") != "specgraph":
        raise ConfigError(f"{folder} was not written by specgraph; give a folder python -m specgraph dump wrote.")
    if marker.get("format") != FORMAT:
        raise ConfigError(f"{folder} has format {marker.get('format')}, this version reads {FORMAT}; {AGAIN}.")


def _stage(folder: Path, name: str, made: dict[str, Any]) -> Stage:
    graphs = _mapping(folder / NODES)
    try:
        nodes = {graph: [Node.of_record(record) for record in records] for graph, records in graphs.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(folder / NODES, repr(error)) from None
    if "step" not in nodes:
        raise _damaged(folder / NODES, "it has no step graph")
    return Stage(name, nodes, _tensors(folder / "weights.json"), made)


def _tensors(path: Path) -> list[Tensor]:
    """Every tensor of a stage once, in the order of the first names."""
    found = _mapping(path)
    names: dict[str, list[str]] = {}
    try:
        for name, key in found["names"].items():
            names.setdefault(_is(str, key), []).append(name)
        layouts = {key: found["tensors"][key] for key in names}
        return [
            Tensor(tuple(own), tuple(_is(list, layouts[key]["shape"])), _is(str, layouts[key]["dtype"]),
                   _is(int, layouts[key]["bytes"]))
            for key, own in names.items()
        ]  # fmt: skip
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, repr(error)) from None


def _mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); {AGAIN}.") from None
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(found, dict):
        raise _damaged(path, "it is no JSON object")
    return found


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path} is damaged ({' '.join(reason.split())}); {AGAIN}.")
