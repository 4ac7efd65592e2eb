"""Constants that a model computes on another device than its own become tensors of the traced module.

Some models build the frequencies of their rotary embedding in every forward, on the CPU, and copy them to the GPU. A
CUDA graph cannot hold such a copy, and the result is always the same: it is computed once, with the same operations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from specgraph.ir.graphs import get_attribute, remove_dead_code, set_attribute


@torch.no_grad()
def fold_foreign_constants(module: fx.GraphModule, device: torch.device) -> int:
    """Replace what is copied to ``device`` and depends on no input by an attribute; returns how many there were.

    Constants that are computed on ``device`` stay as they are.
    """
    values: dict[fx.Node, Any] = {}
    arriving = [node for node in module.graph.nodes if _arrives(node, device)]
    folded = [node for node in arriving if _evaluate(module, node, device, values)]
    for index, node in enumerate(folded):
        name = f"folded_constant_{index}"
        set_attribute(module, name, values[node])
        with module.graph.inserting_before(node):
            attribute = module.graph.get_attr(name)
        attribute.meta = dict(node.meta)
        node.replace_all_uses_with(attribute)
    if folded:
        remove_dead_code(module)
    return len(folded)


def _arrives(node: fx.Node, device: torch.device) -> bool:
    """Whether ``node`` is a tensor on ``device`` that is made of one that is elsewhere."""
    inputs = [_device(value) for value in node.all_input_nodes]
    return _device(node) == device.type and any(kind not in (None, device.type) for kind in inputs)


def _device(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, Tensor) else None


def _evaluate(module: fx.GraphModule, node: fx.Node, device: torch.device, values: dict[fx.Node, Any]) -> bool:
    """Compute ``node`` and what it reads into ``values``; False if that depends on an input or on a weight."""
    if node in values:
        return True
    if node.op == "get_attr" and _device(node) != device.type:
        values[node] = get_attribute(module, str(node.target))
        return True
    if node.op != "call_function":
        return False
    if not all(_evaluate(module, value, device, values) for value in node.all_input_nodes):
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
    values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return True
