"""The graphs of MTP modules: three parts are exported for each, and joined where the step graph is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from specgraph.drafters.mtp_module import MtpModule, MtpOptions
from specgraph.frontend.tracing import TracedModel, export_hooked
from specgraph.ir.exporting import export_module
from specgraph.ir.graphs import new_module, replace_tensors, splice
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels import step as functions

Graphs: TypeAlias = dict[str, fx.GraphModule]


def module_name(index: int) -> str:
    """The name of a module in the program."""
    return f"mtp_{index}"


def part_names(name: str) -> tuple[str, str, str]:
    """The names of the traced parts of a module: its block, its final norm, and its vocabulary projection."""
    return name, f"{name}_norm", f"{name}_head"


def module_info(target: ModelInfo) -> ModelInfo:
    """Facts about a module of a target."""
    return replace(target, name="MtpModule", num_layers=1, num_caches=None, max_positions=None)


class _Body(nn.Module):
    """What is exported of a module. The names of arguments become those of the graph's inputs."""

    def __init__(self, module: MtpModule) -> None:
        super().__init__()
        self.module = module

    def forward(self, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        rows: Tensor = self.module(tokens, positions, hidden)
        return rows


class _Norm(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor) -> Tensor:
        normed: Tensor = self.norm(hidden)
        return normed


def export_all(modules: Sequence[MtpModule], model: PreTrainedModel, traced: TracedModel) -> Graphs:
    """The parts of all modules as graphs.

    An export takes seconds. So a module that differs from the first one in its tensors alone gets copies of the first
    one's graphs, with its own tensors.
    """
    first = modules[0]
    graphs = {**export(first, model, traced, module_name(0))}
    for index, module in enumerate(modules[1:], 1):
        tensors = counterparts(first, module)
        made = None if tensors is None else _with_tensors(graphs, tensors, index)
        graphs |= made or export(module, model, traced, module_name(index))
    return graphs


def counterparts(first: MtpModule, other: MtpModule) -> dict[int, Tensor] | None:
    """For the ``id`` of every tensor of a module, the tensor that another module has in its place.

    None if the graphs of the modules differ: their layers do, or one shares a tensor where the other has two, or rotary
    positions depend on the number of the module.
    """
    if first.options != other.options or first.options.rotary_position == "token" or repr(first) != repr(other):
        return None
    if first.block.config.to_dict() != other.block.config.to_dict():
        return None
    found: dict[int, Tensor] = {}
    for (name, own), (same, tensor) in zip(_tensors(first), _tensors(other), strict=True):
        if name != same or own.shape != tensor.shape or found.setdefault(id(own), tensor) is not tensor:
            return None
    return found


def _tensors(module: MtpModule) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer by its name, also those that several names share."""
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def _with_tensors(
    graphs: dict[str, fx.GraphModule], tensors: dict[int, Tensor], index: int
) -> dict[str, fx.GraphModule]:
    """Copies of the parts of module 0 for module ``index``, with the tensors that :func:`counterparts` gives."""
    parts = zip(part_names(module_name(0)), part_names(module_name(index)), strict=True)
    copies = {name: _copy(graphs[first], name) for first, name in parts}
    for copied in copies.values():
        replace_tensors(copied, tensors)
    return copies


def export(module: MtpModule, model: PreTrainedModel, traced: TracedModel, name: str) -> dict[str, fx.GraphModule]:
    """The three parts of a module as graphs.

    The vocabulary projection is the target's traced one, with all that the target does to logits, such as a soft cap;
    a projection of the module's own takes the place of the target's tensor.
    """
    weight = module.projection.weight
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=1)
    dims = {0: batch, 1: length}
    tokens = torch.zeros(3, 5, dtype=torch.int64, device=weight.device)
    positions = torch.arange(5, device=weight.device).expand(3, 5).contiguous()
    hidden = weight.new_zeros(3, 5, len(weight))
    body, norm, head = part_names(name)
    inputs = ("tokens", "positions", "hidden")
    rows, rope = dict.fromkeys(inputs, dims), traced.info.rope
    graphs = {
        body: export_hooked(_Body(module), (tokens, positions, hidden), rows, body, "module.", rope),
        norm: export_module(_Norm(module.norm), (hidden,), {"hidden": dims}, norm),
        head: _copy(traced.head, head),
    }
    own: Any = model.get_output_embeddings()
    replace_tensors(graphs[head], {id(own.weight): module.lm_head.weight})
    return graphs


def _copy(module: fx.GraphModule, name: str) -> fx.GraphModule:
    """A copy whose tensors can be replaced without changing the original."""
    graph, root = fx.Graph(), nn.Module()
    mapping = {n: graph.placeholder(n.name) for n in module.graph.nodes if n.op == "placeholder"}
    for node, copied in mapping.items():
        copied.meta = dict(node.meta)
    graph.output(splice(graph, root, module, mapping))
    return new_module(root, graph, name)


def join(
    body: fx.GraphModule, norm: fx.GraphModule, head: fx.GraphModule, feeds: str | None, options: MtpOptions, name: str
) -> fx.GraphModule:
    """One graph of the three parts of a module: rows to the logits of one row, and to what the next call reads."""
    graph, root = fx.Graph(), nn.Module()
    mapping = {n: graph.placeholder(n.name) for n in body.graph.nodes if n.op == "placeholder"}
    for traced, node in mapping.items():
        node.meta.update({key: traced.meta[key] for key in ("val", "state", "shared") if key in traced.meta})
    index = graph.placeholder("row")
    rows = splice(graph, root, body, mapping)
    normed_rows = feeds == "rows" and options.fed_hidden == "final_norm"
    if normed_rows:
        rows = _append(graph, root, norm, rows)
    last = graph.call_function(functions.take_rows, (rows, index, 1))
    normed = last if normed_rows else _append(graph, root, norm, last)
    logits = _append(graph, root, head, normed)
    fed = {None: None, "rows": rows, "row": normed if options.fed_hidden == "final_norm" else last}[feeds]
    graph.output(logits if fed is None else (logits, fed))
    return new_module(root, graph, name)


def _append(graph: fx.Graph, root: nn.Module, module: fx.GraphModule, value: fx.Node) -> fx.Node:
    """Copy a graph of one input to the end of ``graph``; returns its result for ``value``."""
    (source,) = (n for n in module.graph.nodes if n.op == "placeholder")
    result: fx.Node = splice(graph, root, module, {source: value})
    return result
