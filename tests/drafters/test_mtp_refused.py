"""Checkpoints and targets with which MTP is refused, and the sentences that say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from specgraph import compile_speculative
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from tests.checkpoints.running import info
from tests.decoding import CONFIG, compiled
from tests.drafters.mtp_files import example, model_of, random_modules, save_inside
from tests.models import make_model

QUICK: dict[str, Any] = {"pipeline": {"verify": False}}


def broken(folder: Path, change: Any, **config: Any) -> Path:
    model = model_of("llama")
    save_inside(folder, "deepseek", model, random_modules(model, 2), **config)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")
    return folder


def without(name: str) -> Any:
    return lambda weights: [weights.pop(key) for key in [*weights] if key.startswith(name)]


def replaced(name: str, tensor: Tensor) -> Any:
    return lambda weights: weights.update({name: tensor})


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "the first module": (
        without("model.layers.2"), {}, r"has no tensors of MTP module 1 of 2; download it again\.$"
    ),
    "a module that is declared": (
        lambda weights: None, {"num_nextn_predict_layers": 3},
        r"has no tensors of MTP module 3 of 3; download it again, or set draft\.num_modules to 2\.$",
    ),
    "a tensor": (
        without("model.layers.3.eh_proj"), {},
        r"lacks model\.layers\.3\.eh_proj\.weight; download it again or correct its config\.json",
    ),
    "a tensor of the layer": (
        without("model.layers.3.mlp.up_proj"), {}, r"lacks model\.layers\.3\.mlp\.up_proj\.weight"
    ),
    "width": (
        replaced("model.layers.3.enorm.weight", torch.ones(5)), {},
        r"does not fit: model\.layers\.3\.enorm\.weight has the shape \[5\], but the target \w+ and config\.json need "
        r"\[32\]",
    ),
    **{
        f"fp8 with {scale}": (
            lambda weights, scale=scale: weights.update({
                "model.layers.2.mlp.up_proj.weight": torch.ones(48, 32).to(torch.float8_e4m3fn),
                f"model.layers.2.mlp.up_proj.{scale}": torch.ones(1, 1),
            }), {},
            r"mlp\.up_proj\.weight of .* is torch\.float8_e4m3fn; convert it to bfloat16 or float32\.$",
        )
        for scale in ("weight_scale_inv", "weight_scale")
    },
    "two weights in a byte": (
        replaced("model.layers.2.mlp.up_proj.weight", torch.ones(48, 16, dtype=torch.uint8)), {},
        r"model\.layers\.2\.mlp\.up_proj\.weight of .* is torch\.uint8; convert it to bfloat16 or float32\.$",
    ),
    "a scale": (
        replaced("model.layers.2.mlp.up_proj.weight_scale_inv", torch.ones(1, 1)), {},
        r"holds model\.layers\.2\.mlp\.up_proj\.weight_scale_inv, which an MTP module of this layout",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_broken_checkpoint_is_one_sentence(case: str, tmp_path: Path) -> None:
    change, config, message = REFUSED[case]
    model, folder = model_of("llama"), broken(tmp_path, change, **config)
    with pytest.raises(ConfigError, match=message) as raised:
        MtpDrafter.load(open_checkpoint(folder, "mtp"), MtpDraftConfig(), model, info(model))
    assert "\n" not in str(raised.value)


def test_the_modules_before_one_that_is_missing_can_be_used(tmp_path: Path) -> None:
    model, folder = model_of("llama"), broken(tmp_path, lambda weights: None, num_nextn_predict_layers=3)
    options = MtpDraftConfig(num_modules=2)
    assert len(MtpDrafter.load(open_checkpoint(folder, "mtp"), options, model, info(model)).module) == 2


def test_a_target_without_modules_says_so(tmp_path: Path) -> None:
    model = make_model("llama")
    with pytest.raises(ConfigError, match=r"out of the target's own checkpoint, and there is no folder of the name ''"):
        compiled(model, "mtp", 2, **QUICK)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1})
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no MTP modules, although its config\.json names 1; give"):
        compiled(loaded, "mtp", 2, **QUICK)


def test_more_modules_than_there_are_and_unknown_values(tmp_path: Path) -> None:
    model, _, folder = example("deepseek", tmp_path)
    for given, message in (
        ({"num_modules": 3}, r"draft\.num_modules is 3, but .* holds 2; lower it"),
        ({"family": "linked"}, r"draft\.family is 'linked'; it is one of chained, target, or null"),
    ):
        with pytest.raises(ConfigError, match=message):
            compile_speculative(model, {**CONFIG, "draft": {"kind": "mtp", **given}}, draft=folder)


def test_a_target_of_another_form_is_refused() -> None:
    model = make_model("gpt_neox")
    with pytest.raises(ConfigError, match="has no decoder layers under 'layers' with a 'norm' behind them"):
        MtpDrafter.random(model, MtpDraftConfig())


def test_a_type_of_layer_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    folder = example("mimo_v2", tmp_path)[2]
    wanted = "The MTP modules have a decoder layer of the type sliding_attention, and LlamaForCausalLM has no types of"
    with pytest.raises(ConfigError, match=wanted):
        MtpDrafter.load(open_checkpoint(folder, "mtp"), MtpDraftConfig(), model_of("llama"), info(model_of("llama")))
    message = (
        "the type linear, and MiMoV2FlashForCausalLM has only full_attention, sliding_attention; set draft.layer_ty"
    )
    with pytest.raises(ConfigError, match=message):
        MtpDrafter.random(make_model("mimo_v2_flash"), MtpDraftConfig(layer_type="linear"))
