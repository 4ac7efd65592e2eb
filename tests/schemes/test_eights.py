"""Weights of eight bits with a scale for each output or matrix: their meaning, their files, and tokens."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized import NaiveQuantizationCompressor
from compressed_tensors.compressors.pack_quantized import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

import specgraph
from specgraph.checkpoints.files import open_files
from specgraph.errors import InputError, UnsupportedModelError
from specgraph.ir.linear import linears
from specgraph.kernels.packed.eights import (
    FP8_CHANNEL,
    FP8_STATIC,
    FP8_TOKEN,
    INT8_CHANNEL,
    INT8_STATIC,
    INT8_TOKEN,
    EightBits,
)
from specgraph.schemes.compressed_tensors import CompressedTensors
from specgraph.schemes.eight_bits import unpacked
from specgraph.schemes.layouts import read_layout
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.ir.test_linear import misses
from tests.kernels.packed.definition import floating, normal
from tests.models import make_model, ragged_prompts, saved
from tests.schemes.files import Change, assert_equal_models, changed, drop, input_scales, put, static
from tests.schemes.models import packed_experts, packed_layers

INT8 = torch.int8
FORMS = (FP8_CHANNEL, FP8_TOKEN, INT8_CHANNEL, INT8_TOKEN)
every_form = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
PROJECTION = "model.layers.1.mlp.down_proj"
SCALE = f"{PROJECTION}.weight_scale"


def packed(form: EightBits, architecture: str = "llama", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return specgraph.quantise(make_model(architecture, seed=3, dtype=dtype), form.name)


def values(form: EightBits, numbers: Tensor) -> Tensor:
    """What stored bytes mean, by a table of all 256 codes."""
    fp8 = [floating(code, 4, 3) for code in range(256)]
    table = fp8 if form.stored.is_floating_point else [code - 256 * (code > 127) for code in range(256)]
    return torch.tensor(table, dtype=torch.float64)[numbers.cpu().view(torch.uint8).long()]


def rounded(form: EightBits, x: Tensor) -> Tensor:
    """Rows as the scheme quantises them, by a search over all numbers, one entry at a time."""
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    choices = values(form, codes)
    choices = choices[choices.abs() <= (448 if form.stored.is_floating_point else 128)].unique()
    half = 448 if form.stored.is_floating_point else 127.5
    scale = (x.abs().amax(-1, keepdim=True) / half).float().to(x.dtype)
    scale = scale.where(scale > 0, 1)
    nearest = (x[..., None] / scale[..., None] - choices.to(x.dtype)).abs().argmin(-1)
    return choices.to(x.dtype)[nearest] * scale


class Rounded(nn.Linear):
    form: EightBits

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(rounded(self.form, x), self.weight)


def dense(model: PreTrainedModel, form: EightBits, architecture: str = "llama") -> PreTrainedModel:
    """The same model with the weights that bytes and scales mean, and rows rounded by the definition."""
    made: Any = make_model(architecture, seed=3, dtype=torch.float64)
    for name, layer in packed_layers(model).items():
        plain = (Rounded if form.quantises_rows else nn.Linear)(layer.in_features, layer.out_features, bias=False)
        plain.form = form  # type: ignore[assignment]
        plain.weight.data = values(form, layer.weight.data) * layer.weight_scale.data.double()  # type: ignore[operator]
        made.set_submodule(name, plain)
    for name, experts in packed_experts(model).items():
        for stack in ("gate_up_proj", "down_proj"):
            scale = experts.get_parameter(f"{stack}_scale").double()
            made.get_submodule(name).get_parameter(stack).data = values(form, experts.get_parameter(stack)) * scale
    return made  # type: ignore[no-any-return]


@every_form
def test_weights_are_those_of_compressed_tensors(form: EightBits) -> None:
    """Bit for bit: scales, numbers, and what its reader makes of them."""
    kind = "float" if form.stored.is_floating_point else "int"
    args = QuantizationArgs(num_bits=8, type=kind, symmetric=True, strategy="channel")
    scheme, weight = QuantizationScheme(targets=["Linear"], weights=args), normal(7, 40, dtype=torch.float32).cpu()
    weight[2] = 0
    scale, _ = calculate_qparams(weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True), args)
    theirs = NaiveQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    numbers, found = form.quantise(weight)
    assert torch.equal(found, theirs["weight_scale"]) and torch.equal(
        numbers.view(torch.uint8), theirs["weight"].view(torch.uint8)
    )
    back = NaiveQuantizationCompressor.decompress(dict(theirs), scheme)["weight"]
    assert torch.equal(back, form.dequantise([numbers, found], torch.float32))
    assert torch.equal(form.dequantise([numbers, found], torch.float64), values(form, numbers) * found.double())
    faulty = form.dequantise([numbers, found.roll(1, 0)], torch.float64)
    assert not torch.equal(faulty, values(form, numbers) * found.double())


@every_form
def test_a_row_is_rounded_as_if_it_were_alone(form: EightBits) -> None:
    x = normal(5, 33) * torch.tensor([1.0, 1e-3, 50.0, 0.0, 3.0], dtype=torch.float64, device="cpu")[:, None]
    found = form.quantise_rows(x)
    assert torch.equal(found, torch.cat([form.quantise_rows(row[None]) for row in x]))
    if form.quantises_rows:
        torch.testing.assert_close(found, rounded(form, x), rtol=1e-15, atol=0)
    else:
        assert found is x


@every_form
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_a_saved_model_is_loaded(form: EightBits, architecture: str, tmp_path: Path) -> None:
    model = packed(form, architecture)
    found = specgraph.load(saved(model, tmp_path))
    assert_equal_models(found, model)
    assert {layer.format for layer in packed_layers(found).values()} == {form.name}
    QuantizationConfig.model_validate(found.config.quantization_config)


@every_form
@pytest.mark.parametrize(("architecture", "draft"), [("llama", "ngram"), ("qwen3_moe", "ngram")])
def test_tokens_are_those_of_the_dequantised_model(form: EightBits, architecture: str, draft: str) -> None:
    model, prompts = packed(form, architecture, torch.float64), ragged_prompts()
    # The rows of experts are rounded by the packed model's own forward alone.
    alone = architecture == "qwen3_moe" and form.quantises_rows
    expected = model if alone else dense(model, form, architecture)
    tokens_of = forward_greedy(expected, prompts, 8)
    config = {**CONFIG, "draft": {"kind": draft, "num_speculative_tokens": 3}}
    tokens = specgraph.compile_speculative(model, config).generate(prompts, max_new_tokens=8, eos_token_id=[])
    assert_same_tokens(expected, prompts, tokens.new_tokens, tokens_of)


def one_scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Files with one scale for each matrix, another one for each."""
    for place, name in enumerate(sorted(name for name in tensors if name.endswith("weight_scale"))):
        tensors[name] = torch.tensor([0.01 + place / 1000])
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "tensor"


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_one_scale_of_a_matrix_is_that_of_all_its_outputs(architecture: str, tmp_path: Path) -> None:
    folder = changed(packed(FP8_TOKEN, architecture), tmp_path / "first", one_scale)
    stored, found = load_file(folder / "model.safetensors"), specgraph.load(folder)
    for name, layer in packed_layers(found).items():
        expected = values(FP8_TOKEN, stored[f"{name}.weight"]) * stored[f"{name}.weight_scale"].double()
        assert torch.equal(layer.dequantised(torch.float64), expected)
    for name, experts in packed_experts(found).items():
        scales = [stored[f"{name}.1.{part}_proj.weight_scale"] for part in ("gate", "up")]
        rows = experts.gate_up_proj_scale.shape[1] // 2
        assert torch.equal(experts.gate_up_proj_scale[1], torch.cat([x.expand(rows) for x in scales])[:, None])
    again = specgraph.load(saved(found, tmp_path / "second"))
    assert_equal_models(again, found)


# Static activations

STATIC = {FP8_TOKEN: FP8_STATIC, INT8_TOKEN: INT8_STATIC}
INPUT = f"{PROJECTION}.input_scale"
OWN = "each of them says by which scale its inputs are rounded, and not all of them the same"
every_static = pytest.mark.parametrize("form", STATIC, ids=lambda form: STATIC[form].name)


class ByPackage(nn.Linear):
    args: QuantizationArgs
    input_scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        rows = fake_quantize(x, self.input_scale, None, self.args)  # type: ignore[arg-type]
        return functional.linear(rows, self.weight)


@pytest.mark.parametrize("equal", [False, True])
@every_static
def test_rows_are_rounded_by_the_scale_of_a_layer_as_by_compressed_tensors(
    form: EightBits, equal: bool, tmp_path: Path
) -> None:
    """Layers of one input are merged if their scales are equal. Tokens are those of the package's rounding."""
    kind, prompts = "float" if form is FP8_TOKEN else "int", ragged_prompts()
    folder = changed(packed(form), tmp_path / "first", functools.partial(static, equal=equal))
    model = specgraph.load(folder, dtype=torch.float64)
    assert {layer.format for layer in packed_layers(model).values()} == {STATIC[form].name}
    theirs = QuantizationConfig.model_validate(model.config.quantization_config).config_groups["group_0"]
    args: Any = theirs.input_activations  # type: ignore[union-attr]
    assert (args.dynamic, args.strategy, args.type) == (False, "tensor", kind)
    expected: Any = dense(model, form)
    for name, layer in packed_layers(model).items():
        made = expected.get_submodule(name)
        made.__class__, made.args, made.input_scale = ByPackage, args, layer.input_scale.data.double()
        x = normal(3, layer.in_features, dtype=torch.bfloat16).cpu() * 0.5
        rows = STATIC[form].quantise_rows(x, layer.weight_parts)
        assert torch.equal(rows, fake_quantize(x.float(), layer.input_scale, None, args))  # type: ignore[arg-type]
    tokens_of = forward_greedy(expected, prompts, 8)
    config = {**CONFIG, "lowering": {"name": "gpu"}, "draft": {"kind": "ngram", "num_speculative_tokens": 3}}
    decoder = specgraph.compile_speculative(model, config)
    assert misses(decoder, "merge_linears") == (set() if equal else {OWN})
    graph = [*decoder.stages.values()][-1].modules.unchanged["target"].graph
    assert sum(linear.scheme.name == STATIC[form].name for linear in linears(graph)) == 2 * (4 if equal else 7)
    tokens = decoder.generate(prompts, max_new_tokens=8, eos_token_id=[])
    assert_same_tokens(expected, prompts, tokens.new_tokens, tokens_of)
    assert_equal_models(specgraph.load(saved(model, tmp_path / "second"), dtype=torch.float64), model)
    assert read_layout(model.config.quantization_config) == CompressedTensors(STATIC[form])
    for name in ("layers.0.self_attn.q_proj", "layers.1.self_attn.k_proj") if equal else ():
        made = specgraph.compile_speculative(model, config)
        with torch.no_grad():
            model.get_parameter(f"model.{name}.input_scale").mul_(2)
        with pytest.raises(InputError, match=rf"{name}\.input_scale, of which the decoder reads a copy"):
            made.generate(prompts, max_new_tokens=2)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", drop(INPUT), rf"no tensor {INPUT}"),
        ("llama", put(INPUT, torch.zeros(1)), rf"{INPUT} of .* is 0\.0 at \[0\]; scales must be"),
        ("llama", put(INPUT, torch.ones(48)), r"the shape \[48\], and config.json needs \[1\]"),
        ("qwen3_moe", drop(), r"gate_proj says by itself by which scale its inputs are rounded, .* input_scale\."),
    ],
)
def test_scales_of_inputs_that_do_not_fit_are_refused(
    architecture: str, change: Change, message: str, tmp_path: Path
) -> None:
    def both(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        static(tensors, config)
        change(tensors, config)

    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(packed(FP8_TOKEN, architecture), tmp_path, both))
    with pytest.raises(ValueError, match=r"input_scale is torch.float32 \[2\]; they must be a matrix, and \[1\]"):
        FP8_STATIC.check([*FP8_TOKEN.quantise(normal(5, 32)), torch.ones(2)])


def by_auto_fp8(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Files as AutoFP8 has them: single numbers as scales of a matrix and of the inputs of a layer."""
    tensors |= {name: x.reshape(()) for name, x in input_scales(tensors, equal=True).items()}
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        tensors[name] = tensors[name].amax()
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "ignored_layers": ["lm_head"],
    }


def test_the_files_of_auto_fp8_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    """With another configuration. The head is never packed, though older files do not name it."""

    def alike(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        stated = config["quantization_config"]
        by_auto_fp8(tensors, config)
        group = stated["config_groups"]["group_0"]
        group["weights"]["strategy"] = "tensor"
        group["input_activations"].update({"strategy": "tensor", "dynamic": False})
        config["quantization_config"] = stated

    def unnamed(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        by_auto_fp8(tensors, config)
        del config["quantization_config"]["ignored_layers"]

    model, prompt = packed(FP8_TOKEN), ragged_prompts()[1][None]
    expected = specgraph.load(changed(model, tmp_path / "theirs", alike))
    for name, change in (("auto", by_auto_fp8), ("unnamed", unnamed)):
        found = specgraph.load(changed(model, tmp_path / name, change))
        assert_equal_models(found, expected)
        assert {layer.format for layer in packed_layers(found).values()} == {FP8_STATIC.name}
        assert torch.equal(found(prompt).logits, expected(prompt).logits)
        assert_equal_models(specgraph.load(saved(found, tmp_path / f"{name} again")), expected)

    def dynamic(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        by_auto_fp8(tensors, config)
        config["quantization_config"]["activation_scheme"] = "dynamic"

    with pytest.raises(UnsupportedModelError, match=r"weight_block_size of quantization_config is None; allowed is"):
        specgraph.load(changed(model, tmp_path / "dynamic", dynamic))


def in_words(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Files as the package packs four integers into an int32."""
    for name in [name for name in tensors if name.endswith(".weight") and tensors[name].dtype == torch.int8]:
        numbers = tensors.pop(name)
        tensors[f"{name}_packed"] = pack_to_int32(numbers, 8)
        tensors[f"{name}_shape"] = torch.tensor(numbers.shape)
    config["quantization_config"]["format"] = "pack-quantized"
    config["quantization_config"]["config_groups"]["group_0"]["format"] = None


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_words_of_four_integers_are_those_integers(architecture: str, tmp_path: Path) -> None:
    model = packed(INT8_CHANNEL, architecture)
    found = specgraph.load(changed(model, tmp_path / "first", in_words))
    assert_equal_models(found, model)
    assert found.config.quantization_config == model.config.quantization_config
    assert_equal_models(specgraph.load(saved(found, tmp_path / "second")), model)


def test_every_integer_is_unpacked_and_words_that_are_not_full(tmp_path: Path) -> None:
    numbers = torch.arange(-128, 127, dtype=torch.int8).view(5, 51)
    tensors = {"x.weight_packed": pack_to_int32(numbers, 8), "x.weight_shape": torch.tensor([5, 51])}
    save_file({"y": torch.ones(2), **tensors}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    found = unpacked(open_files(tmp_path).tensors)
    assert found.keys() == {"x.weight", "y"} and (found["x.weight"].shape, found["x.weight"].dtype) == ((5, 51), INT8)
    assert torch.equal(found["x.weight"].read(), numbers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(f"{PROJECTION}.weight_packed"), "down_proj.weight_packed of .* is missing; for .*weight_shape"),
        (drop(f"{PROJECTION}.weight_shape"), "no tensor .*down_proj.weight,"),
        (put(f"{PROJECTION}.weight_packed", torch.zeros(32, 12)), "weight_packed of .* is torch.float32"),
        (put(f"{PROJECTION}.weight_shape", torch.tensor([32, 49])), r"is torch.int32 \[32, 12\]; .* \[32, 13\]"),
        (put(f"{PROJECTION}.weight_shape", torch.tensor([32])), r"weight_shape \[32\] it must be torch.int32 \[\]"),
    ],
)  # fmt: skip
def test_words_that_do_not_fit_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    def words(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        in_words(tensors, config)
        change(tensors, config)

    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(packed(INT8_CHANNEL), tmp_path, words))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, rf"no tensor {SCALE}"),
        (torch.zeros(32, 1), rf"{SCALE} of .* is 0\.0 at \[0, 0\]; scales must be"),
        (torch.full((32, 1), torch.nan), r"is nan at \[0, 0\]"),
        (torch.ones(1), r"the shape \[1\], and config.json needs \[32, 1\]"),
        (torch.ones(32, 2), r"the shape \[32, 2\], and config.json needs \[32, 1\]"),
    ],
)
def test_damaged_scales_are_refused(tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    change = drop(SCALE) if tensor is None else put(SCALE, tensor)
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(packed(INT8_CHANNEL), tmp_path, change))


def test_a_scale_for_each_output_is_refused_where_one_is_stated(tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        one_scale(tensors, config)
        tensors[SCALE] = torch.ones(32, 1)

    with pytest.raises(UnsupportedModelError, match=r"the shape \[32, 1\], and config.json needs \[1\]"):
        specgraph.load(changed(packed(FP8_CHANNEL), tmp_path, change))


@every_form
def test_what_is_stated_is_read_as_the_same(form: EightBits) -> None:
    assert read_layout(CompressedTensors(form, None, ("lm_head",)).stated()) == CompressedTensors(form)


@pytest.mark.parametrize(
    ("part", "stated", "message"),
    [
        ("input_activations", {"strategy": "tensor"}, "the scale of a row would depend on the other rows"),
        ("input_activations", {"dynamic": False}, "dynamic of .* is False; allowed is True"),
        ("input_activations", {"strategy": "group"}, "strategy of .* is 'group'; allowed is 'token', 'tensor'"),
        ("input_activations", {"strategy": "tensor", "dynamic": "local"}, "dynamic of .* is 'local'; allowed is False"),
        ("input_activations", {"type": "int"}, "input_activations.type .* is 'int'; allowed is 'float'"),
        ("input_activations", {"num_bits": 4}, "input_activations.num_bits .* is 4; allowed is 8"),
        ("weights", {"type": "int"}, "weights.type .* is 'int'; allowed is 'float'"),
        ("weights", {"strategy": "group"}, "weights.strategy .* is 'group'; allowed is 'channel', 'tensor'"),
        ("weights", {"symmetric": False}, "weights.symmetric .* is False"),
    ],
)
def test_other_activations_and_weights_are_refused(part: str, stated: dict[str, Any], message: str) -> None:
    config = CompressedTensors(FP8_TOKEN).stated()
    config["config_groups"]["group_0"][part].update(stated)
    with pytest.raises(UnsupportedModelError, match=message):
        read_layout(config)
