"""Shapes and dtypes of every node, from running the program on fake tensors.

``node.meta["layout"]`` becomes the value of the node, with a :class:`~specgraph.ir.known_shapes.Layout` in place of
each tensor. The sizes in it are numbers, and :data:`SIZES` says which number stands for which letter of
:class:`~specgraph.kernels.state.Buffer`; ``?`` stands for a size that depends on values.

Readers of a graph get letters: :func:`shape_of` gives ``i64[B, T+1]`` or ``(i64[B, T], i64[B])``, where numbers are
real dimensions, and :func:`describe_bytes` gives the size of the tensors, as in ``1024*B*T`` or ``8*B*(T-1) + 4*B``.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.compat import FakeTensorMode, OpOverload, ShapeEnv, pytree
from specgraph.errors import VerificationError
from specgraph.ir.graphs import get_attribute, written_by
from specgraph.ir.known_shapes import (
    CALLS,
    MODULES,
    Layout,
    allocated,
    call_key,
    fingerprint,
    layouts_of,
    remember,
)
from specgraph.ir.views import ProgramView
from specgraph.kernels.state import Buffer, Input, map_input, per_call
from specgraph.kernels.step import WRITES

SIZES = {
    "B": 401_309, "b": 349_507, "T": 467_903, "M": 545_203, "N": 635_507, "S": 740_711, "E": 863_479, "W": 914_219,
    "R": 1_016_009,
}  # fmt: skip
"""The number for each letter: a prime that no real dimension is near to or a multiple of. Fake tensors cost nothing."""
NEAR = 64
"""Sizes up to this far from a letter's read as that letter plus or minus a number."""
SMALLEST = min(SIZES.values()) - NEAR
UNKNOWN = "?"
"""The text for a size that depends on values."""
LISTED = 4
"""Longer tuples are abbreviated to their first two entries and their length."""

LAYOUT = "layout"
"""The key under which :func:`propagate` notes the layout of a node in its ``meta``."""

_MISSING = object()


def propagate(program: ProgramView, *, inside: bool = True) -> None:
    """Write ``node.meta["layout"]`` for the step graph and for every module that it calls.

    A module that is called several times keeps the layouts of its first call. A module that is not called yet is run
    alone if its inputs are known, and left as it is otherwise. Nothing is computed and no tensor is copied.

    Without ``inside``, only the nodes of the step graph are written, and modules that other programs share stay shared.

    Raises:
        VerificationError: an op refuses its arguments; names the graph, the node and the op's reason.
    """
    shape_env = ShapeEnv()
    with FakeTensorMode(shape_env=shape_env, static_shapes=True), torch.no_grad():
        run = _Run(program)
        try:
            run.step()
            for name in program.modules.keys() - run.written.keys() if inside else ():
                run.uncalled(name)
        finally:
            run.write(inside)  # of a wrong graph, what is known up to the node that fails


def describe(value: Any) -> str:
    """The string for a value: a (fake) tensor or its layout, a number, None, or a tuple of these."""
    if isinstance(value, Tensor | Layout):
        return f"{dtype_name(value.dtype)}[{', '.join(map(size_name, value.shape))}]"
    if isinstance(value, int | torch.SymInt) and not isinstance(value, bool):
        return size_name(value)
    if isinstance(value, tuple | list):
        parts = [describe(v) for v in (value if len(value) <= LISTED else value[:2])]
        if len(value) > LISTED:
            parts.append(f"... {len(value)} in all")
        return f"({', '.join(parts)}{',' if len(value) == 1 else ''})"
    return str(value)


def describe_bytes(value: Any) -> str:
    """The bytes of the tensors in a value: a sum of products, equal letters joined; ``0`` if there is no tensor."""
    sums: dict[str, int] = {}
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, Tensor | Layout):
            number, letters = _factors(tensor)
            sums[letters] = sums.get(letters, 0) + number
    terms = [f"{number}*{letters}" if letters else str(number) for letters, number in sums.items() if number]
    return " + ".join(terms) or "0"


def _factors(tensor: Tensor | Layout) -> tuple[int, str]:
    """The bytes of a tensor as a number and the product of letters that it is to be multiplied with."""
    number, letters = tensor.dtype.itemsize, list[str]()
    for size in tensor.shape:
        times, factors = _product(size) if isinstance(size, int) else (1, [UNKNOWN])
        number, letters = number * times, letters + factors
    return number, "*".join(letters)


def shape_of(node: fx.Node) -> str | None:
    """The string for the value of a node; None if :func:`propagate` has not come to it."""
    return describe(node.meta[LAYOUT]) if LAYOUT in node.meta else None


def items_of(node: fx.Node) -> tuple[str, ...] | None:
    """The strings for the items of a node whose value is a tuple; None for other nodes, and for outputs of graphs."""
    value = node.meta.get(LAYOUT)
    return tuple(map(describe, value)) if isinstance(value, tuple | list) and node.op != "output" else None


def columns_beyond(node: fx.Node, rows: str, columns: str) -> int | None:
    """How many more columns than the letter ``columns`` says the tensor ``[rows, columns + n, ...]`` of a node has.

    None if the value of the node is no such tensor.
    """
    layout = node.meta.get(LAYOUT)
    if not isinstance(layout, Layout) or len(layout.shape) < 2 or layout.shape[0] != SIZES[rows]:
        return None
    more = layout.shape[1] - SIZES[columns] if isinstance(layout.shape[1], int) else -1
    return more if 0 <= more <= NEAR else None


def dtype_name(dtype: torch.dtype) -> str:
    """``i64`` for int64, ``bf16``, ``f32``, ``bool`` and so on."""
    name = str(dtype).removeprefix("torch.")
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    return name


def size_name(size: object) -> str:
    """A size in letters, such as ``B``, ``T+1`` or ``2*B*T``; numbers that come from no letter stay numbers."""
    if not isinstance(size, int):
        return UNKNOWN
    number, factors = _product(size)
    if number == 1 and len(factors) == 1:
        return factors[0].strip("()")
    return "*".join([str(number)] * (number != 1 or not factors) + factors)


def _product(size: int) -> tuple[int, list[str]]:
    """A size as a number, and the letters and the sums in parentheses that it is multiplied with."""
    factors = []
    for letter, value in SIZES.items():
        while size and size % value == 0:
            factors.append(letter)
            size //= value
    if size >= SMALLEST and (sum_ := _sum(size)):
        size, term = sum_
        factors.append(f"({term})")
    return size, factors


def _sum(size: int) -> tuple[int, str] | None:
    """``size`` as a number of times a letter plus or minus a few, or a letter and a few times another; else None."""
    for offset in sorted(range(-NEAR, NEAR + 1), key=abs):
        for letter, value in SIZES.items():
            if size % (value + offset) == 0:
                return size // (value + offset), f"{letter}{offset:+d}"
    for letter, value in SIZES.items():
        for other, step in SIZES.items():
            times, rest = divmod(size - value, step)
            if not rest and 0 < times <= NEAR:
                return 1, f"{letter}+{other}" if times == 1 else f"{letter}+{times}*{other}"
    return None


class _Run:
    """One propagation, and what the nodes of every graph gave in its first call.

    A value is a fake tensor, or its layout where no call has needed the tensor yet.
    """

    def __init__(self, program: ProgramView) -> None:
        self.program = program
        self.written: dict[str, Sequence[Any]] = {}
        self._fingerprints: dict[str, Hashable] = {}

    def step(self) -> None:
        """The step graph, and through it the modules."""
        inputs = {name: self.input(spec) for name, spec in self.program.inputs.items()}
        self.graph("step", self.program.graph, None, inputs)

    def uncalled(self, name: str) -> None:
        """A module that nothing calls yet, if its inputs are known."""
        placeholders = self.program.modules.unchanged[name].graph.find_nodes(op="placeholder")
        known = {node.name: self._known(node) for node in placeholders}
        if all(value is not _MISSING for value in known.values()):
            self._module(name, (), known)

    def write(self, inside: bool) -> None:
        """Write what is known of every node. A module whose nodes say it already may be shared, and stays so."""
        for name, written in self.written.items():
            if name != "step" and not inside:
                continue
            graph = self.program.graph if name == "step" else self.program.modules.unchanged[name].graph
            known = (node.meta.get(LAYOUT, _MISSING) for node in graph.nodes)
            if all(map(operator.eq, known, written)):
                continue
            graph = self.program.graph if name == "step" else self.program.modules[name].graph
            for node, layout in zip(graph.nodes, written, strict=False):
                node.meta[LAYOUT] = layout

    def input(self, spec: Input) -> Any:
        """The layouts of an input of the step graph."""
        device = self.program.target.device
        return map_input(lambda buffer: _layout(buffer, device), spec)

    def graph(
        self, name: str, graph: fx.Graph, root: fx.GraphModule | None, inputs: dict[str, Any]
    ) -> tuple[Any, list[Any]]:
        """Run one graph; returns what it returns, and the layouts of the values of all nodes."""
        values: dict[fx.Node, Any] = {}
        written: list[Any] = []
        self.written.setdefault(name, written)
        for node in graph.nodes:
            try:
                values[node] = value = self._node(node, values, root, inputs)
            except VerificationError:
                raise
            except Exception as error:
                text = f"{name}: {node.name} = {called(node)} fails: {_reason(error)}"
                raise VerificationError(text, name) from error
            written.append(pytree.tree_map(_noted, value))
        return value, written

    def _node(
        self, node: fx.Node, values: dict[fx.Node, Any], root: fx.GraphModule | None, inputs: dict[str, Any]
    ) -> Any:
        """The value of one node."""
        if node.op == "placeholder":
            return inputs[node.name]
        if node.op == "get_attr":
            value = get_attribute(root, str(node.target)) if root is not None else None
            return Layout.of(value) if isinstance(value, Tensor) else value
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.op == "call_method":
            self_, *rest = allocated(args)
            return getattr(self_, str(node.target))(*rest, **allocated(kwargs))
        if node.op == "call_module" and root is not None:
            return root.get_submodule(str(node.target))(*allocated(args), **allocated(kwargs))
        if node.op == "call_module":
            return self._module(str(node.target), args, kwargs)
        assert callable(node.target)
        picks = node.target is operator.getitem and isinstance(args[0], tuple | list)
        return node.target(*args) if picks else self._function(node, values, checked=root is None)

    def _function(self, node: fx.Node, values: dict[fx.Node, Any], *, checked: bool) -> Any:
        """A call of a function, which is known if an equal one was run before.

        If it is ``checked``, as in the step graph, it must have said what it writes.
        """
        assert callable(node.target)
        inputs = node.all_input_nodes
        key = call_key(node, [values[read] for read in inputs], checked)
        if key is not None and (known := CALLS.find(key)) is not None:
            _check_written(node, [inputs[index] for index in known.noted])
            return known.result
        for read in inputs:
            values[read] = allocated(values[read])
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        watched = [values[read] for read in inputs] if checked else []
        before = list(map(_versions, watched))
        result = node.target(*args, **kwargs)
        written = tuple(index for index, value in enumerate(watched) if _versions(value) != before[index])
        _check_written(node, [inputs[index] for index in written])
        if key is not None:
            remember(CALLS, key, result, written, watched)
        return result

    def _module(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A call of a module of the program, whose result is known if an equal one was run before."""
        module = self.program.modules.unchanged[name]
        names = [node.name for node in module.graph.nodes if node.op == "placeholder"]
        inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        if name not in self._fingerprints:
            self._fingerprints[name] = fingerprint(module)
        key = self._fingerprints[name], str(layouts_of(inputs))
        if (known := MODULES.find(key)) is not None:
            self.written.setdefault(name, known.noted)
            return known.result
        result, written = self.graph(name, module.graph, module, allocated(inputs))
        remember(MODULES, key, result, written)
        return result

    def _known(self, node: fx.Node) -> Any:
        """A value for the input of a module that is not called yet: it is state that was described, or was traced."""
        if "state" in node.meta:
            return self.input(node.meta["state"])
        traced = node.meta.get("val")
        buffer = _buffer(traced) if isinstance(traced, Tensor) else None
        return self.input(buffer) if buffer is not None else _MISSING


@functools.lru_cache(maxsize=4096)
def _layout(buffer: Buffer, device: torch.device) -> Layout:
    """The layout of a buffer for :data:`SIZES`. Inside of a ``FakeTensorMode``, no memory is taken for it."""
    return Layout.of(buffer.allocate(SIZES, device))


def _noted(value: Any) -> Any:
    """The note of a tensor or a number. It holds nothing symbolic, which would belong to one propagation."""
    value = Layout.of(value) if isinstance(value, Tensor) else value
    if isinstance(value, Layout):
        return replace(value, shape=tuple(map(_noted, value.shape)), stride=tuple(map(_noted, value.stride)))
    return UNKNOWN if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool) else value


def _buffer(traced: Tensor) -> Buffer | None:
    """The buffer a traced input stands for: its dynamic sizes are the batch, then the rows; None if it has more."""
    letters = iter(("B", "T"))
    shape = [n if isinstance(n, int) else next(letters, None) for n in traced.shape]
    known = tuple(n for n in shape if n is not None)
    return per_call(*known, dtype=traced.dtype) if len(known) == len(shape) else None


def _versions(value: Any) -> list[int]:
    """How often each tensor in ``value`` has been written in place."""
    return [leaf._version for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _check_written(node: fx.Node, written: Sequence[fx.Node]) -> None:
    """Functions must say what they write: state that is not known to be written would not be kept."""
    unsaid = [value.name for value in written if value not in written_by(node, WRITES)]
    if unsaid:
        raise VerificationError(
            f"step: {node.name} = {called(node)} writes {unsaid[0]} in place without saying so, so that it would not "
            f"be kept; mark {called(node)} with @writes (specgraph.kernels.step) and the name of that parameter."
        )


def called(node: fx.Node) -> str:
    """The name of the function that a node calls, for messages."""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.target)
    return str(node.target) if isinstance(node.target, OpOverload) else str(target)


def _reason(error: Exception) -> str:
    """The first line of an op's message, with sizes in letters, as the end of a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"\d{6,}", lambda match: size_name(int(match[0])), line.strip().rstrip(".")) + "."
