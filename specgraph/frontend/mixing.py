"""Checks that rows of a traced model influence each other only through ops that will get a cache or a state.

Everything else in the graph must compute each row from that row alone, because a step runs only the new ones. So one
row of the embeddings becomes NaN, and the graph is run with zeros as the results of those ops: then no other row may
become NaN. This finds recurrences and convolutions that a model writes out by itself, wherever they stand.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, fx

from specgraph.errors import UnsupportedModelError

_BATCH, _ROWS = 3, 5
_AT = (1, 2)
"""The place of the row that becomes NaN; one is before it, and one behind."""


def check_mixing(body: fx.GraphModule, known: Container[Any], name: str) -> None:
    """Refuse a graph of tokens and positions in which other ops than the ``known`` ones look at several rows.

    Raises:
        UnsupportedModelError: names the layer and the class of it in which rows influence each other first.
    """
    device = next((p.device for p in body.parameters()), torch.device("cpu"))
    tokens = torch.zeros(_BATCH, _ROWS, dtype=torch.int64, device=device)
    positions = torch.arange(_ROWS, device=device).expand(_BATCH, -1)
    with torch.no_grad():
        try:
            _Probe(body, known, name).run(tokens, positions)
        except UnsupportedModelError:
            # A model that gives NaN by itself says nothing here; the self-check says where it comes from.
            if not _gives_nan(_Probe(body, known, name, at=None), tokens, positions):
                raise


def _gives_nan(probe: _Probe, tokens: Tensor, positions: Tensor) -> bool:
    """Whether there is NaN although no row was made so."""
    try:
        probe.run(tokens, positions)
    except UnsupportedModelError:
        return True
    return False


class _Probe(fx.Interpreter):
    """Runs a graph in which the row ``at`` of ``hs[0]`` is NaN, if one is named."""

    def __init__(
        self, body: fx.GraphModule, known: Container[Any], name: str, at: tuple[int, int] | None = _AT
    ) -> None:
        super().__init__(body)
        self._known, self._name, self._at, self.extra_traceback = known, name, at, False

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if not isinstance(value, Tensor) or node.op in ("placeholder", "get_attr"):
            return value
        if node.target in self._known:
            return torch.zeros_like(value)
        if node.meta.get("hidden_state") == 0 and self._at is not None:
            value = value.clone()
            value[self._at] = torch.nan
        elif value.is_floating_point() and value.shape[:2] == (_BATCH, _ROWS):
            broken = value.isnan().flatten(2).any(2)
            broken[_AT] = False  # the row that may be NaN
            if bool(broken.any()):
                raise self._error(node)
        return value

    def _error(self, node: fx.Node) -> UnsupportedModelError:
        stack = [*node.meta.get("nn_module_stack", {}).values()]
        path, kind = stack[-1] if stack else ("its forward", "")
        path = re.sub(r"\.slice\([^)]*\)", "", path)  # a model may run a slice of its layers
        kind = str(getattr(kind, "__name__", kind)).rpartition(".")[2]
        return UnsupportedModelError(
            f"{self._name} mixes tokens outside of its attention, in {path} ({kind}), by operations of its own. That "
            "needs a recurrent state, which specgraph keeps for the functions that it knows alone, so the model is "
            "refused."
        )
