"""What ``specgraph.quantise`` replaces, what it states in the configuration, and what it refuses."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config, Mxfp4Config
from transformers.quantizers.quantizers_utils import should_convert_module

import specgraph
from specgraph.config.schemes import SCHEMES as EVERY
from specgraph.errors import InputError, SpecgraphError, UnsupportedModelError
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.fp8 import FP8_BLOCKS
from specgraph.kernels.packed.int4 import INT4, WHOLE_ROW
from specgraph.kernels.packed.int4_zeros import INT4_ACT_ORDER, INT4_ZEROS
from specgraph.kernels.packed.mxfp4 import MXFP4
from specgraph.schemes.compressed_tensors import CompressedTensors
from specgraph.schemes.fine_grained import FineGrained
from specgraph.schemes.gpt_oss import GptOss
from specgraph.schemes.layout import Layout
from specgraph.schemes.layouts import read_layout
from tests.models import make_model, saved
from tests.schemes.files import assert_equal_models
from tests.schemes.models import FORMATS, SCHEMES, packed_experts, packed_layers, quantised, sizes


@pytest.mark.parametrize(("scheme", "options"), [("int4", {"group_size": 16}), ("mxfp4", {}), ("fp8", {})])
def test_every_linear_layer_is_replaced_but_the_head(scheme: str, options: dict[str, Any]) -> None:
    model = make_model("llama", **sizes("llama", scheme))
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    inner = model.config.intermediate_size
    assert specgraph.quantise(model, scheme, **options) is model
    assert [*packed_layers(model)] == [name for name in names if name != "lm_head"]
    assert type(model.lm_head) is nn.Linear
    layer = model.model.layers[0].mlp.down_proj
    assert (layer.in_features, layer.out_features, layer.format, layer.bias) == (inner, 32, FORMATS[scheme], None)
    assert f"format={FORMATS[scheme]}" in repr(layer)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_stacks_of_experts_are_replaced_and_routers_are_not(architecture: str, scheme: str) -> None:
    """Of gpt-oss in mxfp4, experts alone."""
    dense = make_model(architecture, seed=3, dtype=torch.float64, **sizes(architecture, scheme))
    model = quantised(architecture, scheme)
    linear = [name for name, layer in dense.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    assert [*packed_layers(model)] == ([] if (architecture, scheme) == ("gpt_oss", "mxfp4") else linear)
    stacks = {f"{name}.{stack}" for name in packed_experts(model) for stack in ("gate_up_proj", "down_proj")}
    assert stacks == {name for name, _ in dense.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))}
    before = {name: value for name, value in dense.state_dict().items() if "proj" not in name}
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())


def test_a_stack_that_is_transposed_is_packed_with_its_outputs_first() -> None:
    dense, model = make_model("gpt_oss", seed=3, dtype=torch.float64), quantised("gpt_oss", "int4")
    experts = model.model.layers[1].mlp.experts
    for stack in ("gate_up_proj", "down_proj"):
        expected = INT4.quantise(getattr(dense.model.layers[1].mlp.experts, stack).detach().mT, 8)
        for part, tensor in zip(INT4.stack_parts, expected, strict=True):
            assert torch.equal(experts.get_parameter(f"{stack}{part}"), tensor)


@pytest.mark.parametrize(
    ("ignore", "left"),
    [
        (("lm_head", "model.layers.0.mlp.up_proj"), {"layers.0.mlp.up_proj"}),
        (("lm_head", r"re:.*\.layers\.1\.mlp"), {f"layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")}),
        (("lm_head", "re:layers"), set()),  # an expression matches the beginning of a name
        ((), set()),
    ],
)
def test_what_is_ignored_stays(ignore: tuple[str, ...], left: set[str]) -> None:
    model = specgraph.quantise(make_model("llama"), group_size=16, ignore=ignore)
    names = {name.removeprefix("model.") for name, layer in model.named_modules() if type(layer) is nn.Linear}
    assert names == left | ({"lm_head"} if "lm_head" in ignore else set())


@pytest.mark.parametrize("ignore", ["model.layers.0.mlp", r"model\.layers\.0", "layers.0.mlp.experts"])
def test_experts_of_gpt_oss_that_are_ignored_stay(ignore: str, tmp_path: Path) -> None:
    model = specgraph.quantise(make_model("gpt_oss", intermediate_size=64), "mxfp4", ignore=("lm_head", ignore))
    for found in (model, specgraph.load(saved(model, tmp_path))):
        assert [*packed_experts(found)] == ["model.layers.1.mlp.experts"]
        assert ignore in found.config.quantization_config["modules_to_not_convert"]
        assert_equal_models(found, model)


def test_the_configuration_is_one_of_compressed_tensors() -> None:
    model = specgraph.quantise(make_model("llama"), group_size=16, ignore=("lm_head", "re:.*q_proj"))
    stated = model.config.quantization_config
    theirs = QuantizationConfig.model_validate(stated)
    assert (theirs.quant_method, theirs.format) == ("compressed-tensors", "pack-quantized")
    assert theirs.ignore == ["lm_head", "re:.*q_proj"]
    scheme: Any = theirs.config_groups["group_0"]
    weights = scheme.weights
    assert (scheme.targets, scheme.input_activations, weights.num_bits) == (["Linear"], None, 4)
    assert (weights.type, weights.strategy, weights.group_size, weights.symmetric) == ("int", "group", 16, True)
    assert read_layout(theirs.model_dump(mode="json")) == CompressedTensors(INT4, 16, ignore=("lm_head", "re:.*q_proj"))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _with(name: str, layer: nn.Module) -> Any:
    model = make_model("llama")
    model.set_submodule(name, layer)
    return model


class Int8Tensor(torch.Tensor):
    """As those by which torchao replaces weights."""


def _of_another_tool() -> Any:
    model = make_model("llama")
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Int8Tensor), requires_grad=False)
    return model


def _as_gpt_oss() -> Any:
    model = make_model("llama")
    model.config.model_type = "gpt_oss"
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any], type[SpecgraphError], str]] = {
    "unknown scheme": (None, {"scheme": "int3"}, InputError, "scheme is 'int3'; allowed is int4, mxfp4, fp8"),
    "no list": (None, {"ignore": "lm_head"}, InputError, "ignore is 'lm_head'; it must be a list"),
    "too large": (None, {"group_size": 32}, InputError, "model.layers.0.mlp.down_proj cannot be stored in int4: its 48 "
                  "inputs are no multiple of the group size, 32; all layers have groups of 8, 16"),
    "no multiple of 8": (None, {"group_size": 4}, InputError, "group size, 4, is no positive .* have groups of 8, 16"),
    "zero": (None, {"group_size": 0}, InputError, "the group size, 0, is no positive multiple of 8; .* of 8, 16"),
    "by default": (None, {"group_size": None}, InputError, "q_proj .* no multiple of the group size, 128; .* of 8, 16"),
    "odd inputs": (lambda: _with("model.layers.1.mlp.up_proj", nn.Linear(36, 48)), {}, InputError,
                   "model.layers.1.mlp.up_proj cannot be stored in int4: its 36 inputs .* add its name to ignore"),
    "a stack": (lambda: make_model("qwen3_moe"), {}, InputError,
                "experts.down_proj cannot be stored in int4: its 24 inputs .* 16; all layers have groups of 8"),
    "groups of mxfp4": (lambda: make_model("llama", intermediate_size=64), {"scheme": "mxfp4"}, InputError,
                        "groups of mxfp4 have 32 inputs, not 16; all layers have groups of 32"),
    "inputs of mxfp4": (None, {"scheme": "mxfp4", "group_size": None}, InputError,
                        "down_proj cannot be stored in mxfp4: its 48 inputs are no multiple of 32; add its name"),
    "groups of channels": (None, {"scheme": "int8_channel"}, InputError,
                           "int8_channel has a scale for each output, and no groups of 16; leave group_size out"),
    "groups of nvfp4": (None, {"scheme": "nvfp4", "group_size": 32}, InputError,
                        "groups of nvfp4 have 16 inputs, not 32; all layers have groups of 16"),
    "groups of fp8": (None, {"scheme": "fp8"}, InputError,
                      "fp8 has blocks of 128 x 128, and no groups of 16; leave group_size out"),
    "derived, fp8": (lambda: _with("model.layers.1.mlp.up_proj", Scaled(32, 48)), {"scheme": "fp8", "group_size": None},
                     UnsupportedModelError, "model.layers.1.mlp.up_proj is a Scaled"),
    "a tensor of torchao": (lambda: _of_another_tool(), {}, UnsupportedModelError,
                            "is quantised already: model.layers.1.mlp.up_proj.weight is Int8Tensor; give .* before"),
    "no experts": (lambda: _as_gpt_oss(), {"scheme": "mxfp4", "group_size": None}, UnsupportedModelError,
                   "has no linear layer but those of ignore"),
    "derived": (lambda: _with("model.layers.1.mlp.up_proj", Scaled(32, 48)), {}, UnsupportedModelError,
                "model.layers.1.mlp.up_proj is a Scaled"),
    "tied": (lambda: make_model("llama", tie_word_embeddings=True), {"ignore": ()}, UnsupportedModelError,
             "lm_head has its weight in common with model.embed_tokens.weight"),
    "nothing left": (None, {"ignore": ("Linear",)}, UnsupportedModelError, "no linear layer but those of ignore"),
    "twice": (lambda: specgraph.quantise(make_model("llama"), group_size=16), {}, UnsupportedModelError,
              "has a quantization_config already"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_quantised_is_refused_before_anything_is_changed(case: str) -> None:
    make, options, error, message = REFUSED[case]
    model = make() if make else make_model("llama")
    before = {name: type(layer) for name, layer in model.named_modules()}
    stated = getattr(model.config, "quantization_config", None)
    with pytest.raises(error, match=message):
        specgraph.quantise(model, **{"group_size": 16, **options})
    assert {name: type(layer) for name, layer in model.named_modules()} == before
    assert getattr(model.config, "quantization_config", None) is stated


STATED = CompressedTensors(INT4, 16).stated()


def _group(**changed: Any) -> dict[str, Any]:
    return {**STATED, "config_groups": {"group_0": {**STATED["config_groups"]["group_0"], **changed}}}


def _weights(**changed: Any) -> dict[str, Any]:
    return _group(weights={**STATED["config_groups"]["group_0"]["weights"], **changed})


FP8: dict[str, Any] = FineGrained(FP8_BLOCKS).stated()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({**STATED, "quant_method": "aqlm"}, "quant_method of quantization_config is 'aqlm'; allowed is 'compressed-ten"
         "sors', 'fp8', 'mxfp4', 'awq', 'gptq'"),
        ({}, "quant_method of quantization_config is None"),
        ({**STATED, "format": "marlin-24"}, "format .* is 'marlin-24'; allowed is 'pack-quantized', 'mxfp4-"),
        ({**STATED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme of quantization_config"),
        ({**STATED, "config_groups": {}}, "has 0 config_groups"),
        ({**STATED, "config_groups": None}, "has no config_groups"),
        (_group(weights=None), "group_0 of quantization_config has no weights"),
        (_group(format="float-quantized"), "group_0.format .* 'float-quantized'"),
        (_group(input_activations={"num_bits": 8}), "group_0.input_activations"),
        (_group(output_activations={"num_bits": 8}), "group_0.output_activations"),
        (_weights(num_bits=3), "group_0.weights.num_bits of quantization_config is 3; allowed is 4"),
        (_weights(num_bits=8), "weights.strategy of .* is 'group'; allowed is 'channel', 'tensor'"),
        (_weights(type="float"), "group_0.weights.type .* 'float'; allowed is 'int'"),
        (_weights(symmetric=None), "group_0.weights.symmetric .* None; allowed is True"),
        (_weights(strategy="tensor"), "group_0.weights.strategy .* 'tensor'; allowed is 'group'"),
        (_weights(group_size=0), "group_0.weights.group_size .* 0"),
        (_weights(group_size=None), "group_0.weights.group_size .* None"),
        ({**STATED, "format": "mxfp4-pack-quantized"}, "group_0.format .* 'pack-quantized'; allowed is 'mxfp4-pack-q"),
        ({**CompressedTensors(MXFP4, 16).stated()}, "group_0.weights.group_size .* is 16; allowed is 32"),
        ({**FP8, "weight_block_size": [64, 128]}, r"weight_block_size .* is \[64, 128\]; allowed is \[128, 128\]"),
        ({**FP8, "weight_block_size": None}, "weight_block_size of quantization_config is None"),
        ({**FP8, "weight_block_size": 128}, "weight_block_size of quantization_config is 128"),
        ({**FP8, "activation_scheme": "static"}, "activation_scheme .* is 'static'; allowed is 'dynamic'"),
        ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt .* is 'ue8m0'; allowed is 'float'"),
        ({**FP8, "fmt": "e5m2"}, "fmt of quantization_config is 'e5m2'; allowed is 'e4m3'"),
    ],
)  # fmt: skip
def test_another_layout_is_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_layout(stated)


@pytest.mark.parametrize(
    "layout",
    [CompressedTensors(INT4, 16, ("lm_head", "re:x")), CompressedTensors(INT4, WHOLE_ROW),
     CompressedTensors(INT4_ZEROS, 32), CompressedTensors(INT4_ZEROS, WHOLE_ROW), CompressedTensors(INT4_ACT_ORDER, 16),
     CompressedTensors(MXFP4, 32, (), ("re:.*mlp",)),
     FineGrained(FP8_BLOCKS, None, ("lm_head", "model.layers.0")), GptOss(MXFP4)],
    ids=lambda layout: layout.method,
)  # fmt: skip
def test_what_a_layout_states_is_read_as_the_same(layout: Layout) -> None:
    assert read_layout(layout.stated()) == layout


def test_what_other_tools_state_beside_it_is_read() -> None:
    """DeepSeek's files name the kind of numbers, and gpt-oss's may leave out what is not packed."""
    assert read_layout({**FP8, "fmt": "e4m3", "scale_fmt": None}) == FineGrained(FP8_BLOCKS)
    stated = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert read_layout(stated) == FineGrained(FP8_BLOCKS, None, ())
    assert read_layout({"quant_method": "mxfp4"}) == GptOss(MXFP4, None, ())


def test_the_configuration_of_fp8_and_of_gpt_oss_is_one_of_transformers() -> None:
    fp8 = FineGrainedFP8Config.from_dict(dict(quantised("llama", "fp8").config.quantization_config))
    assert (fp8.weight_block_size, fp8.activation_scheme) == ([128, 128], "dynamic")
    assert fp8.modules_to_not_convert == ["lm_head"]
    mxfp4 = Mxfp4Config.from_dict(dict(quantised("gpt_oss", "mxfp4").config.quantization_config))
    assert "lm_head" in mxfp4.modules_to_not_convert
    assert quantised("llama", "mxfp4").config.quantization_config["format"] == "mxfp4-pack-quantized"


KEPT = {
    ("lm_head",): set(),
    (): set(),  # the head is never packed
    ("lm_head", "model.layers.1"): {"layers.1"},  # a module that holds others
    (r"model\.layers\.\d\.mlp",): {"mlp"},
    ("q_proj",): {"q_proj"},  # the end of a name
    ("model.layers.0.self_attn.q", "del.layers.0"): set(),  # only whole names
}


@pytest.mark.parametrize("ignore", KEPT)
def test_fp8_leaves_what_transformers_leaves(ignore: tuple[str, ...]) -> None:
    model = specgraph.quantise(make_model("llama"), "fp8", ignore=ignore)
    left = {name for name, layer in model.named_modules() if type(layer) is nn.Linear}
    every = {name for name, layer in make_model("llama").named_modules() if isinstance(layer, nn.Linear)}
    assert left == {"lm_head"} | {name for name in every if any(text in name for text in KEPT[ignore])}
    assert left == {name for name in every if not should_convert_module(name, ["lm_head", *ignore])}


def test_fp8_leaves_experts_that_are_named() -> None:
    model = specgraph.quantise(make_model("qwen3_moe"), "fp8", ignore=("lm_head", "model.layers.0.mlp"))
    assert [*packed_experts(model)] == ["model.layers.1.mlp.experts"]


OTHERS = [scheme for scheme in EVERY if scheme not in SCHEMES]


@pytest.mark.parametrize("scheme", OTHERS)
def test_every_name_is_a_layout_that_compressed_tensors_reads(scheme: str, tmp_path: Path) -> None:
    """Bit for bit, in the dtype in which the package makes weights. NVFP4's is bfloat16."""
    options = {"group_size": 16} if scheme == "int4_zeros" else {}
    model = specgraph.quantise(make_model("llama", seed=3, dtype=torch.float32), scheme, **options)
    told = CompressedTensorsConfig(dequantize=True)
    theirs, info = AutoModelForCausalLM.from_pretrained(
        saved(model, tmp_path), dtype=torch.float32, quantization_config=told, output_loading_info=True
    )
    assert not any(info.values()), info
    found = packed_layers(specgraph.load(tmp_path))
    assert len(found) == 14
    for name, layer in found.items():
        assert layer.format == scheme
        weight, made = layer.dequantised(torch.float32), theirs.get_submodule(name).weight
        assert torch.equal(made, weight.bfloat16().float() if scheme == "nvfp4" else weight), name


def test_a_model_that_is_cast_keeps_its_numbers() -> None:
    for scheme in SCHEMES:
        model = quantised("qwen3_moe", scheme, torch.float32)
        wide, kept = copy.deepcopy(model).double(), format_of(FORMATS[scheme]).stored
        for name, tensor in model.state_dict().items():
            same = tensor.dtype == kept or not tensor.is_floating_point()
            assert wide.state_dict()[name].dtype == (tensor.dtype if same else torch.float64), name
            assert torch.equal(wide.state_dict()[name].double(), tensor.double())
