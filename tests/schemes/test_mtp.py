"""MTP modules in quantised checkpoints: packed as the target is, or left in 16 bits by the tool."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

import specgraph
from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.mtp_module import Mtp
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError, UnsupportedModelError
from specgraph.kernels.packed.formats import format_of
from tests.checkpoints.running import info
from tests.decoding import assert_same_tokens, compiled, forward_greedy
from tests.drafters.files_contract import shown_by_inspect
from tests.drafters.mtp_files import OPTIONS, random_modules, tensors_of
from tests.drafters.mtp_formula import drafted_logits
from tests.harness import Options, Run, fresh_start
from tests.kernels.packed.definition import matrix
from tests.models import make_model, ragged_prompts, saved
from tests.schemes.files import Change
from tests.schemes.models import FORMATS, oracle, packed_experts, packed_layers

FULL: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
"""Sizes for which blocks of fp8 end where a matrix of an expert does."""


@dataclass(frozen=True)
class Case:
    """A target, the layout of its modules, their number, and how both are stored."""

    architecture: str
    layout: str
    scheme: str
    count: int = 1
    sizes: tuple[tuple[str, Any], ...] = ()
    packed: bool = True

    def __str__(self) -> str:
        return f"{self.layout}-{self.scheme}{'' if self.packed else '-dense'}"


BEHIND = (*FULL.items(), ("num_nextn_predict_layers", 1))
CASES = [
    Case("deepseek_v3", "deepseek", "fp8", sizes=BEHIND),
    Case("deepseek_v3", "deepseek", "int4", sizes=BEHIND[-1:], packed=False),
    Case("qwen3_next", "qwen3_next", "fp8", sizes=tuple(FULL.items())),
    Case("qwen3_next", "qwen3_next", "int4"),
    Case("qwen2", "mimo", "mxfp4", 2, (("intermediate_size", 64),)),
    Case("mimo_v2_flash", "mimo_v2", "int4", 2),
]
BESIDE = ("_packed", "_scale", "_scale_inv", "_shape", "_zero_point")
"""How the names of tensors end that are no weights themselves."""
each = pytest.mark.parametrize("case", CASES, ids=str)


def group_of(scheme: str) -> int | None:
    return 8 if scheme.startswith("int4") else None


def packed(tensors: dict[str, Tensor], scheme: str) -> dict[str, Tensor]:
    """The tensors of modules, with those of linear layers in attention and behind it as the scheme stores them."""
    form, found = format_of(FORMATS.get(scheme, scheme)), {}
    for name, tensor in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if leaf != "weight" or tensor.dim() < 2 or not any(part in name for part in ("self_attn.", "mlp.")) or (
            layer.endswith((".gate", "shared_expert_gate"))
        ):  # fmt: skip
            found[name] = tensor
            continue
        parts = form.quantise(tensor.float(), group_of(scheme))
        found |= {f"{layer}.{part}": value for part, value in zip(form.parts, parts, strict=True)}
        found |= {f"{layer}.{part}": torch.tensor(tensor.shape) for part in form.beside}
    return found


def checkpoint(case: Case, folder: Path, change: Change = lambda tensors, config: None) -> tuple[Path, set[str]]:
    """The files of a quantised target with modules in them, and the names of these."""
    model = make_model(case.architecture, seed=3, tie_word_embeddings=False, **dict(case.sizes))
    modules = tensors_of(case.layout, random_modules(model, case.count, **OPTIONS[case.layout]), model)
    modules = packed(modules, case.scheme) if case.packed else modules
    ignore = [name for name, _ in model.named_modules() if name.endswith(("lm_head", ".gate", "shared_expert_gate"))]
    specgraph.quantise(model, case.scheme, group_size=group_of(case.scheme), ignore=ignore)
    weights, config = saved(model, folder) / "model.safetensors", json.loads((folder / "config.json").read_text())
    change(modules, config)
    save_file({name: t.contiguous() for name, t in (load_file(weights) | modules).items()}, weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder, {*modules}


def dense(head: DraftHead) -> DraftHead:
    """The same modules with dense weights, which a loop over the entries of the packed ones gives."""
    modules = []
    for module in head.module:
        made = copy.copy(module)
        made._modules = dict(module._modules)
        made.block.config.quantization_config = None  # which the oracle takes away
        made.block = oracle(module.block, module.projection.weight.dtype)
        modules.append(made)
    return DraftHead(Mtp(modules), head.features)


def loaded(folder: Path, model: PreTrainedModel) -> DraftHead:
    return MtpDrafter.load(open_checkpoint(folder, "mtp"), MtpDraftConfig(), model, info(model))


@each
def test_modules_have_the_weights_that_the_files_mean(case: Case, tmp_path: Path) -> None:
    """By the names of the files, with numbers and scales as a loop reads them."""
    folder, names = checkpoint(case, tmp_path)
    model, form = specgraph.load(folder, dtype=torch.float32), format_of(FORMATS[case.scheme])
    head, stored = loaded(folder, model), load_file(folder / "model.safetensors")
    held = [*packed_layers(head.module).values(), *packed_experts(head.module).values()]
    assert {owner.format for owner in held} == ({form.name} if case.packed else set())
    found = tensors_of(case.layout, dense(head), model)
    assert {*found} == {name for name in names if not name.endswith(BESIDE)} | {
        f"{name.removesuffix(form.parts[0])}weight" for name in names if name.endswith(f".{form.parts[0]}")
    }
    for name, tensor in found.items():
        parts = [stored.get(f"{name.removesuffix('weight')}{part}") for part in form.parts]
        is_packed = all(part is not None for part in parts)
        expected = (
            matrix(form.name, [part for part in parts if part is not None], tensor.dtype) if is_packed else stored[name]
        )
        assert torch.equal(tensor, expected.to(tensor.dtype)), name


def without_scale(modules: dict[str, Tensor], _: dict[str, Any]) -> None:
    del modules[f"{DOWN}.weight_scale_inv"]


def without_numbers(modules: dict[str, Tensor], _: dict[str, Any]) -> None:
    del modules[f"{DOWN}.weight"]


def of_another_shape(modules: dict[str, Tensor], _: dict[str, Any]) -> None:
    modules[f"{DOWN}.weight_scale_inv"] = torch.ones(3, 1)


def of_nothing(modules: dict[str, Tensor], _: dict[str, Any]) -> None:
    modules[f"{DOWN}.weight_scale_inv"].zero_()


def packed_projection(modules: dict[str, Tensor], _: dict[str, Any]) -> None:
    modules["mtp.fc.weight"] = modules["mtp.fc.weight"].to(torch.float8_e4m3fn)


def superfluous(modules: dict[str, Tensor], _: dict[str, Any]) -> None:
    modules["mtp.layers.0.self_attn.q_proj.g_idx"] = torch.zeros(4)


DOWN = "mtp.layers.0.mlp.down_proj"
REFUSED: list[tuple[Change, str]] = [
    (without_scale, rf"{DOWN}\.weight of .* is torch.float8_e4m3fn; it must be torch.float"),
    (without_numbers, r"no tensor layers\.0\.mlp\.down_proj\.weight"),
    (of_another_shape, rf"{DOWN}\.weight_scale_inv of .* has the shape \[3, 1\]"),
    (of_nothing, rf"{DOWN}\.weight_scale_inv of .* is 0\.0 at \[0, 0\]"),
    (packed_projection, r"mtp\.fc\.weight of .* is torch.float8_e4m3fn; convert it"),
    (superfluous, r"holds the tensor mtp\.layers\.0\.self_attn\.q_proj\.g_idx"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED, ids=lambda x: getattr(x, "__name__", ""))
def test_damaged_modules_are_one_sentence(change: Change, message: str, tmp_path: Path) -> None:
    folder, _ = checkpoint(Case("qwen3_5_text", "qwen3_next", "fp8"), tmp_path, change)
    model = specgraph.load(folder)
    with pytest.raises((ConfigError, UnsupportedModelError), match=message):
        loaded(folder, model)


def test_inspect_says_that_packed_modules_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = checkpoint(Case("qwen3_5_text", "qwen3_next", "int4"), tmp_path)
    shown = shown_by_inspect(capsys, folder, folder, "draft.kind=mtp")
    assert ["fits the target", "yes"] in shown and ["weights", "int4"] in shown


@each
def test_drafts_are_those_of_dense_modules_and_tokens_stay(case: Case, tmp_path: Path) -> None:
    folder, _ = checkpoint(case, tmp_path)
    target, prompts = specgraph.load(folder, dtype=torch.float64), ragged_prompts()
    target.set_attn_implementation(make_model(case.architecture, **dict(case.sizes)).config._attn_implementation)
    target.config._experts_implementation = "eager"
    tested = compiled(target, "mtp", 3, **({} if case.count > 1 else {"pipeline": {"verify": False}}))
    expected = drafted_logits(oracle(target), dense(loaded(folder, target)))
    accepted = ragged_prompts((9,), seed=2)[0].tolist()
    run = Run(
        tested.stages["insert_draft"], [64], torch.zeros(1, 1), Options(temperature=(0.0,), top_k=(0,), seeds=(0,))
    )
    drafts = fresh_start(run, 0, accepted)[1].tolist()
    assert drafts == [int(expected([accepted], [drafts[:index]]).argmax()) for index in range(3)]
    tokens = tested.generate(prompts, max_new_tokens=10, eos_token_id=[]).new_tokens
    assert_same_tokens(target, prompts, tokens, forward_greedy(oracle(target), prompts, 10))
