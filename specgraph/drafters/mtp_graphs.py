"""The graphs of MTP modules: three parts are exported for each, and joined where the step graph is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel

from specgraph.drafters.mtp_module import MtpModule, MtpOptions
from specgraph.frontend.tracing import TracedModel, export_hooked
from specgraph.ir.graphs import export_module, new_module, replace_tensors, splice
from specgraph.ir.model_info import ModelInfo
from specgraph.kernels import step as functions


def module_name(index: int) -> str:
    """The name of a module in the program."""
    return f"mtp_{index}"


def part_names(name: str) -> tuple[str, str, str]:
    """The names of the traced parts of a module: its block, its final norm, and its vocabulary projection."""
    return name, f"{name}_norm", f"{name}_head"


def module_info(target: ModelInfo) -> ModelInfo:
    """Facts about a module of a target."""
    return replace(target, name="MtpModule", num_layers=1, max_positions=None)


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
    graphs = {
        body: export_hooked(_Body(module), (tokens, positions, hidden), dict.fromkeys(inputs, dims), body, "module."),
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
