"""Packed stacks of experts in files that hold a matrix for each expert, against the readers of transformers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, PreTrainedModel
from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

import specgraph
from specgraph.errors import UnsupportedModelError
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.fp8 import FP8_BLOCKS
from specgraph.schemes import names as names_module
from specgraph.schemes.layers import PackedExperts, PackedLinear
from tests.models import make_model, saved
from tests.schemes.files import Change, assert_equal_models, bytes_of, changed, drop, put, state, watched_reads

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 32, "moe_intermediate_size": 32}
FULL: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 128, "moe_intermediate_size": 128}
"""Sizes of whole blocks of fp8, two layers and few heads."""
MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {}, "gpt_oss": {},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 8},
    "qwen3_next": {"shared_expert_intermediate_size": 32},
    "mixtral": {},
}  # fmt: skip
SCHEMES = ("fp8", "int4", "mxfp4")
DOWN = "model.layers.1.mlp.experts.2.down_proj"
GATE = "model.layers.1.mlp.experts.2.gate_proj"


@functools.cache
def quantised(architecture: str, scheme: str, ignore: tuple[str, ...] = ("lm_head",)) -> PreTrainedModel:
    sizes = {**(FULL if scheme == "fp8" else SIZES), **MORE[architecture]}
    sizes["intermediate_size"] = sizes["moe_intermediate_size"]
    model = make_model(architecture, seed=3, **sizes)
    return specgraph.quantise(model, scheme, group_size=16 if scheme == "int4" else None, ignore=ignore)


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The dequantised weights in float32, by the names that they have in transformers' model."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            found[f"{name}.weight"] = module.dequantised(torch.float32)
        elif isinstance(module, PackedExperts):
            form = format_of(module.format)
            for stack in ("gate_up_proj", "down_proj"):
                weight = form.dequantise(
                    [getattr(module, f"{stack}{part}") for part in form.stack_parts], torch.float32
                )
                found[f"{name}.{stack}"] = weight.transpose(1, 2) if getattr(module, "is_transposed", False) else weight
    return found


# What is saved is what is loaded


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("architecture", MORE)
def test_a_saved_model_is_loaded_and_saved_again(architecture: str, scheme: str, tmp_path: Path) -> None:
    model = quantised(architecture, scheme)
    first = load_file(saved(model, tmp_path / "first") / "model.safetensors")
    found = specgraph.load(tmp_path / "first")
    assert any(isinstance(module, PackedExperts) for module in found.modules())
    assert_equal_models(found, model)
    again = load_file(saved(found, tmp_path / "again") / "model.safetensors")
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("architecture", "experts", "layers"),
    [("qwen3_moe", "mlp.experts", ("gate_proj", "up_proj", "down_proj")),
     ("mixtral", "block_sparse_moe.experts", ("w1", "w3", "w2"))],
)  # fmt: skip
@pytest.mark.parametrize(
    ("scheme", "parts"),
    [("fp8", {"weight": (128, 128), "weight_scale_inv": (1, 1)}),
     ("int4", {"weight_packed": (32, 4), "weight_scale": (32, 2), "weight_shape": (2,)}),
     ("mxfp4", {"weight_packed": (32, 16), "weight_scale": (32, 1)})],
)  # fmt: skip
def test_files_have_the_published_names_and_shapes(
    architecture: str, experts: str, layers: tuple[str, ...], scheme: str, parts: dict[str, Any], tmp_path: Path
) -> None:
    tensors = load_file(saved(quantised(architecture, scheme), tmp_path) / "model.safetensors")
    prefix = f"model.layers.1.{experts}."
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith(prefix)}
    assert found == {
        f"{prefix}{expert}.{layer}.{part}": shape
        for expert in range(4) for layer in layers for part, shape in parts.items()
    }  # fmt: skip


def test_a_stack_is_what_its_matrices_are_one_by_one(tmp_path: Path) -> None:
    """Files in fp8 that are made from those of the dense model, a matrix at a time."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] = model.config.quantization_config
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}_scale_inv"] = FP8_BLOCKS.quantise(tensors[name])

    model, dense = quantised("qwen3_moe", "fp8"), make_model("qwen3_moe", seed=3, **FULL, intermediate_size=128)
    assert_equal_models(specgraph.load(changed(dense, tmp_path, change)), model)


def test_a_renamed_head_is_read(tmp_path: Path) -> None:
    """That of gpt_neox, which is packed if it is not ignored."""
    for ignore in (("lm_head",), ()):
        model = specgraph.quantise(make_model("gpt_neox", tie_word_embeddings=False), group_size=16, ignore=ignore)
        folder = saved(model, tmp_path / str(len(ignore)))
        kept = {name for name in load_file(folder / "model.safetensors") if "embed_out" in name or "lm_head" in name}
        parts = ("weight",) if ignore else ("weight_packed", "weight_scale", "weight_shape")
        assert kept == {f"embed_out.{part}" for part in parts}
        assert_equal_models(specgraph.load(folder), model)


def test_files_with_other_names_are_saved_with_these(tmp_path: Path) -> None:
    """Those of a model for text and images, whose prefix transformers removes; ``ignore`` has the names of files."""
    model = specgraph.quantise(make_model("qwen3_5_moe_text"), group_size=8)
    kept = "model.language_model.layers.0.linear_attn.in_proj_qkv"

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"]["ignore"].append(kept)
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            del tensors[f"{kept}.{part}"]
        tensors[f"{kept}.weight"] = dense

    owner = model.get_submodule(kept.replace(".language_model", ""))
    dense = torch.randn(owner.out_features, owner.in_features)
    found = specgraph.load(changed(model, tmp_path / "first", change))
    assert torch.equal(found.get_submodule(kept.replace(".language_model", "")).weight, dense)
    first, again = (
        load_file(tmp_path / "first/model.safetensors"),
        load_file(saved(found, tmp_path / "again") / "model.safetensors"),
    )
    assert again.keys() == first.keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


def test_one_tensor_at_a_time_is_read_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the peak is the packed size and the largest tensor of the files, and never a stack and its parts."""
    folder, alive = saved(quantised("qwen3_moe", "int4"), tmp_path), watched_reads(monkeypatch)
    tensors = load_file(folder / "model.safetensors")
    found = specgraph.load(folder)
    assert len(alive) == len(tensors)
    assert max(alive) == 0
    stated = sum(x.nbytes for name, x in tensors.items() if ".experts." in name and name.endswith("_shape"))
    assert bytes_of(found) == sum(x.nbytes for x in tensors.values()) - stated


# Against transformers and compressed-tensors


@pytest.mark.parametrize(
    ("architecture", "scheme"),
    [("qwen3_moe", "fp8"), ("deepseek_v3", "fp8"), ("qwen3_next", "fp8"), ("mixtral", "fp8"), ("qwen3_moe", "int4"),
     ("mixtral", "int4"), ("deepseek_v3", "mxfp4"), ("mixtral", "mxfp4"), ("gpt_oss", "mxfp4")],
)  # fmt: skip
def test_transformers_dequantises_the_same_weights(architecture: str, scheme: str, tmp_path: Path) -> None:
    """Bit for bit. It dequantises fp8 and gpt-oss's mxfp4 where there is no accelerator, and the rest if it is told."""
    model = quantised(architecture, scheme)
    saved(model, tmp_path)
    told = (
        {}
        if scheme == "fp8" or architecture == "gpt_oss"
        else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    )
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True, **told)
    assert not any(info.values()), info
    state, ours = theirs.state_dict(), weights_of(specgraph.load(tmp_path))
    assert {name.rpartition(".")[2] for name in ours} >= {"gate_up_proj", "down_proj"}
    for name, weight in ours.items():
        assert torch.equal(state[name].to(torch.float32), weight), name


# Which experts are packed


PATTERNS = {
    "module": "model.layers.0.mlp.experts",
    "expression": r"re:.*\.layers\.0\.mlp\.experts\..*",
    "published": r"re:model\.layers\.0\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
}


@pytest.mark.parametrize("case", PATTERNS)
def test_experts_that_ignore_names_stay_dense(case: str, tmp_path: Path) -> None:
    model = quantised("qwen3_moe", "int4", ("lm_head", PATTERNS[case]))
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert not isinstance(first, PackedExperts) and isinstance(second, PackedExperts)
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    assert f"{DOWN.replace('layers.1', 'layers.0')}.weight" in tensors and f"{DOWN}.weight_packed" in tensors
    assert_equal_models(specgraph.load(tmp_path), model)


def test_every_expert_of_a_mixture_may_be_named(tmp_path: Path) -> None:
    """As published files have it, by the names of linear layers that the model itself does not have."""
    model = quantised("qwen3_moe", "int4", ("lm_head", PATTERNS["module"]))
    every = [f"model.layers.0.mlp.experts.{e}.{name}_proj" for e in range(4) for name in ("gate", "up", "down")]
    folder = changed(model, tmp_path, state("ignore", ["lm_head", *every]))
    assert_equal_models(specgraph.load(folder), model)


def test_a_mixture_is_packed_as_a_whole(tmp_path: Path) -> None:
    model = quantised("qwen3_moe", "int4")
    for ignore in ([GATE], [r"re:.*gate_proj"]):
        with pytest.raises(UnsupportedModelError, match=r"experts\.\d\.\w+ is packed and .*\.\d\.gate_proj is not"):
            specgraph.load(changed(model, tmp_path / ignore[0][:2], state("ignore", ["lm_head", *ignore])))
    with pytest.raises(UnsupportedModelError, match="all of them must be packed, or none"):
        specgraph.quantise(make_model("qwen3_moe"), group_size=8, ignore=("re:.*gate_proj",))


# What is refused


def _dense(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    for part in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{GATE}.{part}"]
    tensors[f"{GATE}.weight"] = torch.zeros(32, 32)


def _bfloat16(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors[f"{DOWN}.weight_scale"] = tensors[f"{DOWN}.weight_scale"].bfloat16()


def _more(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors |= {name.replace(".2.", ".4."): tensor.clone() for name, tensor in tensors.items() if name.startswith(DOWN)}


def _twice(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors["model.layers.1.mlp.experts.gate_up_proj_packed"] = torch.zeros(4, 64, 4, dtype=torch.int32)


INT = torch.int32
REFUSED: dict[str, tuple[Change, str]] = {
    "missing numbers": (drop(f"{GATE}.weight_packed"),
                        r"no tensor for expert 2 of .*\.gate_up_proj_packed, as .*\.0\.gate_proj\.weight_packed is"),
    "missing scale": (drop(f"{DOWN}.weight_scale"), r"no tensor for expert 2 of .*experts\.down_proj_scale, as "),
    "missing kind": (drop(*(f"{GATE.replace('.2.', f'.{e}.')}.weight_scale" for e in range(4))),
                     r"no tensor for expert 0 of .*experts\.gate_up_proj_scale; "),
    "missing stack": (drop(*(f"{DOWN.replace('.2.', f'.{e}.')}.weight_scale" for e in range(4))),
                      r"no tensor .*experts\.down_proj_scale, which"),
    "dense": (_dense, r"no tensor for expert 2 of .*\.gate_up_proj_packed, as .*\.0\.gate_proj\.weight_packed is"),
    "dense beside": (put(f"{GATE}.weight", torch.zeros(32, 32)), rf"holds the tensor {GATE}\.weight, which"),
    "more": (_more, rf"holds the tensor {DOWN.replace('.2.', '.4.')}\.weight_packed, and .* has fewer experts"),
    "twice": (_twice, r"holds .* and .*, and both are model\.layers\.1\.mlp\.experts\.gate_up_proj_packed"),
    "shape": (put(f"{GATE}.weight_packed", torch.zeros(32, 5, dtype=INT)),
              rf"{GATE}\.weight_packed of .* the shape \[32, 5\], and config.json needs \[32, 4\]"),
    "scale's shape": (put(f"{DOWN}.weight_scale", torch.ones(32, 4)),
                      rf"{DOWN}\.weight_scale of .* the shape \[32, 4\], and config.json needs \[32, 2\]"),
    "stated shape": (put(f"{GATE}.weight_shape", torch.tensor([32, 64])),
                     rf"{GATE}\.weight_shape is \[32, 64\], and config.json needs \[32, 32\]"),
    "numbers' dtype": (put(f"{GATE}.weight_packed", torch.zeros(32, 4)), rf"{GATE}\.weight_packed .* torch.float32"),
    "dtypes": (_bfloat16, rf"{DOWN}\.weight_scale of .* is torch.bfloat16, and .*\.0\.down_proj\.weight_scale is "),
    "zero scale": (lambda tensors, _: tensors[f"{DOWN}.weight_scale"][3].__setitem__(1, 0.0),
                   rf"{DOWN}\.weight_scale of .* is 0\.0 at \[3, 1\]"),
    "zero point": (put(f"{DOWN}.weight_zero_point", torch.zeros(4, 2, dtype=INT)), r"holds the tensor .*_zero_point"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(quantised("qwen3_moe", "int4"), tmp_path, change))


def test_a_dense_expert_in_fp8_is_refused(tmp_path: Path) -> None:
    """Its name is that of a packed one."""
    change = put(f"{DOWN}.weight", torch.zeros(128, 128))
    with pytest.raises(UnsupportedModelError, match=rf"{DOWN}\.weight of .* is torch.float32, and .*\.0\.down_proj\.w"):
        specgraph.load(changed(quantised("qwen3_moe", "fp8"), tmp_path, change))


def test_matrices_that_would_share_a_scale_are_refused(tmp_path: Path) -> None:
    """Gate and up of 192 outputs each: the second block of their stack would hold outputs of both."""

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["quantization_config"] = model.config.quantization_config
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}_scale_inv"] = FP8_BLOCKS.quantise(tensors[name])

    sizes = {**FULL, "moe_intermediate_size": 192}
    model = specgraph.quantise(make_model("qwen3_moe", **sizes), "fp8")
    with pytest.raises(
        UnsupportedModelError, match=r"layers\.0\.mlp\.experts\.gate_up_proj cannot be saved .* share a scale"
    ):
        saved(model, tmp_path)
    folder = changed(make_model("qwen3_moe", **sizes), tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=r"experts\.0\.gate_proj\.weight_scale_inv of .* cannot be joined"):
        specgraph.load(folder)


def test_another_conversion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(quantised("qwen3_moe", "int4"), tmp_path / "experts")
    sources = ["mlp.experts.*.down_proj.weight"]
    turned = WeightConverter(sources, ["mlp.experts.down_proj"], [MergeModulelist(0), Transpose(1, 2)])
    with monkeypatch.context() as patch:
        patch.setattr(names_module, "get_model_conversion_mapping", lambda _: [turned])
        with pytest.raises(UnsupportedModelError, match=r"experts\.\d\.\w+\.weight_packed, which "):
            specgraph.load(folder)
    joined = specgraph.quantise(make_model("olmo_hybrid"), group_size=8)
    with pytest.raises(UnsupportedModelError, match=r"_conv1d\.weight, which transformers converts by \[Concatenate"):
        specgraph.load(saved(joined, tmp_path / "joined"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_that_the_model_leaves_out_are_not_read(scheme: str, tmp_path: Path) -> None:
    """Files of deepseek_v3 hold a module for multi-token prediction as one layer more, which config.json counts."""
    model, pattern = quantised("deepseek_v3", scheme), r"model\.layers\.2.*"

    def change(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["num_nextn_predict_layers"] = count
        beyond = {
            name.replace("layers.1", "layers.2"): tensor.clone()
            for name, tensor in tensors.items()
            if "layers.1" in name
        }
        tensors |= beyond

    count = 1
    found = specgraph.load(changed(model, tmp_path, change))
    assert all(torch.equal(value, found.state_dict()[name]) for name, value in model.state_dict().items())
    count = 0
    folder = changed(model, tmp_path, change)
    with pytest.raises(UnsupportedModelError, match=r"holds the tensor model\.layers\.2\..*, which"):
        specgraph.load(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_keys_to_ignore_on_load_unexpected", [pattern])
        assert_equal_models(specgraph.load(folder), model)
