"""RMS norms whose result is only multiplied by a function of a gate become ``specgraph::gated_rms_norm``.

Recurrent layers do so: ``norm(x) * silu(gate)``, with the product in float32. The gate may be a copy of columns of a
merged projection, brought into the shape of the norm; the op reads those columns where they are.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import fx

from specgraph.ir.graphs import calls
from specgraph.passes.common.patterns import (
    CASTS,
    RMS_NORM,
    aten,
    before_cast,
    dtype_of,
    only_user,
    producer,
    replace_by,
    same_sizes,
    value_of,
)

GATED = torch.ops.specgraph.gated_rms_norm.default
_ACTIVATIONS: dict[Any, str] = {aten.silu.default: "silu", aten.sigmoid.default: "sigmoid"}
_COPIES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.clone.default)


def gate_norms(graph: fx.Graph, chosen: Counter[str]) -> None:
    """Join the norms of one graph with their gates, and count them in ``chosen``."""
    for norm in list(calls(graph, RMS_NORM)):
        found = _gated(norm)
        if found is not None:
            end, gate, activation = found
            options = {**norm.kwargs, "activation": activation}
            replace_by(end, GATED, (*norm.args, gate), options, "gated_rms_norm")
            chosen["gated_rms_norm"] += 1


def _gated(norm: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """The last node of a gated norm, its gate, and the function of the gate; None if the norm is not gated."""
    value, product = value_of(norm), producer(_user(norm), aten.mul.Tensor)
    if value is None or product is None:
        return None
    opened = [arg for arg in product.args if isinstance(arg, fx.Node) and before_cast(arg) is not norm]
    function = producer(opened[0], *_ACTIVATIONS) if len(opened) == 1 else None
    if function is None or only_user(function) is None:
        return None
    gate, exact = before_cast(function.args[0]), torch.promote_types(value.dtype, torch.float32)
    end = product if dtype_of(product) == value.dtype else only_user(product)
    fits = dtype_of(gate) == value.dtype and dtype_of(function) == dtype_of(product) == exact
    if not fits or end is None or dtype_of(end) != value.dtype or not (end is product or end.target in CASTS):
        return None
    same = same_sizes(gate.meta["val"].shape, value.shape) and same_sizes(end.meta["val"].shape, value.shape)
    return (end, _copied(gate), _ACTIVATIONS[function.target]) if same else None


def _user(norm: fx.Node) -> fx.Node | None:
    """The one node that reads a norm, or reads nothing but its conversion."""
    user = only_user(norm)
    return only_user(user) if user is not None and user.target in CASTS else user


def _copied(gate: fx.Node) -> fx.Node:
    """The source of which ``gate`` is a view or a copy, as long as its rows stay as wide, and so in the same order."""
    width: Any = gate.meta["val"].shape[-1:]
    while gate.target in _COPIES:
        source: Any = gate.args[0]
        value = value_of(source)
        if value is None or not same_sizes(value.shape[-1:], width):
            break
        gate = source
    return gate
