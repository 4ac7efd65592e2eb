"""Tracing: the graphs compute what the model computes, hold its own parameters, and leave it as it was."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import fx

from specgraph.errors import UnsupportedModelError
from specgraph.frontend.tracing import ATTENTION, TracedModel, attention_hook, trace
from tests.models import ARCHITECTURES, MORE, VOCAB, WINDOW, make_model

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


class HiddenStates(fx.Interpreter):
    """Runs a body and keeps every hidden state by its index."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: dict[int, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if "hidden_state" in n.meta:
            self.seen[n.meta["hidden_state"]] = value
        return value


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MORE])
def test_graph_computes_every_hidden_state_and_the_logits(architecture: str) -> None:
    model = make_model(architecture, dtype=torch.float64)
    traced = trace(model)
    for shape in ((1, 17), (4, 1)):
        tokens = torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            check_graph(model, traced, tokens)


def check_graph(model: Any, traced: TracedModel, tokens: torch.Tensor) -> None:
    expected = model(tokens, use_cache=False, output_hidden_states=True)
    body, layers = HiddenStates(traced.body), traced.info.num_layers
    logits = traced.head(body.run(tokens, torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()))
    entered = body.seen.pop(layers + 1)
    assert sorted(body.seen) == list(range(layers + 1))
    torch.testing.assert_close(_final_norm(model)(entered), body.seen[layers], rtol=1e-5, atol=1e-5)
    # Norms, rotary and routers stay in float32 inside a float64 model.
    for index, state in body.seen.items():
        torch.testing.assert_close(state, expected.hidden_states[index], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-5, atol=1e-5)


def _final_norm(model: Any) -> Any:
    """The norm behind the layers, by the names that it has."""
    owner = getattr(model.base_model, "decoder", model.base_model)
    names = ("norm", "final_layernorm", "final_layer_norm", "ln_f")
    return next(getattr(owner, name) for name in names if hasattr(owner, name))


def test_parameters_are_the_models_own() -> None:
    model = make_model("llama")
    traced = trace(model)
    own = {id(p) for p in model.parameters()}
    assert {id(p) for g in (traced.body, traced.head) for p in g.parameters()} == own


@pytest.mark.parametrize("architecture", ["llama", "gpt_oss", "mixtral", "step_text"])
def test_model_is_left_as_it_was(architecture: str) -> None:
    model = make_model(architecture).train()
    tokens = torch.arange(3, 12).unsqueeze(0)
    before = copy.deepcopy(model.config.to_dict()), model.config._attn_implementation
    with torch.no_grad():
        expected = model.eval()(tokens).logits
    model.train()
    trace(model)
    assert (model.config.to_dict(), model.config._attn_implementation) == before
    assert model.training
    assert all("forward" not in vars(module) and not module._forward_hooks for module in model.modules())
    pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens).logits, expected)


def test_attention_nodes_carry_what_attention_receives() -> None:
    def options(architecture: str) -> list[dict[str, Any]]:
        graph = trace(make_model(architecture)).body.graph
        return [{**n.kwargs, "sinks": len(n.args) > 3} for n in graph.nodes if n.target is ATTENTION]

    gemma, oss = options("gemma2"), options("gpt_oss")
    assert [o.get("window") for o in gemma] == [WINDOW, None]
    assert {o.get("softcap") for o in gemma} == {5.0}
    assert [o["sinks"] for o in oss] == [True, True]


def test_unknown_attention_argument_is_refused() -> None:
    q = torch.zeros(1, 2, 3, 4)
    with pytest.raises(UnsupportedModelError, match=r"passes surprise to its attention, .* refused"):
        attention_hook(torch.nn.Linear(1, 1), q, q, q, None, surprise=1)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("bloom", {"n_layer": 2, "n_head": 4}, "BloomForCausalLM does not call its attention through .*Interface"),
        ("falcon", {"alibi": True}, "FalconForCausalLM does not call its attention through .*Interface"),
        ("mpt", {"n_layers": 2, "n_heads": 4, "d_model": 32}, "MptForCausalLM does not call its attention through "),
        ("doge", {"keep_window_size": 8}, "DogeForCausalLM alters the attention mask of layer 0, or builds it"),
        ("minimax", {}, "MiniMax.* 2 layers but 1 attention"),
        ("llama4_text", {"attention_chunk_size": 8, "head_dim": 8, "num_local_experts": 4, "num_hidden_layers": 4,
                         "intermediate_size_mlp": 48}, "Llama4.* mask that is not the causal window"),
        ("diffllama", {}, "DiffLlama.* one per layer is expected"),
    ],
)  # fmt: skip
def test_refused_by_name(architecture: str, options: dict[str, Any], message: str) -> None:
    model = make_model(architecture, attention="eager", **options)
    with pytest.raises(UnsupportedModelError, match=message):
        trace(model)


class MixesRows(torch.nn.Module):
    """An MLP that also looks at the row before."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.mlp(x + 1e-6 * torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])
        return mixed


def test_rows_that_influence_each_other_outside_of_the_known_ops_are_refused_by_the_layer() -> None:
    """Also if the influence is too small for any tolerance, and there is attention beside it."""
    model = make_model("llama")
    model.model.layers[1].mlp = MixesRows(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match=r"mixes tokens .* in model.model.layers.1.mlp \(MixesRows\)"):
        trace(model)


def test_a_window_that_is_named_but_never_masked_is_refused() -> None:
    # olmoe passes sliding_window to its attention and builds a full causal mask; at bfloat16 numbers hide it.
    options = {**ARCHITECTURES["mixtral"], "sliding_window": 64}
    with pytest.raises(UnsupportedModelError, match=r"mask that is not the causal window .*64"):
        trace(make_model("olmoe", dtype=torch.bfloat16, **options))


def test_every_module_keeps_its_own_training_mode() -> None:
    model = make_model("llama").train()
    model.model.layers[0].eval()
    before = [m.training for m in model.modules()]
    trace(model)
    assert [m.training for m in model.modules()] == before


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, 128),
        ({"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, 128),
        ({"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.5] * 4, "long_factor": [3.0] * 4,
          "original_max_position_embeddings": 48, "factor": 2.0}, 48),
    ],
)  # fmt: skip
def test_length_dependent_rotary_is_right_below_its_switch_and_capped_there(rope: dict[str, Any], limit: int) -> None:
    model = make_model("llama", rope_parameters=rope)
    tokens = torch.arange(3, 43).unsqueeze(0)
    # A long forward before tracing leaves a dynamic rotary embedding in its grown state.
    with torch.no_grad():
        model(torch.zeros(1, 300, dtype=torch.int64))
        traced = trace(model)
        expected = model(tokens, use_cache=False).logits
        actual = traced.head(traced.body(tokens, torch.arange(40).unsqueeze(0)))
    assert traced.info.max_positions == limit
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
