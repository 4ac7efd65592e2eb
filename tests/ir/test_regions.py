from __future__ import annotations

import gc
from collections.abc import Hashable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._dynamo.utils import counters

from specgraph.frontend.tracing import trace
from specgraph.ir import compiling
from specgraph.ir.compiling import Compiled, compile_module
from specgraph.ir.graphs import new_module
from specgraph.ir.regions import Region, cut_at_layers
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts

TOKENS = torch.tensor([[5, 9, 3, 7], [2, 8, 8, 1]])
POSITIONS = torch.arange(4).expand(2, 4).contiguous()


def cut(module: fx.GraphModule) -> tuple[fx.GraphModule, dict[Hashable, fx.GraphModule]]:
    """What becomes of a module, and the graphs that its regions share."""
    made: dict[Hashable, fx.GraphModule] = {}

    def make(key: Hashable, region: fx.GraphModule, num_weights: int) -> nn.Module:
        assert key not in made and num_weights <= len(region.graph.find_nodes(op="placeholder"))
        made[key] = region
        return region

    return cut_at_layers(module, make), made


def shared(module: fx.GraphModule) -> list[int]:
    """For every region in order, the number of the graph that it has."""
    regions = [m for m in module.children() if isinstance(m, Region)]
    graphs = list(dict.fromkeys(region.shared for region in regions))
    return [graphs.index(region.shared) for region in regions]


LAYERS = {
    "llama": [0, 1, 1, 1, 1, 2],
    # Every other layer of this one has a sliding window, and the layers are alike in pairs.
    "gemma2": [0, 1, 2, 1, 2, 3],
    # The first one is dense, and the others have experts.
    "deepseek_v3": [0, 1, 2, 2, 2, 3],
}


@pytest.mark.parametrize("architecture", LAYERS)
def test_layers_that_are_alike_share_a_graph(architecture: str) -> None:
    body = trace(make_model(architecture, dtype=torch.float64, num_hidden_layers=4)).body
    found, made = cut(body)
    assert shared(found) == LAYERS[architecture] and len(made) == max(LAYERS[architecture]) + 1
    assert torch.equal(found(TOKENS, POSITIONS), body(TOKENS, POSITIONS))


def test_layers_that_differ_in_a_constant_share_none() -> None:
    body = trace(make_model("llama", dtype=torch.float64, num_hidden_layers=3)).body
    (activation, *_) = [n for n in body.graph.nodes if "silu" in str(n.target)]
    activation.target = torch.ops.aten.relu.default
    found, _ = cut(body)
    assert shared(found) == [0, 1, 2, 2, 3]


def test_a_module_without_layers_that_are_alike_stays_as_it_is() -> None:
    traced = trace(make_model("llama", dtype=torch.float64, num_hidden_layers=1))
    assert cut(traced.body)[0] is traced.body and cut(traced.head)[0] is traced.head


def test_a_layer_whose_weights_are_other_tensors_of_other_shapes_is_another_one() -> None:
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=3)
    layer: Any = model.model.layers[1]
    for name in ("gate_proj", "up_proj"):
        old = getattr(layer.mlp, name)
        setattr(layer.mlp, name, nn.Linear(old.in_features, 2 * old.out_features, bias=False, dtype=torch.float64))
    layer.mlp.down_proj = nn.Linear(2 * old.out_features, old.in_features, bias=False, dtype=torch.float64)
    body = trace(model).body
    found, _ = cut(body)
    assert shared(found) == [0, 1, 2, 1, 3]
    assert torch.equal(found(TOKENS, POSITIONS), body(TOKENS, POSITIONS))


def test_weights_of_one_layer_that_are_one_tensor_stay_one() -> None:
    model = make_model("llama", dtype=torch.float64, num_hidden_layers=3)
    layer: Any = model.model.layers[2]
    layer.mlp.up_proj.weight = layer.mlp.gate_proj.weight
    body = trace(model).body
    found, _ = cut(body)
    assert torch.equal(found(TOKENS, POSITIONS), body(TOKENS, POSITIONS))


# Compiled


@pytest.fixture
def fresh(torch_compile: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of earlier tests is compiled."""
    monkeypatch.setattr(compiling, "_regions", type(compiling._regions)())
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.usefixtures("fresh")
def test_layers_and_decoders_that_are_alike_are_compiled_once() -> None:
    model, prompts = make_model("llama", num_hidden_layers=6), ragged_prompts((3, 9))
    first = compiled(model, k=2, lowering={"name": "inductor"})
    wanted = compiled(model, k=2, lowering={"name": "eager"}).generate(prompts, max_new_tokens=12).new_tokens
    assert all(map(torch.equal, first.generate(prompts, max_new_tokens=12).new_tokens, wanted))
    # What is in front of the layers, a layer, what is behind them, and the head.
    assert counters["stats"]["unique_graphs"] <= 2 * 4  # a batch of one sequence is another size
    before = counters["stats"]["unique_graphs"]
    second = compiled(model, "none", lowering={"name": "inductor"}, draft=None)
    assert all(map(torch.equal, second.generate(prompts, max_new_tokens=12).new_tokens, wanted))
    assert counters["stats"]["unique_graphs"] - before <= 4  # steps of one row


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.scale + y, x


@pytest.mark.usefixtures("fresh")
def test_calls_of_a_known_layout_go_past_dynamo() -> None:
    module = Scaled()
    made = compile_module(module)
    assert isinstance(made, Compiled)
    checked: list[int] = []
    made._checked.register_forward_pre_hook(lambda _, given: checked.append(len(given)))
    with torch.no_grad():
        for x, y in [(torch.randn(2, 3), torch.randn(2, 3)) for _ in range(3)] + [(torch.randn(5, 3), torch.ones(3))]:
            result, same = made(x, y)
            assert torch.allclose(result, x * module.scale + y) and same is x
        assert len(checked) == 2  # one for each layout
        module.scale.data = torch.tensor([1.0, 0.0, -1.0])
        assert torch.allclose(made(x, y)[0], x * module.scale + y)
        made(x.t().contiguous().t(), y)
        assert len(checked) == 3  # other strides are another layout
        made._direct.clear()
        for _ in range(2):
            assert torch.allclose(made(x, x)[0], x * module.scale + x)
        assert len(checked) == 5 and not made._direct  # one tensor twice might be two the next time
    with torch.enable_grad():
        made(x, y)
    assert len(checked) == 6


@pytest.mark.usefixtures("fresh")
def test_regions_are_forgotten_with_the_decoders() -> None:
    body = trace(make_model("llama", dtype=torch.float64, num_hidden_layers=3)).body
    made = compile_module(new_module(body, body.graph, "body"))
    assert len(compiling._regions) == 3
    del made
    gc.collect()
    assert len(compiling._regions) == 0
