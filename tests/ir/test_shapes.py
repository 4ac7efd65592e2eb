"""Shape strings of step graphs and modules, and how a wrong shape is named."""

from __future__ import annotations

import collections
import operator

import pytest
import torch
from torch import fx, nn

from specgraph.config.drafters import NGramConfig
from specgraph.drafters.draft_model import draft_model
from specgraph.drafters.ngram import NGramDrafter
from specgraph.drafters.none import NoDrafter
from specgraph.errors import VerificationError
from specgraph.frontend.first_program import first_program
from specgraph.frontend.tracing import trace
from specgraph.ir import shapes
from specgraph.ir.graphs import calls, new_module
from specgraph.ir.model_info import ModelInfo
from specgraph.ir.program import Program
from specgraph.ir.shapes import SIZES, describe, dtype_name, propagate, shape_of, size_name
from specgraph.kernels import step
from specgraph.kernels.state import Buffer, page_pool, per_call
from specgraph.passes.base import Pass
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.insert_draft import InsertDraft
from specgraph.passes.insert_kv_cache import InsertKVCache
from specgraph.passes.insert_verify import InsertVerify
from specgraph.passes.pipeline import run_passes
from tests.models import make_model, shared_model

aten = torch.ops.aten
B, T = SIZES["B"], SIZES["T"]


def empty_program() -> Program:
    info = ModelInfo("toy", 7, 1, 4, torch.float32, torch.device("cpu"), None)
    return Program(fx.Graph(), {}, {}, info, NoDrafter())


def scaling_module(weight: torch.Tensor) -> fx.GraphModule:
    """``linear(x, weight)``."""
    root, graph = nn.Module(), fx.Graph()
    root.register_buffer("weight", weight)
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.linear.default, (x, graph.get_attr("weight"))))
    return new_module(root, graph, "scale")


def cached_program(architecture: str = "llama") -> Program:
    traced = trace(shared_model(architecture))
    return last(first_program(traced, NoDrafter()), [InsertKVCache()])


def last(program: Program, passes: list[Pass]) -> Program:
    return list(run_passes(program, passes)[0].values())[-1]


def shape(graph: fx.Graph, name: str) -> str | None:
    return next(shape_of(n) for n in graph.nodes if n.name == name)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0"), (1, "1"), (151936, "151936"), (-1, "-1"), (B, "B"), (T + 1, "T+1"), (T - 1, "T-1"), (B * T, "B*T"),
        (2 * B * T, "2*B*T"), (B * (T + 1), "B*(T+1)"), (4 * B * (T + 1), "4*B*(T+1)"), (2 * (T + 1), "2*(T+1)"),
    ],
)  # fmt: skip
def test_sizes_read_as_letters(size: int, text: str):
    assert size_name(size) == text


def test_values_of_all_kinds():
    tensor = torch.empty(B, 3, device="meta", dtype=torch.bfloat16)
    assert describe(tensor) == "bf16[B, 3]"
    assert describe((tensor, 4, None)) == "(bf16[B, 3], 4, None)"
    assert describe((tensor,)) == "(bf16[B, 3],)"
    assert describe((tensor,) * 64) == "(bf16[B, 3], bf16[B, 3], ... 64 in all)"
    assert describe(True) == "True"
    assert [dtype_name(d) for d in (torch.uint8, torch.bool, torch.float64)] == ["u8", "bool", "f64"]


def test_a_traced_llama_with_a_cache():
    program = cached_program()
    propagate(program)
    target = program.modules["target"].graph
    assert shape(program.graph, "target_caches") == "(" + ", ".join(["f32[N, 16, 2, 8]"] * 4) + ")"
    assert shape(program.graph, "block_table") == "i64[B, M]"
    assert shape(program.graph, "hidden") == "f32[B, T, 32]"
    assert shape(program.graph, "output") == "f32[B, T, 101]"
    assert shape(target, "slots") == "i64[B, T]"
    assert shape(target, "k_cache_0") == "f32[N, 16, 2, 8]"
    assert shape(target, "model_layers_0_mlp_up_proj_weight") == "f32[48, 32]"
    assert {shape_of(n) for n in target.nodes if "paged_attention" in n.name} == {"f32[B, T, 4, 8]"}
    assert all("layout" in n.meta for m in program.modules.values() for n in m.graph.nodes)


def test_the_whole_step_with_a_draft_model():
    target, draft = trace(shared_model("llama")), trace(shared_model("qwen2"))
    first = first_program(target, draft_model(draft, 3))
    rule = "probabilistic"
    program = last(first, [ExposeFeatures((1,)), InsertKVCache(), InsertDraft(rule), InsertVerify(rule)])
    propagate(program)
    expected = {
        "target_outputs": "(f32[B, T, 32], f32[B, T, 32])", "hidden": "f32[B, T, 32]", "hs_1": "f32[B, T, 32]",
        "logits": "f32[B, 4, 101]", "positions": "i64[B, T]",
        "emitted": "i64[B, T]", "drafter_tokens": "i64[B, T+1]", "draft_0": "f32[B, 1, 101]", "token_3": "i64[B, 1]",
        "draft_logits": "f32[B, 3, 101]", "eos_ids": "i64[B, E]", "bad": "i32[B]", "advance": "None",
        "output": "(i64[B, T], i64[B], f32[B, 0], i32[B])",
    }  # fmt: skip
    assert {name: shape(program.graph, name) for name in expected} == expected
    assert [shape_of(n) for n in calls(program.graph, step.draft_tokens)] == ["i64[B, T-1]"]
    # Called with T + 1 rows first, then with one: the first call is the one that stays.
    assert shape(program.modules["draft"].graph, "tokens") == "i64[B, T+1]"


def test_history_drafters_write_where_a_mask_says():
    traced = trace(shared_model("llama"))
    drafter = NGramDrafter(3, options=NGramConfig(max_ngram=3))
    program = last(first_program(traced, drafter), [InsertKVCache(), InsertDraft()])
    propagate(program)
    assert shape_of(program.one("drafts")) == "i64[B, 3]"
    assert shape_of(program.input("history")) == "i64[B, S]"


def test_modules_that_are_not_called_yet_run_alone_if_their_inputs_are_known():
    traced = trace(shared_model("llama"))
    program = last(first_program(traced, draft_model(traced, 2)), [InsertKVCache()])
    program.modules["stranger"] = scaling_module(torch.ones(3, 4))
    propagate(program)
    assert shape(program.modules["draft_body"].graph, "output") == "f32[B, T, 32]"
    assert shape(program.modules["draft_head"].graph, "output") == "f32[B, T, 101]"
    assert not any("layout" in n.meta for n in program.modules["stranger"].graph.nodes)


def test_sizes_that_depend_on_values_are_question_marks():
    program = empty_program()
    mask = program.placeholder("mask", Buffer(("B", "T"), torch.bool))
    found = program.call(aten.nonzero.default, mask)
    program.set_output(found)
    propagate(program)
    assert shape_of(found) == "i64[?, 2]"


def test_a_wrong_shape_in_the_step_graph_is_named():
    program = empty_program()
    start = program.placeholder("start", Buffer(("B",)))
    window = program.placeholder("window", Buffer(("B", "T")))
    program.set_output(program.call(operator.add, start, window, name="total"))
    with pytest.raises(VerificationError, match=r"^step: total = add fails: .*T.*B.*\.$") as raised:
        propagate(program)
    assert "\n" not in str(raised.value)


def test_a_wrong_shape_in_a_module_is_named():
    program = empty_program()
    program.modules["scale"] = scaling_module(torch.ones(3, 4))
    program.set_output(program.call("scale", program.placeholder("x", Buffer(("B", 5), torch.float32))))
    with pytest.raises(VerificationError, match=r"^scale: linear_default = aten\.linear\.default fails: .*5.*4"):
        propagate(program)


def test_our_own_ops_name_the_argument_that_is_wrong():
    program = cached_program()
    program.inputs["block_table"] = per_call("M")
    with pytest.raises(VerificationError, match=r"^target: slots = row_slots fails: "):
        propagate(program)


def test_a_wrong_dtype_is_named():
    program = cached_program()
    program.inputs["target_caches"] = (page_pool(16, 2, 8, dtype=torch.float16),) * 4
    with pytest.raises(VerificationError, match=r"paged_attention.*must have the dtype of the rows written to it\.$"):
        propagate(program)


def test_nothing_real_is_touched():
    program = empty_program()
    weight = torch.ones(4, 4)
    program.modules["scale"] = scaling_module(weight)
    x = program.placeholder("x", Buffer(("B", 4), torch.float32))
    program.set_output(program.call("scale", x))
    before = weight.data_ptr()
    propagate(program)
    held = program.modules["scale"].get_buffer("weight")
    assert held is weight and held.data_ptr() == before and type(held) is torch.Tensor
    assert torch.equal(program.step()(x=torch.ones(1, 4)), torch.full((1, 4), 4.0))


def test_every_node_of_a_deep_model_runs_once(monkeypatch: pytest.MonkeyPatch):
    traced = trace(make_model("llama", num_hidden_layers=16))
    program = last(first_program(traced, NoDrafter()), [InsertKVCache()])
    run, counts = shapes._Run._node, collections.Counter()

    def counted(self, node, *arguments):
        counts[node] += 1
        return run(self, node, *arguments)

    monkeypatch.setattr(shapes._Run, "_node", counted)
    propagate(program)
    assert set(counts.values()) == {1}
    assert len(counts) >= len(traced.body.graph.nodes)


def test_slices_and_several_outputs():
    program = empty_program()
    start = program.placeholder("start", Buffer(("B",)))
    window = program.placeholder("window", Buffer(("B", "T")))
    positions = program.call(step.row_positions, start, window)
    program.set_output(positions, program.call(operator.getitem, positions, (slice(None), 0)))
    propagate(program)
    assert shape_of(program.graph.output_node()) == "(i64[B, T], i64[B])"
