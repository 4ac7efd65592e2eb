"""Checkpoints that are not supported, do not fit, or contradict themselves: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from tests.checkpoints import layouts
from tests.checkpoints.layouts import DRAFT_VOCAB, VOCAB, Written
from tests.checkpoints.running import load, target

UNSUPPORTED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "mtp of another form": ({"model_type": "deepseek_v4"}, ["mtp.0.e_proj.weight"], "an MTP head"),
    "dflash": ({"architectures": ["DFlash3Model"]}, ["fc.weight"], r"a variant of DFlash \(DFlash3Model\)"),
    "xpress": ({"speculators_model_type": "xpress"}, ["fc.weight"], "a xpress head"),
    "dspark": ({"architectures": ["Gemma4DSparkModel"]}, ["fc.weight"], r"a DSpark head \(Gemma4DSparkModel\)"),
    "mla": (
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        ["layers.0.hidden_norm.weight"],
        r"an EAGLE-3 head with MLA attention \(Eagle3DeepseekV2ForCausalLM\)",
    ),
    "mlp speculator": ({"model_type": "mlp_speculator"}, ["speculator.emb.0.weight"], "an MLP speculator"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_kinds_are_named(case: str, tmp_path: Path) -> None:
    config, names, message = UNSUPPORTED[case]
    Written(config, {name: torch.zeros(1) for name in names}).save(tmp_path / "head")
    with pytest.raises(
        ConfigError,
        match=rf"is {message}, which specgraph does not read; it reads DFlash heads .*, EAGLE-1 and EAGLE-2",
    ):
        open_checkpoint(tmp_path / "head")


def test_an_unknown_layout_is_described(tmp_path: Path) -> None:
    Written({"architectures": ["Other"]}, {"a.weight": torch.zeros(1)}).save(tmp_path / "head")
    with pytest.raises(
        ConfigError, match=r"no draft that specgraph knows \(architectures \['Other'\], tensors a.weight"
    ):
        open_checkpoint(tmp_path / "head")


@pytest.mark.parametrize(
    ("extra", "layout", "mask"),
    [
        ({}, "transformers", None),
        ({"pard_token": 9, "spd_type": "pard"}, "pard", 9),
        ({"spd_type": "pard"}, "pard", None),
    ],
)
def test_causal_lms(extra: dict[str, Any], layout: str, mask: int | None, tmp_path: Path) -> None:
    target().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | extra))
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.layout, checkpoint.mask_token_id) == ("draft_model", layout, mask)
    assert checkpoint.parallel == (layout == "pard")
    with pytest.raises(ConfigError, match="a draft of the kind draft_model, not an EAGLE-3 head"):
        load(tmp_path)


Change = Callable[[Written], object]


def _config(**changed: Any) -> Change:
    return lambda written: written.config.update(changed)


def _nested(**changed: Any) -> Change:
    return lambda written: written.config["eagle_config"].update(changed)


def _without(*names: str) -> Change:
    return lambda written: [written.tensors.pop(name) for name in names]


def _with(**tensors: torch.Tensor) -> Change:
    return lambda written: written.tensors.update({name.replace("__", "."): t for name, t in tensors.items()})


def _offset(value: int, at: int = -1) -> Change:
    def change(written: Written) -> None:
        written.tensors["d2t"][at] = value

    return change


def _all(*changes: Change) -> Change:
    return lambda written: [change(written) for change in changes]


_IDS = "eagle_aux_hidden_state_layer_ids"
MISFITS: dict[str, tuple[Callable[[], Written], Change, dict[str, Any], str]] = {
    "hidden size of the configuration": (
        layouts.specforge,
        _config(hidden_size=16),
        {},
        r"embed_tokens.weight has the shape \[101, 32\], but the target Llama and config.json need \[101, 16\]",
    ),
    "hidden size of the target": (
        layouts.specforge,
        _with(fc__weight=torch.zeros(32, 192)),
        {},
        r"fc.weight has the shape \[32, 192\], but the target Llama and config.json need \[32, 96\]",
    ),
    "declared target": (
        layouts.speculators,
        _config(target_hidden_size=64),
        {},
        "made for a target with hidden size 64, but .* has 32",
    ),
    "missing tensor": (
        layouts.specforge,
        _without("layers.0.mlp.up_proj.weight"),
        {},
        "lacks midlayer.mlp.up_proj.weight;",
    ),
    "missing tensors": (
        layouts.nvidia,
        _without("norm.weight", "fc.weight", "layers.1.input_layernorm.weight", "layers.0.hidden_norm.weight"),
        {},
        "lacks fc.weight, layers.0.hidden_norm.weight, layers.1.input_layernorm.weight and 1 more;",
    ),
    "unused tensor": (
        layouts.specforge,
        _with(other__weight=torch.zeros(1)),
        {},
        "holds other.weight, which an EAGLE-3 head .* not use",
    ),
    "norm the configuration denies": (
        layouts.speculators,
        _with(input_norm__weight=torch.ones(96)),
        {},
        "holds input_norm.weight, which",
    ),
    "quantised": (
        layouts.specforge,
        _with(norm__weight=torch.zeros(32, dtype=torch.int8)),
        {},
        "norm.weight of .* is torch.int8; convert",
    ),
    "short embedding": (
        layouts.specforge,
        _with(embed_tokens__weight=torch.zeros(99, 32)),
        {},
        r"embed_tokens.weight .* \[99, 32\].* \[101, 32\]",
    ),
    "borrowed embedding of another width": (
        layouts.eagle,
        _config(hidden_size=16),
        {},
        r"no embed_tokens.weight, needs \[101, 16\], but the target Llama has \[101, 32\]",
    ),
    "borrowed head with a reduced vocabulary": (
        layouts.specforge,
        _without("lm_head.weight"),
        {},
        r"no lm_head.weight, needs \[40, 32\], but .* has \[101, 32\]",
    ),
    "d2t above": (
        layouts.specforge,
        _offset(VOCAB),
        {},
        "d2t of .* names the target id 140, outside .* vocabulary of 101",
    ),
    "d2t below": (layouts.specforge, _offset(-1, 0), {}, "d2t of .* names the target id -1, outside"),
    "d2t not unique": (
        layouts.specforge,
        _all(_offset(0, 0), _offset(-1, 1)),
        {},
        "d2t of .* two draft ids the same target id",
    ),
    "d2t of another length": (
        layouts.specforge,
        _with(d2t=torch.zeros(3, dtype=torch.int64)),
        {},
        r"d2t of .* is .*\[3\]; it must be int64 \[40\]",
    ),
    "d2t and t2d": (
        layouts.specforge,
        _with(d2t=torch.zeros(DRAFT_VOCAB, dtype=torch.int64)),
        {},
        "t2d and d2t of .* name different",
    ),
    "no d2t": (
        layouts.specforge,
        _without("d2t"),
        {},
        "no d2t and a draft vocabulary of 40, but .* a vocabulary of 101",
    ),
    "mask token too large": (
        lambda: layouts.speculators("peagle"),
        _config(mask_token_id=VOCAB),
        {},
        "mask token of .* is 101, outside its vocabulary of 101; set draft.mask_token_id to an id from 0 to 100",
    ),
    "mask token of the option": (
        lambda: layouts.speculators("peagle"),
        _config(),
        {"mask_token_id": -1},
        "mask token of .* is -1, outside",
    ),
    "no mask token": (
        lambda: layouts.speculators("peagle"),
        _config(mask_token_id=None),
        {},
        "names no mask token .* set draft.mask_token_id",
    ),
    "a mask token that is no id": (
        lambda: layouts.speculators("peagle"),
        _config(mask_token_id="<mask>"),
        {},
        "mask_token_id of .* is '<mask>'; it must be one token id",
    ),
    "no mask_hidden": (
        lambda: layouts.speculators("peagle"),
        _without("mask_hidden"),
        {},
        "lacks mask_hidden; download it again or correct its config.json",
    ),
    "mask_hidden of another width": (
        lambda: layouts.speculators("peagle"),
        _with(mask_hidden=torch.zeros(1, 1, 32)),
        {},
        r"mask_hidden has the shape \[32\], but the target Llama and config.json need \[96\]",
    ),
    "parallel without mask_hidden": (
        layouts.specforge,
        _config(),
        {"parallel": True},
        "draft.parallel is set, but .* has no mask_hidden",
    ),
    "mask token without mask_hidden": (
        layouts.specforge,
        _config(),
        {"mask_token_id": 3},
        "draft.mask_token_id is set, but .* has no mask_hidden",
    ),
    "regular layers": (
        layouts.nvidia,
        _nested(next_layer_regular=False),
        {},
        "has next_layer_regular=False, a variant of EAGLE-3",
    ),
    "mtp norm": (layouts.nvidia, _nested(use_mtp_layernorm=True), {}, "has use_mtp_layernorm=True, a variant"),
    "parallel heads": (layouts.nvidia, _nested(parallel_draft_step=3), {}, "has parallel_draft_step=3, a variant"),
    "layers outside": (
        layouts.specforge,
        _nested(**{_IDS: [0, 2, 7]}),
        {},
        r"hidden states \[1, 3, 8\] \(eagle_config.eagle_aux.*\) of a target with 7 layers; set draft.feature_layers",
    ),
    "layers out of order": (
        layouts.speculators,
        _config(**{_IDS: [6, 1, 3]}),
        {},
        r"is \[6, 1, 3\], out of order, .* set draft",
    ),
    "layers that disagree": (
        layouts.specforge,
        _config(**{_IDS: [0, 2, 4]}),
        {},
        r"\[0, 2, 4\] by .* and \[1, 3, 5\] by eagle_config.* set draft",
    ),
    "layers that are no list": (
        layouts.speculators,
        _config(**{_IDS: "1,2"}),
        {},
        "is '1,2'; it must be a list of integers",
    ),
    "number of layers": (layouts.speculators, _config(), {"feature_layers": [1, 3]}, r"fc.weight .* need \[32, 64\]"),
    "a flag that is no flag": (
        layouts.speculators,
        _config(norm_output="no"),
        {},
        "norm_output of .* is 'no'; it must be true or",
    ),
    "rotary that changes with the length": (
        layouts.nvidia,
        _config(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        {},
        "the rope_type 'dynamic', .* runs default",
    ),
    "rotary base": (
        layouts.eagle,
        _config(rope_theta=-1.0),
        {},
        "rope_theta of .* is -1.0; set draft.rope_theta to a base above 0",
    ),
    "activation": (layouts.eagle, _config(hidden_act="other"), {}, "hidden_act of .* is 'other', unknown"),
    "no heads": (
        layouts.eagle,
        _config(num_attention_heads=None),
        {},
        "num_attention_heads in .* is None; it must be an integer above 0",
    ),
    "uneven heads": (
        layouts.eagle,
        _config(num_attention_heads=5, head_dim=None),
        {},
        "config.json of .* describes no decoder layer",
    ),
    "sliding window": (
        layouts.eagle,
        _config(layer_types=["sliding_attention"]),
        {},
        "has sliding_attention in llama-style layers",
    ),
}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_hidden_size": 32}, "it was made for a target with hidden size 32, but the target Llama has 16"),
        ({}, "its fc.weight reads 96 columns, but the target Llama has 2 hidden states of 16"),
    ],
)
def test_the_size_of_another_target_is_said_before_its_number_of_layers(
    keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    written = layouts.specforge()
    written.config.update(keys)
    with pytest.raises(ConfigError, match=message):
        load(written.save(tmp_path / "head"), target(1, 16))


@pytest.mark.parametrize("case", MISFITS)
def test_misfits_get_one_sentence(case: str, tmp_path: Path) -> None:
    make, change, options, message = MISFITS[case]
    written = make()
    change(written)
    written.save(tmp_path / "head")
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path / "head", **options)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_default_layers_need_a_target_that_has_them(tmp_path: Path) -> None:
    small = target(layers=3)
    layouts.eagle().save(tmp_path / "head")
    with pytest.raises(
        ConfigError, match=r"the hidden states \[2, 1, 0\] \(default: 2, L // 2, L - 3\).* set draft.feature"
    ):
        load(tmp_path / "head", small)
    assert load(tmp_path / "head", small, feature_layers=[3, 0, 1]).features == (3, 0, 1)
