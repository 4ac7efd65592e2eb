"""Programs as Python files: written to be read, and loaded again to be run.

A dump is one numbered folder per stage with ``step.py``, a file per module, ``inputs.json`` (the state the step takes)
and ``weights.json`` (which tensor each attribute holds); beside them ``report.md``, the weights of all stages in one
``weights.safetensors``, and ``dump.json``, which lists the files and marks the folder as ours.

Nothing is traced again and nothing is pickled: a file is the graph, node by node, so what runs after loading is what
ran before. State and caches are arguments of ``forward``.
"""

from __future__ import annotations

import json
import keyword
import math
import operator
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, fx, nn
from torch.fx.node import _get_qualified_name

from specgraph.errors import ConfigError, VerificationError
from specgraph.graphs import get_attribute
from specgraph.model_info import ModelInfo
from specgraph.program import Buffer, Input, Program
from specgraph.shapes import propagate
from specgraph.state import State, allocate

FORMAT = 1
"""Version of the files' layout; another one is refused on loading."""
MARKER = "dump.json"
WEIGHTS = "weights.safetensors"
WIDTH = 120
SAVED_UNASKED = 256 * 2**20
"""Weights of at most so many bytes are saved without asking."""

_OPERATORS: dict[object, str] = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=", operator.and_: "&", operator.or_: "|",
}  # fmt: skip


# Reading: a graph as source


def render(program: Program, module: str = "step") -> str:
    """The Python of the step graph, or of one module: a class with ``forward``, one line per node.

    Every line ends with the shape of its value and the pass that made the node. Weights read as attributes
    (``self.model.layers[0].mlp.up_proj.weight``), functions by their imported name, modules as ``self.target(...)``.

    Raises:
        ConfigError: the program has no such module.
    """
    if module != "step" and module not in program.modules:
        names = ", ".join(["step", *program.modules])
        raise ConfigError(f"The program has no module {module!r}; it has {names}.")
    _ensure_shapes(program)
    graph = program.graph if module == "step" else program.modules[module].graph
    return _Source(graph).text(module)


def _ensure_shapes(program: Program) -> None:
    """Propagate shapes unless every node of the step and of what it calls has one."""
    called = [program.modules[n.target] for n in program.graph.nodes if n.op == "call_module"]
    nodes = [n for graph in (program.graph, *(m.graph for m in called)) for n in graph.nodes]
    if any("shape" not in node.meta for node in nodes):
        try:
            propagate(program)
        except VerificationError:
            return  # A graph that is wrong is worth reading, too: what is known of its shapes is there.


class _Source:
    """Python for one graph. Variables are named first, then imports, so that neither hides the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        spelled = {operator.getitem, *_OPERATORS}
        functions = [n.target for n in graph.nodes if n.op == "call_function" and (n.target not in spelled or n.kwargs)]
        self._roots = {"torch"} | {r for r in map(_root, functions) if r}
        self._taken = {"self", "slice", *self._roots}
        self._variables: dict[fx.Node, str] = {}
        for node in sorted(graph.nodes, key=lambda n: n.op != "placeholder"):
            if node.op not in ("get_attr", "output"):
                self._variables[node] = self._unique(str(node.target) if node.op == "placeholder" else node.name)
        self._functions: dict[object, str] = {}
        self._imports: dict[str, list[str]] = {"specgraph.dump": ["Module"]}
        self._missing: list[str] = []
        for function in dict.fromkeys(functions):
            self._functions[function] = self._import(function)

    def text(self, name: str) -> str:
        """The whole file."""
        lines = [f"import {root}" for root in sorted(self._roots)] + [""]
        lines += [_import_line(module, sorted(names)) for module, names in sorted(self._imports.items())]
        undefined = "was defined inside a function and cannot be imported: define it here."
        lines += [f"# {missing} {undefined}" for missing in self._missing]
        unpacked = {item for node in self.graph.nodes for item in self._items(node)}
        shown = [n for n in self.graph.nodes if n.op not in ("placeholder", "get_attr") and n not in unpacked]
        body = [self._line(n) for n in shown]
        inputs = [self._input(n) for n in self.graph.nodes if n.op == "placeholder"]
        subject = "The step graph" if name == "step" else f"The module ``{name}``"
        lines = [f'"""{subject}, {len(body)} lines beside its inputs and weights."""', "", *lines, "", ""]
        lines += [f"class {class_name(name)}(Module):", "    def forward(", "        self,", *inputs, "    ):"]
        return "\n".join([*lines, *(f"        {line}" for line in body)]) + "\n"

    def _unique(self, name: str) -> str:
        """A free variable name as close to ``name`` as possible."""
        name = re.sub(r"\W", "_", name)
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"{name}_" if keyword.iskeyword(name) else f"_{name}"
        candidate, count = name, 0
        while candidate in self._taken:
            count += 1
            candidate = f"{name}_{count}"
        self._taken.add(candidate)
        return candidate

    def _import(self, function: Any) -> str:
        """How a function is called, importing it if need be."""
        if isinstance(function, torch._ops.HigherOrderOperator):
            return f"torch.ops.higher_order.{function}"
        if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return f"torch.ops.{function}"
        if _root(function):
            return _get_qualified_name(function).removeprefix("_")
        module, name = function.__module__, function.__qualname__
        if not name.isidentifier():
            self._missing.append(self._unique(function.__name__))
            return self._missing[-1]
        if name not in self._taken:
            self._taken.add(name)
            self._imports.setdefault(module, []).append(name)
            return str(name)
        alias = self._unique(f"{module.rpartition('.')[2]}_{name}")
        self._imports.setdefault(module, []).append(f"{name} as {alias}")
        return alias

    def _input(self, node: fx.Node) -> str:
        default = f"={self._value(node.args[0])}" if node.args else ""
        return f"        {self._variables[node]}{default},{_comment(node)}"

    def _line(self, node: fx.Node) -> str:
        if node.op == "output":
            (value,) = node.args
            several = isinstance(value, tuple) and len(value) > 1
            return f"return {self._value(value)[1:-1] if several else self._value(value)}{_comment(node)}"
        items = self._items(node)
        if items:
            names = {item.args[1]: self._variables[item] for item in items}
            targets = ", ".join(names.get(index, "_") for index in range(node.meta["outputs"]))
            return f"{targets} = {self._call(node)}{_comment(node)}"
        nothing = not node.users and node.meta.get("shape") in (None, "None")
        target = "" if nothing else f"{self._variables[node]} = "
        return f"{target}{self._call(node)}{_comment(node)}"

    def _items(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that take a tuple apart, if that is all that is done with it, at once: it reads as one line."""
        items, following = list(node.users), node.next
        # An item may stand in its tuple's line already, so its own items get lines of theirs.
        if node.op in ("placeholder", "get_attr") or node.target is operator.getitem or "outputs" not in node.meta:
            return []
        for _ in items:
            if following not in items or following.target is not operator.getitem:
                return []
            following = following.next
        indices = [item.args[1] for item in items]
        usual = all(isinstance(i, int) and 0 <= i < node.meta["outputs"] for i in indices)
        return items if usual and len(set(indices)) == len(items) else []

    def _call(self, node: fx.Node) -> str:
        args = [self._value(a) for a in node.args]
        if node.target is operator.getitem and not node.kwargs:
            return f"{args[0]}[{self._index(node.args[1])}]"
        if node.target in _OPERATORS and not node.kwargs:
            return f"{args[0]} {_OPERATORS[node.target]} {args[1]}"
        arguments = [*args, *(f"{name}={self._value(value)}" for name, value in node.kwargs.items())]
        if node.op == "call_method":
            return f"{args[0]}.{node.target}({', '.join(arguments[1:])})"
        name = _attribute(str(node.target)) if node.op == "call_module" else self._functions[node.target]
        return f"{name}({', '.join(arguments)})"

    def _index(self, value: Any) -> str:
        """A subscript, with slices as one writes them."""
        if isinstance(value, tuple) and value:
            return ", ".join(map(self._index, value)) + ("," if len(value) == 1 else "")
        if isinstance(value, slice):
            ends = [self._value(v) if v is not None else "" for v in (value.start, value.stop, value.step)]
            return ":".join(ends if ends[2] else ends[:2])
        return self._value(value)

    def _value(self, value: Any) -> str:
        """An argument as an expression."""
        if isinstance(value, fx.Node):
            return _attribute(str(value.target)) if value.op == "get_attr" else self._variables[value]
        if isinstance(value, tuple):
            return f"({', '.join(map(self._value, value))}{',' if len(value) == 1 else ''})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._value, value))}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._value(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._value, (value.start, value.stop, value.step)))})"
        return _literal(value)


def _import_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    listed = textwrap.fill(", ".join(names), WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"from {module} import (\n{listed},\n)"


def _literal(value: Any) -> str:
    """A constant as an expression."""
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "torch.inf", -math.inf: "-torch.inf"}.get(value, "torch.nan")
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    text = repr(value)
    return f'"{text[1:-1]}"' if isinstance(value, str) and text[0] == "'" and '"' not in text else text


def _attribute(name: str) -> str:
    """A dotted name below ``self``: numbers as indices, anything else that is no identifier as a key."""
    text = "self"
    for part in name.split("."):
        if part.isdecimal() and str(int(part)) == part:
            text += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part) and not part.startswith("__"):
            text += f".{part}"
        else:
            text += f"[{part!r}]"
    return text


def _comment(node: fx.Node) -> str:
    parts = [node.meta.get("shape"), node.meta.get("pass_name")]
    known = [part for part in parts if part not in (None, "None")]
    return f"  # {', '.join(known)}" if known else ""


def _root(function: Any) -> str:
    """The package a function is reached from by its full name, such as ``math``; empty if it is imported by name."""
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator):
        return "torch"
    module = getattr(function, "__module__", None) or "torch"
    root = module.partition(".")[0]
    return {"_operator": "operator"}.get(root, root) if root in ("torch", "math", "operator", "_operator") else ""


def class_name(module: str) -> str:
    """The class that a module's file defines: ``lm_head`` gives ``LmHead``."""
    return "".join(part[:1].upper() + part[1:] for part in re.split(r"\W|_", module))


# Writing


def dump(stages: Mapping[str, Program], folder: Path, *, report: str, weights: bool | None = None) -> Path:
    """Write every stage, the report and (up to 256 MB, or if ``weights`` is true) the weights to ``folder``.

    An earlier dump is replaced, file by file; anything else that is in its way is left alone and refused. Everything
    is written next to the folder first, so that a failure leaves what was there.

    Args:
        stages: programs by stage name, in order.
        folder: created if it does not exist.
        report: Markdown for ``report.md``; a line about the weights is added.
        weights: save them (True), leave them out (False), or decide by their size (None).

    Returns:
        ``folder``.

    Raises:
        ConfigError: the folder holds files that no dump wrote, or it cannot be written.
    """
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
            if saved and tensors:
                save_file(_separate(tensors), temporary / WEIGHTS)
            _write(
                temporary / "report.md", f"{report.rstrip()}\n\n{_about_weights(saved, size, len(tensors), stages)}\n"
            )
            _install(temporary, target, earlier)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"The graphs cannot be written to {folder}: {error}. Choose another folder.") from error
    return folder


def weights_of(program: Program) -> dict[str, Tensor]:
    """The tensors that a program's modules name, by module and dotted name: what ``load_stage`` takes."""
    found = {}
    for name, module in program.modules.items():
        for node in module.graph.nodes:
            value = get_attribute(module, node.target) if node.op == "get_attr" else None
            if isinstance(value, Tensor):
                found[f"{name}.{node.target}"] = value
    return found


def stage_folder(index: int, stage: str) -> str:
    """The folder of a stage: ``02_insert_kv_cache``."""
    name = re.sub(r"[^\w-]", "_", stage)
    return f"{index:02d}_{name}"


def _about_weights(saved: bool, size: int, count: int, stages: Mapping[str, Program]) -> str:
    amount = f"{size / 1e6:,.1f} MB in {count} tensors"
    if saved:
        return f"The weights, {amount}, are in `{WEIGHTS}`; `specgraph.load_dump(folder)` loads a stage with them."
    last = list(stages)[-1]
    return (
        f"The weights, {amount}, were left out; load a stage with those of the live model, "
        f"`specgraph.load_dump(folder, tensors=specgraph.dump.weights_of(decoder.stages[{last!r}]))`."
    )


def _view(tensor: Tensor) -> tuple[object, ...]:
    """Equal for two tensors that show the same memory in the same way, such as tied weights."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride, tensor.is_conj(), tensor.is_neg()


def _collect(stages: Mapping[str, Program]) -> tuple[dict[str, Tensor], dict[str, dict[str, str]]]:
    """Every tensor of all stages once, under the first name it has; per stage, the key of each name."""
    tensors: dict[str, Tensor] = {}
    keys: dict[tuple[object, ...], str] = {}
    names: dict[str, dict[str, str]] = {}
    for stage, program in stages.items():
        names[stage] = {}
        for name, tensor in weights_of(program).items():
            view = _view(tensor)
            if view not in keys:
                keys[view] = name if name not in tensors else f"{name}@{stage}"
                tensors[keys[view]] = tensor
            names[stage][name] = keys[view]
    return tensors, names


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values on the CPU, contiguous, none sharing memory with another: what safetensors can hold."""
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
    _write(folder / "inputs.json", _json(_facts(stage, program)))
    used = {key: _layout(tensors[key]) for key in dict.fromkeys(names.values())}
    _write(folder / "weights.json", _json({"names": dict(names), "tensors": used}))


def _facts(stage: str, program: Program) -> dict[str, Any]:
    """What it takes to allocate the state of a stage and to know what it does."""
    drafter = program.drafter
    return {
        "format": FORMAT,
        "stage": stage,
        "device": str(program.target.device),
        "modules": list(program.modules),
        "inputs": {name: _encode(spec) for name, spec in program.inputs.items()},
        "options": {name: value for name, value in program.options.items() if _is_plain(value)},
        "drafter": {
            "name": drafter.name,
            "kind": drafter.kind,
            "num_speculative_tokens": drafter.num_speculative_tokens,
            "features": list(drafter.features),
        },
        "target": _model(program.target),
        "draft": _model(drafter.model) if drafter.model is not None else None,
        "facts": sorted(program.facts),
        "compiled": sorted(program.compiled),
    }


def _model(info: ModelInfo) -> dict[str, Any]:
    return {name: value if _is_plain(value) else str(value) for name, value in asdict(info).items()}


def _is_plain(value: Any) -> bool:
    """Whether JSON keeps the value as it is; caches' buffers, for one, are in ``inputs`` already."""
    return value is None or isinstance(value, bool | int | float | str)


def _encode(spec: Input) -> Any:
    if isinstance(spec, Buffer):
        return {"shape": list(spec.shape), "dtype": _dtype(spec.dtype), "fill": spec.fill}
    return [_encode(buffer) for buffer in spec]


def _decode(spec: Any) -> Input:
    if isinstance(spec, list):
        return tuple(cast(Buffer, _decode(buffer)) for buffer in spec)
    return Buffer(tuple(spec["shape"]), getattr(torch, spec["dtype"]), spec["fill"])


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(tensor: Tensor) -> dict[str, Any]:
    """Shape and dtype of a tensor, and its strides where they are not the usual ones: kernels choose by them."""
    layout = {"shape": list(tensor.shape), "dtype": _dtype(tensor.dtype)}
    return layout if tensor.is_contiguous() else {**layout, "stride": list(tensor.stride())}


def _json(value: Mapping[str, Any], depth: int = 2) -> str:
    """JSON with a line per entry down to ``depth`` levels."""
    indent = " " * (2 * (3 - depth))
    lines = [
        f"{indent}{json.dumps(k)}: {_json(v, depth - 1) if depth > 1 and v and isinstance(v, dict) else json.dumps(v)}"
        for k, v in value.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n" + indent[2:] + "}" + ("\n" if depth == 2 else "")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


@contextmanager
def _sibling(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` that is gone afterwards, whatever happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.writing"
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files_of(folder: Path) -> list[str]:
    """The files of the dump in ``folder``, none if it is empty or missing; anything else there is refused."""
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
    """Put what was written in place of an earlier dump's files, and list it."""
    new = sorted(path.relative_to(temporary).as_posix() for path in temporary.rglob("*") if path.is_file())
    foreign = [name for name in new if name not in earlier and (target / name).exists()]
    if foreign:
        raise ConfigError(f"{target / foreign[0]} is in the way and was not written by a dump; move it elsewhere.")
    _mark(temporary, [*new, MARKER])
    if not target.exists():
        temporary.rename(target)
        return
    # Should this be interrupted, the folder still counts as a dump with all of these files.
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


# Loading


class Module(nn.Module):
    """What dumped classes inherit from: holds weights under their dotted names, and the modules a step calls.

    A number in a name reads as an index: ``self.model.layers[0].mlp.up_proj.weight``.
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
    """One stage of a dump, ready to run.

    Attributes:
        name: the stage, such as ``insert_kv_cache``.
        inputs: the state the step takes, as :attr:`Program.inputs`.
        options: as :attr:`Program.options`, ``block_size`` for one.
        device: where its weights are and its constants are made.
        info: everything in ``inputs.json``, facts about target and drafter among it.
        module: the step; its submodules are the modules of the program.
    """

    name: str
    inputs: dict[str, Input]
    options: dict[str, Any]
    device: torch.device
    info: dict[str, Any]
    module: Module

    def step(self) -> Module:
        """The step, called with the state as keyword arguments; it runs eagerly, as :meth:`Program.step` does."""
        return self.module

    def __call__(self, **state: Any) -> Any:
        """Run one step without recording gradients. State is written in place."""
        with torch.no_grad():
            return self.module(**state)

    def allocate(self, sizes: Mapping[str, int], device: torch.device | str | None = None) -> State:
        """Fresh tensors for every input but ``window``; ``sizes`` gives the letters of :class:`Buffer`."""
        return allocate(cast(Program, self), sizes, torch.device(device or self.device))


def load_stage(folder: str | Path, *, tensors: Mapping[str, Tensor] | None = None) -> LoadedStage:
    """Load one stage of a dump; this runs the Python files in ``folder``.

    Args:
        folder: the folder of a stage, such as ``graphs/02_insert_kv_cache``.
        tensors: weights by module and dotted name, as :func:`weights_of` gives them; None reads those of the dump.

    Raises:
        ConfigError: the folder is not a stage, weights are missing or have another shape, or a file does not import.
    """
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
        modules[name] = _class(folder, name)(weights=own)
    inputs = {name: _decode(spec) for name, spec in info["inputs"].items()}
    step = _class(folder, "step")(modules=modules)
    return LoadedStage(info["stage"], inputs, info["options"], device, info, step)


def _read_info(folder: Path) -> dict[str, Any]:
    """``inputs.json`` of a stage, or an error that says which folder to give."""
    if not (folder / "inputs.json").is_file():
        inside = sorted(path.parent.name for path in folder.glob("*/inputs.json")) if folder.is_dir() else []
        example = (
            f"one of its stages, such as {folder / inside[-1]}" if inside else "a folder below one decoder.dump wrote"
        )
        raise ConfigError(f"{folder} is not a dumped stage (it has no inputs.json); give {example}.")
    info: dict[str, Any] = json.loads((folder / "inputs.json").read_text(encoding="utf-8"))
    if info.get("format") != FORMAT:
        found = info.get("format")
        raise ConfigError(f"{folder} has format {found}, this version reads {FORMAT}; write the dump again.")
    return info


def _read_weights(folder: Path, wanted: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The tensors a stage needs from the dump's file, each once, with the strides they had."""
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
    tensor = tensor.to(device)
    stride = layout.get("stride")
    if stride is None or 0 in stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=device).copy_(tensor)


def _pick(folder: Path, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors a stage needs out of those given, after a look at their shapes."""
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


def _class(folder: Path, name: str) -> Callable[..., Module]:
    """The class a stage's file defines. Compiled anew each time: cached bytecode could be an earlier dump's."""
    path = folder / f"{name}.py"
    namespace: dict[str, Any] = {"__name__": f"{folder.name}.{name}", "__file__": str(path)}
    try:
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), namespace)
        return cast(Callable[..., Module], namespace[class_name(name)])
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} cannot be loaded ({reason}); mend the file or write the dump again.") from error
