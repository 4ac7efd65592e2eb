"""What ``specgraph.quantise`` replaces, what it states in the configuration, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from torch import nn

import specgraph
from specgraph.errors import InputError, SpecgraphError, UnsupportedModelError
from specgraph.schemes.int4 import Int4Linear
from specgraph.schemes.layout import Layout, read_layout
from tests.models import make_model


def packed(model: nn.Module) -> list[str]:
    return [name for name, layer in model.named_modules() if isinstance(layer, Int4Linear)]


def test_every_linear_layer_is_replaced_but_the_head() -> None:
    model = make_model("llama")
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    assert specgraph.quantise(model, "int4", group_size=16) is model
    assert packed(model) == [name for name in names if name != "lm_head"]
    assert type(model.lm_head) is nn.Linear
    layer = model.model.layers[0].mlp.down_proj
    assert (layer.in_features, layer.out_features, layer.group_size, layer.bias) == (48, 32, 16, None)
    assert "group_size=16" in repr(layer)


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
    assert read_layout(theirs.model_dump(mode="json")) == Layout(16, ignore=("lm_head", "re:.*q_proj"))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def _with(name: str, layer: nn.Module) -> Any:
    model = make_model("llama")
    model.set_submodule(name, layer)
    return model


REFUSED: dict[str, tuple[Any, dict[str, Any], type[SpecgraphError], str]] = {
    "unknown scheme": (None, {"scheme": "int3"}, InputError, "scheme is 'int3'; allowed is int4"),
    "no list": (None, {"ignore": "lm_head"}, InputError, "ignore is 'lm_head'; it must be a list"),
    "too large": (None, {"group_size": 32}, InputError, "does not divide the 48 inputs of "
                  "model.layers.0.mlp.down_proj; the inputs of all layers are divided by 8, 16"),
    "no multiple of 8": (None, {"group_size": 4}, InputError, "is no positive multiple of 8; .* by 8, 16"),
    "zero": (None, {"group_size": 0}, InputError, "group_size is 0, which is no positive"),
    "odd inputs": (lambda: _with("model.layers.1.mlp.up_proj", nn.Linear(36, 48)), {}, InputError,
                   "model.layers.1.mlp.up_proj has 36 inputs"),
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


STATED = Layout(16).stated()


def _group(**changed: Any) -> dict[str, Any]:
    return {**STATED, "config_groups": {"group_0": {**STATED["config_groups"]["group_0"], **changed}}}


def _weights(**changed: Any) -> dict[str, Any]:
    return _group(weights={**STATED["config_groups"]["group_0"]["weights"], **changed})


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({**STATED, "quant_method": "awq"}, "quant_method of quantization_config is 'awq'; allowed is 'compressed-ten"),
        ({**STATED, "format": "int-quantized"}, "format of quantization_config is 'int-quantized'; allowed is 'pack-q"),
        ({**STATED, "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme of quantization_config"),
        ({**STATED, "config_groups": {}}, "has 0 config_groups"),
        ({**STATED, "config_groups": None}, "has no config_groups"),
        (_group(weights=None), "group_0 of quantization_config has no weights"),
        (_group(format="float-quantized"), "group_0.format .* 'float-quantized'"),
        (_group(input_activations={"num_bits": 8}), "group_0.input_activations"),
        (_weights(num_bits=8), "group_0.weights.num_bits of quantization_config is 8; allowed is 4"),
        (_weights(type="float"), "group_0.weights.type .* 'float'; allowed is 'int'"),
        (_weights(symmetric=False), "group_0.weights.symmetric .* False; allowed is True"),
        (_weights(strategy="channel"), "group_0.weights.strategy .* 'channel'; allowed is 'group'"),
        (_weights(group_size=None), "group_0.weights.group_size .* None"),
    ],
)
def test_another_layout_is_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_layout(stated)
