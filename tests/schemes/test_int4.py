"""Models in four bits: what is recognised, what is merged, and tokens against those of the dequantised model."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import quantize
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor, nn
from transformers import PreTrainedModel

import specgraph
from specgraph.errors import UnsupportedModelError
from specgraph.frontend.tracing import trace
from specgraph.ir import linear as linears
from specgraph.ir.int4 import INT4
from specgraph.ir.linear import packed_tensors, scheme_of
from specgraph.ir.traffic import reads_of
from specgraph.kernels.linear.int4 import dequantise, unpack
from specgraph.schemes.int4 import Int4Linear, quantise_weight
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.ir.test_linear import up_to_end
from tests.kernels.linear.test_int4 import FAULTS
from tests.models import make_head, make_model, ragged_prompts
from tests.pairwise import cover, product

GROUP = 8


@functools.cache
def _dense(architecture: str, dtype: torch.dtype, layers: int | None) -> PreTrainedModel:
    overrides = {} if layers is None else {"num_hidden_layers": layers}
    return make_model(architecture, seed=3, dtype=dtype, **overrides)


def quantised(
    architecture: str = "llama", dtype: torch.dtype = torch.float64, layers: int | None = None, group_size: int = GROUP
) -> PreTrainedModel:
    return specgraph.quantise(copy.deepcopy(_dense(architecture, dtype, layers)), group_size=group_size)


def oracle(model: PreTrainedModel) -> PreTrainedModel:
    """The same model with dense layers, whose weights are the dequantised ones."""
    model = copy.deepcopy(model)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Int4Linear):
            dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=model.dtype)
            values = unpack(layer.weight_packed).to(model.dtype)
            scales = layer.weight_scale.to(model.dtype).repeat_interleave(layer.group_size, 1)
            dense.weight.data = values * scales
            if layer.bias is not None:
                dense.bias.data = layer.bias.data
            model.set_submodule(name, dense)
    del model.config.quantization_config
    return model


def layer_of(outer: int = 6, inner: int = 32, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Linear(inner, outer, bias=bias, dtype=dtype)


# Tokens


AXES = {"architecture": ("llama", "qwen3", "gemma3_text", "qwen3_moe"), "dtype": (torch.float64, torch.float32),
        "draft": ("none", "ngram", "draft_model", "eagle3"), "lowering": ("inductor", "gpu")}  # fmt: skip


@pytest.mark.parametrize([*AXES], cover(product(AXES), (0, 2)))
def test_tokens_are_those_of_the_dequantised_model(
    architecture: str, dtype: torch.dtype, draft: str, lowering: str
) -> None:
    model = quantised(architecture, dtype)
    dense = oracle(model)
    made = {"draft_model": lambda: quantised(dtype=dtype, layers=1), "eagle3": lambda: make_head(dense)}.get(draft)
    given: Any = made() if made else None
    chosen = {} if made else {"draft": {"kind": draft}}
    config = {**CONFIG, "lowering": {"name": lowering}, "pipeline": {"verify": True}, **chosen}
    decoder = specgraph.compile_speculative(model, config, draft=given)
    graph = list(decoder.stages.values())[-1].modules.unchanged["target"].graph
    assert sum(linear.scheme is INT4 for linear in linears.linears(graph)) > 0
    prompts = ragged_prompts()
    found = decoder.generate(prompts, max_new_tokens=12).new_tokens
    expected = [up_to_end(tokens) for tokens in forward_greedy(dense, prompts, 12)]
    assert_same_tokens(dense, prompts, found, expected)


def test_the_model_itself_computes_the_same() -> None:
    model, prompt = quantised("qwen2"), ragged_prompts()[1][None]  # with biases
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, oracle(model)(prompt).logits, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_that_reads_its_tensors_wrongly_gives_other_tokens(fault: str) -> None:
    """The comparison of tokens finds a fault in a single layer."""
    model, prompts = quantised(), ragged_prompts()
    expected = [up_to_end(tokens) for tokens in forward_greedy(oracle(model), prompts, 12)]
    layer: Any = model.model.layers[0].mlp.gate_proj
    layer.weight_packed.data, layer.weight_scale.data = FAULTS[fault](layer.weight_packed.data, layer.weight_scale.data)
    decoder = specgraph.compile_speculative(model, {**CONFIG, "draft": {"kind": "none"}})
    found = decoder.generate(prompts, max_new_tokens=12).new_tokens
    assert any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# Quantising a weight


@pytest.mark.parametrize("group_size", [8, 32])
def test_numbers_and_scales_are_those_of_compressed_tensors(group_size: int) -> None:
    weight = layer_of().weight.detach()
    weight[2] = 0  # whose groups have no scale of their own
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
    groups = weight.unflatten(-1, (-1, group_size))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    values = quantize(weight, scale, zero, args, dtype=torch.int8)
    packed, found = quantise_weight(weight, group_size)
    assert torch.equal(found, scale) and torch.equal(packed, pack_to_int32(values, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_entry_is_further_away_than_half_a_scale(dtype: torch.dtype) -> None:
    weight = layer_of(40, 64, dtype).weight.detach()
    packed, scale = quantise_weight(weight, 16)
    assert scale.dtype == (torch.float32 if dtype == torch.float64 else dtype)
    off = (dequantise(packed, scale, torch.float64) - weight.double()).abs()
    rounding = 8 * torch.finfo(scale.dtype).eps  # of a scale, of which an entry is at most eight
    assert bool((off <= (0.5 + rounding) * scale.double().repeat_interleave(16, 1)).all())
    assert unpack(packed).unique().tolist() == list(range(-8, 8))


# Recognising a layer


class Foreign(nn.Module):
    """A layer of another package: the same names, all of them parameters."""

    def __init__(self, **tensors: Tensor | None) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, None if tensor is None else nn.Parameter(tensor, requires_grad=False))


def foreign(**changed: Tensor | None) -> Foreign:
    layer = Int4Linear.quantised(layer_of(), 16)
    parts = {name: getattr(layer, name).data for name in ("weight_packed", "weight_scale", "weight_shape")}
    return Foreign(**{**parts, "bias": None, **changed})


def test_a_layer_of_another_package_is_recognised() -> None:
    layer = foreign()
    found = scheme_of(layer)
    assert found is not None and found[0] is INT4
    assert found[1][0] is layer.weight_packed and found[1][1] is layer.weight_scale
    assert {id(part) for part in packed_tensors(layer)} == {id(part) for part in layer.parameters()}


@pytest.mark.parametrize(
    "changed",
    [
        {"weight_packed": torch.zeros(6, 4, dtype=torch.uint8)},
        {"weight_packed": torch.zeros(5, 4, dtype=torch.int32)},
        {"weight_packed": torch.zeros(2, 6, 4, dtype=torch.int32)},
        {"weight_packed": None},
        {"weight_scale": torch.ones(6, 3)},
        {"weight_scale": torch.ones(6, 2, dtype=torch.int32)},
        {"weight_scale": torch.ones(6)},
        {"weight_scale": None},
        {"weight_zero_point": torch.zeros(1, 2)},
        {"weight_g_idx": torch.zeros(32)},
    ],
    ids=str,
)
def test_a_layer_of_another_scheme_is_not(changed: dict[str, Tensor | None]) -> None:
    assert scheme_of(foreign(**changed)) is None


def test_a_model_with_layers_of_another_package_is_compiled() -> None:
    model, prompts = quantised(), ragged_prompts()
    expected = [up_to_end(tokens) for tokens in forward_greedy(oracle(model), prompts, 8)]
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Int4Linear):
            parts = {**dict(layer.named_parameters()), "weight_shape": layer.weight_shape}
            model.set_submodule(name, Foreign(**parts))
    found = specgraph.compile_speculative(model, CONFIG).generate(prompts, max_new_tokens=8).new_tokens
    assert_same_tokens(oracle(quantised()), prompts, found, expected)


def test_a_model_that_is_cast_keeps_its_numbers_and_scales() -> None:
    model, prompts = quantised(dtype=torch.float32), ragged_prompts()
    wide = copy.deepcopy(model).double()
    assert {x.weight_scale.dtype for x in wide.modules() if isinstance(x, Int4Linear)} == {torch.float64}
    found = specgraph.compile_speculative(wide, CONFIG).generate(prompts, max_new_tokens=8).new_tokens
    expected = [up_to_end(tokens) for tokens in forward_greedy(oracle(model).double(), prompts, 8)]
    assert_same_tokens(oracle(wide), prompts, found, expected)


def test_a_layer_that_no_scheme_recognises_is_refused() -> None:
    model = quantised()
    layer: Any = model.model.layers[1].self_attn.q_proj
    layer.weight_zero_point = nn.Parameter(torch.zeros(2, 32), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"q_proj.weight_packed is torch\.int32"):
        specgraph.compile_speculative(model)


# Passes


def test_layers_of_one_input_are_merged() -> None:
    decoder = specgraph.compile_speculative(
        quantised(), {**CONFIG, "lowering": {"name": "gpu"}, "draft": {"kind": "none"}}
    )
    graph = list(decoder.stages.values())[-1].modules.unchanged["target"].graph
    found = [str(x.weight[0].target) for x in linears.linears(graph) if x.scheme is INT4]
    assert [name.rpartition("layers.0.")[2] for name in found[:4]] == [
        "self_attn.q_proj_k_proj_v_proj.weight_packed", "self_attn.o_proj.weight_packed",
        "mlp.gate_proj_up_proj.weight_packed", "mlp.down_proj.weight_packed",
    ]  # fmt: skip


def test_groups_of_two_sizes_are_not_merged() -> None:
    weights = [quantise_weight(layer_of().weight.detach(), size) for size in (8, 16, 16)]
    assert INT4.why_not_merged(weights) == "their inputs are in 2 and 4 groups"
    assert INT4.why_not_merged(weights[1:]) is None


def test_packed_bytes_count() -> None:
    model = quantised()
    reads = sum(size for size, _ in reads_of(trace(model).body).weights)
    packed = sum(x.numel() * x.element_size() for x in packed_tensors(model))
    dense = sum(x.in_features * x.out_features for x in model.modules() if isinstance(x, Int4Linear)) * 8
    assert packed == dense // 16 + dense // 8 // GROUP * 4 and packed <= reads < dense
