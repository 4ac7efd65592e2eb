"""Whatever a traced module computes on another device than the model's own moves there.

Some models build the frequencies of their rotary embedding in every forward, on the CPU, and copy them to the GPU. A
CUDA graph cannot hold such a copy. What depends on no input is always the same, so it is computed once, with the same
operations on the same device, and becomes a tensor of the module. What is made of it runs on the model's device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from specgraph.ir.graphs import get_attribute, is_no_op, remove_dead_code, set_attribute


@torch.no_grad()
def move_foreign_nodes(module: fx.GraphModule, device: torch.device) -> int:
    """Let everything run on ``device``; returns how many constants became attributes of ``module``."""
    foreign = [node for node in module.graph.nodes if _device(node) not in (None, device.type)]
    values: dict[fx.Node, Tensor] = {}
    for node in foreign:
        _evaluate(module, node, values)
    read = [node for node in foreign if node in values and any(user not in values for user in node.users)]
    for index, node in enumerate(read):
        _fold(module, node, f"folded_constant_{index}", values[node].to(device))
    for node in foreign:
        if node not in values:
            move_node(node, device)
    for node in [node for node in module.graph.nodes if is_no_op(node)]:
        node.replace_all_uses_with(node.all_input_nodes[0])
    if foreign:
        remove_dead_code(module)
    return len(read)


def _device(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    return value.device.type if isinstance(value, Tensor) else None


def _evaluate(module: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Tensor]) -> None:
    """Compute a foreign node into ``values``, unless it depends on an input or on a weight of the model."""
    if node.op == "get_attr":
        values[node] = get_attribute(module, str(node.target))
    elif node.op == "call_function" and all(value in values for value in node.all_input_nodes):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        values[node] = node.target(*args, **kwargs)  # type: ignore[operator]


def _fold(module: fx.GraphModule, node: fx.Node, name: str, value: Tensor) -> None:
    """Put a constant in the place of a node."""
    set_attribute(module, name, value)
    with module.graph.inserting_before(node):
        attribute = module.graph.get_attr(name)
    attribute.meta = {**node.meta, "val": torch.empty_like(node.meta["val"], device=value.device)}
    node.replace_all_uses_with(attribute)


def move_node(node: fx.Node, device: torch.device) -> None:
    """Let a node that is said to run elsewhere run on ``device``, where its values are, if tracing has noted them."""
    given: Any = node.args, node.kwargs
    node.args, node.kwargs = fx.node.map_aggregate(given, lambda arg: device if isinstance(arg, torch.device) else arg)

    def there(value: Any) -> Any:
        return torch.empty_like(value, device=device) if isinstance(value, Tensor) else value

    if "val" in node.meta:
        node.meta["val"] = fx.node.map_aggregate(node.meta["val"], there)
