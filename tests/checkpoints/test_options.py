"""Where every option of a head comes from, what overrules it, and what is shared with the target."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from specgraph.checkpoints import loading
from specgraph.checkpoints.loading import shared_notes
from specgraph.drafters.base import DraftHead
from specgraph.drafters.eagle3 import Eagle3DraftConfig as DraftConfig
from specgraph.drafters.eagle3 import Eagle3Drafter
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.ir.tensors import equal_tensors
from tests.checkpoints import layouts
from tests.checkpoints.layouts import MASK
from tests.checkpoints.running import info, load, target

save_head = Eagle3Drafter.save_head


def _chosen(folder: Path, layers: int | None = 7, **options: Any) -> dict[str, tuple[Any, str]]:
    found = Eagle3Drafter.read_options(open_checkpoint(folder), DraftConfig(**options), layers)
    return {choice.name: (choice.value, choice.source) for choice in found.sources}


def test_every_option_names_its_source(tmp_path: Path) -> None:
    chosen = _chosen(layouts.specforge_parallel().save(tmp_path))
    assert chosen["feature_layers"] == ("hs[1], hs[3], hs[5]", "eagle_config.eagle_aux_hidden_state_layer_ids")
    assert chosen["rope_theta"] == (2e4, "rope_parameters.rope_theta")
    assert chosen["norm_before_residual"] == (False, "default")
    assert chosen["norm_before_fc"] == (True, "config.json")
    assert chosen["num_layers"] == (1, "tensors")
    assert chosen["mask_token_id"] == (MASK, "ptd_token_id")
    assert chosen["lm_head"] == ("its own", "tensors")


def test_options_overrule_the_checkpoint(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "feature_layers": [4, 0, 7], "rope_theta": 5.0, "norm_before_residual": True, "norm_output": True,
        "mask_token_id": 3,
    }  # fmt: skip
    folder = layouts.specforge_parallel().save(tmp_path)
    chosen = _chosen(folder, **given)
    assert {name: source for name, (_, source) in chosen.items() if source.startswith("draft.")} == {
        name: f"draft.{name}" for name in given
    }
    head = load(folder, **given)
    config: Any = head.module.config
    assert (head.features, head.mask_token_id) == ((4, 0, 7), 3)
    assert (config.norm_before_residual, config.norm_output) == (True, True)
    assert config.layers.rope_parameters["rope_theta"] == 5.0
    assert torch.allclose(head.module.rotary.inv_freq, 5.0 ** -torch.arange(0, 1, 0.25))  # type: ignore[operator, arg-type]


@pytest.mark.parametrize(
    ("keys", "theta", "source"),
    [
        ({"rope_theta": 3.0, "rope_parameters": {"rope_theta": 4.0}}, 3.0, "rope_theta"),
        ({"rope_parameters": {"rope_theta": 4.0, "rope_type": "default"}}, 4.0, "rope_parameters.rope_theta"),
        ({}, 10000.0, "default"),
    ],
)
def test_both_spellings_of_the_rotary_base(keys: dict[str, Any], theta: float, source: str, tmp_path: Path) -> None:
    flat, nested = layouts.eagle(), layouts.speculators()
    for settings in (flat.config, nested.config["transformer_layer_config"]):
        del settings["rope_theta"]
        settings.update(keys)
    prefix = "" if source == "default" else "transformer_layer_config."
    assert _chosen(flat.save(tmp_path / "flat"))["rope_theta"] == (theta, source)
    assert _chosen(nested.save(tmp_path / "nested"))["rope_theta"] == (theta, prefix + source)


@pytest.mark.parametrize("ids", [None, []])
def test_missing_layer_ids_depend_on_the_target(ids: list[int] | None, tmp_path: Path) -> None:
    written = layouts.speculators()
    written.config["eagle_aux_hidden_state_layer_ids"] = ids
    written.save(tmp_path)
    assert _chosen(tmp_path)["feature_layers"] == ("hs[2], hs[3], hs[4]", "default: 2, L // 2, L - 3")
    assert _chosen(tmp_path, layers=32)["feature_layers"][0] == "hs[2], hs[16], hs[29]"
    assert _chosen(tmp_path, layers=None)["feature_layers"][0] == "unknown without a target"


def test_missing_tensors_are_the_targets_own(tmp_path: Path) -> None:
    """A full vocabulary: both the embedding and the head are borrowed, without a copy."""
    model: Any = target()
    written = layouts.nvidia()
    del written.tensors["embed_tokens.weight"], written.tensors["lm_head.weight"]
    head = load(written.save(tmp_path))
    assert head.module.embed_tokens.weight is model.model.embed_tokens.weight
    assert head.module.lm_head.weight is model.lm_head.weight
    assert head.module.draft_to_target is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(("change", "shared"), [(None, True), (0, False), (-1, False)])
def test_a_copy_of_the_targets_tensor_is_not_brought_to_its_device(
    change: int | None, shared: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared in the target's dtype, a part after the other; one element more or less is another tensor."""
    monkeypatch.setattr(loading, "equal_tensors", lambda a, b: equal_tensors(a, b, 3 * layouts.HIDDEN))
    model: Any = target() if dtype == torch.float64 else copy.deepcopy(target()).float().double()
    written = layouts.nvidia()
    copied = model.model.embed_tokens.weight.detach().clone()
    if change is not None:
        copied[change, change] += 1e-3
    written.tensors["embed_tokens.weight"] = copied.to(dtype)
    checkpoint = open_checkpoint(written.save(tmp_path))
    head = Eagle3Drafter.load(checkpoint, DraftConfig(), model, info(model))
    assert (head.module.embed_tokens.weight is model.model.embed_tokens.weight) is shared
    assert torch.equal(head.module.embed_tokens.weight, copied.to(dtype).double())
    assert head.module.lm_head.weight is not model.lm_head.weight
    size = f"{layouts.VOCAB * layouts.HIDDEN * 8:,} bytes"
    note = f"shared while loading: draft.embed_tokens.weight is target.model.embed_tokens.weight, {size}"
    assert shared_notes(checkpoint.tensors, head.module, model) == ((note,) if shared else ())


def test_an_identity_map_is_no_map(tmp_path: Path) -> None:
    written = layouts.nvidia()
    written.tensors["d2t"] = torch.zeros(layouts.VOCAB, dtype=torch.int64)
    assert load(written.save(tmp_path)).module.draft_to_target is None


def test_an_embedding_with_room_for_a_mask_token(tmp_path: Path) -> None:
    written = layouts.speculators("peagle")
    written.tensors["embed_tokens.weight"] = torch.randn(layouts.VOCAB + 3, layouts.HIDDEN)
    written.config["mask_token_id"] = layouts.VOCAB + 2
    assert load(written.save(tmp_path)).mask_token_id == layouts.VOCAB + 2


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    given = load(layouts.speculators("peagle", qk_norms=True, layers=2, biases=True, fc_norm=True).save(tmp_path / "a"))
    folder = save_head(given, tmp_path / "b", target_name="target", algorithm="peagle", num_speculative_tokens=5)
    again = load(folder)
    assert (again.features, again.mask_token_id, again.parallel) == (given.features, given.mask_token_id, True)
    expected, found = given.module.state_dict(), again.module.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_the_targets_tensors_are_not_saved(tmp_path: Path) -> None:
    head = load(layouts.eagle().save(tmp_path / "a"))
    for shared, saved in (((), True), (target().parameters(), False)):
        folder = save_head(head, tmp_path / "b", target_name="target", algorithm="eagle3", num_speculative_tokens=3,
                           shared=shared)  # fmt: skip
        checkpoint = open_checkpoint(folder)
        assert checkpoint.layout == "speculators"
        assert ("embed_tokens.weight" in checkpoint.tensors) is saved
        assert "lm_head.weight" in checkpoint.tensors


def test_heads_that_the_layout_cannot_express(tmp_path: Path) -> None:
    plain, without = (
        load(layouts.eagle().save(tmp_path / "a")),
        load(layouts.nvidia_last_hidden_state().save(tmp_path / "b")),
    )

    def save(head: DraftHead, algorithm: Any) -> None:
        save_head(head, tmp_path / "c", target_name="target", algorithm=algorithm, num_speculative_tokens=3)

    with pytest.raises(ConfigError, match="layout cannot express a head without fc, input_layernorm or norm"):
        save(without, "eagle3")
    with pytest.raises(ConfigError, match="A peagle head has a mask_token_id and a mask_hidden"):
        save(plain, "peagle")
    with pytest.raises(ConfigError, match="algorithm is one of eagle3, peagle, not 'medusa'"):
        save(plain, "medusa")
    assert not (tmp_path / "c").exists()
