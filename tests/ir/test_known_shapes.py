"""Modules that were run on fake tensors are not run again, and what is remembered is what they would give."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, fx

from specgraph.errors import VerificationError
from specgraph.ir import known_shapes, shapes
from specgraph.ir.graphs import calls
from specgraph.ir.program import Program
from specgraph.ir.shapes import items_of, shape_of
from specgraph.ir.verifier import verify_program
from tests.compiler.test_pipeline import every_pass, first, last

ADD = torch.ops.aten.add.Tensor


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kept in (known_shapes.MODULES, known_shapes.CALLS):
        monkeypatch.setattr(kept, "values", known_shapes.OrderedDict())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the graphs that are run."""
    names: list[str] = []
    run = shapes._Run.graph

    def watched(self: shapes._Run, name: str, *args: object, **options: object) -> object:
        names.append(name)
        return run(self, name, *args, **options)

    monkeypatch.setattr(shapes._Run, "graph", watched)
    yield names


def described(program: Program) -> dict[str, list[tuple[str, object, object]]]:
    graphs = {"step": program.graph, **{name: module.graph for name, module in program.modules.items()}}
    return {n: [(v.name, shape_of(v), items_of(v)) for v in g.nodes] for n, g in graphs.items()}


def test_the_second_time_nothing_but_the_step_is_run_and_every_node_is_described_as_before(runs: list[str]) -> None:
    program = last(first("draft_model"), every_pass()[:5])
    verify_program(program)
    expected = described(program)
    assert {"target", "draft", "lm_head"} <= {*runs}
    again = program.copy()
    for module in again.modules.values():
        for node in module.graph.nodes:
            node.meta.pop("layout", None)
    runs.clear()
    verify_program(again)
    assert set(runs) <= {"step", *(n for n in again.modules if not list(calls(again.graph, n)))}
    assert described(again) == expected


def test_a_module_that_was_changed_is_run_again(runs: list[str]) -> None:
    program = last(first(), every_pass()[:3])
    verify_program(program)
    changed = program.copy()
    graph = changed.modules["lm_head"].graph
    (result,) = graph.output_node().args
    assert isinstance(result, fx.Node)
    with graph.inserting_after(result):
        graph.output_node().args = (graph.call_function(ADD, (result, 1)),)
    runs.clear()
    verify_program(changed)
    assert "lm_head" in runs and "target" not in runs


def test_a_module_whose_weight_has_another_shape_is_run_again() -> None:
    program = last(first(), every_pass()[:3])
    verify_program(program)
    changed = program.copy()
    module = changed.modules["lm_head"]
    node = next(node for node in module.graph.nodes if node.op == "get_attr")
    path, _, leaf = str(node.target).rpartition(".")
    weight = module.get_parameter(str(node.target))
    setattr(module.get_submodule(path), leaf, torch.nn.Parameter(weight[:, :-1].detach().clone()))
    with pytest.raises(VerificationError, match="lm_head"):
        verify_program(changed)


def test_what_fails_is_not_remembered() -> None:
    program = last(first(), every_pass()[:3]).copy()
    graph = program.modules["lm_head"].graph
    (result,) = graph.output_node().args
    with graph.inserting_after(result):
        graph.output_node().args = (graph.call_function(torch.ops.aten.view.default, (result, [3, 5])),)
    for _ in range(2):
        with pytest.raises(VerificationError, match=r"lm_head: .*view"):
            verify_program(program)


def test_only_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_shapes.MODULES, "most", 2)
    for key in "abc":
        known_shapes.remember(known_shapes.MODULES, key, (torch.zeros(2, 3).t(), None, 4), [])
    assert [known_shapes.MODULES.find(key) is not None for key in "abc"] == [False, True, True]
    found = known_shapes.MODULES.find("c")
    assert found is not None
    tensor, *others = known_shapes.allocated(found.result)
    assert others == [None, 4] and tensor.shape == (3, 2) and tensor.stride() == (1, 3)


def doubled(x: Tensor, by: int) -> Tensor:
    """A function of a step graph that counts how often it runs."""
    CALLS.append(by)
    return x.expand(by, *x.shape) + 1


def same(x: Tensor) -> Tensor:
    """A function that returns memory of its argument."""
    CALLS.append(0)
    return x[:]


def overwrites(x: Tensor) -> Tensor:
    """A function that writes its argument and does not say so."""
    return x.add_(1)


CALLS: list[int] = []


def with_call(function: object, *args: object) -> Program:
    """A program whose step calls a function of its window at the end."""
    program = last(first(), every_pass()[:3]).copy()
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(function, program.input("start"), *args, name="added")  # type: ignore[arg-type]
    return program


@pytest.mark.parametrize(("other", "runs_again"), [((doubled, 2), False), ((doubled, 3), True)])
def test_a_function_runs_again_for_other_arguments_alone(other: tuple[object, ...], runs_again: bool) -> None:
    verify_program(with_call(doubled, 2))
    CALLS.clear()
    again = with_call(*other)
    verify_program(again)
    (added,) = calls(again.graph, doubled)
    assert [other[1]] * runs_again == CALLS and shape_of(added) == f"i64[{other[1]}, B]"


def test_what_shares_memory_with_an_argument_is_not_remembered() -> None:
    verify_program(with_call(same))
    CALLS.clear()
    verify_program(with_call(same))
    assert CALLS == [0]


def test_a_write_that_is_not_declared_is_refused_every_time() -> None:
    for _ in range(2):
        with pytest.raises(VerificationError, match="overwrites writes start in place without saying so"):
            verify_program(with_call(overwrites))
