from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from specgraph.errors import PassError
from specgraph.frontend.tracing import TracedModel, trace
from specgraph.ir.verifier import verify_program
from specgraph.passes.base import PassResult
from specgraph.passes.expose_features import ExposeFeatures
from specgraph.passes.insert_kv_cache import InsertKVCache
from tests.compiler.test_pipeline import body, everything, first, last, text
from tests.models import VOCAB, make_model


@functools.cache
def model_of(architecture: str) -> PreTrainedModel:
    return make_model(architecture, dtype=torch.float64)


@functools.cache
def traced_of(architecture: str) -> TracedModel:
    return trace(model_of(architecture))


TOKENS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def test_the_step_unpacks_hidden_states_in_the_order_asked_for():
    program = last(first(), [ExposeFeatures((2, 0))])
    verify_program(program)
    assert text(body(program)) == text("""
        positions = row_positions(start, window)
        hidden, hs_2, hs_0 = self.target(tokens=window, positions=positions)
        logits = self.lm_head(hidden)
        return logits
    """)
    assert [n.name for n in program.with_role("feature")] == ["hs_2", "hs_0"]
    assert program.one("hidden").name == "hidden"


def test_the_target_returns_nodes_that_were_there():
    program = first()
    after = last(program, [ExposeFeatures((0, 1))])
    nodes = list(zip(program.modules["target"].graph.nodes, after.modules["target"].graph.nodes, strict=True))
    assert all((a.op, a.name) == (b.op, b.name) for a, b in nodes)
    (values,) = after.modules["target"].graph.output_node().args
    assert [v.meta["hidden_state"] for v in values] == [2, 0, 1]


def test_a_residual_stream_in_float32_is_converted_to_the_dtype_of_heads():
    model = make_model("mamba", dtype=torch.bfloat16, residual_in_fp32=True)
    program = last(first(target=trace(model)), [ExposeFeatures((0, 1, 2))])
    verify_program(program)
    (values,) = program.modules["target"].graph.output_node().args
    assert [v.meta["val"].dtype for v in values[1:]] == [torch.bfloat16] * 3
    assert values[2].args[0].meta["val"].dtype == torch.float32


def test_without_layers_the_drafter_decides_and_nothing_is_nothing():
    program = first("draft_model").copy()
    before = everything(program)
    assert ExposeFeatures().apply(program) == PassResult(0, notes=("the drafter reads no hidden states",))
    assert ExposeFeatures(()).apply(program) == PassResult(0, notes=("the drafter reads no hidden states",))
    assert everything(program) == before
    program.drafter = replace(program.drafter, features=(1,))
    assert ExposeFeatures().apply(program) == PassResult(1, expected=1)
    assert [n.name for n in program.with_role("feature")] == ["hs_1"]


@pytest.mark.parametrize(("layers", "named"), [((4,), "4"), ((0, -1, 7), "-1, 7")])
def test_a_hidden_state_that_does_not_exist_is_refused_with_the_range(layers: tuple[int, ...], named: str):
    program = first()
    before = everything(program)
    with pytest.raises(PassError) as raised:
        last(program, [ExposeFeatures(layers)])
    assert str(raised.value) == f"expose_features: hs[{named}] does not exist; this model has hs[0] to hs[3]."
    assert everything(program) == before


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mixtral"])
@pytest.mark.parametrize("cached", [False, True], ids=["dense", "with a cache"])
def test_all_features_equal_the_hidden_states_of_transformers(architecture: str, cached: bool):
    model = model_of(architecture)
    program = last(first(target=traced_of(architecture)), [ExposeFeatures((0, 1, 2)), *[InsertKVCache(4)] * cached])
    program.set_output(*program.with_role("hidden"), *program.with_role("feature"))
    state = {"window": TOKENS, "start": torch.zeros(2, dtype=torch.int64)}
    if cached:
        state["num_rows"] = state["max_length"] = torch.full((2,), 9)
        state["block_table"] = torch.tensor([[5, 0, 2], [1, 4, 3]])
        state["target_caches"] = tuple(b.allocate({"N": 6}, "cpu") for b in program.inputs["target_caches"])
    with torch.no_grad():
        expected = model(TOKENS, output_hidden_states=True).hidden_states
        hidden, *features = program.step()(**state)
    assert torch.equal(hidden, features[-1])
    # Norms, rotary and routers stay in float32 inside a float64 model.
    torch.testing.assert_close(tuple(features), tuple(expected), rtol=1e-5, atol=1e-5)
