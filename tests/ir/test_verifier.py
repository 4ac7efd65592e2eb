"""Every invariant of a program, broken once: the message names the graph and the node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from specgraph.errors import VerificationError
from specgraph.ir.graphs import calls, new_module
from specgraph.ir.program import Program
from specgraph.ir.verifier import verify_program
from specgraph.kernels import step
from specgraph.kernels.state import Buffer
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.pipeline import run_passes
from tests.compiler.test_pipeline import every_pass, first, last, toy

aten = torch.ops.aten


@pytest.mark.parametrize("rule", ["strict", "block"])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft_model"])
def test_every_stage_of_the_pipeline_is_well_formed(drafter: str, rule: str):
    for program in run_passes(first(drafter), every_pass(rule))[0].values():
        verify_program(program)
        program.step()
        verify_program(program)  # the graph belongs to a module now


def refused(program: Program, message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify_program(program)


def test_a_module_that_does_not_exist():
    program = toy()
    program.call("scael", program.input("x"), name="other")
    refused(program, r"^step: other calls 'scael', which is not a module of the program\.$")


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (lambda kwargs: {"tokens": kwargs["tokens"]}, r"\['tokens'\]"),
        (lambda kwargs: {**kwargs, "caches": kwargs["tokens"]}, r"\['tokens', 'positions', 'caches'\]"),
        (lambda kwargs: {"tokens": kwargs["tokens"], "position": kwargs["positions"]}, r"\['tokens', 'position'\]"),
    ],
    ids=["missing", "too many", "misspelt"],
)
def test_a_module_call_that_does_not_fill_the_inputs(change: Callable[[dict], dict], given: str):
    program = first()
    call = program.one("target")
    call.kwargs = change(call.kwargs)
    refused(program, rf"^step: hidden passes {given} to 'target', which takes \['tokens', 'positions'\]\.$")


def test_the_cache_without_its_state():
    program = last(first(), [InsertKVCache()])
    call = program.one("target")
    call.kwargs = {name: value for name, value in call.kwargs.items() if name != "max_length"}
    refused(program, r"^step: hidden passes .* to 'target', which takes \[.*'max_length', 'caches'\]\.$")


def test_a_module_call_with_more_arguments_than_inputs():
    program = first()
    call = program.one("logits")
    call.args = (*call.args, program.input("start"))
    refused(program, "^step: logits passes .* to 'lm_head', which takes")


def test_a_tensor_of_the_step_graphs_own():
    program = toy()
    with program.graph.inserting_before(program.graph.output_node()):
        program.graph.get_attr("weight").name = "own"
    refused(program, r"^step: own is a get_attr; state and weights enter as inputs and modules\.$")


def test_a_method_call_in_the_step_graph():
    program = toy()
    with program.graph.inserting_before(program.graph.output_node()):
        program.graph.call_method("clone", (program.input("x"),))
    refused(program, "^step: clone is a call_method; ")


def test_an_input_that_is_not_described_and_one_that_does_not_exist():
    program = toy()
    program.inputs["y"] = Buffer(("B",))
    refused(program, r"^step: its inputs are \['x'\], but \['x', 'y'\] are described\.$")
    program.inputs.clear()
    refused(program, r"^step: its inputs are \['x'\], but \[\] are described\.$")


def test_a_module_that_calls_a_module():
    program = toy()
    root, graph = nn.Module(), fx.Graph()
    root.add_module("inner", nn.Identity())
    graph.output(graph.call_module("inner", (graph.placeholder("x"),)))
    program.modules["outer"] = new_module(root, graph, "outer")
    refused(program, r"^outer: inner calls a module; tensor-level graphs are flat\.$")


def test_a_node_that_reads_a_later_one():
    program = first()
    positions, hidden = program.one("positions"), program.one("target")
    hidden.append(positions)
    refused(program, "^step: Argument 'positions' of Node 'hidden' was used before it has been defined")


def test_a_weight_that_a_module_does_not_have():
    program = toy()
    del program.modules["scale"].weight
    refused(program, "^scale: .*weight")


@pytest.mark.parametrize("written", ["start", "num_rows", "num_forced", "next_window"])
def test_reading_state_after_it_was_written(written: str):
    program = last(first("draft_model"), every_pass())
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(operator.add, program.input(written), 1, name="late")
    refused(
        program, rf"^step: late reads {written} after advance has written it; move it up, or mark .* final=False\) if"
    )


def test_reading_draft_logits_after_a_proposal_wrote_them():
    program = last(first("draft_model"), every_pass("block"))
    (verify,) = calls(program.graph, torch.ops.specgraph.verify.default)
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(operator.add, program.input("draft_logits"), 1, name="late")
    refused(
        program,
        r"^step: late reads draft_logits after token_\d has written it; move it up, or mark .* final=False\) if",
    )
    assert program.input("draft_logits") in verify.args


def test_a_read_moved_behind_a_write():
    program = last(first("ngram"), every_pass())
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(operator.add, program.input("num_rows"), 1, name="late")
    refused(program, r"^step: late reads num_rows after advance has written it; move it up, or mark .* final=False\)")


def test_a_write_that_no_function_admits_to():
    def count_(count: torch.Tensor, more: torch.Tensor) -> None:
        count[1:] += more[1:]

    program = last(first("ngram"), every_pass())
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(count_, program.placeholder("count", Buffer(("B",))), program.one("num_emitted"), name="counted")
    refused(program, r"^step: counted = count_ writes count in place .* not be kept; mark count_ with @writes \(")
    step.writes("count")(count_)
    verify_program(program)


def test_reading_the_window_after_the_next_one_was_written():
    program = last(first("ngram"), every_pass())
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(operator.add, program.input("window"), 1, name="late")
    refused(program, "^step: late reads window after advance has written it")


def test_reading_a_write_only_recorded_in_history_is_allowed():
    program = last(first("ngram"), every_pass())
    (recorded,) = calls(program.graph, step.record_tokens_)
    assert any(user is not recorded for user in program.input("history").users)
    verify_program(program)


def test_a_wrong_shape_is_named_with_graph_and_node():
    program = toy()
    program.inputs["x"] = Buffer(("B", 5), torch.float32)
    refused(program, r"^scale: mul_tensor = aten\.mul\.Tensor fails: .*length 4 .*\[B, 5\]\.$")
    program = first()
    with program.graph.inserting_before(program.graph.output_node()):
        program.call(torch.cat, [program.input("window"), program.input("start")], name="joined")
    refused(program, "^step: joined = cat fails: ")


def test_a_wrong_dtype_is_named_with_graph_and_node():
    program = last(first(), [InsertKVCache()])
    caches = program.inputs["target_caches"]
    assert isinstance(caches, tuple)
    program.inputs["target_caches"] = tuple(replace(cache, dtype=torch.float16) for cache in caches)
    refused(program, r"^target: .* fails: k_cache must have the dtype of the rows written to it")
