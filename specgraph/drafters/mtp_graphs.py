"""The graphs of MTP modules: three parts are exported for each, and joined where the step graph is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torch import fx, nn
from transformers import PreTrainedModel

from specgraph.drafters.mtp_module import MtpModule, MtpOptions
from specgraph.drafters.parts import Part, copy_inputs, export_parts, output_for
from specgraph.frontend.tracing import TracedModel
from specgraph.ir.graphs import copy_module, new_module, replace_tensors, splice
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
    return replace(target, name="MtpModule", num_layers=1, num_caches=None, max_positions=None)


def export(module: MtpModule, model: PreTrainedModel, traced: TracedModel, name: str) -> dict[str, fx.GraphModule]:
    """The three parts of a module as graphs.

    The vocabulary projection is the target's traced one, with all that the target does to logits, such as a soft cap;
    a projection of the module's own takes the place of the target's tensor.
    """
    weight, inputs = module.projection.weight, ("tokens", "positions", "hidden")
    # The names are the same for all modules, so that those which differ in their tensors alone are exported once.
    parts = {"body": Part(module.forward, inputs), "norm": Part(module.normed, ("hidden",))}
    exported = export_parts(module, weight, {"hidden": len(weight)}, parts, traced.info.rope)
    head, own = copy_module(traced.head), cast(Any, model.get_output_embeddings())
    replace_tensors(head, {id(own.weight): module.lm_head.weight})
    return dict(zip(part_names(name), (*exported.values(), head), strict=True))


def join(
    body: fx.GraphModule, norm: fx.GraphModule, head: fx.GraphModule, feeds: str | None, options: MtpOptions, name: str
) -> fx.GraphModule:
    """One graph of the three parts of a module: rows to the logits of one row, and to what the next call reads."""
    graph, root = fx.Graph(), nn.Module()
    mapping = copy_inputs(graph, body)
    index = graph.placeholder("row")
    rows = splice(graph, root, body, mapping)
    normed_rows = feeds == "rows" and options.fed_hidden == "final_norm"
    if normed_rows:
        rows = output_for(graph, root, norm, rows)
    last = graph.call_function(functions.take_rows, (rows, index, 1))
    normed = last if normed_rows else output_for(graph, root, norm, last)
    logits = output_for(graph, root, head, normed)
    fed = {None: None, "rows": rows, "row": normed if options.fed_hidden == "final_norm" else last}[feeds]
    graph.output(logits if fed is None else (logits, fed))
    return new_module(root, graph, name)
