"""Copies of a program share its modules until one of them asks for a module to change it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import fx

from specgraph.errors import PassError
from specgraph.ir.graphs import copy_module
from specgraph.ir.modules import Modules
from specgraph.ir.program import Program
from specgraph.ir.shapes import propagate, shape_of
from specgraph.ir.verifier import verify_program
from specgraph.kernels.state import per_call
from specgraph.passes.base import Pass, PassResult
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import every_pass, everything, first


def modules() -> Modules:
    """Two modules that copies share."""
    made = Modules(first("draft_model").modules.unchanged)
    made.share()
    return made


def unchanged(program: Program) -> Mapping[str, fx.GraphModule]:
    return program.modules.unchanged


def test_only_what_is_asked_for_is_copied_and_only_once() -> None:
    given = modules()
    copy = given.copy()
    own = copy["target"]
    assert own is not given.unchanged["target"] and copy["target"] is own is copy.unchanged["target"]
    assert copy.unchanged["lm_head"] is given.unchanged["lm_head"]
    assert dict(copy) == {**copy.unchanged}
    assert not any(copy.unchanged[name] is given.unchanged[name] for name in given)


def test_a_copy_of_what_is_not_shared_is_a_copy_at_once() -> None:
    """Somebody may hold the module and go on with changing it."""
    given = modules()
    held = given["target"]
    copy = given.copy()
    assert given["target"] is held and copy.unchanged["target"] is not held
    given.share()
    assert given.copy().unchanged["target"] is held and given["target"] is not held


def test_they_are_a_mapping() -> None:
    given = modules()
    copy = given.copy()
    new = copy_module(given.unchanged["lm_head"])
    copy["new"] = new
    copy.update(newer=copy.pop("lm_head"))
    del copy["target"]
    assert copy["new"] is new and [*copy] == [*copy.keys()] and "lm_head" not in copy and len(copy) == len(given)
    assert "target" in given and "lm_head" in given and "newer" not in given
    with pytest.raises(KeyError):
        copy["target"]
    assert [name for name, _ in given.where(lambda graph: graph is given.unchanged["target"].graph)] == ["target"]
    with pytest.raises(TypeError):
        given.unchanged["target"] = new  # type: ignore[index]


def test_stages_share_what_no_pass_in_between_has_changed() -> None:
    stages, _ = run_passes(first("draft_model"), every_pass())
    programs = [unchanged(stage) for stage in stages.values()]
    assert len({id(program["lm_head"]) for program in programs}) == 1
    assert len({id(program["target"]) for program in programs}) == 2  # insert_kv_cache alone changes it


def test_the_verifier_copies_nothing_that_has_the_same_shapes_as_before() -> None:
    stages, _ = run_passes(first(), every_pass(), [lambda pass_, before, after, report: verify_program(after)])
    for stage in stages.values():
        again = stage.copy()
        propagate(again)
        assert dict(unchanged(again)) == dict(unchanged(stage)) or stage is stages["trace"]


def test_other_shapes_are_those_of_the_copy_alone() -> None:
    program = first()
    propagate(program)
    program.modules.share()
    other = program.copy()
    other.inputs["window"] = per_call("B", 3)
    propagate(other)

    def shape(of: Program) -> str:
        return str(shape_of(unchanged(of)["target"].graph.output_node()))

    assert (shape(program), shape(other)) == ("f64[B, T, 32]", "f64[B, 3, 32]")


class _HalfWay(Pass):
    """Changes a module and gives up."""

    name = "half_way"

    def apply(self, program: Program) -> PassResult:
        graph = program.modules["target"].graph
        with graph.inserting_before(graph.output_node()):
            graph.call_function(torch.neg, (next(iter(graph.nodes)),))
        raise PassError("half-way")


def test_a_pass_that_fails_leaves_nothing_behind() -> None:
    program = first()
    before, held = everything(program.copy()), dict(unchanged(program))
    with pytest.raises(PassError, match="half-way"):
        run_passes(program, [_HalfWay()])
    assert dict(unchanged(program)) == held and everything(program.copy()) == before
