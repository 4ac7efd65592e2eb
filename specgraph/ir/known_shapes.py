"""What modules return for which inputs, so that a graph that was run on fake tensors need not be run again.

The program is verified after every pass, and most passes leave most modules as they are. Decoders of models of one
architecture have equal graphs, too.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from specgraph.ir.graphs import get_attribute

MOST = 512
"""So many modules are remembered, those used last. One of 500 nodes takes about 100 kB."""


class Layout(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def allocate(self) -> Tensor:
        """A tensor of this layout; a fake one inside of a ``FakeTensorMode``."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Known(NamedTuple):
    """A module that was run.

    Attributes:
        result: what it returned, with a :class:`Layout` in place of each tensor.
        meta: what every node's ``meta`` was given, in order.
    """

    result: Any
    meta: list[dict[str, Any]]

    def returned(self) -> Any:
        """What it would return again."""
        return pytree.tree_map_only(Layout, Layout.allocate, self.result, is_leaf=lambda leaf: isinstance(leaf, Layout))


_known: OrderedDict[Hashable, Known] = OrderedDict()
_lock = threading.Lock()


def fingerprint(module: fx.GraphModule) -> Hashable:
    """Equal for graphs that compute the same, node by node, from tensors of equal layouts."""
    return tuple(
        (node.op, node.name, node.target, repr(node.args), repr(node.kwargs), _attribute(module, node))
        for node in module.graph.nodes
    )


def find(key: Hashable) -> Known | None:
    """What is known for a key, if anything is."""
    with _lock:
        if key in _known:
            _known.move_to_end(key)
        return _known.get(key)


def remember(key: Hashable, result: Any, meta: list[dict[str, Any]]) -> None:
    """Keep what a module returned, unless a size depends on values."""
    leaves, tree = pytree.tree_flatten(result)
    layouts = [_layout(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    plain = all(isinstance(size, int) for layout in layouts if isinstance(layout, Layout) for size in layout.shape)
    if not plain or any(isinstance(leaf, torch.SymInt) for leaf in leaves):
        return
    with _lock:
        _known[key] = Known(pytree.tree_unflatten(layouts, tree), meta)
        while len(_known) > MOST:
            _known.popitem(last=False)


def _layout(value: Tensor) -> Layout:
    return Layout(tuple(value.shape), tuple(value.stride()), value.dtype, value.device)


def _attribute(module: fx.GraphModule, node: fx.Node) -> Hashable:
    """The layout of the tensor that a node gets from the module; what else it gets, as text."""
    if node.op != "get_attr":
        return None
    value = get_attribute(module, str(node.target))
    return _layout(value) if isinstance(value, Tensor) else repr(value)
