"""Traces of models, kept for models that are equal in all but the values of their tensors.

Tests build the same small models again and again, and an export of one takes seconds. :func:`kept` wraps a function
that exports a module. An equal module that is given later gets a copy of the graphs with its own tensors.

Modules are equal if their keys are (:func:`key_of`). A key holds the whole tree of modules: every class, every
attribute, hook and configuration, the layout of every tensor, and which tensors are one. What it does not know how to
compare enters the key as itself, so that it equals nothing else, and the module is exported anew. The code is part of
the key as well: the functions of every class, and the names of the Python modules that take part in an export, so that
a test that replaces a function gets graphs of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from transformers import GenerationConfig, PretrainedConfig

from specgraph.frontend.tracing import TracedModel
from specgraph.ir.graphs import copy_module, get_attribute, replace_tensors

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, enum.Enum)
_CODE = ("specgraph.frontend.", "specgraph.ir.", "transformers.masking_utils", "transformers.modeling_rope_utils",
         "transformers.modeling_layers", "transformers.activations", "transformers.integrations.")  # fmt: skip
"""Python modules whose functions an export runs, beside those of the classes of the model."""
_OTHERS = {
    "_name_or_path", "name_or_path", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks",
}  # fmt: skip
"""Attributes that take no part in a forward pass: where a model was loaded from, and how it is loaded and saved."""


@dataclass(frozen=True, eq=False)
class _Itself:
    """Stands in a key for an object that equals nothing but itself."""

    value: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(*values: Any) -> Hashable:
    """Equal for arguments of which the same graphs are made, apart from the values of the modules' tensors."""
    return _Key().of(values)


class _Key:
    """The key of some values. An object that occurs again is named by its number."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._storages: dict[int, int] = {}
        self._python: dict[str, Hashable] = {}

    def of(self, values: tuple[Any, ...]) -> Hashable:
        """The key, with the code and the settings of the process on which an export depends."""
        parts = tuple(map(self._value, values))
        for name in sorted(name for name in [*sys.modules] if name.startswith(_CODE)):  # another thread may import
            self._code(name)
        settings = torch.get_default_dtype(), str(torch.get_default_device()), torch.is_grad_enabled()
        return parts, tuple(self._python.items()), settings

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, FunctionType | BuiltinFunctionType | type):
            return _Itself(value)
        if isinstance(value, Tensor | nn.Module | PretrainedConfig | GenerationConfig):
            if id(value) in self._numbers:
                return "seen", self._numbers[id(value)]
            self._numbers[id(value)] = len(self._numbers)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, PretrainedConfig | GenerationConfig):
            return type(value), self._attributes(vars(value))
        return self._parts(value)

    def _parts(self, value: Any) -> Hashable:
        if type(value) in (dict, OrderedDict, MappingProxyType):
            return type(value), tuple((self._value(k), self._value(v)) for k, v in value.items())
        if type(value) in (list, tuple):
            return type(value), tuple(map(self._value, value))
        if type(value) in (set, frozenset):
            return type(value), frozenset(map(self._value, value))
        if dataclasses.is_dataclass(value):
            return type(value), tuple(self._value(getattr(value, field.name)) for field in dataclasses.fields(value))
        if type(value) is functools.partial:
            return functools.partial, self._value((value.func, value.args, value.keywords))
        if isinstance(value, torch.export.Dim):
            return "dimension", value.__name__, value.min, value.max
        return _Itself(value)

    def _module(self, module: nn.Module) -> Hashable:
        for one in type(module).__mro__:
            if one.__module__ not in ("builtins", "torch.nn.modules.module"):
                self._code(one.__module__, one)
        held = {name: value for name, value in vars(module).items() if not isinstance(value, Tensor)}
        loose = tuple((name, _Itself(value)) for name, value in vars(module).items() if isinstance(value, Tensor))
        return type(module), self._attributes(held), loose

    def _attributes(self, held: dict[str, Any]) -> Hashable:
        return tuple((name, self._value(value)) for name, value in held.items() if name not in _OTHERS)

    def _tensor(self, tensor: Tensor) -> Hashable:
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, nn.Parameter):
            return _Itself(tensor)
        storage = tensor.untyped_storage()._cdata
        number = self._storages.setdefault(storage, len(self._storages))
        layout = tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset(), tensor.dtype, tensor.device
        return type(tensor), layout, tensor.requires_grad, number

    def _code(self, module: str, cls: type | None = None) -> None:
        """Note what a Python module, and a class of it, call by which names."""
        if module not in self._python and (found := sys.modules.get(module)) is not None:
            self._python[module] = _named(vars(found))
        if cls is not None and (name := f"{module}.{cls.__qualname__}") not in self._python:
            self._python[name] = _named(vars(cls))


def _named(names: Mapping[str, Any]) -> Hashable:
    """The functions, classes and constants among the names of a Python module or class."""
    plain = tuple((name, type(value), value) for name, value in names.items() if isinstance(value, _PLAIN))
    code = tuple((name, _Itself(value)) for name, value in names.items() if callable(value) or _is_member(value))
    return plain, code


def _is_member(value: object) -> bool:
    return isinstance(value, property | staticmethod | classmethod)


class _Kept(NamedTuple):
    """What was made of a module, and the tensors of that module by their names."""

    result: Any
    tensors: dict[str, Tensor]


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes graphs of a module, its first argument, and makes them once for equal arguments.

    Whoever calls it gets a copy, which may be changed.
    """
    known: dict[Hashable, _Kept] = {}

    @functools.wraps(function)
    def cached(module: Any, *rest: Any, **options: Any) -> Any:
        if not isinstance(module, nn.Module):
            return function(module, *rest, **options)
        key = key_of(module, rest, options)
        if key not in known:
            made = function(module, *rest, **options)
            if not _movable(made, module):
                return made
            known[key] = _Kept(made, _tensors(module))
        return _with_tensors(known[key], _tensors(module))

    return cached


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by its name, also those that several names share."""
    named = module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    return {name: tensor for pairs in named for name, tensor in pairs}


def _graphs(result: Any) -> list[fx.GraphModule]:
    return [result.body, result.head] if isinstance(result, TracedModel) else [result]


def _attributes_of(graph: fx.GraphModule) -> Iterator[Tensor]:
    return (get_attribute(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr")


def _movable(result: Any, module: nn.Module) -> bool:
    """Whether every tensor of the graphs is one of the module's, or a constant, which shares no memory with those."""
    tensors = {id(tensor) for tensor in _tensors(module).values()}
    storages = {tensor.untyped_storage()._cdata for tensor in _tensors(module).values()}
    held = [tensor for graph in _graphs(result) for tensor in _attributes_of(graph)]
    return all(id(tensor) in tensors or tensor.untyped_storage()._cdata not in storages for tensor in held)


def _with_tensors(known: _Kept, tensors: dict[str, Tensor]) -> Any:
    """A copy of what is known, with other tensors in the place of those of the module that it was made of."""
    new = {id(old): tensors[name] for name, old in known.tensors.items()}
    copies = [copy_module(graph) for graph in _graphs(known.result)]
    for graph in copies:
        replace_tensors(graph, new)
    if isinstance(known.result, TracedModel):
        return replace(known.result, body=copies[0], head=copies[1])
    return copies[0]
