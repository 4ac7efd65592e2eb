"""Kept graphs are those that an export of the given model would have made, with that model's own tensors."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from specgraph.frontend import tracing
from specgraph.frontend.tracing import TracedModel, trace
from specgraph.ir import kept as kept_module
from specgraph.ir.exporting import export_module
from specgraph.ir.graphs import get_attribute
from specgraph.ir.kept import UnknownKeyError, kept, key_of
from tests.models import make_model

TOKENS, POSITIONS = torch.tensor([[3, 7, 5, 11]]), torch.arange(4).unsqueeze(0)


EXPORT, EXPORT_MODULE = (function.__wrapped__ for function in (tracing._exported, export_module))
"""The functions themselves, which keep nothing."""


def counted(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[object]]:
    """The kept function, and the modules that were really exported."""
    exported: list[object] = []

    def count(module: object, *rest: Any) -> Any:
        exported.append(module)
        return function(module, *rest)

    return kept(count), exported


def nothing(module: nn.Module, *rest: Any) -> fx.GraphModule:
    """An export of no time, where only the key matters."""
    return fx.symbolic_trace(nn.Identity())


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The models that tracing really exports; no graphs are kept yet."""
    function, exported = counted(EXPORT)
    monkeypatch.setattr(tracing, "_exported", function)
    return exported


def llama(**options: Any) -> PreTrainedModel:
    """One layer is enough for what may make an export another one."""
    return make_model("llama", num_hidden_layers=1, **options)


def fresh(model: PreTrainedModel) -> TracedModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tracing, "_exported", EXPORT)
        return trace(model)


@pytest.mark.parametrize("function", [tracing._exported, export_module], ids=["model", "module"])
def test_a_process_of_tests_keeps_every_export(function: Callable[..., Any]) -> None:
    """``tests/conftest.py`` raises the bound before anything is wrapped, which a new name of the bound once undid."""
    assert inspect.getclosurevars(function).nonlocals["known"].most == kept_module.MAX_EXPORTS > 1000


def logits(traced: TracedModel) -> Tensor:
    out: Tensor = traced.head(traced.body(TOKENS, POSITIONS))
    return out


def own(model: nn.Module) -> set[int]:
    return {id(tensor) for tensor in (*model.parameters(), *model.buffers())}


def held(traced: TracedModel) -> set[int]:
    graphs = (traced.body, traced.head)
    return {id(get_attribute(g, n.target)) for g in graphs for n in g.graph.nodes if n.op == "get_attr"}


@pytest.mark.parametrize("architecture", ["llama", "mixtral", "gpt2", "gemma2", "qwen3_next", "mamba2"])
def test_an_equal_model_gets_the_graphs_with_its_own_tensors(architecture: str, exported: list[object]) -> None:
    models = [make_model(architecture, seed=seed) for seed in range(2)]
    graphs = [trace(model) for model in (*models, models[0])]
    assert exported == models[:1]  # so the first of the graphs is a fresh one
    for model, made, new in ((models[1], graphs[1], fresh(models[1])), (models[0], graphs[2], graphs[0])):
        assert str(made.body.graph) == str(new.body.graph)
        assert str(made.head.graph) == str(new.head.graph)
        assert made.info == new.info
        assert torch.equal(logits(made), logits(new))
        assert held(made) & own(model) == held(new) & own(model)
    # Of its own tensors, no graph has one of the other model.
    assert not held(graphs[0]) & own(models[1])
    assert not held(graphs[1]) & own(models[0])
    assert not torch.equal(logits(graphs[0]), logits(graphs[1]))


def test_tied_tensors_stay_tied(exported: list[object]) -> None:
    models = [llama(seed=seed, tie_word_embeddings=True) for seed in range(2)]
    for model in models:
        made = trace(model)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(2)
        assert torch.equal(logits(made), logits(fresh(model)))
    assert exported == models[:1]


@pytest.mark.usefixtures("exported")
def test_what_is_done_to_a_graph_reaches_no_other_one() -> None:
    model = llama()
    first = trace(model)
    expected = logits(first)
    for node in first.body.graph.nodes:
        node.meta.clear()
    first.body.graph.output_node().args = (first.body.graph.output_node().prev.prev,)
    second = trace(model)
    assert torch.equal(logits(second), expected)
    assert all("val" in node.meta for node in second.body.graph.nodes if node.op != "output")


def tie(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def share_storage(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)


def set_epsilon(model: Any) -> None:
    model.model.norm.variance_epsilon = 0.5


def configure(model: Any) -> None:
    model.config.rms_norm_eps = 0.5


def use_eager(model: Any) -> None:
    model.config._attn_implementation = "eager"


def replace_module(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32)


def write_buffer(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def scale(model: Any) -> None:
    model.model.layers[0].self_attn.scaling = 0.5


def widen(model: Any) -> None:
    model.to(torch.float64)


def freeze(model: Any) -> None:
    model.requires_grad_(False)


@pytest.mark.parametrize("change", [tie, share_storage, set_epsilon, configure, use_eager, replace_module, write_buffer,
                                    scale, widen, freeze, nn.Module.train])  # fmt: skip
def test_a_model_that_was_changed_is_exported_again(change: Callable[[PreTrainedModel], object]) -> None:
    export, exported = counted(nothing)
    plain, changed = llama(), llama()
    assert key_of(plain) == key_of(changed)
    for model in (plain, changed):
        export(model)
    change(changed)
    assert key_of(plain) != key_of(changed)
    export(changed)
    assert exported == [plain, changed]


def add_hook(model: Any) -> None:
    model.model.norm.register_forward_hook(lambda module, args, out: 2 * out)


def replace_forward(model: Any) -> None:
    model.model.norm.forward = MethodType(lambda self, hidden: hidden, model.model.norm)


def hold_a_tensor(model: Any) -> None:
    model.model.norm.scale = torch.ones(1)


class Own(nn.Identity):
    """A class that is not of transformers."""


def put_own_module(model: Any) -> None:
    model.model.norm = Own()


def hold_an_object(model: Any) -> None:
    model.model.norm.scale = object()


def hold_a_closed_function(model: Any) -> None:
    model.model.norm.scale = functools.partial(logits, model)


def hold_a_method(model: Any) -> None:
    model.model.norm.scale = {"scale": 1.0}.get


def hold_own_class(model: Any) -> None:
    model.model.norm.scale = Own


@pytest.mark.parametrize("change", [add_hook, replace_forward, hold_a_tensor, put_own_module, hold_an_object,
                                    hold_a_closed_function, hold_a_method, hold_own_class])  # fmt: skip
def test_what_cannot_be_compared_is_exported_every_time(change: Callable[[PreTrainedModel], object]) -> None:
    export, exported = counted(nothing)
    model = llama()
    change(model)
    with pytest.raises(UnknownKeyError):
        key_of(model)
    for _ in range(2):
        export(model)
    assert exported == [model, model]


def times_two(hidden: Any) -> Any:
    return 2 * hidden


@pytest.mark.parametrize("owner, name, value", [
    (modeling_llama.LlamaAttention, "forward", times_two),
    (modeling_llama.LlamaAttention, "forward", torch.no_grad()(times_two)),
    (modeling_llama.LlamaAttention, "forward", functools.partialmethod(times_two)),
    (modeling_llama.LlamaAttention, "scaling", property(times_two)),
    (modeling_llama, "rotate_half", times_two),
    (modeling_llama, "rotate_half", functools.partial(times_two)),
    (nn.functional, "silu", times_two),
    (nn.Module, "_call_impl", times_two),
])  # fmt: skip
def test_a_model_that_runs_code_of_a_user_is_never_kept(
    owner: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    monkeypatch.setattr(owner, name, value, raising=False)
    with pytest.raises(UnknownKeyError):
        key_of(model)


def test_nothing_is_kept_while_all_modules_have_a_hook(exported: list[object]) -> None:
    model = llama()
    plain = logits(trace(model))

    def double(module: nn.Module, args: Any, out: Any) -> Any:
        return 2 * out if isinstance(module, modeling_llama.LlamaMLP) else None

    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        hooked = logits(trace(model))
    finally:
        handle.remove()
    assert not torch.equal(plain, hooked)
    assert torch.equal(plain, logits(trace(model)))
    assert exported == [model, model]


@pytest.mark.parametrize("value", [torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2)._neg_view()])
def test_a_module_with_a_buffer_that_is_no_plain_memory_is_never_kept(value: Tensor) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("value", value)
    with pytest.raises(UnknownKeyError):
        key_of(module)


@pytest.mark.parametrize("owner, name, value", [(modeling_llama, "rotate_half", modeling_llama.repeat_kv),
                                                (modeling_llama.LlamaForCausalLM, "_supports_sdpa", 2),
                                                (modeling_llama.LlamaConfig, "rms_norm_eps", 0.5),
                                                (modeling_llama.LlamaMLP.forward, "__code__", times_two.__code__),
                                                (tracing, "_HARMLESS", "nothing")])  # fmt: skip
def test_code_that_was_replaced_is_other_code(
    owner: Any, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = llama()
    before = key_of(model)
    monkeypatch.setattr(owner, name, value)
    assert key_of(model) != before


def test_a_table_of_functions_that_was_changed_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    before = key_of(model)
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "dynamic", ROPE_INIT_FUNCTIONS["yarn"])
    assert key_of(model) != before


def test_a_model_of_another_class_changes_no_key() -> None:
    """transformers notes what a class can record, and what it can choose, when it is first made and asked."""
    model = llama()
    before = key_of(model)

    class Other(modeling_llama.LlamaForCausalLM):
        pass

    Other(model.config)
    type(model)._can_set_experts_implementation()
    type(model)._can_set_attn_implementation()
    assert key_of(model) == before


def test_what_is_kept_holds_no_model() -> None:
    model = llama()
    weights = [weakref.ref(tensor) for tensor in model.parameters()]
    trace(model)
    del model
    gc.collect()
    assert not any(weight() is not None for weight in weights)


def test_only_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_module, "MAX_EXPORTS", 2)
    export, exported = counted(EXPORT_MODULE)
    layers = [nn.Linear(3, width).eval() for width in (1, 2, 3)]
    for layer in (*layers[:2], layers[0], layers[2], layers[0], layers[1]):
        export(layer, (torch.ones(4, 3),), {"input": {0: torch.export.Dim("rows", min=1)}}, "part")
    assert exported == [*layers, layers[1]]


def test_other_shapes_names_and_settings_are_exported_anew() -> None:
    export, exported = counted(EXPORT_MODULE)
    layers = [nn.Linear(3, 3).eval() for _ in range(2)]
    dims = {0: torch.export.Dim("rows", min=1)}
    named = {"input": dims}
    first = export(layers[0], (torch.ones(4, 3),), named, "part")
    second = export(layers[1], (torch.zeros(4, 3),), {"input": {0: torch.export.Dim("rows", min=1)}}, "part")
    assert len(exported) == 1
    assert torch.equal(second(torch.ones(2, 3)), layers[1](torch.ones(2, 3)))
    assert torch.equal(first(torch.ones(2, 3)), layers[0](torch.ones(2, 3)))
    export(layers[0], (torch.ones(5, 3),), named, "part")
    export(layers[0], (torch.ones(4, 3),), named, "other")
    export(layers[0], (torch.ones(4, 3),), {"input": {0: torch.export.Dim("rows", min=2)}}, "part")
    with torch.no_grad():
        export(layers[0], (torch.ones(4, 3),), named, "part")
    assert len(exported) == 5
