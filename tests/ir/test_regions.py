from __future__ import annotations

import gc
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters

from specgraph.compat import FakeTensorMode, ShapeEnv
from specgraph.frontend.tracing import trace
from specgraph.ir import compiling
from specgraph.ir.compiling import compile_module
from specgraph.ir.graphs import constant, new_module
from specgraph.ir.regions import Region, cut_at_layers
from specgraph.kernels.linear import few_rows
from specgraph.kernels.linear.few_rows import few_rows_linear
from tests.decoding import compiled
from tests.models import make_model, ragged_prompts

fx.wrap("few_rows_linear")

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


def test_a_module_without_layers_that_are_alike_is_one_region() -> None:
    traced = trace(make_model("llama", dtype=torch.float64, num_hidden_layers=1))
    body, head = cut(traced.body)[0], cut(traced.head)[0]
    assert shared(body) == shared(head) == [0]
    hidden = body(TOKENS, POSITIONS)
    assert torch.equal(hidden, traced.body(TOKENS, POSITIONS))
    assert torch.equal(head(hidden), traced.head(hidden))


def test_a_module_that_computes_nothing_stays_as_it_is() -> None:
    module = constant(torch.ones(3), "constant")
    assert cut(module)[0] is module


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
    counters.clear()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The codes that Inductor has made, and the graphs of which it made them."""
    found: list[object] = []

    class Counted(compiling._Code):
        def __init__(self, graph: fx.GraphModule, *given: Any) -> None:
            found.append(graph)
            super().__init__(graph, *given)

    monkeypatch.setattr(compiling, "_Code", Counted)
    return found


@pytest.mark.usefixtures("fresh")
def test_layers_and_decoders_that_are_alike_are_compiled_once(made: list[object]) -> None:
    model, prompts = make_model("llama", num_hidden_layers=6), ragged_prompts((3, 9))
    first = compiled(model, k=2, lowering={"name": "inductor"})
    wanted = compiled(model, k=2, lowering={"name": "eager"}).generate(prompts, max_new_tokens=12).new_tokens
    assert all(map(torch.equal, first.generate(prompts, max_new_tokens=12).new_tokens, wanted))
    # What is in front of the layers, a layer, what is behind them, and the head.
    assert len({*map(id, made)}) == 4 and len(made) <= 2 * 4  # a batch of one sequence is another size
    before = len(made)
    second = compiled(model, "none", lowering={"name": "inductor"}, draft=None)
    assert all(map(torch.equal, second.generate(prompts, max_new_tokens=12).new_tokens, wanted))
    assert len({*map(id, made)}) == 4 and len(made) - before <= 4  # steps of one row


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.scale + y, x


@pytest.mark.usefixtures("fresh")
def test_code_is_right_for_other_sizes(made: list[object]) -> None:
    module = Scaled()
    compiled_module = compile_module(fx.symbolic_trace(module))

    def check(x: Tensor, y: Tensor, codes: int) -> None:
        with torch.no_grad():
            result, same = compiled_module(x, y)
            assert torch.allclose(result, x * module.scale + y) and same is x and len(made) == codes

    for rows in (2, 2, 5, 3, 2):
        check(torch.randn(rows, 3), torch.randn(rows, 3), 1)
    check(torch.randn(5, 3), torch.ones(3), 2)  # another number of dimensions
    check(torch.randn(1, 3), torch.randn(1, 3), 3)
    check(torch.randn(3, 4).t(), torch.ones(3), 4)  # dimensions in another order
    check(torch.randn(3, 7).t(), torch.ones(3), 4)
    check(torch.randn(5, 9)[:, 3:6], torch.ones(3), 5)  # a stride that no size explains
    check(torch.randn(4, 8)[:, :3], torch.ones(3), 5)
    x = torch.randn(2, 3)
    check(x, x, 5)  # one tensor twice, which is two again the next time
    check(x, torch.randn(2, 3), 5)
    module.scale.data = torch.tensor([1.0, 0.0, -1.0])
    check(x, x, 5)
    with torch.enable_grad():
        result, _ = compiled_module(x, x)
    assert result.requires_grad and len(made) == 5


@pytest.mark.parametrize("shape", [(8, 1, 6), (1, 5, 6), (1, 1, 6), (4, 3, 6), (3, 4, 1), (2, 1, 1), (1,), ()])
def test_inductor_sees_the_strides_of_a_contiguous_tensor(shape: tuple[int, ...]) -> None:
    """Also where a size is 1: PyTorch's ``linear`` of other strides is a product for each sequence."""
    value = torch.zeros(shape)
    form = compiling._form(value, None)
    env, sizes = ShapeEnv(duck_shape=False), form.changing(value)
    with FakeTensorMode(shape_env=env):
        fake = form.fake(value.device, iter([compiling._symbol(env, *each) for each in enumerate(sizes)]))
    assert fake.shape == value.shape and fake.stride() == value.stride()


class FewRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return few_rows_linear(x, self.weight)


@pytest.mark.usefixtures("fresh")
def test_code_that_was_made_for_a_condition_is_not_used_where_it_fails(
    made: list[object], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``few_rows_linear`` asks how many rows there are. Code that is found in a cache knows the condition as well."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(few_rows, "MKL_IS_FAST", False)
    module = FewRows()
    for hits in (0, 2):
        counters.clear()
        made.clear()
        compiled_module = compile_module(fx.symbolic_trace(module))
        with torch.no_grad():
            for rows, codes in ((2, 1), (8, 1), (9, 2), (30, 2), (3, 2)):  # 16 rows are few
                x = torch.randn(2, rows, 4)
                assert torch.allclose(compiled_module(x), x @ module.weight.t(), atol=1e-5)
                assert len(made) == codes
        assert counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] >= hits
        compiling._regions.clear()


@pytest.mark.usefixtures("fresh")
def test_regions_are_forgotten_with_the_decoders() -> None:
    body = trace(make_model("llama", dtype=torch.float64, num_hidden_layers=3)).body
    made = compile_module(new_module(body, body.graph, "body"))
    assert len(compiling._regions) == 3
    del made
    gc.collect()
    assert len(compiling._regions) == 0
