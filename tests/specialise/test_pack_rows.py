"""Packed rows of modules: where the nodes stand, what stays a grid, and that nothing else changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.shapes import SIZES
from specgraph.ir.state import allocate
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.passes.insert_processors import InsertProcessors
from specgraph.passes.pipeline import apply
from specgraph.specialise.index_rows import IndexRows
from specgraph.specialise.pack_rows import CAPACITY, PackRows, extra_columns
from tests.compiler.test_pipeline import body
from tests.drafters.test_matrix import DRAFTERS, VOCAB, decoder, heads_exported_once
from tests.passes.test_insert_processors import built

__all__ = ["heads_exported_once"]
WHOLE = (InsertProcessors(), IndexRows())
COUNTS = (5, 0, 1, 7, 3)
"""The real rows of each sequence; the second is inactive, and the last one decodes."""


def packed(program: Program) -> tuple[Program, Any]:
    report, after = apply(PackRows(), program)
    verify_program(after)
    return after, report.result


def test_the_target_runs_packed_rows_and_only_needed_ones_are_taken_from_them() -> None:
    program, result = packed(built("none", *WHOLE))
    lines = [
        line for line in body(program) if any(word in line for word in ("pack", "cu_seqlens", "places", "lm_head"))
    ]
    assert lines == [
        "cu_seqlens, source = packed_places(gathered_num_rows, capacity, window)",
        "packed_window = pack_rows(window, source)",
        "packed_positions = pack_rows(positions, source)",
        "packed_slots = pack_rows(slots, source, fill=-1)",
        "hidden = self.target_packed(tokens=packed_window, positions=packed_positions, "
        "block_table=gathered_block_table, caches=target_caches, slots=packed_slots, cu_seqlens=cu_seqlens)",
        "needed = needed_packed_rows(hidden, cu_seqlens, window, gathered_num_forced, 1)",
        "logits = self.lm_head(needed)",
    ]
    assert result.notes == ("1 calls run packed rows",) and not result.near_misses
    assert "target" not in program.modules and "max_length" not in str(program.modules["target_packed"].graph)


def test_what_a_draft_model_reads_is_packed_with_room_for_a_row_more_of_each() -> None:
    program, result = packed(built("draft_model", *WHOLE))
    places = [node.kwargs for node in calls(program.graph, step.packed_places)]
    assert result.matches == 2 and places == [{}, {"limited": True}, {"extra": 1}]
    # A chained call drafts for one row of each sequence, which is no grid.
    assert [n.target for n in program.graph.find_nodes(op="call_module") if "draft" in n.target] == [
        "draft_packed", "draft", "draft",
    ]  # fmt: skip


def halved(logits: Tensor) -> Tensor:
    """Somebody's own function, of which a pass does not know what it does."""
    return logits / 2


def test_a_head_that_may_look_at_several_rows_runs_the_grid() -> None:
    def mixed(program: Program, function: Any, *more: Any) -> Program:
        copy = program.copy()
        graph = copy.modules["lm_head"].graph
        (result,) = graph.output_node().args
        with graph.inserting_before(graph.output_node()):
            graph.output_node().args = (graph.call_function(function, (result, *more)),)
        copy.modules["lm_head"].recompile()
        return copy

    for changed, word in (
        (mixed(built("draft_model", *WHOLE), halved), "halved"),
        (mixed(built("draft_model", *WHOLE), torch.ops.aten.view.default, [SIZES["b"], 4, 101]), "view"),
    ):
        report, after = apply(PackRows(), changed)
        (miss,) = report.result.near_misses
        assert miss.where == "logits" and word in miss.reason
        (head,) = after.graph.find_nodes(op="call_module", target="lm_head")
        assert head.args[0].target is step.needed_packed_rows


def test_a_grid_is_told_by_its_columns() -> None:
    program = built("draft_model", *WHOLE)
    verify_program(program)
    extras = {node.name: extra_columns(node) for node in program.graph.nodes}
    assert extras["window"] == 0 and extras["start"] is None and extras["position_1"] is None
    assert 1 in extras.values()


def outcome(
    program: Program, state: dict[str, Any], window: Tensor, capacity: int | None
) -> tuple[Any, dict[str, Any]]:
    """What a step gives for active sequences, and the state behind it."""
    own = {name: _clone(value) for name, value in state.items() if capacity is not None or name != CAPACITY}
    if capacity is not None:
        own[CAPACITY] = torch.empty(capacity, dtype=torch.int64)
    with torch.no_grad():
        results = program.step()(window=window, **own)
    own.pop(CAPACITY, None)
    return [part for part in results if isinstance(part, Tensor)], own


def _clone(value: Any) -> Any:
    return tuple(map(_clone, value)) if isinstance(value, tuple) else value.clone()


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_step_over_prompts_and_drafts_is_the_same(name: str) -> None:
    """Prompts of all lengths, and a sequence that verifies drafts, some of them wrong."""
    program = decoder(name, None, "llama", "block", 3, max_length=64).stages["index_rows"]
    batch, width = len(COUNTS), max(COUNTS)
    state = allocate(program, {"B": batch, "M": 8, "N": 8 * batch, "S": 64, "E": 1, "R": 1}, torch.device("cpu"))
    state["block_table"].copy_(torch.randperm(8 * batch, generator=torch.Generator().manual_seed(1)).view(batch, 8))
    state["max_length"].fill_(30)
    state["eos_ids"].fill_(-1)
    state["seeds"].copy_(torch.arange(batch))
    state["temperature"].copy_(torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0]))
    state["num_rows"].copy_(torch.tensor(COUNTS))
    state["num_forced"].copy_(torch.tensor([5, 0, 0, 6, 0]))
    window = torch.randint(0, VOCAB, (batch, width), generator=torch.Generator().manual_seed(2))
    after, result = packed(program)
    assert result.matches and not result.near_misses
    expected, kept = outcome(program, state, window, None)
    for spare in (0, 9):
        found, own = outcome(after, state, window, sum(COUNTS) + spare)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        for key, value in kept.items():
            _close(own[key], value, key)


@pytest.mark.parametrize("name", ["pard", "peagle"])
def test_a_sequence_makes_as_many_drafts_as_it_is_to_have(name: str) -> None:
    """They are the first ones of those that it would make, and take no more rows than that."""
    program = decoder(name, None, "llama", "strict", 3, max_length=64).stages["index_rows"]
    wanted = torch.tensor([0, 2, 1, 3])
    state = allocate(program, {"B": 4, "M": 8, "N": 32, "S": 64, "E": 1, "R": 1}, torch.device("cpu"))
    state["block_table"].copy_(torch.arange(32).view(4, 8))
    state["max_length"].fill_(30)
    state["eos_ids"].fill_(-1)
    state["num_rows"].fill_(1)
    window = torch.randint(0, VOCAB, (4, 4), generator=torch.Generator().manual_seed(2))
    after, _ = packed(program)
    _, every = outcome(after, state, window, 12)
    _, own = outcome(after, state | {"max_drafts": wanted}, window, 6)
    assert every["num_rows"].tolist() == [4] * 4 and own["num_rows"].tolist() == (wanted + 1).tolist()
    real = torch.arange(4) <= wanted.unsqueeze(1)
    assert torch.equal(own["next_window"][real], every["next_window"][real])
    for cache, other in zip(own["draft_caches"], every["draft_caches"], strict=True):
        _close(cache[0][::8], other[0][::8], "the first page of each sequence")


def _close(found: Any, expected: Any, key: str) -> None:
    if isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            _close(a, b, key)
    else:
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9, msg=lambda text: f"{key}: {text}")


def _with(program: Program, change: Callable[[fx.Graph], None]) -> Program:
    copy = program.copy()
    change(copy.modules["target"].graph)
    copy.modules["target"].recompile()
    return copy


def test_a_module_that_reads_its_row_counts_for_something_else_runs_the_grid() -> None:
    def read(graph: fx.Graph) -> None:
        rows = next(node for node in graph.nodes if node.name == "num_rows")
        (result,) = graph.output_node().args
        with graph.inserting_before(graph.output_node()):
            some = graph.call_function(torch.ops.aten.sum.default, (rows,))
            graph.output_node().args = (graph.call_function(torch.ops.aten.add.Tensor, (result, some)),)

    program, result = packed(_with(built("none", *WHOLE), read))
    assert [(miss.where, miss.reason) for miss in result.near_misses] == [
        ("hidden", "it reads num_rows for something else than slots")
    ]
    assert "target" in program.modules and not result.matches


def changed(value: Callable[[fx.Graph, fx.Node], fx.Node]) -> Callable[[fx.Graph], None]:
    """Puts what ``value`` makes of a module's result in its place."""

    def change(graph: fx.Graph) -> None:
        output = graph.output_node()
        with graph.inserting_before(output):
            output.args = (value(graph, output.args[0]),)  # type: ignore[arg-type]

    return change


def backwards(values: Tensor) -> Tensor:
    return values.flip(1)


def per_sequence(graph: fx.Graph, result: fx.Node) -> fx.Node:
    table = next(node for node in graph.nodes if node.name == "block_table")
    pages = graph.call_function(torch.ops.aten.sum.dim_IntList, (table, [1]))
    return graph.call_function(torch.ops.aten.add.Tensor, (result, graph.call_function(
        torch.ops.aten.view.default, (pages, [-1, 1, 1]))))  # fmt: skip


def in_its_module(graph: fx.Graph, result: fx.Node) -> fx.Node:
    tokens = next(node for node in graph.nodes if node.name == "tokens")
    table = next(node for node in graph.nodes if node.name == "block_table")
    joined = graph.call_function(torch.ops.aten.cat.default, ([tokens, table], 1))
    first = graph.call_function(torch.ops.aten.slice.Tensor, (joined, 1, 0, 1))
    return graph.call_function(torch.ops.aten.add.Tensor, (result, graph.call_function(
        torch.ops.aten.unsqueeze.default, (first, 2))))  # fmt: skip


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (lambda graph, result: graph.call_function(backwards, (result,)), "backwards, which may look at several rows"),
        (in_its_module, "target_packed: .* fails: "),
        (per_sequence, "step: needed = .* fails: values must be"),
    ],
)
def test_a_module_that_looks_at_several_rows_runs_the_grid(value: Any, reason: str) -> None:
    program, result = packed(_with(built("none", *WHOLE), changed(value)))
    (miss,) = result.near_misses[:1]
    assert miss.where == "hidden" and re.search(reason, miss.reason)
    assert "target" in program.modules and "target_packed" not in program.modules and not result.matches


def test_where_shapes_are_not_known_every_module_runs_the_grid() -> None:
    program = built("none", *WHOLE)
    (advance,) = calls(program.graph, step.advance_)
    advance.target = lambda next_window, *others: next_window.zero_()
    report, after = apply(PackRows(), program)
    (miss,) = report.result.near_misses
    assert re.search("its shapes are not known: .* in place without saying so", miss.reason)
    assert CAPACITY in after.inputs and "target" in after.modules


def test_rows_that_are_counted_by_an_unknown_function_run_as_a_grid() -> None:
    program = built("draft_model", *WHOLE)
    every = program.graph.find_nodes(op="call_module", target="draft")
    (call,) = (node for node in every if extra_columns(node.kwargs["tokens"]) is not None)
    with program.graph.inserting_before(call):
        more = program.graph.call_function(torch.add, (call.kwargs["num_rows"], 1))
    more.name = "more"
    call.update_kwarg("num_rows", more)
    _, result = packed(program)
    assert [(miss.where, miss.reason) for miss in result.near_misses] == [
        (call.name, "more may be more rows than there is room for")
    ]
