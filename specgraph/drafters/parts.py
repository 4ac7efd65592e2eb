"""Exports the parts of a head, each of which is a method of its module, as graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from specgraph.frontend.tracing import export_hooked

FEATURES = "features"
"""The name of the hidden states of the target that a part takes as positional arguments."""


@dataclass(frozen=True)
class Part:
    """One part of a head.

    Attributes:
        run: a method of the head. The names of its arguments become those of the graph's inputs.
        inputs: the arguments that it gets, of which :data:`FEATURES` may be there several times.
        rows: the number of rows of every input; None for any number.
    """

    run: Callable[..., Any]
    inputs: tuple[str, ...]
    rows: int | None = None


class _Module(nn.Module):
    """A part as a module, since ``torch.export`` takes nothing else."""

    def __init__(self, head: nn.Module, run: Callable[..., Any]) -> None:
        super().__init__()
        self.head = head
        self.forward = run


def export_parts(
    head: nn.Module, like: Tensor, widths: Mapping[str, int], parts: Mapping[str, Part]
) -> dict[str, fx.GraphModule]:
    """The graphs of the parts of a head, by their names.

    Args:
        head: the module that the parts are methods of.
        like: a tensor with the dtype and the device of the head.
        widths: of every input ``[B, rows, width]``; the other ones are int64 ``[B, rows]``.
        parts: the parts by the names of their graphs.
    """
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    graphs = {}
    for name, part in parts.items():
        dims = {0: batch, 1: length} if part.rows is None else {0: batch}
        # Each argument is a tensor of its own, because export would merge inputs that are the same tensor.
        given = tuple(_example(like, part.rows or 5, widths.get(key)) for key in part.inputs)
        shapes = {key: (dims,) * part.inputs.count(key) if key == FEATURES else dims for key in part.inputs}
        graphs[name] = export_hooked(_Module(head, part.run), given, shapes, name, "head.")
    return graphs


def _example(like: Tensor, rows: int, width: int | None) -> Tensor:
    if width is None:
        return torch.arange(rows, device=like.device).expand(3, rows).contiguous()
    return like.new_zeros(3, rows, width)
