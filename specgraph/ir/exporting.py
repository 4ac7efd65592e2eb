"""Lets one thread export a module while others run theirs.

``torch.export`` changes what belongs to the whole process, and its changes would reach every other thread:

- It puts fake tensors into the parameters of the module that it exports. So what is exported is :func:`own_copy`, of
  which no other thread knows. The copy also leaves the caller's modules and configurations as they are.
- ``torch.fx`` replaces ``__call__`` and ``__getattr__`` of ``torch.nn.Module``, and would record the calls of other
  threads. :func:`exporting` lets the replacements work in its own thread alone.
- A flag says that the process is compiling. transformers asks for it, and leaves out what a compiler does not
  understand. :func:`exporting` lets it be seen in its own thread alone.

One thread at a time exports or traces a region for Inductor (:mod:`specgraph.ir.compiling`), and none does while
``torch.compile`` compiles in another one: all undo their replacements in the order in which they made them, which no
two threads could keep.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from specgraph.compat import Patcher, proxy
from specgraph.ir.functional import functional
from specgraph.ir.graphs import new_module, unlift
from specgraph.ir.kept import kept
from specgraph.ir.origins import ModelFrames

_EXPORTING = threading.RLock()
_Module = TypeVar("_Module", bound=nn.Module)


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """For as long as the context lasts, this thread may export, and no other thread notices."""
    # This import takes a second, and torch.export makes it anyway.
    from specgraph.compat import compile_lock, dynamo_config, proxy_tensor

    with _EXPORTING, compile_lock, contextlib.ExitStack() as stack:
        stack.enter_context(replaced(Patcher, "patch_method", _patching_here(Patcher.patch_method)))
        for name in ("is_compiling", "is_exporting"):
            here = _only_here(getattr(torch.compiler, name), lambda: False)
            stack.enter_context(replaced(torch.compiler, name, here))
        # Symbolic shapes are seldom the same, so that a quarter of an export went to noting what is not asked for.
        stack.enter_context(dynamo_config.patch(fake_tensor_cache_enabled=False))
        # What it finds stands in "val" as well, and asking symbolic sizes for three formats of memory takes long.
        stack.enter_context(replaced(proxy_tensor, "_extract_tensor_metadata", lambda *_, **__: None))
        for name, method in (("__enter__", _enter_no_grad), ("__exit__", _exit_no_grad)):
            stack.enter_context(replaced_here(torch.no_grad, name, method))
        if hasattr(proxy, "CapturedTraceback"):
            nearest = _only_here(ModelFrames, proxy.CapturedTraceback.extract)
            stack.enter_context(replaced(proxy, "CapturedTraceback", SimpleNamespace(extract=nearest)))
        yield


@kept
def export_module(
    module: nn.Module, args: tuple[Any, ...], dims: dict[str, Any], name: str, prefix: str = ""
) -> fx.GraphModule:
    """Export a module without attention as a graph of ATen nodes.

    ``prefix`` is removed from the names of its tensors.
    """
    with exporting():
        exported = torch.export.export(own_copy(module), args, dynamic_shapes=dims, strict=False)
        unlifted = unlift(functional(exported), prefix)
    output = unlifted.graph.output_node()
    (outputs,) = output.args
    if isinstance(outputs, tuple) and len(outputs) == 1:
        output.args = outputs
    return new_module(unlifted, unlifted.graph, name)


def _enter_no_grad(self: torch.no_grad) -> None:
    """A model's ``no_grad`` where no gradients are computed anyway.

    It would become nodes of the graph, which a pass of torch.export then cuts apart and puts together again.
    """
    self.prev = torch.is_grad_enabled()
    if self.prev:
        torch.set_grad_enabled(False)


def _exit_no_grad(self: torch.no_grad, *error: object) -> None:
    if self.prev:
        torch.set_grad_enabled(True)


@contextlib.contextmanager
def replaced(owner: Any, name: str, new: Any) -> Iterator[None]:
    """``new`` is the attribute ``name`` of a module or class for as long as the context lasts."""
    before = getattr(owner, name)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, before)


def replaced_here(owner: Any, name: str, new: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """Like :func:`replaced`, but other threads call the function that was there before."""
    return replaced(owner, name, _only_here(new, getattr(owner, name)))


def _only_here(function: Callable[..., Any], elsewhere: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` in this thread, and ``elsewhere`` in all others."""
    here = threading.get_ident()

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == here else elsewhere)(*args, **kwargs)

    return chosen


def _patching_here(patch: Callable[..., None]) -> Callable[..., None]:
    """A method of ``torch.fx`` that replaces another method of a class, for this thread alone."""

    def patch_method(self: Any, cls: type, name: str, new: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        patch(self, cls, name, _only_here(new, getattr(cls, name)), *args, **kwargs)

    return patch_method


def own_copy(module: _Module, shared: type[Tensor] | tuple[()] = Tensor) -> _Module:
    """The same module made of objects of its own, with the same tensors.

    Submodules, configurations, hooks and whatever else the modules hold are copied, so that nothing done to the copy
    reaches the module, except for values that are written into its tensors. What cannot be copied is shared.

    ``shared`` is the class of the tensors that are not copied; with () all are copied. A copy that shares only its
    parameters may run a forward pass that writes into buffers, as some rotary embeddings do.
    """
    modules = [*module.modules()]
    copies: dict[int, Any] = {id(one): object.__new__(type(one)) for one in modules}
    for one in modules:
        held = itertools.chain(one._parameters.values(), one._buffers.values(), vars(one).values())
        copies |= {id(tensor): tensor for tensor in held if isinstance(tensor, shared)}
    for one in modules:
        copies[id(one)].__dict__.update({name: _copied(value, copies) for name, value in vars(one).items()})
    return copies[id(module)]


def _copied(value: Any, copies: dict[int, Any]) -> Any:
    """A copy of a value that a module holds. ``copies`` has the copies that exist, by the id of the original."""
    if id(value) in copies:
        return copies[id(value)]
    # A compiled function runs the module that it was made of, so the copy gets the function that was compiled.
    value = getattr(value, "_torchdynamo_orig_callable", value)
    if isinstance(value, FunctionType) and value.__closure__:
        return _copied_function(value, copies)
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copied(item, copies)) for key, item in value.items())
    try:
        return copy.deepcopy(value, copies)
    except Exception:
        return value


def _copied_function(function: FunctionType, copies: dict[int, Any]) -> FunctionType:
    """The same function around copies of what it holds, such as the method that it stands in for."""
    theirs = function.__closure__ or ()
    cells = tuple(CellType() for _ in theirs)
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    own.__kwdefaults__, own.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    copies[id(function)] = own
    for cell, their in zip(cells, theirs, strict=True):
        with contextlib.suppress(ValueError):  # the cell is empty
            cell.cell_contents = _copied(their.cell_contents, copies)
    return own
