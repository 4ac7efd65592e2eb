"""Packed models that are saved and loaded, against the readers of other packages, and damaged files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel

import specgraph
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.kernels.packed.formats import format_of
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.kernels.packed.definition import FAULTS, PUBLISHED_FAULTS
from tests.models import make_model, ragged_prompts, saved, with_own_code
from tests.schemes.files import Change, assert_equal_models, bytes_of, changed, drop, put, state, watched_reads
from tests.schemes.models import SCHEMES, oracle, packed_layers, sizes
from tests.schemes.models import quantised as of_scheme

PROJECTION = "model.layers.1.mlp.down_proj"
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)


def quantised(architecture: str = "llama", scheme: str = "int4", **options: Any) -> PreTrainedModel:
    """In float32. Groups of int4 have 16 inputs unless told."""
    return of_scheme(
        architecture, scheme, torch.float32, **{**({"group_size": 16} if scheme == "int4" else {}), **options}
    )


LAYOUTS = [("llama", "int4"), ("llama", "mxfp4"), ("llama", "fp8"), ("gpt_oss", "mxfp4")]
"""A model for each layout."""
every_layout = pytest.mark.parametrize(("architecture", "scheme"), LAYOUTS)


# What is saved is what is loaded


ROPE = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
TIED = {"tie_word_embeddings": True}
SAVED: list[tuple[str, str, dict[str, Any], str]] = [
    ("llama", "int4", TIED, "5GB"), ("qwen2", "int4", {}, "20KB"), ("qwen3", "int4", {}, "20KB"),
    ("gemma2", "int4", {}, "5GB"), ("gemma3_text", "int4", TIED, "20KB"), ("phi3", "int4", {}, "5GB"),
    ("llama", "int4", ROPE, "5GB"), ("qwen3_moe", "int4", {}, "20KB"), ("llama", "mxfp4", TIED, "5GB"),
    ("qwen2", "mxfp4", {}, "20KB"), ("qwen3_moe", "mxfp4", {}, "5GB"), ("deepseek_v3", "mxfp4", {}, "20KB"),
    ("llama", "fp8", {}, "20KB"), ("gemma3_text", "fp8", TIED, "5GB"), ("gpt_oss", "fp8", {}, "5GB"),
    ("gpt_oss", "int4", {}, "5GB"), ("gpt_oss", "mxfp4", {}, "20KB"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "scheme", "options", "shard", "dtype"),
    [(*case, (torch.float32, torch.bfloat16)[index % 2]) for index, case in enumerate(SAVED)],
    ids=str,
)
def test_a_saved_model_is_loaded(
    architecture: str, scheme: str, options: dict[str, Any], shard: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The buffers are compared with those of a model that transformers has loaded."""
    options = {**sizes(architecture, scheme), **options}
    dense = saved(make_model(architecture, seed=3, **options), tmp_path / "dense")
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=dtype)
    specgraph.quantise(model, scheme, **SCHEMES[scheme])
    packed = tmp_path / "packed"
    model.save_pretrained(packed, max_shard_size=shard)
    assert (len([*packed.glob("*.safetensors")]) > 1) == (shard == "20KB")
    found = specgraph.load(packed)
    assert_equal_models(found, model)
    assert not found.training and found.config.quantization_config == model.config.quantization_config
    tied = options.get("tie_word_embeddings", model.config.tie_word_embeddings)
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == tied


@pytest.mark.parametrize(("architecture", "scheme"), [*LAYOUTS, ("qwen3_moe", "mxfp4")])
def test_a_loaded_model_is_compiled_and_saved_again(architecture: str, scheme: str, tmp_path: Path) -> None:
    model, prompts = quantised(architecture, scheme), ragged_prompts()
    found = specgraph.load(saved(model, tmp_path / "first"))
    again = specgraph.load(saved(found, tmp_path / "second"))
    assert_equal_models(again, model)
    again.set_attn_implementation(model.config._attn_implementation)
    made = specgraph.compile_speculative(again, CONFIG)
    tokens = made.generate(prompts, max_new_tokens=8, eos_token_id=[]).new_tokens
    assert_same_tokens(model, prompts, tokens, forward_greedy(model, prompts, 8))


KINDS = {
    "int4": {"weight_packed": torch.int32, "weight_scale": torch.float32, "weight_shape": torch.int64},
    "mxfp4": {"weight_packed": torch.uint8, "weight_scale": torch.uint8},
    "fp8": {"weight_scale_inv": torch.float32},
}  # fmt: skip


@every_scheme
def test_another_dtype_is_that_of_all_but_the_packed_tensors(scheme: str, tmp_path: Path) -> None:
    found = specgraph.load(saved(quantised("llama", scheme), tmp_path), dtype=torch.float64)
    packed = {f"{name}.{part}" for name in packed_layers(found) for part in ("weight", *KINDS[scheme])}
    for name, value in found.state_dict().items():
        own = {**KINDS[scheme], "weight": torch.float8_e4m3fn}.get(name.rpartition(".")[2])
        assert value.dtype == (own if name in packed else torch.float64), name
    assert found.dtype == torch.float64


def test_the_files_of_gpt_oss_have_a_dimension_for_the_bytes_of_a_group(tmp_path: Path) -> None:
    model = quantised("gpt_oss", "mxfp4")
    stored = load_file(saved(model, tmp_path) / "model.safetensors")
    path, experts = "model.layers.0.mlp.experts", model.model.layers[0].mlp.experts
    assert {name for name in stored if name.startswith(f"{path}.")} == {
        f"{path}.{stack}_proj_{part}" for stack in ("gate_up", "down") for part in ("blocks", "scales", "bias")
    }
    assert stored[f"{path}.gate_up_proj_blocks"].shape == (4, 128, 1, 16)
    assert torch.equal(stored[f"{path}.gate_up_proj_blocks"].flatten(2), experts.gate_up_proj_blocks)
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float32


def test_a_model_that_is_not_quantised_is_loaded_by_transformers(tmp_path: Path) -> None:
    model = make_model("llama", seed=4)
    assert_equal_models(specgraph.load(str(saved(model, tmp_path)), device="cpu"), model)


@every_layout
def test_one_tensor_at_a_time_is_read_beside_the_model(
    architecture: str, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the peak is the packed size and the largest tensor."""
    folder, alive = saved(quantised(architecture, scheme), tmp_path), watched_reads(monkeypatch)
    found = specgraph.load(folder)
    assert len(alive) == len(load_file(folder / "model.safetensors"))
    assert max(alive) <= 1
    assert bytes_of(found) == sum(x.nbytes for x in load_file(folder / "model.safetensors").values())


# Against other packages


@pytest.mark.parametrize(
    ("scheme", "reader"), [("int4", PackedQuantizationCompressor), ("mxfp4", MXFP4PackedCompressor)]
)
def test_compressed_tensors_makes_the_same_weights_of_the_files(scheme: str, reader: Any, tmp_path: Path) -> None:
    """In bfloat16, bit for bit."""
    model = of_scheme("llama", scheme, torch.bfloat16)
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    loaded = packed_layers(specgraph.load(tmp_path))
    for name, layer in packed_layers(model).items():
        parts = {part: tensors[f"{name}.{part}"] for part in KINDS[scheme]}
        theirs = reader.decompress(parts, group)["weight"]
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(theirs, layer.dequantised(torch.bfloat16))
        assert torch.equal(theirs, loaded[name].dequantised(torch.bfloat16))


def test_a_group_may_be_a_whole_row(tmp_path: Path) -> None:
    model = specgraph.quantise(make_model("llama"), group_size=-1)
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    group = QuantizationConfig.model_validate(model.config.quantization_config).config_groups["group_0"]
    assert_equal_models(specgraph.load(tmp_path), model)
    for name, layer in packed_layers(model).items():
        assert layer.weight_parts[1].shape == (layer.out_features, 1)
        theirs = PackedQuantizationCompressor.decompress({p: tensors[f"{name}.{p}"] for p in KINDS["int4"]}, group)
        assert torch.equal(theirs["weight"], layer.dequantised(torch.float32))


@torch.no_grad()
def by_transformers(folder: Path, prompt: Tensor) -> Tensor:
    """Logits in float32. Its first pass makes weights, in bfloat16 of mxfp4 for every model, which may not fit it."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    with contextlib.suppress(RuntimeError):
        model(prompt)
    logits: Tensor = nn.Module.float(model)(prompt).logits
    return logits


@pytest.mark.parametrize("scheme", ["int4", "mxfp4"])
def test_transformers_with_compressed_tensors_loads_the_same_model(scheme: str, tmp_path: Path) -> None:
    model, prompt = quantised("qwen2", scheme), ragged_prompts()[1][None]
    theirs = by_transformers(saved(model, tmp_path), prompt)
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, theirs, rtol=1e-5, atol=1e-5)


def blocks(architecture: str = "llama") -> PreTrainedModel:
    """A model in fp8 whose blocks are full, as transformers needs them."""
    full: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_key_value_heads": 4, "intermediate_size": 384}
    model = make_model(architecture, seed=3, dtype=torch.bfloat16, initializer_range=0.1, **full)
    return specgraph.quantise(model, "fp8")


def gpt_oss() -> PreTrainedModel:
    return of_scheme("gpt_oss", "mxfp4", torch.bfloat16)


def dequantised_by_transformers(folder: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """All tensors of the model in bfloat16, as transformers loads it on a CPU."""
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if model.config.model_type == "gpt_oss" else {}
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).state_dict())


@pytest.mark.parametrize("make", [blocks, gpt_oss])
def test_transformers_dequantises_the_files_to_the_same_weights(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    """Bit for bit."""
    model = make()
    theirs, ours = dequantised_by_transformers(saved(model, tmp_path), model), oracle(specgraph.load(tmp_path))
    assert theirs.keys() == ours.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def _faulty(name: str, fault: str, numbers: str, scale: str) -> Change:
    """A change of the files' tensors of those names. Blocks of gpt-oss are changed as they stand without dimension."""

    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        shape = tensors[numbers].shape
        flat = tensors[numbers].flatten(2) if len(shape) == 4 else tensors[numbers]
        changed, tensors[scale] = FAULTS[name][fault](flat, tensors[scale])
        tensors[numbers] = changed.view(shape)

    return change


@pytest.mark.parametrize(("name", "fault"), PUBLISHED_FAULTS)
def test_another_package_sees_a_wrong_layout(name: str, fault: str, tmp_path: Path) -> None:
    """Of int4 and mxfp4 by logits, and of fp8 and of the stacks of gpt-oss by weights."""
    first, second = format_of(name).parts
    change = _faulty(name, fault, f"{PROJECTION}.{first}", f"{PROJECTION}.{second}")
    if name == "fp8_blocks":
        model = blocks()
        theirs = dequantised_by_transformers(changed(model, tmp_path, change), model)
        right = oracle(model).state_dict()
        assert {key for key in right if not torch.equal(right[key], theirs[key])} == {f"{PROJECTION}.weight"}
        return
    model, prompt = quantised("llama", name), ragged_prompts()[1][None]
    logits = by_transformers(changed(model, tmp_path, change), prompt)
    with torch.no_grad():
        assert float((logits - model(prompt).logits).abs().nan_to_num(torch.inf).max()) > 1e-2


@pytest.mark.parametrize("fault", FAULTS["mxfp4"])
def test_transformers_sees_a_wrong_layout_of_stacks(fault: str, tmp_path: Path) -> None:
    stack, model = "model.layers.1.mlp.experts.down_proj", gpt_oss()
    change = _faulty("mxfp4", fault, f"{stack}_blocks", f"{stack}_scales")
    theirs = dequantised_by_transformers(changed(model, tmp_path, change), model)
    right = oracle(model).state_dict()
    assert {key for key in right if not torch.equal(right[key], theirs[key])} == {stack}


# What is refused


def _change_scale(value: float) -> Change:
    return lambda tensors, _: tensors[f"{PROJECTION}.weight_scale"][3].__setitem__(1, value)


def _group_size(size: int) -> Change:
    return lambda _, config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(
        group_size=size
    )


INT = torch.int32
REFUSED: dict[str, tuple[Change, str]] = {
    "missing": (drop(f"{PROJECTION}.weight_scale"), rf"no tensor {PROJECTION}\.weight_scale"),
    "missing norm": (drop("model.norm.weight"), r"no tensor model\.norm\.weight"),
    "missing head": (drop("lm_head.weight"), r"no tensor lm_head\.weight"),
    "superfluous": (put(f"{PROJECTION}.weight_g_idx", torch.zeros(48)), r"holds the tensor .*\.weight_g_idx"),
    "zero point": (put(f"{PROJECTION}.weight_zero_point", torch.zeros(4, 3, dtype=INT)), "weight_zero_point"),
    "dense": (put(f"{PROJECTION}.weight", torch.zeros(32, 48)), rf"holds the tensor {PROJECTION}\.weight,"),
    "shape": (put(f"{PROJECTION}.weight_packed", torch.zeros(32, 5, dtype=INT)),
              rf"{PROJECTION}\.weight_packed of .* the shape \[32, 5\], and config.json needs \[32, 6\]"),
    "scale's shape": (put(f"{PROJECTION}.weight_scale", torch.ones(32, 6)),
                      rf"{PROJECTION}\.weight_scale of .* the shape \[32, 6\], and config.json needs \[32, 3\]"),
    "stated shape": (put(f"{PROJECTION}.weight_shape", torch.tensor([48, 32])),
                     rf"{PROJECTION}\.weight_shape is \[48, 32\], and config.json needs \[32, 48\]"),
    "packed dtype": (put(f"{PROJECTION}.weight_packed", torch.zeros(32, 6)), "weight_packed of .* be torch.int32"),
    "scale's dtype": (put(f"{PROJECTION}.weight_scale", torch.ones(32, 3, dtype=torch.int32)),
                      "weight_scale of .* is torch.int32; it must be torch.bfloat16"),
    "zero scale": (_change_scale(0.0), r"scale of .* is 0\.0 at \[3, 1\]; .* other than 0"),
    "NaN scale": (_change_scale(float("nan")), rf"{PROJECTION}\.weight_scale of .* is nan at \[3, 1\]"),
    "infinite scale": (_change_scale(float("inf")), rf"{PROJECTION}\.weight_scale of .* is inf at \[3, 1\]"),
    "integer norm": (put("model.norm.weight", torch.ones(32, dtype=INT)), r"norm\.weight of .* is torch.int32"),
    "method": (state("quant_method", "aqlm"), "quant_method of quantization_config is 'aqlm'; allowed is 'comp"),
    "format": (state("format", "mxfp8-quantized"), "format of quantization_config .* is 'pack-quantized'"),
    "ignored": (state("ignore", ["lm_head", PROJECTION]), rf"no tensor {PROJECTION}\.weight,"),
    "group size": (_group_size(32), r"mlp\.down_proj cannot be stored as quantization_config states: .* size, 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(quantised(), tmp_path, change))


SCALE, STACK = f"{PROJECTION}.weight_scale", "model.layers.1.mlp.experts.down_proj"
INVERSE = f"{PROJECTION}.weight_scale_inv"
BYTE = torch.uint8
REFUSED_OF_OTHERS: list[tuple[str, str, Change, str]] = [
    ("llama", "mxfp4", drop(SCALE), rf"no tensor {PROJECTION}\.weight_scale"),
    ("llama", "mxfp4", put(SCALE, torch.ones(32, 2)), "weight_scale of .* is torch.float32; it must be torch.uint8"),
    ("llama", "mxfp4", put(SCALE, torch.ones(32, 4, dtype=BYTE)), r"the shape \[32, 4\], .* needs \[32, 2\]"),
    ("llama", "mxfp4", put(SCALE, torch.full((32, 2), 255, dtype=BYTE)), rf"{SCALE} of .* is inf at \[0, 0\]; scales"),
    ("llama", "mxfp4", put(f"{PROJECTION}.weight_packed", torch.ones(32, 8, dtype=torch.int32)), r"\[32, 8\]"),
    ("llama", "mxfp4", put(f"{PROJECTION}.weight_global_scale", torch.ones(1)), "holds the tensor .*global_scale"),
    ("llama", "mxfp4", put(f"{PROJECTION}.weight_shape", torch.ones(2)), "holds the tensor .*weight_shape"),
    ("llama", "mxfp4", lambda _, config: config.update(intermediate_size=48),
     "down_proj cannot be stored as quantization_config states: its 48 inputs are no multiple of 32"),
    ("llama", "fp8", drop(INVERSE), rf"no tensor {PROJECTION}\.weight_scale_inv"),
    ("llama", "fp8", put(f"{PROJECTION}.weight", torch.ones(32, 48)),
     "weight of .* is torch.float32; it must be torch.float8_e4m3fn"),
    ("llama", "fp8", put(f"{PROJECTION}.weight", torch.ones(48, 32)), r"\[48, 32\], and config.json needs \[32, 48\]"),
    ("llama", "fp8", put(INVERSE, torch.ones(1, 2)), r"the shape \[1, 2\], and config.json needs \[1, 1\]"),
    ("llama", "fp8", put(INVERSE, torch.ones(1, 1, dtype=BYTE)), "is torch.uint8; it must be torch.float32, torch.bf"),
    ("llama", "fp8", put(INVERSE, torch.zeros(1, 1)), r"weight_scale_inv of .* is 0\.0 at \[0, 0\]; scales must be"),
    ("llama", "fp8", put(INVERSE, torch.full((1, 1), torch.nan)), r"weight_scale_inv of .* is nan at \[0, 0\]"),
    ("llama", "fp8", put(f"{PROJECTION}.activation_scale", torch.ones(1)), "holds the tensor .*activation_scale"),
    ("llama", "fp8", state("modules_to_not_convert", ["lm_head", PROJECTION]),
     rf"{PROJECTION}\.weight of .* is torch.float8_e4m3fn; it must be torch.float32"),
    ("llama", "fp8", state("weight_block_size", [1, 128]), r"weight_block_size .* is \[1, 128\]; allowed is"),
    ("gpt_oss", "mxfp4", drop(f"{STACK}_scales"), rf"no tensor {STACK}_scales"),
    ("gpt_oss", "mxfp4", put(f"{STACK}_blocks", torch.ones(4, 32, 32, dtype=BYTE)),
     r"the shape \[4, 32, 32\], and config.json needs \[4, 32, 2, 16\]"),
    ("gpt_oss", "mxfp4", put(f"{STACK}_blocks", torch.ones(4, 32, 2, 16)), "is torch.float32; it must be torch.uint8"),
    ("gpt_oss", "mxfp4", put(f"{STACK}_scales", torch.full((4, 32, 2), 255, dtype=BYTE)), r"is inf at \[0, 0, 0\]"),
    ("gpt_oss", "mxfp4", put(STACK, torch.ones(4, 64, 32)), rf"holds the tensor {STACK},"),
    ("gpt_oss", "fp8", put(f"{STACK}_scale_inv", torch.ones(4, 1, 2)), r"\[4, 1, 2\], .* needs \[4, 1, 1\]"),
    ("gpt_oss", "int4", put(f"{STACK}_scale", torch.zeros(4, 32, 6)), r"is 0\.0 at \[0, 0, 0\]"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "scheme", "change", "message"), REFUSED_OF_OTHERS)
def test_files_of_other_layouts_that_do_not_fit_are_refused(
    architecture: str, scheme: str, change: Change, message: str, tmp_path: Path
) -> None:
    options = {"group_size": 8} if scheme == "int4" else {}
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(quantised(architecture, scheme, **options), tmp_path, change))


@pytest.mark.parametrize("stated", ["int4", ["fp8"], {"quant_method": ["fp8"]}, {}], ids=str)
def test_a_configuration_that_is_none_is_refused(stated: Any, tmp_path: Path) -> None:
    folder = changed(quantised(), tmp_path, lambda _, config: config.update(quantization_config=stated))
    with pytest.raises(
        UnsupportedModelError, match=r"quant_method of quantization_config is .*; allowed is 'compressed-"
    ):
        specgraph.load(folder)


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    model = specgraph.quantise(make_model("llama", tie_word_embeddings=True), group_size=16)
    for change in (0.0, 1.0):
        head = model.lm_head.weight.detach().clone() + change
        folder = changed(model, tmp_path / str(change), put("lm_head.weight", head))
        if not change:
            assert_equal_models(specgraph.load(folder), model)
            continue
        with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight and model\.embed_tokens\.weight with"):
            specgraph.load(folder)


def test_a_tied_tensor_may_be_stored_under_its_other_name(tmp_path: Path) -> None:
    def rename(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    model = specgraph.quantise(make_model("llama", tie_word_embeddings=True), group_size=16)
    assert_equal_models(specgraph.load(changed(model, tmp_path, rename)), model)


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        specgraph.load(tmp_path)
    saved(quantised(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        specgraph.load(tmp_path)


def test_a_buffer_that_transformers_does_not_make_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would hold whatever was in memory."""
    folder = saved(quantised(), tmp_path)
    monkeypatch.setattr(PreTrainedModel, "_init_weights", lambda self, module: None)
    with pytest.raises(UnsupportedModelError, match=r"buffer model\.rotary_emb\.(original_)?inv_freq"):
        specgraph.load(folder)


def test_the_defaults_of_generation_are_loaded(tmp_path: Path) -> None:
    model = specgraph.quantise(make_model("llama"), group_size=16)
    model.generation_config.max_new_tokens = 7
    assert specgraph.load(saved(model, tmp_path)).generation_config.max_new_tokens == 7


@pytest.mark.parametrize("scheme", [None, "int4"])
def test_code_of_a_model_runs_if_it_is_trusted(scheme: str | None, tmp_path: Path) -> None:
    model = make_model("llama") if scheme is None else of_scheme("llama", scheme)
    with_own_code(saved(model, tmp_path))
    with pytest.raises(ConfigError, match="if you trust it, set trust_remote_code=true"):
        specgraph.load(tmp_path)
    found = specgraph.load(tmp_path, trust_remote_code=True)
    assert type(found).__name__ == "MineForCausalLM"
    expected = model.state_dict()
    assert found.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.state_dict().items())


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = changed(quantised(), tmp_path, lambda _, config: config.update(model_type="lama"))
    with pytest.raises(ConfigError, match=r"folder=.* cannot be loaded as a causal LM: .*lama"):
        specgraph.load(folder)
