"""Exports of modules, kept for modules that are equal in all but the values of their parameters.

Exporting a model takes most of the time of a compilation, and one process compiles the same model again and again: for
several drafters, in a notebook, in tests. :func:`kept` wraps a function that exports a module. For a module that equals
an earlier one, it returns a copy of the earlier graphs with the tensors of the given module.

Modules are equal if their keys are (:func:`key_of`). A key holds the whole tree of modules: every class, every
attribute, hook and configuration, the layout of every tensor, the values of every buffer, and which tensors share
memory. The code is part of the key as well: the functions of every class, and the names of the Python modules that take
part in an export. So a model that was changed is exported again, as is one whose code was replaced.

A key is made only of what it can compare. Code that is neither PyTorch's nor transformers' nor specgraph's may depend
on anything, so a module with a class, a hook or an object from elsewhere is exported every time. So is every module
while code from elsewhere stands in a class or a Python module that a key holds, or while all modules have a hook.

What is kept holds no weights: tensors without memory stand in their places.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import operator
import sys
import sysconfig
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, fx, nn

from specgraph.compat import IN_C, FakeTensor, pytree
from specgraph.ir.graphs import copy_module, get_attribute, set_attribute
from specgraph.ir.known_shapes import Recent

MAX_EXPORTS = 16
"""So many exports of a function are kept, those used last. One of a model of 24 layers takes some ten megabytes."""
TRUSTED = frozenset({"torch", "transformers", "specgraph"})
"""The packages whose code depends on nothing that a key does not hold."""
_LIBRARIES = TRUSTED | sys.stdlib_module_names | {"huggingface_hub"}
"""The packages from which methods of their classes come."""
_INSTALLED = [Path(torch.__file__).parents[1], *(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))]
"""The folders of the packages from which their Python modules import functions."""
_CODE = ("torch.nn.functional", "specgraph.frontend.", "specgraph.ir.", "transformers.masking_utils",
         "transformers.modeling_rope_utils", "transformers.modeling_layers", "transformers.activations",
         "transformers.integrations.")  # fmt: skip
"""Python modules whose functions an export runs, beside those of the classes of the model."""
_OTHERS = {
    "_name_or_path", "name_or_path", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks",
}  # fmt: skip
"""Attributes that take no part in a forward pass: where a model was loaded from, and how it is loaded and saved."""
_FILLED_IN = {
    "__builtins__", "__slotnames__", "__warningregistry__", "_CAN_RECORD_REGISTRY",
    "_can_set_attn_implementation_cached_value", "_can_set_experts_implementation_cached_value",
}  # fmt: skip
"""Names that Python fills in at any time, and transformers, from ``_CAN_RECORD_REGISTRY`` on, with what the code in the
key says already: what a class can record, noted when a model of it is first made, and what it can choose."""
_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)

_Export = TypeVar("_Export", bound=Callable[..., fx.GraphModule])


class UnknownKeyError(Exception):
    """A value has no key, since it cannot be told whether it equals another one."""


@dataclass(frozen=True, eq=False)
class _Itself:
    """Stands in a key for code, which equals nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(module: nn.Module, *rest: Any) -> Hashable:
    """Equal for arguments of which the same graphs are made, apart from the values of the module's parameters.

    Raises:
        UnknownKeyError: the arguments hold something that cannot be compared.
    """
    inputs = {id(leaf) for leaf in pytree.tree_leaves(rest) if isinstance(leaf, Tensor)}
    return _Key(inputs.union(map(id, _tensors(module).values()))).of((module, *rest))


class _Key:
    """The key of some values. An object that occurs again is named by its number."""

    def __init__(self, tensors: set[int]) -> None:
        """``tensors`` are the ids of those that may occur: a graph would hold any other one as a constant."""
        self._tensors = tensors
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._code: dict[str, _Note] = {}

    def of(self, values: tuple[Any, ...]) -> Hashable:
        """The key, with the code and the settings of the process on which an export depends."""
        parts = self._value(values)
        self._note("torch", torch)
        for name in sorted(name for name in [*sys.modules] if name.startswith(_CODE)):  # another thread may import
            self._note(name, sys.modules[name])
        return parts, tuple(self._code.items()), _settings()

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, float | complex):
            return type(value), repr(value)  # zero equals minus zero
        if isinstance(value, BuiltinFunctionType | type):
            return self._builtin(value)
        if type(value) in (tuple, frozenset):
            return type(value), type(value)(map(self._value, value))
        if isinstance(value, MethodType):
            return MethodType, self._value(value.__func__), self._value(value.__self__)
        if id(value) in self._numbers:
            return "seen", self._numbers[id(value)]
        self._numbers[id(value)] = len(self._numbers)
        return type(value), self._parts(value)

    def _parts(self, value: Any) -> Hashable:
        """The key of what may change or occur again. Loops are over copies, since other threads may run the module."""
        if type(value) in (dict, OrderedDict, MappingProxyType):
            return tuple((self._value(key), self._value(item)) for key, item in [*value.items()])
        if type(value) is list:
            return tuple(map(self._value, [*value]))
        if type(value) is set:
            return frozenset(map(self._value, [*value]))
        if type(value) is functools.partial:
            return self._value(value.func), self._value(value.args), self._value(value.keywords)
        if isinstance(value, torch.export.Dim):
            return value.__name__, value.min, value.max
        if isinstance(value, FunctionType):
            return self._function(value)
        return self._tensor(value) if isinstance(value, Tensor) else self._object(value)

    def _function(self, function: FunctionType) -> Hashable:
        _check_trusted(str(function.__globals__.get("__name__")), TRUSTED)
        try:
            held = tuple(cell.cell_contents for cell in function.__closure__ or ())
        except ValueError:  # a cell is empty
            raise UnknownKeyError(function) from None
        return _Itself(function.__code__), *map(self._value, (function.__defaults__, function.__kwdefaults__, held))

    def _builtin(self, value: Any) -> Hashable:
        """A class, or a function in C, which may be the method of an object."""
        if isinstance(value, type):
            _check_trusted(value.__module__, _LIBRARIES)
        elif not isinstance(value.__self__, type | ModuleType | None):
            raise UnknownKeyError(value)
        return _Itself(value)

    def _tensor(self, tensor: Tensor) -> Hashable:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        plain = plain and not tensor.is_conj() and not tensor.is_neg()
        if id(tensor) not in self._tensors or not plain:
            raise UnknownKeyError(type(tensor))
        storage = tensor.untyped_storage()._cdata
        number = self._storages.setdefault(storage, len(self._storages))
        layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, tensor.device
        return layout, tensor.requires_grad, number

    def _object(self, value: Any) -> Hashable:
        """The key of a module, a configuration, or another object that consists of its attributes."""
        if not hasattr(value, "__dict__"):
            raise UnknownKeyError(type(value))
        for kind in type(value).__mro__[:-1]:
            _check_trusted(kind.__module__, TRUSTED)
            if vars(kind).get("__slots__") or kind.__module__.startswith(IN_C):  # its state is elsewhere
                raise UnknownKeyError(kind)
            self._note(kind.__module__, sys.modules[kind.__module__])
            self._note(f"{kind.__module__}.{kind.__qualname__}", kind)
        held = tuple((name, self._value(item)) for name, item in dict(vars(value)).items() if name not in _OTHERS)
        return held, tuple(map(_content, value._buffers.values())) if isinstance(value, nn.Module) else ()

    def _note(self, name: str, owner: object) -> None:
        """Note what a class, or a Python module, calls by which names."""
        if name not in self._code:
            self._code[name] = _note_of(name, owner)


class _Note:
    """A part of a key that is compared by its content where it is not the same object, and hashed once."""

    latest: ClassVar[dict[str, tuple[list[object], list[Hashable], _Note]]] = {}
    """By the name of a class or a Python module its note, and what it was made of: objects, and what tables hold.
    A variable of this Python module would be part of the note of this Python module."""

    def __init__(self, content: Hashable) -> None:
        self._content, self._hash = content, hash(content)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Note) and self._content == other._content)

    def __hash__(self) -> int:
        return self._hash


def _note_of(name: str, owner: object) -> _Note:
    """What a class, or a Python module, calls by which names. As long as that is the same, so is the note."""
    # A package gets a name for each of its modules that is imported, at any time.
    named = {
        key: value
        for key, value in dict(vars(owner)).items()
        if not isinstance(value, ModuleType) and key not in _FILLED_IN
    }
    parts: list[object] = [*named, *named.values()]
    tables: list[Hashable] = []
    for value in named.values():
        if type(value) is FunctionType:
            parts += value.__code__, value.__defaults__
        elif isinstance(value, dict | list | tuple):
            tables.append(_noted(value))
    known = _Note.latest.get(name)
    if known and len(known[0]) == len(parts) and all(map(operator.is_, known[0], parts)) and known[1] == tables:
        return known[2]
    if not name.startswith("specgraph."):
        for value in named.values():
            _check_code(value, installed=not isinstance(owner, type))
    note = _Note(tuple((key, _noted(value)) for key, value in named.items()))
    _Note.latest[name] = parts, tables, note
    return note


def _settings() -> Hashable:
    """The settings of PyTorch on which an export depends.

    Raises:
        UnknownKeyError: there are hooks of all modules.
    """
    if any(hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_")):
        raise UnknownKeyError(nn.modules.module)
    autocast = [torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda")]
    modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    return torch.get_default_dtype(), str(torch.get_default_device()), *modes, *autocast


def _check_trusted(module: str, packages: frozenset[str]) -> None:
    if module.partition(".")[0] not in packages:
        raise UnknownKeyError(module)


def _is_code(value: object) -> bool:
    return not isinstance(value, type) and (callable(value) or hasattr(type(value), "__get__"))


@functools.cache
def _is_installed(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and any(Path(file).is_relative_to(folder) for folder in _INSTALLED)


def _check_code(value: Any, *, installed: bool) -> None:
    """Refuse code that is of no library, also if one of a library's decorators is around it.

    ``installed`` allows that of every package that is installed.
    """
    while value is not None and _is_code(value):
        for name in (getattr(value, "__module__", None), getattr(value, "__globals__", {}).get("__name__")):
            if name is not None and not (installed and _is_installed(name)):
                _check_trusted(name, _LIBRARIES)
        inner = (getattr(value, name, None) for name in ("__wrapped__", "__func__", "fget", "func"))
        value = next((one for one in inner if one is not None), None)


def _noted(value: Any, depth: int = 2) -> Hashable:
    """The key of an attribute of a class or of a Python module: code, a value, or a table of these."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)
    if isinstance(value, FunctionType):
        return _Itself(value), _Itself(value.__code__), _Itself(value.__defaults__)  # a reload may replace the code
    if isinstance(value, dict) and depth:
        return tuple((_noted(key, 0), _noted(item, depth - 1)) for key, item in [*dict.items(value)])
    if isinstance(value, list | tuple) and depth:
        return tuple(_noted(item, depth - 1) for item in [*value])
    if isinstance(value, type) or _is_code(value):
        return _Itself(value)
    return cast(Hashable, type(value))


def _content(buffer: Tensor | None) -> Hashable:
    """The values of a buffer, of which tracing may compute constants."""
    if buffer is None or buffer.is_meta or isinstance(buffer, FakeTensor):
        return None
    flat = buffer.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).digest()


class _Kept(NamedTuple):
    """A graph that was made of a module, without the module's tensors.

    Attributes:
        graph: has tensors without memory in the place of the module's.
        names: the names of these tensors in the graph, and their names in the module.
    """

    graph: fx.GraphModule
    names: dict[str, str]

    @staticmethod
    def of(made: fx.GraphModule, module: nn.Module) -> _Kept:
        """``made``, which stays as it is.

        Raises:
            UnknownKeyError: the graph has a view of one of the module's tensors, which is none of these.
        """
        graph, tensors = copy_module(made), _tensors(module)
        own = {id(tensor): name for name, tensor in tensors.items()}
        memory = {tensor.untyped_storage()._cdata for tensor in tensors.values()}
        held = {
            str(node.target): get_attribute(made, str(node.target)) for node in graph.graph.find_nodes(op="get_attr")
        }
        if any(id(one) not in own and one.untyped_storage()._cdata in memory for one in held.values()):
            raise UnknownKeyError(type(module))
        names = {target: own[id(tensor)] for target, tensor in held.items() if id(tensor) in own}
        for target in names:
            set_attribute(graph, target, _without_memory(held[target]))
        return _Kept(graph, names)

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
        """A copy of the graph with the tensors of a module."""
        graph = copy_module(self.graph)
        for target, name in self.names.items():
            set_attribute(graph, target, tensors[name])
        return graph


def kept(export: _Export) -> _Export:
    """A function that makes a graph of a module, its first argument, and makes it once for equal arguments.

    The graph is the caller's own, who may change it.
    """
    known = Recent[_Kept](MAX_EXPORTS)

    @functools.wraps(export)
    def cached(module: nn.Module, *rest: Any, **options: Any) -> fx.GraphModule:
        try:
            key = key_of(module, *rest, options)
        except UnknownKeyError:
            return export(module, *rest, **options)
        found = known.find(key)
        if found is not None:
            return found.with_tensors(_tensors(module))
        made = export(module, *rest, **options)
        with contextlib.suppress(UnknownKeyError):
            known.keep(key, _Kept.of(made, module))
        return made

    return cast(_Export, cached)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its name, also those that several names share."""
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor for pairs in named for name, tensor in pairs}


def _without_memory(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
