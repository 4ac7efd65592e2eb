"""Queries and keys that several heads of a gated delta rule share are read as they are, and not once for each head."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from specgraph.frontend.recurrent import REPEAT, take_groups
from specgraph.ir.exporting import export_module
from specgraph.ir.graphs import calls

RULE = torch.ops.specgraph.gated_delta_rule.default


class Repeated(nn.Module):
    """A gated delta rule, before which two heads of queries and of keys are repeated as transformers did until 5.22."""

    def __init__(self, *repeats: tuple[int, int]) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, x: Tensor) -> Tensor:
        given = [y.repeat_interleave(*repeat) for y, repeat in zip((x, x + 1), self.repeats, strict=True)]
        v = torch.cat([x, x * 2], 2)
        out: Tensor = torch.ops.specgraph.gated_delta_rule(*given, v, -v.abs().sum(-1), v.sigmoid().mean(-1), scale=0.5)
        return out


@pytest.mark.parametrize(
    ("repeats", "heads"),
    [
        (((2, 2), (2, 2)), (2, 2)),
        (((2, -2), (2, -2)), (2, 2)),
        (((1, 2), (1, 2)), (2, 2)),
        (((2, 2), (2, -2)), (4, 4)),  # not written alike, which no model does
    ],
)
def test_what_repeats_for_every_head_is_left_out(repeats: tuple[tuple[int, int], ...], heads: tuple[int, int]) -> None:
    x = torch.randn(1, 5, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    module = Repeated(*repeats)
    graph = export_module(module, (x,), {"x": {1: torch.export.Dim("rows", min=1)}}, "toy")
    take_groups(graph.graph)
    graph.recompile()
    (rule,) = calls(graph.graph, RULE)
    assert tuple(node.meta["val"].shape[2] for node in rule.args[:2]) == heads
    assert any(calls(graph.graph, REPEAT)) == (heads == (4, 4)) and torch.equal(graph(x), module(x))


@pytest.mark.parametrize("other", [None, (3, 2), (2, 1)])
def test_queries_that_keys_do_not_match_stay(other: tuple[int, int] | None) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    q = graph.call_function(REPEAT, (x, 2, 2))
    k = x if other is None else graph.call_function(REPEAT, (x, *other))
    rule = graph.call_function(RULE, (q, k, x, x, x), {"scale": 1.0})
    graph.output(rule)
    take_groups(graph)
    assert rule.args[:2] == (q, k)
