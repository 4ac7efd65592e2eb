"""Models in four bits that are saved and loaded, against the readers of compressed-tensors, and damaged files."""

from __future__ import annotations

import dataclasses
import functools
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import specgraph
from specgraph.checkpoints.files import Files, StoredTensor, open_files
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.schemes import load as load_module
from specgraph.schemes.layers import PackedLinear
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.kernels.packed.definition import FAULTS
from tests.models import make_model, ragged_prompts, saved

Change = Callable[[dict[str, Tensor], dict[str, Any]], None]
"""Changes the tensors of a file and its configuration."""
PROJECTION = "model.layers.1.mlp.down_proj"


@functools.cache
def quantised(
    architecture: str = "llama", dtype: torch.dtype = torch.float32, *, group_size: int = 16, **options: Any
) -> PreTrainedModel:
    return specgraph.quantise(make_model(architecture, seed=3, dtype=dtype, **options), group_size=group_size)


def layers_of(model: PreTrainedModel) -> dict[str, PackedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, PackedLinear)}


def assert_equal_models(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """All tensors are the same, those that no file holds, too, and so are the types of all modules."""
    assert {n: type(m) for n, m in found.named_modules()} == {n: type(m) for n, m in expected.named_modules()}
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = (dict(getattr(model, kind)(remove_duplicate=False)) for model in (found, expected))
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert (ours[name].device, ours[name].dtype) == (tensor.device, tensor.dtype), name
            assert torch.equal(ours[name], tensor), name
            assert ours[name].requires_grad <= tensor.requires_grad


# What is saved is what is loaded


@pytest.mark.parametrize(
    ("architecture", "options", "shard"),
    [("llama", {"tie_word_embeddings": True}, "5GB"), ("qwen2", {}, "20KB"), ("qwen3", {}, "20KB"),
     ("gemma2", {}, "5GB"), ("gemma3_text", {"tie_word_embeddings": True}, "20KB"), ("phi3", {}, "5GB"),
     ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "5GB")],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_saved_model_is_loaded(
    architecture: str, options: dict[str, Any], shard: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The buffers are compared with those of a model that transformers has loaded."""
    dense = saved(make_model(architecture, seed=3, **options), tmp_path / "dense")
    model = specgraph.quantise(AutoModelForCausalLM.from_pretrained(dense, dtype=dtype), group_size=16)
    packed = tmp_path / "packed"
    model.save_pretrained(packed, max_shard_size=shard)
    assert (len([*packed.glob("*.safetensors")]) > 1) == (shard == "20KB")
    found = specgraph.load(packed)
    assert_equal_models(found, model)
    assert not found.training and found.config.quantization_config == model.config.quantization_config
    tied = options.get("tie_word_embeddings", model.config.tie_word_embeddings)
    assert (found.get_output_embeddings().weight is found.get_input_embeddings().weight) == tied


def test_a_loaded_model_is_compiled_and_saved_again(tmp_path: Path) -> None:
    model, prompts = quantised(), ragged_prompts()
    found = specgraph.load(saved(model, tmp_path / "first"))
    again = specgraph.load(saved(found, tmp_path / "second"))
    assert_equal_models(again, model)
    tokens = (
        specgraph.compile_speculative(again, CONFIG).generate(prompts, max_new_tokens=8, eos_token_id=[]).new_tokens
    )
    assert_same_tokens(model, prompts, tokens, forward_greedy(model, prompts, 8))


def test_another_dtype_is_that_of_all_but_the_packed_tensors(tmp_path: Path) -> None:
    found = specgraph.load(saved(quantised(), tmp_path), dtype=torch.float64)
    kinds = {name.rpartition(".")[2]: value.dtype for name, value in found.state_dict().items()}
    assert kinds == {
        "weight": torch.float64, "weight_packed": torch.int32, "weight_scale": torch.float32,
        "weight_shape": torch.int64,
    }  # fmt: skip
    assert found.dtype == torch.float64


def test_a_model_that_is_not_quantised_is_loaded_by_transformers(tmp_path: Path) -> None:
    model = make_model("llama", seed=4)
    assert_equal_models(specgraph.load(str(saved(model, tmp_path)), device="cpu"), model)


def test_one_tensor_at_a_time_is_read_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the peak is the packed size and the largest tensor."""
    read: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def opened(path: Path) -> Files:
        files = open_files(path)
        return dataclasses.replace(files, tensors={n: watched(stored) for n, stored in files.tensors.items()})

    def watched(stored: StoredTensor) -> StoredTensor:
        def watch() -> Tensor:
            alive.append(sum(reference() is not None for reference in read))
            tensor = stored.read()
            read.append(weakref.ref(tensor))
            return tensor

        return dataclasses.replace(stored, read=watch)

    folder = saved(quantised(), tmp_path)
    monkeypatch.setattr(load_module, "open_files", opened)
    found = specgraph.load(folder)
    assert len(read) == len(load_file(folder / "model.safetensors"))
    assert max(alive) <= 1
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in found.state_dict().values()}
    assert sum(sizes.values()) == sum(x.nbytes for x in load_file(folder / "model.safetensors").values())


# Against compressed-tensors


def test_compressed_tensors_makes_the_same_weights_of_the_files(tmp_path: Path) -> None:
    """In the dtype of the scales, bit for bit."""
    model = specgraph.quantise(make_model("llama", seed=3).to(torch.bfloat16), group_size=16)
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    stated = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    loaded = layers_of(specgraph.load(tmp_path))
    for name, layer in layers_of(model).items():
        parts = {part: tensors[f"{name}.{part}"] for part in ("weight_packed", "weight_scale", "weight_shape")}
        theirs = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
        assert theirs.dtype == torch.bfloat16
        assert torch.equal(theirs, layer.dequantised(torch.bfloat16))
        assert torch.equal(theirs, loaded[name].dequantised(torch.bfloat16))


def test_transformers_with_compressed_tensors_loads_the_same_model(tmp_path: Path) -> None:
    model, prompt = quantised("qwen2"), ragged_prompts()[1][None]
    theirs: Any = AutoModelForCausalLM.from_pretrained(saved(model, tmp_path))
    with torch.no_grad():
        expected = theirs(prompt).logits
        torch.testing.assert_close(model(prompt).logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("fault", FAULTS["int4"])
def test_compressed_tensors_sees_a_wrong_layout(fault: str, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        names = [f"{PROJECTION}.{part}" for part in ("weight_packed", "weight_scale")]
        tensors |= dict(zip(names, FAULTS["int4"][fault](*(tensors[name] for name in names)), strict=True))

    model, prompt = quantised(), ragged_prompts()[1][None]
    theirs: Any = AutoModelForCausalLM.from_pretrained(changed(model, tmp_path, change))
    with torch.no_grad():
        assert float((theirs(prompt).logits - model(prompt).logits).abs().max()) > 1e-2


# What is refused


def changed(model: PreTrainedModel, folder: Path, change: Change) -> Path:
    """The files of a model, changed."""
    saved(model, folder)
    weights, config = folder / "model.safetensors", folder / "config.json"
    tensors, stated = load_file(weights), json.loads(config.read_text())
    change(tensors, stated)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, weights, {"format": "pt"})
    config.write_text(json.dumps(stated))
    return folder


def _drop(name: str) -> Change:
    return lambda tensors, _: tensors.__delitem__(name)


def _set(name: str, tensor: Tensor) -> Change:
    return lambda tensors, _: tensors.__setitem__(name, tensor)


def _state(key: str, value: Any) -> Change:
    return lambda _, config: config["quantization_config"].__setitem__(key, value)


def _change_scale(value: float) -> Change:
    return lambda tensors, _: tensors[f"{PROJECTION}.weight_scale"][3].__setitem__(1, value)


def _group_size(size: int) -> Change:
    return lambda _, config: config["quantization_config"]["config_groups"]["group_0"]["weights"].update(
        group_size=size
    )


INT = torch.int32
REFUSED: dict[str, tuple[Change, str]] = {
    "missing": (_drop(f"{PROJECTION}.weight_scale"), rf"no tensor {PROJECTION}\.weight_scale"),
    "missing norm": (_drop("model.norm.weight"), r"no tensor model\.norm\.weight"),
    "missing head": (_drop("lm_head.weight"), r"no tensor lm_head\.weight"),
    "superfluous": (_set(f"{PROJECTION}.weight_g_idx", torch.zeros(48)), r"holds the tensor .*\.weight_g_idx"),
    "zero point": (_set(f"{PROJECTION}.weight_zero_point", torch.zeros(4, 3, dtype=INT)), "weight_zero_point"),
    "dense": (_set(f"{PROJECTION}.weight", torch.zeros(32, 48)), rf"holds the tensor {PROJECTION}\.weight,"),
    "shape": (_set(f"{PROJECTION}.weight_packed", torch.zeros(32, 5, dtype=INT)),
              rf"{PROJECTION}\.weight_packed of .* the shape \[32, 5\], and config.json needs \[32, 6\]"),
    "scale's shape": (_set(f"{PROJECTION}.weight_scale", torch.ones(32, 6)),
                      rf"{PROJECTION}\.weight_scale of .* the shape \[32, 6\], and config.json needs \[32, 3\]"),
    "stated shape": (_set(f"{PROJECTION}.weight_shape", torch.tensor([48, 32])),
                     rf"{PROJECTION}\.weight_shape is \[48, 32\], and config.json needs \[32, 48\]"),
    "packed dtype": (_set(f"{PROJECTION}.weight_packed", torch.zeros(32, 6)), "weight_packed of .* be torch.int32"),
    "scale's dtype": (_set(f"{PROJECTION}.weight_scale", torch.ones(32, 3, dtype=torch.int32)),
                      "weight_scale of .* is torch.int32; it must be torch.bfloat16"),
    "zero scale": (_change_scale(0.0), r"scale of .* is 0\.0 at \[3, 1\]; .* other than 0"),
    "NaN scale": (_change_scale(float("nan")), rf"{PROJECTION}\.weight_scale of .* is nan at \[3, 1\]"),
    "infinite scale": (_change_scale(float("inf")), rf"{PROJECTION}\.weight_scale of .* is inf at \[3, 1\]"),
    "integer norm": (_set("model.norm.weight", torch.ones(32, dtype=INT)), r"norm\.weight of .* is torch.int32"),
    "method": (_state("quant_method", "gptq"), "quant_method of quantization_config is 'gptq'; allowed is 'comp"),
    "format": (_state("format", "nvfp4-pack-quantized"), "format of quantization_config .* is 'pack-quantized'"),
    "ignored": (_state("ignore", ["lm_head", PROJECTION]), rf"no tensor {PROJECTION}\.weight,"),
    "group size": (_group_size(32), r"mlp\.down_proj cannot be stored as quantization_config states: .* size, 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(quantised(), tmp_path, change))


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    model = specgraph.quantise(make_model("llama", tie_word_embeddings=True), group_size=16)
    for change in (0.0, 1.0):
        head = model.lm_head.weight.detach().clone() + change
        folder = changed(model, tmp_path / str(change), _set("lm_head.weight", head))
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


def test_a_model_that_transformers_does_not_have_is_refused(tmp_path: Path) -> None:
    folder = changed(quantised(), tmp_path, lambda _, config: config.update(model_type="lama"))
    with pytest.raises(ConfigError, match=r"folder=.* cannot be loaded as a causal LM: .*lama"):
        specgraph.load(folder)


def test_files_with_a_matrix_for_each_expert_are_refused(tmp_path: Path) -> None:
    """As other tools save a mixture of experts."""

    def split(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
        for name in [name for name in tensors if ".down_proj_" in name]:
            path, _, part = name.rpartition(".down_proj_")
            for expert, matrix in enumerate(tensors.pop(name)):
                tensors[f"{path}.{expert}.down_proj.weight_{part}"] = matrix

    folder = changed(quantised("qwen3_moe", group_size=8), tmp_path, split)
    with pytest.raises(UnsupportedModelError, match=r"experts\.down_proj_packed, .* in another way than transformers"):
        specgraph.load(folder)
