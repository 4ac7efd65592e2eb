"""DFlash heads in implementations that are not ours, on random weights: the package speculators, and transformers.

What runs here are the graphs of a compiled decoder, with pages: the context is written in two calls, and the block
reads it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specgraph.drafters import dflash
from specgraph.kernels.state import buffers_of
from tests.checkpoints.layouts import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, VOCAB
from tests.drafters import test_dflash
from tests.drafters.contract import Case
from tests.drafters.dflash_formula import BLOCK, EPS, GIVEN, MASK, WINDOW, Given, Seen, formula, target
from tests.harness import drafting_stage
from tests.models import exact_norms

CLOSE = {"rtol": 0.0, "atol": 1e-12}
"""The same sums in another order, in float64: they differ by 1e-14, and logits reach 7."""


@pytest.fixture(autouse=True)
def cached_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dflash, "export_block", test_dflash.EXPORT)


@functools.cache
def example() -> tuple[Tensor, list[int]]:
    """Features ``[P, 2 * Ht]`` of a context, and the tokens behind the first, the last of which is the anchor."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(19, 2 * HIDDEN, generator=generator, dtype=torch.float64)
    return features, torch.randint(0, VOCAB, (20,), generator=generator).tolist()


@torch.no_grad()
def ours(name: str, features: Tensor, anchor: int, count: int) -> Tensor:
    """Logits ``[count, Vd]`` of the drafts of a block behind a context with ``features`` ``[P, 2 * Ht]``."""
    program, length = drafting_stage(test_dflash.TestDrafts.decoder(Case(name, count))), len(features)
    sizes = {"N": 9, "B": 1}
    caches = tuple(b.allocate(sizes, "cpu") for b in buffers_of(program.inputs["draft_caches"]))
    table = torch.tensor([[7, 2, 5, 0, 8, 1, 3]])
    rows = program.modules["draft_features"](*features[None].split(HIDDEN, dim=-1))
    for begin, end in ((0, length // 2), (length // 2, length)):
        given = {"num_rows": torch.tensor([end - begin]), "block_table": table, "max_length": torch.tensor([28])}
        positions = torch.arange(begin, end)[None]
        program.modules["draft_context"](hidden=rows[:, begin:end], positions=positions, caches=caches, **given)
    masks = count - GIVEN[name].shifted
    tokens, positions = torch.tensor([[anchor] + [MASK] * masks]), torch.arange(length, length + masks + 1)[None]
    logits: Tensor = program.modules["draft"](tokens=tokens, positions=positions, block_table=table, caches=caches)[0]
    return logits


SPECULATORS = [name for name in GIVEN if name.startswith("speculators")]


@pytest.mark.parametrize("name", SPECULATORS)
@pytest.mark.parametrize("length", [2, 19])
def test_logits_are_those_of_speculators(
    name: str, length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("speculators", reason="make installs it")
    features, tokens = example()
    features, tokens = features[:length], tokens[: length + 1]
    expected = _theirs(name, features, tokens, tmp_path, monkeypatch)
    found = ours(name, features, tokens[-1], len(expected))
    torch.testing.assert_close(found, expected, **CLOSE)
    torch.testing.assert_close(formula(name, features, tokens[-1], len(expected)), expected, **CLOSE)


@torch.no_grad()
def _theirs(name: str, features: Tensor, tokens: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Logits ``[R, Vd]`` of the block whose anchor is the last token, by their draft model in float64."""
    from speculators.models.dflash import DFlashSpeculatorConfig, core

    model = loaded(core.DFlashDraftModel, DFlashSpeculatorConfig, GIVEN[name], folder)
    _, logits = run_backbone(model, core, features, tokens, monkeypatch)
    return logits[0, not GIVEN[name].shifted :]


def loaded(model_class: Any, config_class: Any, given: Given, folder: Path) -> Any:
    """A draft model of speculators with the tensors of a head, in float64."""
    target().save_pretrained(folder)
    config: Any = config_class(**given.written.config, speculators_config={
        "algorithm": "dflash", "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
        "verifier": {"name_or_path": str(folder), "architectures": ["LlamaForCausalLM"]},
    })  # fmt: skip
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = model_class(config)
    own = {"embed_tokens.weight": target().get_input_embeddings().weight,
           "lm_head.weight": target().get_output_embeddings().weight}  # fmt: skip
    left, unknown = model.load_state_dict({**own, **given.written.tensors}, strict=False)
    assert not unknown and all(key.startswith("verifier_") for key in left)
    model = model.double().eval()
    exact_norms(model)
    return model


def run_backbone(
    model: Any, core: Any, features: Tensor, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Tensor, Tensor]:
    """Rows ``[1, R, H]`` and logits ``[1, R, Vd]`` of the block whose anchor is the last token."""
    last, size = len(tokens) - 1, len(tokens) + BLOCK
    monkeypatch.setattr(core, "select_anchors", lambda *_: (torch.tensor([last]), torch.tensor([True])))
    padded = torch.zeros(1, size, 2 * HIDDEN, dtype=torch.float64)
    padded[0, :last], padded[0, last:] = features, 99.0  # what no row may see
    ids = torch.zeros(1, size, dtype=torch.int64)
    ids[0, : last + 1] = torch.tensor(tokens)
    hidden, logits, *_ = model._backbone_forward(
        hidden_states=padded, input_ids=ids, loss_mask=torch.ones(1, size), document_ids=torch.zeros_like(ids),
        verifier_last_hidden_states=torch.zeros(1, size, HIDDEN, dtype=torch.float64), max_anchors=1,
    )  # fmt: skip
    return hidden, logits


TRANSFORMERS = {"z-lab": Seen(), "windows everywhere": Seen(WINDOW)}


@pytest.mark.parametrize("name", TRANSFORMERS)
@torch.no_grad()
def test_logits_are_those_of_transformers(name: str) -> None:
    """Their only DFlash head is that of Muse Glimmer. It has other names for two tensors, and its windows hold one
    position more.
    """
    muse = pytest.importorskip("transformers.models.muse_glimmer_assistant", reason="transformers 5.23 has it")
    from transformers.cache_utils import DFlashCache

    features, tokens = example()
    sliding = GIVEN[name].seen[0].window is not None
    config = muse.MuseGlimmerAssistantConfig(
        hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=EPS, block_size=BLOCK, mask_token_id=MASK,
        rope_parameters={"rope_type": "default", "rope_theta": GIVEN[name].theta}, target_layer_ids=[0, 2],
        layer_types=["sliding_attention" if sliding else "full_attention"] * 2, sliding_window=WINDOW - 1,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = muse.MuseGlimmerAssistantModel(config)
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    model.load_state_dict({renamed.get(key, key): value for key, value in GIVEN[name].written.tensors.items()})
    model = model.double().eval()
    exact_norms(model)
    for count in (BLOCK - 1, 3):
        embedded = target().get_input_embeddings()(torch.tensor([[tokens[-1]] + [MASK] * count]))
        cache = DFlashCache(config=config)
        cache.set_previous_accepted_tokens(len(features))  # their masks are as wide as this says
        rows = model(noise_embeds=embedded, context_hidden_states=features[None], past_key_values=cache)
        expected = target().get_output_embeddings()(rows.last_hidden_state[0, 1:])
        torch.testing.assert_close(ours(name, features, tokens[-1], count), expected, **CLOSE)
