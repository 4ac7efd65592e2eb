"""Files of AWQ and GPTQ against loops over their bits, what is saved of them, faults, and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AwqConfig, GPTQConfig, PreTrainedModel

import specgraph
from specgraph.errors import UnsupportedModelError
from specgraph.ir.linear import SCHEMES, linears
from specgraph.kernels.packed.format import join_nibbles, nibbles
from specgraph.kernels.packed.formats import format_of
from specgraph.kernels.packed.int4 import INT4
from specgraph.kernels.packed.int4_zeros import INT4_ZEROS, Int4Zeros
from specgraph.schemes import awq, gptq
from specgraph.schemes.awq import Awq
from specgraph.schemes.gptq import Gptq
from specgraph.schemes.layouts import read_layout
from tests.decoding import CONFIG, assert_same_tokens, forward_greedy
from tests.ir.test_linear import misses
from tests.models import ragged_prompts, saved
from tests.schemes.files import Change, assert_equal_models, bytes_of, drop, put, state, watched_reads
from tests.schemes.files import changed as changed_files
from tests.schemes.integers import AWQ, GPTQ, KINDS, by_transformers, files, write
from tests.schemes.models import packed_experts, packed_layers

FORMATS = {
    "awq": "int4_zeros", "gptq": "int4_zeros", "gptq_v2": "int4_zeros", "symmetric": "int4",
    "act-order": "int4_act_order", "symmetric act-order": "int4_act_order",
    "act-order of inputs": "int4_act_order", "awq rows": "int4_zeros",
    "gptq rows": "int4_zeros",
}  # fmt: skip
"""The format of each kind of files."""
CASES = [("llama", kind) for kind in KINDS] + [("qwen3_moe", kind) for kind in KINDS if "act-order" not in kind]
every_case = pytest.mark.parametrize(("architecture", "kind"), CASES)
PROJECTION = "model.layers.1.mlp.down_proj"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def differing(model: PreTrainedModel, dense: PreTrainedModel) -> set[str]:
    """The weights of a loaded model that are not those of the dense one, bit for bit in float64."""
    found = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    for name, layer in packed_layers(model).items():
        found[f"{name}.weight"] = layer.dequantised(torch.float64)
    for name, experts in packed_experts(model).items():
        form = format_of(experts.format)
        for stack in ("gate_up_proj", "down_proj"):
            parts = [getattr(experts, f"{stack}{part}") for part in form.stack_parts]
            found[f"{name}.{stack}"] = form.dequantise(parts, torch.float64)
    return {name for name, value in dense.state_dict().items() if not torch.equal(value, found[name])}


@every_case
def test_weights_are_those_that_the_bits_mean(architecture: str, kind: str, tmp_path: Path) -> None:
    packed, meant = files(tmp_path, kind, architecture)
    model, dense = specgraph.load(packed), by_transformers(meant)
    linear = {name for name, m in dense.named_modules() if isinstance(m, nn.Linear) and name.endswith("_proj")}
    assert packed_layers(model).keys() == linear
    assert len(packed_experts(model)) == (2 if architecture == "qwen3_moe" else 0)
    of = {module.format for module in (*packed_layers(model).values(), *packed_experts(model).values())}
    assert of == {FORMATS[kind]}
    assert not differing(model, dense)


DECODED = [
    *(("llama", kind) for kind in ("awq", "gptq rows", "symmetric", "act-order", "symmetric act-order")),
    *(("qwen3_moe", kind) for kind in ("gptq", "gptq_v2", "symmetric", "awq rows")),
]
"""Every kind, and every format of layers and of stacks: kinds of one format are the same to a decoder."""


@pytest.mark.parametrize(("architecture", "kind"), DECODED)
def test_tokens_are_those_of_the_dequantised_model(architecture: str, kind: str, tmp_path: Path) -> None:
    packed, meant = files(tmp_path, kind, architecture)
    model, dense, prompts = specgraph.load(packed), by_transformers(meant), ragged_prompts()
    tokens = compiled(model).generate(prompts, max_new_tokens=8, eos_token_id=[])
    assert_same_tokens(dense, prompts, tokens.new_tokens, forward_greedy(dense, prompts, 8))


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "act-order"), ("qwen3_moe", "awq"), ("llama", "gptq")])
def test_one_tensor_at_a_time_is_read(
    architecture: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, _ = files(tmp_path, kind, architecture)
    alive, given = watched_reads(monkeypatch), load_file(packed / "model.safetensors")
    model = specgraph.load(packed)
    assert max(alive) <= 1
    shapes = sum(tensor.nbytes for name, tensor in model.state_dict().items() if name.endswith("weight_shape"))
    unread = 0 if kind == "act-order" else sum(t.nbytes for name, t in given.items() if name.endswith("g_idx"))
    assert bytes_of(model) == sum(tensor.nbytes for tensor in given.values()) + shapes - unread


# What is saved is in the layout of compressed-tensors


@every_case
def test_a_loaded_model_is_saved_as_compressed_tensors_has_it(architecture: str, kind: str, tmp_path: Path) -> None:
    packed, meant = files(tmp_path, kind, architecture)
    model = specgraph.load(packed)
    again = specgraph.load(saved(model, tmp_path / "again"))
    assert_equal_models(again, model)
    assert again.config.quantization_config["quant_method"] == "compressed-tensors"
    assert "lm_head" in again.config.quantization_config["ignore"]
    assert not differing(again, by_transformers(meant))


@pytest.mark.parametrize("kind", [kind for kind, form in FORMATS.items() if form != "int4_act_order"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
def test_compressed_tensors_reads_what_is_saved(architecture: str, kind: str, tmp_path: Path) -> None:
    """Bit for bit, in the dtype of the scales."""
    packed, _ = files(tmp_path, kind, architecture)
    model = specgraph.load(packed)
    tensors = load_file(saved(model, tmp_path / "again") / "model.safetensors")
    stated = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    group = QuantizationConfig.model_validate(stated).config_groups["group_0"]
    names = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    assert names == {name.removesuffix(".qweight") for name in load_file(packed / "model.safetensors")
                     if name.endswith(".qweight")}  # fmt: skip
    form = format_of(FORMATS[kind])
    for name in names:
        parts = {part: tensors[f"{name}.{part}"] for part in (*form.parts, "weight_shape")}
        theirs = PackedQuantizationCompressor.decompress(parts, group)["weight"]
        assert theirs.dtype == torch.float16
        assert torch.equal(theirs, form.dequantise([parts[part] for part in form.parts], torch.float16))


# Faults


def _swapped(numbers: Tensor) -> Tensor:
    codes = numbers.contiguous().view(torch.uint8)
    return (codes << 4 | codes >> 4).view(torch.int32)


def _after(kind: type, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    before = getattr(kind, name)
    return lambda self, given: change(before(self, given))


def _without_carry(_: Any, qzeros: Tensor) -> Tensor:
    return join_nibbles(nibbles(qzeros) + 1 & 15, torch.int32).t().contiguous()


def _without_zero_point(_: Any, weight: list[Tensor], dtype: torch.dtype) -> Tensor:
    return INT4.dequantise(weight[:2], dtype)


FAULTS: dict[str, tuple[str, Any, str, Any]] = {
    "order of AWQ forgotten": ("awq", awq, "PLACES", [*range(8)]),
    "order of AWQ the other way": ("awq", awq, "PLACES", [0, 2, 4, 6, 1, 3, 5, 7]),
    "zero point of AWQ forgotten": ("awq", Int4Zeros, "dequantise", _without_zero_point),
    "zero point of GPTQ forgotten": ("gptq", Int4Zeros, "dequantise", _without_zero_point),
    "minus one forgotten": ("gptq", gptq, "VERSIONS", {"gptq": 0, "gptq_v2": 0}),
    "minus one in the second version": ("gptq_v2", gptq, "VERSIONS", dict.fromkeys(gptq.VERSIONS, 0x11111111)),
    "no carry of zero points": ("gptq", Gptq, "zero_points_of", _without_carry),
    "act-order ignored": ("act-order", Gptq, "_is_ordered", lambda *_: True),
    "nibbles of AWQ swapped": ("awq", Awq, "numbers_of", _after(Awq, "numbers_of", _swapped)),
    "nibbles of GPTQ swapped": ("gptq", Gptq, "numbers_of", _after(Gptq, "numbers_of", _swapped)),
    "zero points of GPTQ swapped": ("gptq", Gptq, "zero_points_of", _after(Gptq, "zero_points_of", _swapped)),
    "taken for symmetric": ("gptq", Gptq, "_is_symmetric", lambda *_: True),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every packed layer."""
    kind, owner, name, wrong = FAULTS[fault]
    packed, meant = files(tmp_path, kind)
    dense = by_transformers(meant)
    monkeypatch.setattr(owner, name, wrong)
    model = specgraph.load(packed)
    assert differing(model, dense) == {f"{layer}.weight" for layer in packed_layers(model)}


# What is refused, and what older tools wrote


def changed(folder: Path, kind: str, change: Change, architecture: str = "llama") -> Path:
    packed, _ = files(folder, kind, architecture)
    tensors, config = load_file(packed / "model.safetensors"), json.loads((packed / "config.json").read_text())
    change(tensors, config)
    return write(folder / "changed", tensors, config)


def _entry(name: str, place: Any, value: Any) -> Change:
    return lambda tensors, _: tensors[name].__setitem__(place, value)


def _order(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors[f"{EXPERT}.g_idx"] = tensors[f"{EXPERT}.g_idx"].flip(0)


INT = torch.int32
REFUSED: dict[str, tuple[str, str, Change, str]] = {
    "AWQ's zeros": ("llama", "awq", put(f"{PROJECTION}.qzeros", torch.zeros(5, 4, dtype=INT)),
                    rf"{PROJECTION}\.qzeros of .* has the shape \[5, 4\]; for .*\.qweight \[48, 4\] and groups of 8 "
                    r"inputs it must be \[6, 4\]"),
    "GPTQ's zeros": ("llama", "gptq", put(f"{PROJECTION}.qzeros", torch.zeros(6, 32, dtype=INT)),
                     rf"{PROJECTION}\.qzeros of .* \[6, 32\]; .* it must be \[6, 4\]"),
    "scales": ("llama", "gptq", put(f"{PROJECTION}.scales", torch.ones(32, 6)), r"scales of .* it must be \[6, 32\]"),
    "no scales": ("llama", "awq", drop(f"{PROJECTION}.scales"), rf"there is no {PROJECTION}\.scales; the checkpoint"),
    "no numbers": ("llama", "gptq", drop(f"{PROJECTION}.qweight"), rf"there is no {PROJECTION}\.qweight; the check"),
    "no layer": ("llama", "awq", drop(*(f"{PROJECTION}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))),
                 rf"no tensor {PROJECTION}\.weight"),
    "zero scale": ("llama", "awq", _entry(f"{PROJECTION}.scales", (1, 3), 0.0),
                   rf"{PROJECTION}\.scales of .* is 0\.0 at \[3, 1\]; scales must be"),
    "NaN scale": ("llama", "gptq", _entry(f"{PROJECTION}.scales", (1, 3), torch.nan), r"down_proj\.scales .* is nan"),
    "numbers' dtype": ("llama", "awq", put(f"{PROJECTION}.qweight", torch.zeros(48, 4)),
                       rf"{PROJECTION}\.qweight of .* is torch.float32; it must be torch.int32"),
    "numbers of another model": ("llama", "awq", put(f"{PROJECTION}.qweight", torch.zeros(40, 4, dtype=INT)),
                                 rf"{PROJECTION}\.scales of .* it must be \[5, 32\]"),
    "layer of another model": ("llama", "gptq", lambda _, config: config.update(intermediate_size=40),
                               r"\.(qweight|scales|qzeros) of .* has the shape .* of another model"),
    "numbers of three dimensions": ("llama", "gptq", put(f"{PROJECTION}.qweight", torch.zeros(1, 6, 32, dtype=INT)),
                                    rf"{PROJECTION}\.scales of .* it must be \[0, 0\]"),
    "group too large": ("llama", "act-order", _entry(f"{PROJECTION}.g_idx", 5, 6),
                        rf"{PROJECTION}\.g_idx of .* is 6 at \[5\]; it must be from 0 to 5"),
    "group below 0": ("llama", "gptq", _entry(f"{PROJECTION}.g_idx", 7, -1), r"down_proj\.g_idx of .* is -1 at \[7\]"),
    "groups' shape": ("llama", "gptq", put(f"{PROJECTION}.g_idx", torch.zeros(47, dtype=INT)),
                      rf"{PROJECTION}\.g_idx of .* has the shape \[47\]; .* it must be \[48\]"),
    "groups' dtype": ("llama", "gptq", put(f"{PROJECTION}.g_idx", torch.zeros(48)), r"g_idx of .* is torch.float32"),
    "group size": ("llama", "awq", state("group_size", 16), r"\.(scales|qzeros) of .* and groups of 16 inputs it must"),
    "stack in act-order": ("qwen3_moe", "gptq", _order, "by itself which of its inputs are a group, .* weight_g_idx"),
    "expert's zeros": ("qwen3_moe", "awq", put(f"{EXPERT}.qzeros", torch.zeros(1, 4, dtype=INT)),
                       rf"{EXPERT}\.qzeros of .* it must be \[3, 4\]"),
    "expert missing": ("qwen3_moe", "awq", drop(*(f"{EXPERT}.{leaf}" for leaf in ("qweight", "qzeros", "scales"))),
                       "no tensor for expert 2 of model.layers.1.mlp.experts.down_proj"),
    "named dense": ("llama", "awq", state("modules_to_not_convert", ["mlp.down_proj"]),
                    r"holds model\.layers\.\d\.mlp\.down_proj\.qweight, and modules_to_not_convert .* names"),
    "bias": ("llama", "gptq", put(f"{PROJECTION}.bias", torch.ones(32)), rf"holds the tensor {PROJECTION}\.bias,"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_do_not_fit_are_refused(case: str, tmp_path: Path) -> None:
    architecture, kind, change, message = REFUSED[case]
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed(tmp_path, kind, change, architecture))


WEIGHT = f"{PROJECTION}.weight"


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("awq", drop(f"{WEIGHT}_zero_point"), rf"no tensor {WEIGHT}_zero_point"),
        ("awq", put(f"{WEIGHT}_zero_point", torch.zeros(32, 6, dtype=INT)), r"\[32, 6\], and config.json needs \[4,"),
        ("awq", put(f"{WEIGHT}_zero_point", torch.zeros(4, 6)), "zero_point of .* is torch.float32; .* be torch.int32"),
        ("awq", put(f"{WEIGHT}_g_idx", torch.zeros(48, dtype=INT)), rf"holds the tensor {WEIGHT}_g_idx"),
        ("act-order", drop(f"{WEIGHT}_g_idx"), rf"no tensor {WEIGHT}_g_idx"),
        ("act-order", _entry(f"{WEIGHT}_g_idx", 3, 6), rf"{WEIGHT}_g_idx of .* is 6 at \[3\]; it must be from 0 to 5"),
    ],
)  # fmt: skip
def test_files_of_compressed_tensors_that_do_not_fit_are_refused(
    kind: str, change: Change, message: str, tmp_path: Path
) -> None:
    model = specgraph.load(files(tmp_path, kind)[0])
    with pytest.raises(UnsupportedModelError, match=message):
        specgraph.load(changed_files(model, tmp_path / "again", change))


def symmetric(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """As files of symmetric integers in act-order are, which have no zero points."""
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    drop(*[name for name in tensors if name.endswith("zero_point")])(tensors, config)


def test_symmetric_integers_in_act_order_get_zero_points_in_the_middle(tmp_path: Path) -> None:
    packed, meant = files(tmp_path, "symmetric act-order")
    model = specgraph.load(packed)
    found = specgraph.load(changed_files(model, tmp_path / "symmetric", symmetric))
    assert_equal_models(found, model)
    assert not differing(found, by_transformers(meant))
    weights = found.config.quantization_config["config_groups"]["group_0"]["weights"]
    assert (weights["symmetric"], weights["actorder"]) == (False, "group")
    assert_equal_models(specgraph.load(saved(found, tmp_path / "again")), model)

    def contradicting(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        symmetric(tensors, config)
        tensors[f"{WEIGHT}_zero_point"] = torch.zeros(4, 6, dtype=INT)

    with pytest.raises(UnsupportedModelError, match=rf"holds the tensor {WEIGHT}_zero_point, and .* are symmetric"):
        specgraph.load(changed_files(model, tmp_path / "both", contradicting))


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({**AWQ, "bits": 8}, "bits of quantization_config is 8; allowed is 4"),
        ({**AWQ, "version": "gemv"}, "version of quantization_config is 'gemv'; allowed is 'gemm'"),
        ({**AWQ, "version": None, "format": "llm-awq"}, "format of quantization_config is 'llm-awq'; allowed"),
        ({**AWQ, "zero_point": False}, "zero_point of quantization_config is False; allowed is True"),
        ({**AWQ, "group_size": 0}, "group_size of quantization_config is 0; it must be 1 or more, or -1"),
        ({**AWQ, "group_size": None}, "group_size of quantization_config is None"),
        ({**GPTQ, "bits": 8}, "bits of quantization_config is 8; allowed is 4"),
        ({**GPTQ, "bits": None}, "bits of quantization_config is None"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format .* is 'marlin'; allowed is 'gptq', 'gptq_v2'"),
        ({**GPTQ, "checkpoint_format": None, "format": "gptq_v3"}, "format of quantization_config is 'gptq_v3'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format of quantization_config is True; allowed is False"),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(stated: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read_layout(stated)


def test_what_transformers_states_is_read() -> None:
    ours = read_layout(GPTQConfig(bits=4, group_size=16, checkpoint_format="gptq_v2", desc_act=True).to_dict())
    assert isinstance(ours, Gptq) and (ours.group_size, ours.version) == (16, "gptq_v2")
    ours = read_layout(AwqConfig(group_size=16, modules_to_not_convert=["gate"]).to_dict())
    assert isinstance(ours, Awq) and (ours.group_size, ours.ignore) == (16, ("gate",))
    assert read_layout({**AWQ, "version": "GEMM"}) == read_layout(AWQ)


def test_layers_that_stay_dense(tmp_path: Path) -> None:
    """The files hold them so, and say it."""

    def make_dense(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for leaf in ("qweight", "qzeros", "scales"):
            del tensors[f"{PROJECTION}.{leaf}"]
        tensors[f"{PROJECTION}.weight"] = torch.ones(32, 48, dtype=torch.float64)
        config["quantization_config"]["modules_to_not_convert"] = ["layers.1.mlp.down_proj"]

    model = specgraph.load(changed(tmp_path, "awq", make_dense))
    assert type(model.get_submodule(PROJECTION)) is nn.Linear
    assert len(packed_layers(model)) == 13
    again = specgraph.load(saved(model, tmp_path / "again"))
    assert_equal_models(again, model)
    assert set(again.config.quantization_config["ignore"]) == {"lm_head", PROJECTION}


def test_a_bias_of_zeros_that_the_model_does_not_have_is_left_out(tmp_path: Path) -> None:
    """As older versions of AutoGPTQ write it."""
    folder = changed(tmp_path, "gptq", put(f"{PROJECTION}.bias", torch.zeros(32)))
    model = specgraph.load(folder)
    assert model.get_submodule(PROJECTION).bias is None


# What passes do


def compiled(model: PreTrainedModel, draft: PreTrainedModel | None = None) -> specgraph.SpeculativeDecoder:
    kind = {} if draft is not None else {"kind": "ngram"}
    config = {**CONFIG, "draft": {**kind, "num_speculative_tokens": 3}, "lowering": {"name": "gpu"}}
    return specgraph.compile_speculative(model, {**config, "pipeline": {"verify": True}}, draft=draft)


@pytest.mark.parametrize("kind", ["awq", "act-order", "act-order of inputs"])
def test_layers_are_merged_unless_their_inputs_are_in_orders_of_their_own(kind: str, tmp_path: Path) -> None:
    made = compiled(specgraph.load(files(tmp_path, kind)[0]))
    graph = [*made.stages.values()][-1].modules.unchanged["target"].graph
    found = [linear for linear in linears(graph) if linear.scheme.name == FORMATS[kind]]
    assert len(found) == (2 * 7 if kind == "act-order" else 2 * 4)
    own = {"each of them says which of its inputs are a group, and not all of them the same"}
    assert misses(made, "merge_linears") == (own if kind == "act-order" else set())


@pytest.mark.parametrize(("architecture", "kind"), [("llama", "act-order"), ("qwen3_moe", "awq")])
def test_a_draft_model_that_is_a_copy_shares_every_packed_tensor(
    architecture: str, kind: str, tmp_path: Path
) -> None:  # fmt: skip
    model, form = specgraph.load(files(tmp_path, kind, architecture)[0]), format_of(FORMATS[kind])
    made = specgraph.compile_speculative(model, {**CONFIG, "lowering": {"name": "eager"}}, draft=copy.deepcopy(model))
    (report,) = (report for report in made._reports if report.name == "share_weights")
    found = {note.rsplit(" [", 1)[0] for note in report.result.notes}
    names = [f"{name}.{part}" for name in packed_layers(model) for part in form.parts]
    stacks = ("gate_up_proj", "down_proj")
    names += [f"{name}.{x}{part}" for name in packed_experts(model) for x in stacks for part in form.stack_parts]
    assert {f"draft.{name} -> target.{name}" for name in names} <= found


def test_words_of_zero_points_are_joined_where_they_are_full() -> None:
    scheme = next(scheme for scheme in SCHEMES if scheme.name == "int4_zeros")
    even, odd = (INT4_ZEROS.quantise(torch.randn(outputs, 32), 16) for outputs in (16, 13))
    joined = [torch.cat(parts) for parts in zip(even, odd, strict=True)]
    assert scheme.why_not_merged([even, odd]) is None
    expected = torch.cat([INT4_ZEROS.dequantise(weight, torch.float64) for weight in (even, odd)])
    assert torch.equal(INT4_ZEROS.dequantise(joined, torch.float64), expected)
    reason = "13 outputs do not end a block of 8, so that the next ones would get its zero point"
    assert scheme.why_not_merged([odd, even]) == reason
