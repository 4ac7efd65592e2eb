"""A cache of the results of modules and functions, so that a graph is run on fake tensors once.

The program is verified after every pass, and most passes leave most modules as they are. Decoders of models of one
architecture have equal graphs, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, fx

from specgraph.compat import pytree
from specgraph.ir.graphs import get_attribute

T = TypeVar("T")


class Recent(Generic[T]):
    """The values of the ``most`` keys that were used last. Any thread may ask."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, key: Hashable) -> T | None:
        """The value of a key; None if there is none."""
        with self._lock:
            if key in self.values:
                self.values.move_to_end(key)
            return self.values.get(key)

    def keep(self, key: Hashable, value: T) -> None:
        """Remember a value, and forget the one that was not used for the longest time if there are too many."""
        with self._lock:
            self.values[key] = value
            while len(self.values) > self.most:
                self.values.popitem(last=False)


@dataclass(frozen=True)
class Layout:
    """A tensor without its values. Its sizes are numbers, unless they depend on values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: Tensor) -> Layout:
        """That of a tensor."""
        return Layout(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)

    def allocate(self) -> Tensor:
        """A tensor of this layout; a fake one inside of a ``FakeTensorMode``."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Known(NamedTuple):
    """A module or a function that was run.

    Attributes:
        result: what it returned, with a :class:`Layout` in place of each tensor.
        noted: of a module, the layout of the value of every node, in order; of a function, which of the nodes that it
            reads it wrote in place, by their places among these (none in a module).
    """

    result: Any
    noted: Sequence[Any]


MODULES = Recent[Known](512)
"""One of 500 nodes takes about 100 kB."""
CALLS = Recent[Known](8192)


def allocated(values: Any) -> Any:
    """Values with a tensor in place of each :class:`Layout`."""
    return pytree.tree_map_only(Layout, Layout.allocate, values)


def layouts_of(values: Any) -> Any:
    """Values with a :class:`Layout` in place of each tensor."""
    return pytree.tree_map_only(Tensor, Layout.of, values)


def fingerprint(module: fx.GraphModule) -> Hashable:
    """Equal for graphs that compute the same, node by node, from tensors of equal layouts."""
    return tuple(
        (node.op, node.name, node.target, repr(node.args), repr(node.kwargs), _attribute(module, node))
        for node in module.graph.nodes
    )


def remember(known: Recent[Known], key: Hashable, result: Any, noted: Sequence[Any], read: Sequence[Any] = ()) -> None:
    """Keep what a module or a function returned, unless a size depends on values.

    Nothing is kept either if the result has memory of ``read``: a write into that would be one into the arguments.
    """
    layouts = layouts_of(result)
    if is_fixed(layouts) and not storages(result) & storages(read):
        known.keep(key, Known(layouts, noted))


def is_fixed(layouts: Any) -> bool:
    """Whether no size and no number depends on values."""
    leaves = pytree.tree_leaves(layouts)
    sizes = [size for leaf in leaves if isinstance(leaf, Layout) for size in (*leaf.shape, *leaf.stride)]
    return not any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in (*leaves, *sizes))


def call_key(node: fx.Node, read: Sequence[Any], checked: bool) -> Hashable:
    """Equal for calls of one function with arguments of equal layouts, or None if a size depends on values.

    ``read`` are the values of the nodes among the arguments. Whether what a call writes is ``checked`` tells those
    apart of which it is known.
    """
    layouts = layouts_of(read)
    if not is_fixed(layouts):
        return None
    names = {input_: f"%{index}" for index, input_ in enumerate(node.all_input_nodes)}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), names.__getitem__)
    return node.target, repr(args), repr(kwargs), repr(layouts), checked


def storages(values: Any) -> set[int]:
    """The memory that the tensors among the values have."""
    return {leaf.untyped_storage()._cdata for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)}


def _attribute(module: fx.GraphModule, node: fx.Node) -> Hashable:
    """The layout of the tensor that a node gets from the module; what else it gets, as text."""
    if node.op != "get_attr":
        return None
    value = get_attribute(module, str(node.target))
    return Layout.of(value) if isinstance(value, Tensor) else repr(value)
