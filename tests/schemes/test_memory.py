"""The memory that loading and sorting packed weights takes: the weights, and one tensor beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel

import specgraph
from specgraph.checkpoints.files import open_files
from specgraph.kernels.packed import chunks
from specgraph.kernels.packed.arranged import Arranged
from specgraph.kernels.packed.formats import ARRANGED, format_of
from specgraph.schemes import load as load_module
from specgraph.schemes.layers import PackedExperts, PackedLinear
from tests.models import make_model, saved
from tests.schemes.integers import KINDS, random_layer, write
from tests.schemes.memory import Measured, measured
from tests.schemes.models import packed_experts

CHUNK = 1 << 13
"""The size of a chunk in these tests, which is to small weights as the real one is to those of a large model."""
SMALL = 1 << 13
"""What names, buffers and tensors of a few numbers may take."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", CHUNK)


SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512}
EXPERTS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256}
MOE: dict[str, Any] = {**SIZES, "moe_intermediate_size": 256}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("llama", scheme, SIZES) for scheme in ("int4", "int4_zeros", "fp8", "mxfp4", "nvfp4", "int8_channel")),
    ("gpt_oss", "mxfp4", SIZES), ("qwen3_moe", "fp8", MOE), ("qwen3_moe", "int4", MOE), ("qwen3_moe", "nvfp4", MOE),
    ("deepseek_v3", "fp8", MOE),
]  # fmt: skip


def quantised(architecture: str, scheme: str, sizes: dict[str, Any]) -> PreTrainedModel:
    model = make_model(architecture, seed=3, dtype=torch.bfloat16, **sizes)
    options = {"group_size": 32} if architecture == "qwen3_moe" and scheme == "int4" else {}
    return specgraph.quantise(model, scheme, **options)


def loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Measured[PreTrainedModel]:
    """What loading takes beside the files, which are mapped before: their pages are the kernel's, who may drop them."""
    files = open_files(folder)
    monkeypatch.setattr(load_module, "open_files", lambda _: files)
    return measured(lambda: specgraph.load(folder))


def bytes_of(model: nn.Module) -> int:
    """The memory of all parameters and buffers."""
    tensors = {x.untyped_storage().data_ptr(): x for x in (*model.parameters(), *model.buffers())}
    return sum(x.untyped_storage().nbytes() for x in tensors.values())


def check(folder: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
    largest = max(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    found = loaded(folder, monkeypatch)
    held = bytes_of(found.result)
    assert held <= found.kept <= held + SMALL
    assert found.peak <= held + largest + SMALL
    return found.result


def test_a_copy_is_seen() -> None:
    """One that an operation makes and drops, too, so that the tests below can fail."""
    given = torch.ones(1 << 16)
    kept = measured(lambda: given + 1)
    assert given.nbytes <= kept.kept <= kept.peak < given.nbytes + SMALL
    dropped = measured(lambda: given.double().sum())
    assert dropped.peak >= 2 * given.nbytes and dropped.kept < SMALL
    inside = measured(lambda: given.isfinite().any())  # compares magnitudes, which it makes
    assert inside.peak > given.nbytes


@pytest.mark.parametrize(("architecture", "scheme", "sizes"), CASES)
def test_loading_takes_the_packed_size_and_at_most_one_tensor(
    architecture: str, scheme: str, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(architecture, scheme, sizes)
    found = check(saved(model, tmp_path), monkeypatch)
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    # NVFP4 has its one scale of a matrix for each output here.
    repeated = sum(p.nbytes for name, p in found.named_parameters() if name.endswith("global_scale"))
    assert bytes_of(found) <= stored + repeated + SMALL


@pytest.mark.parametrize("kind", ["awq", "gptq", "symmetric", "act-order"])
def test_words_are_packed_anew_beside_one_tensor(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(make_model("llama", seed=3, dtype=torch.bfloat16, **SIZES), tmp_path)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    for seed, name in enumerate([name for name in tensors if name.endswith("_proj.weight")]):
        layer, path = random_layer(kind, *tensors.pop(name).shape, seed=seed), name.removesuffix("weight")
        tensors |= {f"{path}{leaf}": tensor for leaf, tensor in layer.items()}
    check(write(folder, tensors, {**config, "quantization_config": KINDS[kind]}), monkeypatch)


def packed_modules(model: nn.Module) -> list[PackedLinear | PackedExperts]:
    return [module for module in model.modules() if isinstance(module, PackedLinear | PackedExperts)]


@pytest.mark.parametrize(
    ("architecture", "scheme"), [("llama", "int4"), ("llama", "fp8"), ("llama", "mxfp4"), ("gpt_oss", "mxfp4")]
)
def test_sorting_takes_at_most_one_weight(architecture: str, scheme: str) -> None:
    """Each weight replaces the one that it is made of before the next one is made, the stacks of a mixture, too."""
    sizes = EXPERTS if architecture == "gpt_oss" else SIZES
    model = measured(lambda: quantised(architecture, scheme, sizes)).result  # so that it is seen when a weight is freed
    before = bytes_of(model)
    largest = max(
        sum(module.get_parameter(name).nbytes for name in weight)
        for module in packed_modules(model) for weight in module._places(format_of(module.format))
    )  # fmt: skip

    def arrange() -> None:
        for module in packed_modules(model):
            module.arrange()

    found = measured(arrange)
    assert all(isinstance(format_of(module.format), Arranged) for module in packed_modules(model))
    assert bytes_of(model) == before and found.kept <= SMALL
    assert largest // 2 < found.peak <= largest + 5 * CHUNK + SMALL


def test_a_mixture_of_which_one_stack_is_sorted_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is left where memory ends at the second stack: it computes and states the same, and can be sorted on."""
    model, found = (quantised("gpt_oss", "mxfp4", EXPERTS) for _ in range(2))
    form, tokens, sorted_stacks = ARRANGED["mxfp4"], torch.arange(9)[None], []

    def arrange(weight: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if sorted_stacks:
            raise torch.OutOfMemoryError("no memory is left")
        sorted_stacks.append(weight)
        return type(form).arrange(form, weight)

    expected, (experts, *_) = model.state_dict(), packed_experts(found).values()
    with monkeypatch.context() as patched:
        patched.setattr(form, "arrange", arrange)
        with pytest.raises(torch.OutOfMemoryError):
            experts.arrange()
    held = {name for name, _ in experts.named_parameters()}
    assert {"gate_up_proj_arranged", "down_proj_blocks"} <= held
    for _ in range(2):
        found.load_state_dict(expected)
        assert found.state_dict().keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
        assert torch.equal(found(tokens).logits, model(tokens).logits)
        experts.arrange()
    assert {"gate_up_proj_arranged", "down_proj_arranged"} <= {name for name, _ in experts.named_parameters()}
