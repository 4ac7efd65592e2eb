"""The sentences that say what the functions of a graph do."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from specgraph.ir.summaries import summaries
from specgraph.kernels import step
from tests.decoding import compiled
from tests.models import make_model


def _nodes(*functions: Any) -> list[fx.Node]:
    graph = fx.Graph()
    return [graph.call_function(function) for function in functions]


def test_a_function_and_an_op_are_said_by_their_first_sentence() -> None:
    def own() -> None:
        """Does :func:`this` and ``that``,
        for :class:`~some.where.Somebody`. And more.

        Nobody reads this.
        """

    def silent() -> None:
        pass

    found = summaries(_nodes(own, silent, torch.ops.specgraph.linear.default, step.draft_tokens))
    assert found.pop("own") == "Does this and that, for Somebody."
    assert found.pop("specgraph.linear.default").startswith("activation(x @ weight.T * scale + bias) + residual")
    assert found == {"draft_tokens": "The tokens of window [B, T] that follow the last accepted one: [B, T - 1]."}


def test_functions_of_torch_and_of_python_are_left_out() -> None:
    assert summaries(_nodes(torch.add, torch.ops.aten.mul.Tensor, operator.getitem, len)) == {}


def test_every_function_of_ours_in_a_step_has_a_sentence() -> None:
    decoder = compiled(make_model("llama", num_hidden_layers=1), "ngram", 2)
    for program in decoder.stages.values():
        called = {node.target for node in program.graph.nodes if node.op == "call_function"}
        ours = {target for target in called if "specgraph" in f"{target} {getattr(target, '__module__', '')}"}
        assert ours and len(summaries(program.graph.nodes)) == len(ours)
