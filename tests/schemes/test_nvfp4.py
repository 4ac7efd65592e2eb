"""NVFP4: its meaning and its files, against compressed-tensors, and tokens."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization import quant_scheme as presets
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils.helpers import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
)
from safetensors.torch import load_file
from torch import Tensor

import specgraph
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.nvfp4 import NVFP4, NVFP4_ROWS
from specgraph.schemes.compressed_tensors import CompressedTensors
from specgraph.schemes.layouts import read_layout
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.ir.test_linear import misses
from tests.kernels.packed.definition import matrix, normal
from tests.models import ragged_prompts, saved
from tests.schemes.files import Change, assert_equal_models, changed, drop, put
from tests.schemes.models import oracle, packed_experts, packed_layers, quantised
from tests.schemes.test_tokens import calls

THEIRS = QuantizationScheme(targets=["Linear"], **presets.NVFP4A16)
QUANTISED = QuantizationScheme(targets=["Linear"], **presets.NVFP4)
OWN = "each of them says by which scale its inputs are rounded, and not all of them the same"
PROJECTION = "model.layers.1.mlp.down_proj"
SCALE = f"{PROJECTION}.weight_global_scale"


def by_package(layer: dict[str, Tensor]) -> Tensor:
    """The weight that compressed-tensors makes of a layer's tensors in files, in bfloat16."""
    return NVFP4PackedCompressor.decompress(layer, THEIRS)["weight"]


def test_weights_are_those_of_compressed_tensors() -> None:
    """Bit for bit: scales, numbers, and what its reader makes of them."""
    weight = normal(40, 96, dtype=torch.float32).cpu()
    weight[2], weight[3] = 0, weight[3] * 1e-6  # groups without a scale, and with one that is rounded to 0
    groups = weight.unflatten(-1, (-1, 16))
    whole = generate_gparam(weight.min(), weight.max())
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), THEIRS.weights, global_scale=whole)
    given = {"weight": weight, "weight_scale": scale, "weight_global_scale": whole}
    theirs, ours = NVFP4PackedCompressor.compress(given, THEIRS), NVFP4.quantise(weight)
    assert torch.equal(ours[0], theirs["weight_packed"])
    assert torch.equal(ours[1].float(), theirs["weight_scale"].float()) and torch.equal(ours[2], whole.expand(40, 1))
    assert torch.equal(by_package(theirs), NVFP4.dequantise(ours, torch.float32).bfloat16())
    assert torch.equal(NVFP4.dequantise(ours, torch.float64), matrix("nvfp4", ours))
    wrong = [ours[0], ours[1], 1 / ours[2]]  # as if scales were multiplied
    assert not torch.equal(NVFP4.dequantise(wrong, torch.float64), matrix("nvfp4", ours))


def test_a_stack_is_rounded_matrix_by_matrix_and_zeros_have_scales() -> None:
    given = normal(3, 8, 32, dtype=torch.bfloat16)
    given[1] = 0
    together, apart = NVFP4.quantise(given), [NVFP4.quantise(x) for x in given]
    for found, parts in zip(together, zip(*apart, strict=True), strict=True):
        assert torch.equal(found.float(), torch.stack([part.float() for part in parts]))
    assert not NVFP4.dequantise(together, torch.float32)[1].any() and bool(together[2].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_a_model_that_is_cast_keeps_its_weights(dtype: torch.dtype) -> None:
    """Global scales may be above 65,504, the largest number of float16."""
    model = quantised("qwen3_moe", "nvfp4", torch.float32)
    for layer in packed_layers(model).values():
        layer.weight_global_scale.data *= 100  # type: ignore[operator, union-attr]
    cast = copy.deepcopy(model).to(dtype)
    assert cast.model.norm.weight.dtype == dtype
    for name, layer in packed_layers(model).items():
        assert torch.equal(packed_layers(cast)[name].dequantised(torch.float32), layer.dequantised(torch.float32))
    for name, experts in packed_experts(model).items():
        scale = packed_experts(cast)[name].down_proj_global_scale
        assert scale.dtype == torch.float32 and torch.equal(scale, experts.down_proj_global_scale)


def apart(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Files in which every matrix has a global scale of its own."""
    for place, name in enumerate(sorted(name for name in tensors if name.endswith("global_scale"))):
        tensors[name] = tensors[name] * (1 + place / 100)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_files_are_those_of_compressed_tensors(architecture: str, tmp_path: Path) -> None:
    """Each layer is what the package makes of the files, also behind merging and saving once more."""
    folder = changed(quantised(architecture, "nvfp4", torch.float32), tmp_path / "first", apart)
    stored, found = load_file(folder / "model.safetensors"), specgraph.load(folder)
    made = specgraph.compile_speculative(found, {**CONFIG, "lowering": {"name": "gpu"}, "draft": {"kind": "none"}})
    merged = [linear for linear in calls(made) if "q_proj_k_proj_v_proj" in str(linear.weight[2].target)]
    assert len(merged) == 2 and (architecture != "llama" or not misses(made, "merge_linears"))
    weights = {name: layer.dequantised(torch.float32) for name, layer in packed_layers(found).items()}
    for name, experts in packed_experts(found).items():
        parts = [experts.get_parameter(f"gate_up_proj{part}") for part in NVFP4.stack_parts]
        gate, up = NVFP4.dequantise(parts, torch.float32)[1].chunk(2)
        weights |= {f"{name}.1.gate_proj": gate, f"{name}.1.up_proj": up}
    for name, weight in weights.items():
        layer = {part: stored[f"{name}.{part}"] for part in NVFP4.parts}
        assert layer["weight_global_scale"].shape == (1,)
        assert torch.equal(by_package(layer), weight.bfloat16())
    again = specgraph.load(saved(found, tmp_path / "second"))
    assert_equal_models(again, found)
    again.load_state_dict(found.state_dict())
    theirs = QuantizationConfig.model_validate(found.config.quantization_config).config_groups["group_0"]
    assert isinstance(theirs, QuantizationScheme) and NVFP4PackedCompressor.can_compress(torch.nn.Linear, theirs)


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_tokens_are_those_of_the_dequantised_model(architecture: str) -> None:
    model, prompts = quantised(architecture, "nvfp4"), ragged_prompts()
    expected = oracle(model)
    config = {**CONFIG, "draft": {"kind": "ngram", "num_speculative_tokens": 3}}
    tokens = specgraph.compile_speculative(model, config).generate(prompts, max_new_tokens=8, eos_token_id=[])
    assert_same_tokens(expected, prompts, tokens.new_tokens, forward_greedy(expected, prompts, 8))


INPUT = f"{PROJECTION}.input_global_scale"


def with_rows(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Files that say how activations are quantised, by a global scale for each layer."""
    for place, name in enumerate(sorted(name for name in tensors if name.endswith("weight_packed"))):
        tensors[f"{name.removesuffix('weight_packed')}input_global_scale"] = torch.tensor([200.0 + 90 * place])
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["input_activations"] = QUANTISED.model_dump(mode="json")["input_activations"]


def rows_by_package(x: Tensor, of_layer: Tensor) -> Tensor:
    args: Any = QUANTISED.input_activations
    scale, zero = compute_dynamic_scales_and_zp(x, args, None, global_scale=of_layer)  # type: ignore[arg-type]
    return fake_quantize(x, scale, zero.to(x.dtype), args, of_layer)


class ByPackage(torch.nn.Linear):
    of_layer: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(rows_by_package(x, self.of_layer), self.weight)


def test_activations_are_rounded_as_by_compressed_tensors(tmp_path: Path) -> None:
    """Layers of one input, whose global scales differ, are not merged. Tokens are those of the package's rounding."""
    folder = changed(quantised("llama", "nvfp4", torch.float32), tmp_path / "first", with_rows)
    model, prompts = specgraph.load(folder, dtype=torch.float64), ragged_prompts()
    expected = oracle(model)
    for name, layer in packed_layers(model).items():
        of_layer: Any = layer.input_global_scale
        x = normal(2, 3, layer.in_features, dtype=torch.float32).cpu() * torch.tensor([1e-4, 1.0, 20.0])[:, None]
        x[1, 1] = 0
        rows = NVFP4_ROWS.quantise_rows(x, layer.weight_parts)
        assert torch.equal(rows, rows_by_package(x, of_layer)) and not torch.equal(rows, x)
        assert torch.equal(rows[1, 2:], NVFP4_ROWS.quantise_rows(x[1, 2:], layer.weight_parts))
        dense: Any = expected.get_submodule(name)
        dense.__class__, dense.of_layer = ByPackage, of_layer.data.double()
    config = {**CONFIG, "lowering": {"name": "gpu"}, "draft": {"kind": "ngram", "num_speculative_tokens": 3}}
    decoder = specgraph.compile_speculative(model, config)
    assert OWN in misses(decoder, "merge_linears")
    tokens = decoder.generate(prompts, max_new_tokens=8, eos_token_id=[]).new_tokens
    assert_same_tokens(expected, prompts, tokens, forward_greedy(expected, prompts, 8))
    assert_equal_models(specgraph.load(saved(model, tmp_path / "second"), dtype=torch.float64), model)
    assert read_layout(model.config.quantization_config) == CompressedTensors(NVFP4_ROWS, 16)


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("llama", drop(INPUT), rf"no tensor {INPUT}"),
        ("llama", put(INPUT, torch.zeros(1)), rf"{INPUT} of .* is 0\.0 at \[0\]; scales must be"),
        ("qwen3_moe", drop(), r"gate_proj says by itself by which scale its inputs .* without input_global_scale\."),
    ],
)
def test_activations_that_do_not_fit_are_refused(
    architecture: str, change: Change, message: str, tmp_path: Path
) -> None:
    def both(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        with_rows(tensors, config)
        change(tensors, config)

    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(quantised(architecture, "nvfp4", torch.float32), tmp_path, both))


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, rf"no tensor {SCALE}"),
        (torch.zeros(1), rf"{SCALE} of .* is 0\.0 at \[0, 0\]; scales must be"),
        (torch.ones(2), r"the shape \[2\], and config.json needs \[1\]"),
        (torch.ones(1, dtype=torch.int32), r"global_scale of .* is torch.int32; it must be"),
    ],
)
def test_damaged_scales_are_refused(tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    change = drop(SCALE) if tensor is None else put(SCALE, tensor)
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(quantised("llama", "nvfp4", torch.float32), tmp_path, change))


def test_what_is_stated_is_read_as_the_same() -> None:
    for layout in (CompressedTensors(NVFP4, 16), CompressedTensors(NVFP4_ROWS, 16)):
        assert read_layout(layout.stated()) == layout
    stated = layout.stated()
    stated["config_groups"]["group_0"]["input_activations"]["dynamic"] = True
    with pytest.raises(UnsupportedModelError, match=r"input_activations.dynamic .* True; allowed is 'local'"):
        read_layout(stated)
    with pytest.raises(ValueError, match=r"global_scale is torch.float32 \[1\]; it must be \[5, 1\]"):
        NVFP4.check([*NVFP4.quantise(normal(5, 32))[:2], torch.ones(1)])
