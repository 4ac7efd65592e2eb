"""``target(...) -> hidden`` becomes ``target(...) -> (hidden, hs[i], hs[j], ...)`` for the layers a drafter reads.

``hs[k]`` is the residual stream that enters layer ``k``. ``hs[0]`` are the embeddings. With ``L`` layers, ``hs[L]`` is
taken after the final norm, and ``hs[L + 1]`` before it. Nothing is computed twice, because the nodes exist already and
only become outputs. A stream that a model keeps in another dtype than its weights', as Mamba does, is converted to it,
since that is the dtype of heads.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.ir.program import Program
from specgraph.passes.base import Pass, PassResult


@dataclass(frozen=True)
class ExposeFeatures(Pass, requires={"traced", "target_only"}):
    """Options: ``layers``, the indices ``k`` of ``hs[k]``; None takes those that the drafter reads."""

    layers: tuple[int, ...] | None = None

    def apply(self, program: Program) -> PassResult:
        """Add the outputs to ``target`` and one step node ``hs_k`` for each."""
        layers = tuple(program.drafter.features if self.layers is None else self.layers)
        if not layers:
            return PassResult(0, notes=("the drafter reads no hidden states",))
        target = program.modules["target"]
        found = {n.meta["hidden_state"]: n for n in target.graph.nodes if "hidden_state" in n.meta}
        missing = [k for k in layers if k not in found]
        if missing:
            raise PassError(f"expose_features: hs{missing} does not exist; this model has hs[0] to hs[{max(found)}].")
        output = target.graph.output_node()
        (hidden,) = output.args
        with target.graph.inserting_before(output):
            features = [_in_dtype(found[k], program.target.dtype) for k in layers]
        output.args = ((hidden, *features),)
        target.recompile()
        self._unpack(program, layers)
        return PassResult(len(layers), expected=len(layers))

    def _unpack(self, program: Program, layers: tuple[int, ...]) -> None:
        call = program.one("target")
        with program.graph.inserting_after(call):
            hidden = program.call(operator.getitem, call, 0, role="hidden")
            call.name, hidden.name = "target_outputs", "hidden"
            call.replace_all_uses_with(hidden, lambda user: user is not hidden)
        for index in reversed(range(len(layers))):
            with program.graph.inserting_after(hidden):
                program.call(operator.getitem, call, index + 1, name=f"hs_{layers[index]}", role="feature")


def _in_dtype(node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """The node, or one behind it, where its graph inserts, that converts it to ``dtype``."""
    if node.meta["val"].dtype == dtype:
        return node
    converted = node.graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    converted.meta["val"] = node.meta["val"].to(dtype)
    return converted
