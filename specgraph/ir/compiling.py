"""How modules are compiled by Inductor."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from weakref import WeakValueDictionary

import torch
from torch import SymInt, Tensor, fx, nn

from specgraph import kernels
from specgraph.compat import CustomGraphPass, FakeTensorMode, get_hash_for_files
from specgraph.ir.exporting import exporting, replaced_here
from specgraph.ir.regions import cut_at_layers

if TYPE_CHECKING:
    from specgraph.compat import ShapeEnv

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


def compile_library(source: str, flags: tuple[str, ...]) -> ctypes.CDLL | None:
    """The functions of a source in C++, compiled for this CPU once on a machine.

    None without a compiler, or where ``torch.compile`` is switched off.
    """
    from specgraph.compat import dynamo_config  # takes a second

    return None if dynamo_config.disable else _library(source, flags)


@functools.cache
def _library(source: str, flags: tuple[str, ...]) -> ctypes.CDLL | None:
    from specgraph.compat import CppCodeCache

    with contextlib.suppress(Exception):
        found: ctypes.CDLL = CppCodeCache.load(source, extra_flags=flags)
        return found
    return None


def compile_module(module: fx.GraphModule) -> nn.Module:
    """``module`` compiled by Inductor, for sizes that may change, when it is first called.

    Layers that are alike are compiled once (:mod:`specgraph.ir.regions`), for all decoders of the process.
    """
    return cut_at_layers(module, _compile_region)


_regions: WeakValueDictionary[Hashable, nn.Module] = WeakValueDictionary()
"""The regions that some decoder of this process still uses, by what they compute."""


def _compile_region(key: Hashable, region: fx.GraphModule, num_weights: int) -> nn.Module:
    """A region compiled by Inductor, or the one with the same key that was compiled before."""
    known = _regions.get(key)
    if known is None:
        _regions[key] = known = Compiled(region, num_weights)
    return known


class Compiled(nn.Module):
    """A graph of ATen nodes whose inputs are tensors, compiled by Inductor.

    Inductor gets the graph itself, with symbols in the places of the sizes that may change. So nothing is needed of
    ``torch.compile``, which would read the graph's Python and take most of the time for that. Code that was made for
    one call is right for others, too, unless a condition on their sizes does not hold. Where gradients are computed,
    the graph runs as it is.
    """

    _is_impure = True  # it may write a cache, as the graph does, so dead-code elimination keeps its calls

    def __init__(self, graph: fx.GraphModule, num_weights: int = 0) -> None:
        """The last ``num_weights`` inputs of every call are weights, whose sizes do not change."""
        super().__init__()
        self._graph, self._num_weights = graph, num_weights
        given = graph.graph.find_nodes(op="placeholder")
        self._fixed = [_fixed(node) for node in given[: len(given) - num_weights]]
        self._codes: dict[tuple[_Form, ...], list[_Code]] = {}
        self._by_layout: dict[Hashable, tuple[_Code, list[int]]] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """Call the graph. It stands in the place of torch's own ``__call__``, which looks for hooks.

        Weights are not looked at: :class:`~specgraph.runtime.model_guard.ModelGuard` has done so for the model, and no
        pass changes a module that runs.
        """
        if torch.is_grad_enabled():
            return self._graph(*inputs)
        layouts = tuple([(v.shape, v.stride(), v.dtype) for v in inputs[: len(inputs) - self._num_weights]])
        found = self._by_layout.get(layouts)
        if found is None:
            from specgraph.compat import dynamo_config  # takes a second

            if dynamo_config.disable:
                return self._graph(*inputs)
            found = self._find(inputs)
            if len(self._by_layout) >= MAX_LAYOUTS:
                self._by_layout.clear()
            self._by_layout[layouts] = found
        code, sizes = found
        return code.function(*sizes, *inputs)

    def _find(self, inputs: Sequence[Tensor]) -> tuple[_Code, list[int]]:
        """Code that is right for these inputs, and the sizes that it takes in front of them."""
        forms = tuple(map(_form, inputs, self._fixed))
        sizes = [size for form, value in zip(forms, inputs, strict=False) for size in form.changing(value)]
        with exporting():  # one thread at a time
            codes = self._codes.setdefault(forms, [])
            code = next((known for known in codes if known.holds(sizes)), None)
            if code is None:
                codes.append(code := _Code(self._graph, forms, sizes, inputs))
        return code, sizes


class _Form(NamedTuple):
    """What inputs have in common that Inductor takes for the same: all but sizes that may change.

    Attributes:
        sizes: of every dimension; None is a size that may change, of 2 or more.
        order: the dimensions from the smallest stride to the largest, without those of size 1.
        strides: of these, ``dense`` if it follows from the dimension before, 0 or 1, or None, which may change.
    """

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    order: tuple[int, ...]
    strides: tuple[int | str | None, ...]

    def changing(self, value: Tensor) -> list[int]:
        """The sizes and the strides of an input that may change."""
        strides = [value.stride(place) for place in self.order]
        return [own for own, form in zip((*value.shape, *strides), (*self.sizes, *self.strides), strict=True)
                if form is None]  # fmt: skip

    def fake(self, device: torch.device, symbols: Iterator[SymInt]) -> Tensor:
        """A tensor without memory that has this form, inside of a mode for such tensors."""
        shape: list[Any] = [next(symbols) if size is None else size for size in self.sizes]
        strides: list[Any] = [1] * len(shape)
        dense: Any = 1
        for place, form in zip(self.order, self.strides, strict=True):
            strides[place] = dense if form == "dense" else next(symbols) if form is None else form
            dense = strides[place] * (shape[place] if self.sizes[place] != 0 else 1)
        for place in reversed(range(len(shape) - 1)):  # as in a contiguous tensor, by which PyTorch chooses products
            if self.sizes[place] == 1:
                strides[place] = strides[place + 1] * shape[place + 1]
        return torch.empty_strided(shape, strides, dtype=self.dtype, device=device)


def _form(value: Tensor, fixed: Sequence[bool] | None) -> _Form:
    shape, stride = value.shape, value.stride()
    order = sorted((place for place, size in enumerate(shape) if size != 1), key=lambda at: (stride[at], shape[at]))
    dense, strides = 1, list[int | str | None]()
    for place in order:
        known = stride[place] if stride[place] < 2 else None
        strides.append("dense" if stride[place] == dense else known)
        dense = stride[place] * max(shape[place], 1)
    places = zip(shape, fixed or [False] * len(shape), strict=True)
    sizes = tuple(size if is_fixed or size < 2 else None for size, is_fixed in places)
    return _Form(value.dtype, sizes, tuple(order), tuple(strides))


def _fixed(node: fx.Node) -> list[bool] | None:
    """Which sizes of an input are numbers in its graph; None if the graph does not say, since a pass made the input."""
    known = node.meta["val"]
    return None if known is None else [isinstance(size, int) for size in known.shape]


class _Code:
    """What Inductor made of a graph for inputs of some forms.

    Attributes:
        function: takes the sizes that may change, and then the inputs of the graph.
    """

    function: Callable[..., Any]

    def __init__(
        self, graph: fx.GraphModule, forms: Sequence[_Form], sizes: Sequence[int], inputs: Sequence[Tensor]
    ) -> None:
        from specgraph.compat import ShapeEnv, TracingContext, compile_fx, make_fx, tracing  # takes a second

        self._env = ShapeEnv(duck_shape=False)  # two sizes that are equal by chance, as of batch and cache, stay two
        symbols = [_symbol(self._env, number, size) for number, size in enumerate(sizes)]
        left, mode = iter(symbols), FakeTensorMode(shape_env=self._env)
        with torch.inference_mode(False), torch.no_grad():
            with mode:
                values = [form.fake(value.device, left) for form, value in zip(forms, inputs, strict=False)]
                weights = [
                    torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                    for value in inputs[len(values) :]
                ]
            fakes: list[Any] = [*symbols, *values, *weights]
            with replaced_here(torch.compiler, "is_compiling", lambda: True):
                traced = make_fx(lambda *given: graph(*given[len(symbols) :]))(*fakes)
            with tracing(TracingContext(mode)):
                made: Any = compile_fx(traced, fakes, config_patches={"post_grad_custom_pre_pass": _OurOps()})
        self.function = made
        self._condition = self._env.produce_guards_expression(symbols, ignore_static=False)

    def holds(self, sizes: Sequence[int]) -> bool:
        """Whether the code is right for other sizes."""
        return self._condition is None or bool(self._env.evaluate_guards_expression(self._condition, sizes))


def _symbol(env: ShapeEnv, number: int, size: int) -> SymInt:
    """A symbol for a size that may change."""
    from specgraph.compat import ConstantSource, DimDynamic

    source = ConstantSource(f"size_{number}")
    symbol = env.create_symbol(size, source, DimDynamic.DYNAMIC)
    return cast(SymInt, env.create_symintnode(symbol, hint=size, source=source))
