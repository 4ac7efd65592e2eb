"""Layers whose numbers are sorted for a GPU: they are the same layers to everybody but the kernels."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import specgraph
from specgraph.ir.linear import scheme_of
from specgraph.kernels.packed.int4 import INT4
from specgraph.schemes.layers import PackedExperts, PackedLinear, arrange_weights
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.models import make_model, ragged_prompts, saved
from tests.schemes.models import oracle, packed_layers


def model_of(group_size: int = 128, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = make_model("llama", seed=3, dtype=dtype, hidden_size=128, intermediate_size=256)
    return specgraph.quantise(model, "int4", group_size=group_size)


def arranged(model: PreTrainedModel) -> PreTrainedModel:
    """A copy with arranged layers."""
    model = copy.deepcopy(model)
    for layer in packed_layers(model).values():
        layer.arrange()
    return model


def layer_of(seed: int = 0) -> PackedLinear:
    generator = torch.Generator().manual_seed(seed)
    weight = INT4.quantise(torch.randn(40, 384, generator=generator))
    return PackedLinear(INT4, weight, torch.randn(40, generator=generator))


def test_a_layer_computes_and_states_the_same() -> None:
    layer, found = layer_of(), layer_of()
    found.arrange()
    assert [*dict(found.named_parameters())] == ["weight_arranged", "weight_scale", "bias"]
    assert not torch.equal(found.weight_arranged, layer.weight_packed)
    assert torch.equal(found.dequantised(torch.float64), layer.dequantised(torch.float64))
    x = torch.randn(3, 384)
    assert torch.equal(found(x), layer(x))
    expected = layer.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_goes_into_an_arranged_layer_and_out_of_it(assign: bool) -> None:
    other, found = layer_of(seed=1), layer_of()
    found.arrange()
    given = other.state_dict()
    found.load_state_dict(given, assign=assign)
    assert given.keys() == other.state_dict().keys(), "the caller's dictionary stays as it is"
    assert torch.equal(found.dequantised(torch.float64), other.dequantised(torch.float64))
    back = layer_of()
    back.load_state_dict(found.state_dict())
    assert torch.equal(back.weight_packed, other.weight_packed)


def test_numbers_are_sorted_once() -> None:
    first, second = layer_of(), layer_of()
    second.weight_packed, second.weight_scale = first.weight_packed, first.weight_scale  # as layers that share a weight
    expected = first.dequantised(torch.float64)
    for layer in (first, second, first):
        layer.arrange()
    assert first.weight_arranged is second.weight_arranged
    for layer in (first, second, copy.deepcopy(first)):
        layer.arrange()
        assert torch.equal(layer.dequantised(torch.float64), expected)


def test_other_threads_call_a_layer_that_is_arranged() -> None:
    """As they may while a model is compiled."""
    layers, x = [layer_of() for _ in range(200)], torch.randn(1, 384)
    expected, wrong, over = layers[0](x), [], threading.Event()

    def call() -> None:
        while not over.is_set():
            wrong.extend(place for place, layer in enumerate(layers) if not torch.equal(layer(x), expected))

    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call) for _ in range(2)]
        for layer in layers:
            layer.arrange()
        over.set()
        assert all(future.result() is None for future in calls) and not wrong
    assert {layer.format for layer in layers} == {"int4_arranged"}


@pytest.mark.parametrize("group_size", [32, 64])
def test_smaller_groups_stay_as_they_are(group_size: int) -> None:
    model = model_of(group_size)
    assert all(layer.format == "int4" for layer in packed_layers(arranged(model)).values())


def test_nothing_is_sorted_on_a_cpu() -> None:
    model = model_of()
    arrange_weights(model)
    assert {layer.format for layer in packed_layers(model).values()} == {"int4"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("draft", [{"kind": "none"}, {"kind": "ngram", "num_speculative_tokens": 3}], ids=str)
def test_an_arranged_model_is_compiled(draft: dict[str, object], dtype: torch.dtype) -> None:
    model, prompts = model_of(dtype=dtype), ragged_prompts()
    sorted_model = arranged(model)
    found = scheme_of(sorted_model.model.layers[0].mlp.up_proj)
    assert found is not None and found[0].name == "int4_arranged"
    made = specgraph.compile_speculative(sorted_model, {**CONFIG, "draft": draft})
    tokens = made.generate(prompts, max_new_tokens=10, eos_token_id=[]).new_tokens
    assert_same_tokens(model, prompts, tokens, forward_greedy(oracle(model), prompts, 10))


def test_an_arranged_model_is_saved_in_the_published_layout(tmp_path: Path) -> None:
    model = model_of(dtype=torch.float32)
    expected = specgraph.load(saved(model, tmp_path / "plain"))
    found = specgraph.load(saved(arranged(model), tmp_path / "arranged"))
    assert found.state_dict().keys() == expected.state_dict().keys()
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in found.state_dict().items())


def experts_of(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """gpt_oss with stacks in mxfp4."""
    model = make_model("gpt_oss", seed=3, dtype=dtype, hidden_size=64, intermediate_size=96)
    return specgraph.quantise(model, "mxfp4")


def packed_experts(model: PreTrainedModel) -> list[PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedExperts)]


def test_stacks_of_experts_are_arranged_and_state_the_same(tmp_path: Path) -> None:
    model, found = experts_of(), experts_of()
    for experts in packed_experts(found):
        experts.arrange()
        assert experts.format == "mxfp4_arranged" and "down_proj_arranged" in dict(experts.named_parameters())
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    found.load_state_dict(expected)
    tokens = torch.arange(9)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)
    loaded = specgraph.load(saved(found, tmp_path))
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())


def test_a_model_with_arranged_experts_is_compiled() -> None:
    model, prompts = experts_of(torch.float64), ragged_prompts()
    for experts in packed_experts(model):
        experts.arrange()
    made = specgraph.compile_speculative(model, {**CONFIG, "draft": {"kind": "none"}})
    tokens = made.generate(prompts, max_new_tokens=6, eos_token_id=[]).new_tokens
    assert_same_tokens(model, prompts, tokens, forward_greedy(model, prompts, 6))


def test_scales_that_a_factor_of_bfloat16_cannot_hold_stay_as_they_are() -> None:
    model = experts_of()
    first, second = packed_experts(model)
    first.down_proj_scales[1, 2, 1] = 129  # type: ignore[index,operator]
    first.arrange()
    second.arrange()
    assert (first.format, second.format) == ("mxfp4", "mxfp4_arranged")
