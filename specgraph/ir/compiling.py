"""How modules go through ``torch.compile``."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn

from specgraph import kernels
from specgraph.compat import CustomGraphPass, LazyGraphModule, get_hash_for_files, symbolic_shapes_config
from specgraph.ir.regions import cut_at_layers

MAX_LAYOUTS = 256
"""The most layouts of inputs that a module remembers. Sizes of a cache change with the requests."""


class _OurOps(CustomGraphPass):
    """Changes nothing. It makes what Inductor finds in its caches depend on the sources of our ops.

    Compiled code calls an op with all arguments of its schema, and relies on the shapes and strides that its fake
    implementation gives. Inductor keeps such code on disk, and knows an op by its name alone. So without this, another
    version of specgraph would run code that was compiled for the ops of this one.
    """

    def __call__(self, graph: fx.Graph) -> None:
        pass

    def uuid(self) -> bytes:
        """Equal for equal sources."""
        return _digest()


@functools.cache
def _digest() -> bytes:
    folder = Path(kernels.__file__).parent
    return get_hash_for_files(tuple(str(path) for path in sorted(folder.rglob("*.py"))))


_SMALL_KERNEL = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in_ptr0, float* out_ptr0)
{
    at::vec::Vectorized<float>::loadu(in_ptr0).store(out_ptr0);
}
"""


@functools.cache
def start_compiler() -> None:
    """Let Inductor look at the C++ compiler and compile its header for a CPU, in a thread beside what follows.

    On a machine that has not done so before this takes some ten seconds, nearly all of them in other processes, which
    otherwise the first request waits for. If it fails, that request tells why.
    """
    # What the thread needs is imported here, because two threads that import modules which import each other may see
    # unfinished ones. The first request would import it otherwise.
    from specgraph.compat import AsyncCompile, compile_fx  # noqa: F401

    def compile_small_kernel() -> None:
        with contextlib.suppress(Exception):
            pending = AsyncCompile().cpp_pybinding(["const float*", "float*"], _SMALL_KERNEL)
            if hasattr(pending, "result"):
                pending.result()

    threading.Thread(target=compile_small_kernel, name="specgraph-start-compiler", daemon=True).start()


def compile_module(module: nn.Module) -> nn.Module:
    """``module`` compiled by Inductor, for sizes that may change, when it is first called.

    Layers that are alike are compiled once (:mod:`specgraph.ir.regions`), for all decoders of the process.
    """
    cut = cut_at_layers(module, _compile_region) if isinstance(module, fx.GraphModule) else module
    return Compiled(module) if cut is module else cut


_regions: WeakValueDictionary[Hashable, nn.Module] = WeakValueDictionary()
"""The regions that some decoder of this process still uses, by what they compute."""


def _compile_region(key: Hashable, region: fx.GraphModule, num_weights: int) -> nn.Module:
    """A region compiled by Inductor, or the one with the same key that was compiled before."""
    known = _regions.get(key)
    if known is None:
        _regions[key] = known = Compiled(region, num_weights)
    return known


class Compiled(nn.Module):
    """A module that runs through ``torch.compile``.

    Dynamo checks every input of every call, which costs as much as the work of a small layer. A call whose inputs have
    the layout of an earlier call therefore goes straight to the function that Inductor made for that one. Weights are
    not checked then: :class:`~specgraph.runtime.model_guard.ModelGuard` has done so for the model, and no pass changes
    a module that runs.
    """

    _is_impure = True  # it may write a cache, as the module does, so dead-code elimination keeps its calls

    def __init__(self, module: nn.Module, num_weights: int = 0) -> None:
        """The last ``num_weights`` inputs of every call are weights."""
        super().__init__()
        if isinstance(module, fx.GraphModule):
            LazyGraphModule.force_recompile(module)  # Dynamo cannot trace a forward that generates its own code
        self._num_weights = num_weights
        options: dict[str, Any] = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        self._checked = torch.compile(module, backend=_inductor, dynamic=True, options=options)
        self._direct: dict[Hashable, _DirectCall] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. Inputs are tensors, tuples of tensors and plain values.

        It stands in the place of torch's own ``__call__``, which looks for hooks.
        """
        inputs: list[Any] = []
        for value in (*args, *kwargs.values()):
            inputs.extend(value) if isinstance(value, tuple) else inputs.append(value)
        layouts = map(_layout, inputs[: len(inputs) - self._num_weights])
        key = (*kwargs, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *layouts)
        direct = self._direct.get(key)
        if direct is not None:
            return direct(inputs)
        # Two sizes that are equal by chance, such as those of a batch and of a cache, stay two sizes.
        sizes: Any = symbolic_shapes_config
        with _CHECKED, sizes.patch(use_duck_shape=False), _noting() as noted:
            results = self._checked(*args, **kwargs)
        direct = _direct_call(inputs, noted, results)
        if direct is not None:
            if len(self._direct) >= MAX_LAYOUTS:
                self._direct.clear()
            self._direct[key] = direct
        return results


class _Noted(NamedTuple):
    """A call of a function that Inductor has made."""

    function: Callable[..., Sequence[Any]]
    arguments: tuple[Any, ...]
    results: Sequence[Any]


@dataclass(frozen=True)
class _DirectCall:
    """The work of Dynamo around a compiled function, for inputs of one layout.

    Attributes:
        function: takes ``arguments`` and returns a sequence.
        arguments: each is the index of an input and None, or -1 and a value that is always the same.
        results: indices into what the function returns and the inputs behind that; a single one if the module returns
            no tuple.
    """

    function: Callable[..., Sequence[Any]]
    arguments: tuple[tuple[int, Any], ...]
    results: int | tuple[int, ...]

    def __call__(self, inputs: Sequence[Any]) -> Any:
        found = self.function(*[value if index < 0 else inputs[index] for index, value in self.arguments])
        if isinstance(self.results, int):
            return found[self.results]
        return tuple([found[index] if index < len(found) else inputs[index - len(found)] for index in self.results])


def _direct_call(inputs: Sequence[Any], noted: Sequence[_Noted], results: Any) -> _DirectCall | None:
    """The direct call that does what this one did; None if that is not to be told."""
    if len(noted) != 1:
        return None  # nothing is compiled, or Dynamo has cut the module
    (call,) = noted
    places = {id(value): index for index, value in enumerate(inputs) if isinstance(value, Tensor)}
    if len(places) < sum(isinstance(value, Tensor) for value in inputs):
        return None  # one tensor is two inputs, and the next time they may be two
    arguments = tuple((place, None) if (place := places.get(id(a), -1)) >= 0 else (-1, a) for a in call.arguments)
    known = {id(value): index for index, value in reversed([*enumerate([*call.results, *inputs])])}
    returned = results if isinstance(results, tuple) else (results,)
    if any(not isinstance(value, Tensor) or id(value) not in known for value in returned):
        return None
    found = tuple(known[id(value)] for value in returned)
    return _DirectCall(call.function, arguments, found if isinstance(results, tuple) else found[0])


def _layout(value: Any) -> Hashable:
    """The properties of an input on which compiled code may rely."""
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else value


_CHECKED = threading.Lock()
"""Held in calls that go through Dynamo, which change one of its settings while they last. In torch 2.13 settings
are those of a thread; where they are not, two such calls side by side would not put it back."""
_notes = threading.local()


@contextlib.contextmanager
def _noting() -> Iterator[list[_Noted]]:
    """The calls of compiled functions that this thread makes meanwhile."""
    before, _notes.calls = getattr(_notes, "calls", None), []
    try:
        yield _notes.calls
    finally:
        _notes.calls = before


def _inductor(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Sequence[Any]]:
    """Inductor as a backend of Dynamo, whose functions note their calls."""
    from specgraph.compat import compile_fx  # takes a second

    function: Any = compile_fx(graph, inputs, config_patches={"post_grad_custom_pre_pass": _OurOps()})

    def noting(*arguments: Any) -> Sequence[Any]:
        results: Sequence[Any] = function(*arguments)
        if getattr(_notes, "calls", None) is not None:
            _notes.calls.append(_Noted(function, arguments, results))
        return results

    return noting
