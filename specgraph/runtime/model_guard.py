"""Notices that a model is no longer the one that was compiled.

A decoder reads the tensors that the model had when it was traced, and computes what the model's modules computed then.
What is written into these tensors, as by an optimiser, ``copy_`` or ``load_state_dict``, reaches the decoder. A tensor
that takes the place of another one does not, nor does a layer that is put around another one, as LoRA does. So every
call looks first whether all of them are in their places. What is written into a tensor that a pass has copied, because
it is laid out in another way, does not reach the decoder either, and is noticed by the count of such writes. For the
291 tensors and 423 modules of Llama-3-8B that takes about 60 us on one core, because all loops run inside of Python's
builtins.

A decoder runs the forward hooks that modules had when they were traced, and no others. transformers itself adds some to
a model that is asked for its hidden states. They compute nothing and do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from specgraph.errors import InputError
from specgraph.ir.graphs import get_attribute
from specgraph.ir.program import Program

_FORWARD = "forward"
_ADVICE = (
    "after this decoder was compiled, and the decoder still runs what it was compiled from; compile the model again "
    "(detach and attach it, if it is attached). Only values that are written in place reach a decoder."
)


class _State(NamedTuple):
    """What compiled models are made of.

    Attributes:
        pointers: where the tensors are in memory; nothing if one of them is gone.
        children: the modules inside of each module, by name.
        forwards: the forward methods that single modules have, instead of that of their class.
        types: the class of every module.
        hooks: the forward hooks of every module, and those that run before.
        versions: how often each tensor was written of which the decoder reads a copy.
    """

    pointers: list[int]
    children: list[Any]
    forwards: list[Any]
    types: list[type[nn.Module]]
    hooks: list[Any]
    versions: list[int]

    def copied(self) -> _State:
        """With copies of the dictionaries, which modules change in place."""
        return self._replace(children=[*map(dict, self.children)], hooks=[*map(dict, self.hooks)])


class ModelGuard:
    """What compiled models consisted of: their modules, and the tensors that were traced."""

    def __init__(self, models: Mapping[str, nn.Module], traced: Program, last: Sequence[Program]) -> None:
        """``models``: the target, under an empty name, and the draft, by what errors call it.

        ``traced`` is the first program, which reads the tensors of the models themselves, and ``last`` the one that
        runs, or one for each of several GPUs.
        """
        named = [(_join(role, name), own) for role, model in models.items() for name, own in model.named_modules()]
        self._names, self._modules = [name for name, _ in named], [module for _, module in named]
        self._attributes = [module.__dict__ for module in self._modules]
        self._hooks = [hooks for own in self._modules for hooks in (own._forward_hooks, own._forward_pre_hooks)]
        parents = [(name, module._modules) for name, module in named if module._modules]
        self._parents, self._children = [name for name, _ in parents], [children for _, children in parents]
        read = frozenset(map(id, _read(traced)))
        held = [(_join(name, key), tensors, key) for name, module in named
                for tensors in (module._parameters, module._buffers)
                for key, tensor in tensors.items() if id(tensor) in read]  # fmt: skip
        self._tensor_names = [name for name, *_ in held]
        self._places: list[dict[str, Any]] = [tensors for _, tensors, _ in held]
        self._keys = [key for *_, key in held]
        self._ids = [*map(id, self._tensors())]
        self._looks = _describe_layout if last[0].compiled else _describe
        self._described = [*map(self._looks, self._tensors())]
        # A CUDA graph reads memory. Without one, a step reads tensors, and so the memory that they have got since.
        self._followed = frozenset[int]() if last[0].captured else frozenset(map(id, _read(last[0])))
        memory = set.intersection(*({tensor.untyped_storage().data_ptr() for tensor in _read(each)} for each in last))
        self._copied = [
            index for index, tensor in enumerate(self._tensors())
            if tensor.untyped_storage().data_ptr() not in memory and not tensor.is_inference()
        ]  # fmt: skip
        self._before = self._now().copied()

    def check(self) -> None:
        """Look whether everything is in its place.

        Raises:
            InputError: names what was changed, and says to compile again.
        """
        now = self._now()
        if now != self._before:
            changes = (self._changed_modules(), self._changed_hooks(), self._changed_tensors())
            change = next(itertools.chain(*changes), None)
            if change is not None:
                raise InputError(f"{change} {_ADVICE}")
            self._before = now.copied()

    def _tensors(self) -> Iterator[Any]:
        return map(dict.get, self._places, self._keys)

    def _now(self) -> _State:
        """What is compared at every call, with the dictionaries that modules have themselves."""
        try:
            pointers = [*map(Tensor.data_ptr, self._tensors())]
        except TypeError:
            pointers = []
        forwards = [*map(dict.get, self._attributes, itertools.repeat(_FORWARD))]
        copied = (self._places[index].get(self._keys[index]) for index in self._copied)
        versions = [-1 if tensor is None else tensor._version for tensor in copied]
        return _State(pointers, self._children, forwards, [*map(type, self._modules)], self._hooks, versions)

    def _changed_modules(self) -> Iterator[str]:
        """The beginning of a sentence for every module that is another one now."""
        for parent, children, before in zip(self._parents, self._children, self._before.children, strict=True):
            for key in {**before, **children}:
                name, was, now = _join(parent, key), before.get(key), children.get(key)
                if was is not now:
                    yield f"{name} was " + ("removed" if now is None else f"replaced by a {type(now).__name__}")
        modules = zip(self._names, self._modules, self._before.types, self._before.forwards, strict=True)
        for name, module, kind, forward in modules:
            shown = name or kind.__name__
            if type(module) is not kind:
                yield f"{shown} became a {type(module).__name__}"
            if vars(module).get(_FORWARD) != forward:
                yield f"{shown} got another forward method"

    def _changed_hooks(self) -> Iterator[str]:
        """The beginning of a sentence for every module with other forward hooks, those of transformers left aside."""
        pairs = zip(self._hooks, self._before.hooks, strict=True)
        for place, (hooks, before) in enumerate(pairs):
            name = self._names[place // 2] or self._before.types[place // 2].__name__
            now, was = (_of_others(each) for each in (hooks, before))
            if now != was:
                yield f"{name} " + ("lost a forward hook" if len(now) < len(was) else "got another forward hook")

    def _changed_tensors(self) -> Iterator[str]:
        """The beginning of a sentence for every tensor that the decoder does not follow."""
        versions = dict(zip(self._copied, self._before.versions, strict=True))
        held = zip(self._tensor_names, self._tensors(), self._described, self._before.pointers, self._ids, strict=True)
        for index, (name, tensor, before, pointer, own) in enumerate(held):
            if tensor is None:
                yield f"{name} was removed"
                continue
            for how, was in before.items():
                now = self._looks(tensor)[how]
                if was != now:
                    yield f"{name} was {how} from {was} to {now}"
            if index in versions and tensor._version != versions[index]:
                yield f"{name}, of which the decoder reads a copy, was written"
            if tensor.data_ptr() != pointer and (id(tensor) != own or own not in self._followed):
                yield f"{name} was replaced by another tensor"


def _of_others(hooks: Mapping[int, Any]) -> dict[int, Any]:
    """The hooks that are not of transformers."""
    own = {key: str(getattr(getattr(hook, "func", hook), "__module__", "")) for key, hook in hooks.items()}
    return {key: hook for key, hook in hooks.items() if not own[key].startswith("transformers.")}


def _describe(tensor: Tensor) -> dict[str, object]:
    """What a step takes for granted of a tensor, by what is done to it when it changes."""
    return {"moved": tensor.device, "converted": tensor.dtype, "resized": [*tensor.shape]}


def _describe_layout(tensor: Tensor) -> dict[str, object]:
    """The same where Inductor has compiled for the strides, which ``lower_kernels`` of another decoder may change."""
    return {**_describe(tensor), "laid out anew": [*tensor.stride()]}


def _read(program: Program) -> list[Tensor]:
    """The tensors that the modules of a program read."""
    modules = program.modules.unchanged.values()
    nodes = ((module, node) for module in modules for node in module.graph.find_nodes(op="get_attr"))
    return [get_attribute(module, str(node.target)) for module, node in nodes]


def _join(*parts: str) -> str:
    return ".".join(filter(None, parts))
