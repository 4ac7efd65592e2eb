"""Exports the parts of a head, each of which is a method of its module, as graphs, and joins graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from specgraph.frontend.tracing import export_hooked
from specgraph.ir.graphs import splice
from specgraph.ir.model_info import Rope

TARGET_FEATURES = "features"
"""The name of the hidden states of the target that a part takes as positional arguments."""


@dataclass(frozen=True)
class Part:
    """One part of a head.

    Attributes:
        run: a method of the head. The names of its arguments become those of the graph's inputs.
        inputs: the arguments that it gets, of which :data:`TARGET_FEATURES` may be there several times.
        rows: the number of rows of every input; None for any number.
        ids: those of the inputs with a width that hold int64.
    """

    run: Callable[..., Any]
    inputs: tuple[str, ...]
    rows: int | None = None
    ids: tuple[str, ...] = ()


class _Module(nn.Module):
    """A part as a module, since ``torch.export`` takes nothing else."""

    def __init__(self, head: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.head = head
        self.forward = run


def export_parts(
    head: nn.Module, like: Tensor, widths: Mapping[str, int], parts: Mapping[str, Part], rope: Rope | None = None
) -> dict[str, fx.GraphModule]:
    """The graphs of the parts of a head, by their names.

    Args:
        head: the module that the parts are methods of.
        like: a tensor with the dtype and the device of the head.
        widths: of every input ``[B, rows, width]``; the other ones are int64 ``[B, rows]``.
        parts: the parts by the names of their graphs.
        rope: the rotary embeddings of the target, if the head has these.
    """
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    graphs = {}
    for name, part in parts.items():
        dims = {0: batch, 1: length} if part.rows is None else {0: batch}
        # Each argument is a tensor of its own, because export would merge inputs that are the same tensor.
        given = tuple(_example(like, part.rows or 5, widths.get(key), key in part.ids) for key in part.inputs)
        shapes = {key: (dims,) * part.inputs.count(key) if key == TARGET_FEATURES else dims for key in part.inputs}
        graphs[name] = export_hooked(_Module(head, part.run), given, shapes, name, "head.", rope)
    return graphs


def _example(like: Tensor, rows: int, width: int | None, ids: bool) -> Tensor:
    if width is None:
        return torch.arange(rows, device=like.device).expand(3, rows).contiguous()
    return like.new_zeros(3, rows, width, dtype=torch.int64 if ids else None)


def copy_inputs(graph: fx.Graph, module: fx.GraphModule) -> dict[fx.Node, fx.Node]:
    """Copy a module's placeholders to ``graph``, with what a pass has noted about the state among them."""
    mapping = {}
    for node in module.graph.find_nodes(op="placeholder"):
        mapping[node] = copied = graph.placeholder(node.name)
        copied.meta.update({key: node.meta[key] for key in ("val", "state", "shared") if key in node.meta})
    return mapping


def output_for(graph: fx.Graph, root: nn.Module, module: fx.GraphModule, value: fx.Node) -> Any:
    """Copy a module of one input to the end of ``graph``; returns its output for ``value``."""
    (source,) = module.graph.find_nodes(op="placeholder")
    return splice(graph, root, module, {source: value})
