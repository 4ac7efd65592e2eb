"""The nodes of all stages in one table, so that a node that no pass has touched is in the page once."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specgraph.explore.dump_files import Dump, Node
from specgraph.explore.sizes import evaluate

_LAYER = re.compile(r"\.(\d+)\.")


def node_table(dump: Dump, sizes: Mapping[str, int]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The table of distinct nodes; and for each stage its graphs, as places in the table.

    A graph also has its ``layers``: for each node the number of the layer that it belongs to, or None.
    """
    places: dict[Node, int] = {}
    graphs: dict[str, Any] = {}
    for stage in dump.stages:
        graphs[stage.name] = {}
        for name, nodes in stage.graphs.items():
            own = [places.setdefault(node, len(places)) for node in nodes]
            graphs[stage.name][name] = {"nodes": own, "layers": layers(nodes)}
    return [_record(node, sizes) for node in places], graphs


def layers(nodes: Sequence[Node]) -> list[int | None]:
    """The layer of every node: the one whose weight it reads, or else that of the node before it that reads one.

    A weight is of a layer if its dotted name has a number, as ``model.layers.3.mlp.up_proj.weight`` has. A module of
    which the weights have no numbers, or all the same one, is not divided.
    """
    weights = {node.name: _LAYER.search(node.calls) for node in nodes if node.op == "get_attr"}
    of_weight = {name: int(match[1]) for name, match in weights.items() if match}
    if len(set(of_weight.values())) < 2:
        return [None] * len(nodes)
    found: list[int | None] = []
    current: int | None = None
    for node in nodes:
        if node.op in ("get_attr", "placeholder", "output"):
            found.append(of_weight.get(node.name))
            continue
        read = [of_weight[name] for name in node.inputs if name in of_weight]
        current = max(read if current is None else [*read, current], default=None)
        found.append(current)
    return found


def _record(node: Node, sizes: Mapping[str, int]) -> dict[str, Any]:
    record = asdict(node) | {"size": evaluate(node.bytes, sizes)}
    return {key: value for key, value in record.items() if value is not None}
