"""MTP modules in files: every published layout, what is refused, and the same numbers from implementations of others.

Each layout was compared with: DeepSeek and GLM with transformers' ``MtpModel``; speculators and Qwen3-Next with the
layers of speculators, and Qwen3-Next also with arithmetic that is written out
(:mod:`tests.drafters.test_mtp_recurrent`); MiMo-V2 and Step with the definition of :mod:`tests.drafters.mtp_formula` on
transformers' own classes, and Step also with ``MtpModel``; MiMo with the definition on a stand-in target, with the
options that are written out here. transformers has Step in a multimodal model only, which specgraph refuses; its text
model with a projection is the target (:mod:`tests.step_text`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.mtp_module import MtpOptions
from specgraph.drafters.registry import open_checkpoint
from tests.checkpoints.running import info
from tests.decoding import compiled
from tests.drafters.files_contract import shown_by_inspect
from tests.drafters.mtp_files import OPTIONS, PUBLISHED, example, random_modules, save_inside, tensors_of
from tests.drafters.mtp_formula import drafted_logits
from tests.harness import Options, Run, fresh_start
from tests.models import make_model, ragged_prompts

QUICK: dict[str, Any] = {"pipeline": {"verify": False}}


@pytest.mark.parametrize("layout", [name for name in PUBLISHED if name != "speculators"])
def test_a_layout_is_found_inside_of_the_targets_checkpoint(layout: str, tmp_path: Path) -> None:
    model, head, folder = example(layout, tmp_path / "target")
    model.save_pretrained(tmp_path / "alone")
    names = {*load_file(folder / "model.safetensors")} - {*load_file(tmp_path / "alone" / "model.safetensors")}
    assert {n.removesuffix(".weight") for n in names if not n.endswith(".bias")} == {*PUBLISHED[layout][2]}
    assert open_checkpoint(folder).kind == "draft_model"  # which it could be: only draft=mtp asks for its modules
    found = open_checkpoint(folder, "mtp")
    assert (found.kind, found.layout) == ("mtp", layout)
    loaded = MtpDrafter.load(found, MtpDraftConfig(), model, info(model))
    assert loaded.features == head.features and loaded.module.options == MtpOptions(**OPTIONS[layout])
    assert len(loaded.module) == len(head.module)
    for (name, own), (other, expected) in zip(
        loaded.module.named_parameters(), head.module.named_parameters(), strict=True
    ):
        assert name == other and torch.equal(own, expected)
    first: Any = loaded.module[0]
    shared = (first.embed_tokens.weight is model.get_input_embeddings().weight,
              first.lm_head.weight is model.get_output_embeddings().weight)  # fmt: skip
    assert shared == (layout != "step", layout != "step")  # Step's modules have their own


@pytest.mark.parametrize("layout", PUBLISHED)
def test_modules_in_a_checkpoint_of_their_own(layout: str, tmp_path: Path) -> None:
    """Recognised without being asked for, and used by a target that does not hold them."""
    config, (model, head, _) = PUBLISHED[layout][1], example(layout, tmp_path / "target")
    (tmp_path / "head").mkdir()
    layers = model.config.num_hidden_layers
    (tmp_path / "head" / "config.json").write_text(json.dumps({"num_hidden_layers": layers} | config))
    save_file(tensors_of(layout, head, model), tmp_path / "head" / "model.safetensors")
    assert open_checkpoint(tmp_path / "head").layout == layout
    decoder = compiled(model, "mtp", 2, draft=tmp_path / "head", **QUICK)
    assert f"- draft: mtp in the {layout} layout, {tmp_path / 'head'}" in decoder.report()
    assert len(decoder.stages["trace"].drafter.models) == len(head.module)


@pytest.mark.parametrize("layout", [name for name in PUBLISHED if name != "speculators"])
def test_a_loaded_target_drafts_by_the_definition(layout: str, tmp_path: Path) -> None:
    """From ``draft=mtp`` alone, with a target that was loaded by its folder."""
    _, head, folder = example(layout, tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    decoder = compiled(target, "mtp", 3, **QUICK)
    accepted = ragged_prompts((9,), seed=2)[0].tolist()
    program = decoder.stages["insert_draft"]
    run = Run(program, [64], torch.zeros(1, 1), Options(temperature=(0.0,), top_k=(0,), seeds=(0,)))
    drafts = fresh_start(run, 0, accepted)[1].tolist()
    expected = drafted_logits(target, head)
    assert drafts == [int(expected([accepted], [drafts[:index]]).argmax()) for index in range(3)]


# Implementations of others


@torch.no_grad()
@pytest.mark.parametrize(("architecture", "layers"), [("deepseek_v3", {}), ("glm4_moe", {}), ("step_text", {
    "mtp_layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "mtp_mlp_layer_types": ["dense"] * 3, "num_sliding_attention_heads": 4,
})])  # fmt: skip
def test_several_modules_are_those_of_transformers(architecture: str, layers: dict[str, Any]) -> None:
    """``MtpModel`` gives rotary embeddings the token's position, and keeps the embedding at row 0.

    For Step it also takes the normed hidden states, and gives modules as many heads as layers that attend to everything
    have. Nobody has published modules of more than one kind; here they are.
    """
    modeling_layers = pytest.importorskip("transformers.modeling_layers", reason="of transformers 5.23")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    model = make_model(architecture, dtype=torch.float64, num_mtp_layers=3, **layers)
    head = random_modules(model, 3, rotary_position="token")
    theirs = modeling_layers.MtpModel(model, 3).double().eval()
    if layers and not hasattr(theirs, "has_per_layer_rope"):
        pytest.skip("MtpModel of this version of transformers does not run layers with rotary embeddings by type")
    for own, other in zip(head.module, theirs.layers, strict=True):
        other.mtp_block.load_state_dict(own.block.layers[0].state_dict())
        for name, part in (("enorm", own.embed_norm), ("hnorm", own.hidden_norm), ("eh_proj", own.projection),
                           ("post_norm", own.norm)):  # fmt: skip
            getattr(other, name).load_state_dict(part.state_dict())
    tokens = ragged_prompts((11,), seed=4)[0]
    hidden = model(tokens[None, :-1], output_hidden_states=True, use_cache=False).hidden_states[-1]
    drafts, logits, _ = theirs(
        input_ids=tokens[None, 1:], last_hidden_states=hidden, attention_mask=torch.ones(1, len(tokens) - 1),
        position_ids=torch.arange(1, len(tokens))[None], mtp_cache=cache_utils.MtpCache(config=theirs.config),
    )  # fmt: skip
    expected = drafted_logits(model, head)
    for index in range(3):
        own_logits = expected([tokens.tolist()], [drafts[0, :index].tolist()])
        torch.testing.assert_close(own_logits, logits[:, index], rtol=1e-6, atol=1e-6)  # norms compute in float32


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_next"])
def test_a_module_is_that_of_speculators(architecture: str) -> None:
    definitions = pytest.importorskip("speculators.models.mtp.model_definitions")
    hybrid = {"layer_types": ["full_attention", "linear_attention"]} if architecture == "qwen3_next" else {}
    model = make_model(architecture, dtype=torch.float64, **hybrid)
    (own,) = random_modules(model, 1).module
    theirs = definitions.mtp_model_classes[architecture].first_layer_class(model.config, layer_idx=0).double().eval()
    theirs.load_state_dict(own.block.layers[0].state_dict(), strict=False)
    for name, part in (("token_layernorm", own.embed_norm), ("hidden_layernorm", own.hidden_norm),
                       ("input_proj", own.projection), ("final_layernorm", own.norm)):  # fmt: skip
        getattr(theirs, name).load_state_dict(part.state_dict())
    tokens, positions = ragged_prompts((7,))[0][None], torch.arange(7)[None]
    hidden = torch.randn(1, 7, model.config.hidden_size, dtype=torch.float64)
    embedding = model.get_input_embeddings()(tokens)
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = own.block.rotary_emb(embedding, positions)
    expected = theirs(hidden, embedding, attention_mask=mask, position_ids=positions, position_embeddings=angles)
    torch.testing.assert_close(own.norm(own(tokens, positions, hidden)), expected, rtol=1e-6, atol=1e-6)


# What is shared


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("change", [0.0, 1e-3])
def test_a_projection_that_differs_in_one_element_stays(change: float, tied: bool, tmp_path: Path) -> None:
    model = make_model("llama", dtype=torch.float64, tie_word_embeddings=tied)
    head = random_modules(model, 2)
    save_inside(tmp_path, "deepseek", model, head)
    weights = load_file(tmp_path / "model.safetensors")
    projection = model.get_output_embeddings().weight
    weights["model.layers.3.shared_head.head.weight"] = projection.detach().clone()
    weights["model.layers.3.shared_head.head.weight"][7, 3] += change
    save_file(weights, tmp_path / "model.safetensors")
    loaded = MtpDrafter.load(open_checkpoint(tmp_path, "mtp"), MtpDraftConfig(), model, info(model))
    first, second = (module.lm_head.weight for module in loaded.module)
    assert first is projection and (second is projection) == (change == 0.0)
    decoder = compiled(model, "mtp", 2, draft=tmp_path, **QUICK)
    parameters = decoder.stages["insert_draft"].modules["mtp_1"].parameters()
    own = weights["model.layers.3.shared_head.head.weight"]
    found = {p is projection for p in parameters if p.shape == own.shape and torch.equal(p, own)}
    assert found == {change == 0.0}
    shared, reason = ("mtp_1", "") if change == 0.0 else ("mtp_0", " (the checkpoint has none)")
    targets = "target.model.embed_tokens.weight" if tied else "target.lm_head.weight"
    note = f"shared while loading: {shared}.lm_head.weight is {targets}, 25,856 bytes{reason}"
    assert note in decoder.report()
    assert model.get_output_embeddings().weight is projection and projection.requires_grad
    near = (
        "near miss at mtp_1.lm_head.weight: 1 of 3232 elements differ from "
        f"{'target' if tied else 'lm_head'}.lm_head.weight, by at most 0.001"
    )
    assert (near in decoder.report()) == (change != 0.0)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_of_its_own_stays_beside_the_targets(tied: bool, tmp_path: Path) -> None:
    model = make_model("llama", dtype=torch.float64, tie_word_embeddings=tied)
    save_inside(tmp_path, "deepseek", model, random_modules(model, 1))
    weights, embedding = load_file(tmp_path / "model.safetensors"), model.get_input_embeddings()
    before = embedding.weight
    weights["model.layers.2.embed_tokens.weight"] = before.detach() + 1
    save_file(weights, tmp_path / "model.safetensors")
    (own,) = MtpDrafter.load(open_checkpoint(tmp_path, "mtp"), MtpDraftConfig(), model, info(model)).module
    assert torch.equal(own.embed_tokens.weight, before + 1) and own.lm_head.weight is model.lm_head.weight
    assert model.get_input_embeddings() is embedding and embedding.weight is before


@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe"])
def test_experts_are_stored_one_by_one_and_in_shards(architecture: str, tmp_path: Path) -> None:
    """As published; written by hand, so that transformers' conversions are on one side only."""
    small = {"n_routed_experts": 4, "moe_intermediate_size": 24} if architecture == "glm4_moe" else {}
    model = make_model(architecture, dtype=torch.float64, **small)
    head = random_modules(model, 1)
    (module,), layers = head.module, model.config.num_hidden_layers
    bias = module.block.layers[0].mlp.gate.e_score_correction_bias
    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    tensors = tensors_of("deepseek", head, model)
    names = [name for name in tensors if ".mlp.experts." in name]
    assert not any("gate_up_proj" in name for name in names)
    for name in names:
        del tensors[name]
    experts, place = module.block.layers[0].mlp.experts, f"model.layers.{layers}.mlp."
    for number, (joint, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
        gate, up = joint.chunk(2)
        for name, tensor in (("gate", gate), ("up", up), ("down", down)):
            tensors[f"{place}experts.{number}.{name}_proj.weight"] = tensor.detach().clone()
    assert {*names} == {name for name in tensors if ".mlp.experts." in name}
    assert torch.equal(tensors[f"{place}gate.e_score_correction_bias"], bias)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | tensors
    (tmp_path / "model.safetensors").unlink()
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for shard in set(shards.values()):
        save_file({name: weights[name] for name in shards if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (loaded,) = MtpDrafter.load(open_checkpoint(tmp_path, "mtp"), MtpDraftConfig(), model, info(model)).module
    expected = module.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name].to(tensor.dtype)), name


# Which layer a module has


def test_a_layer_reads_what_was_projected() -> None:
    """Granite's base model scales what it takes as embeddings, which is no part of a module's layer."""
    model = make_model("granite", dtype=torch.float64, attention="eager")
    (module,) = random_modules(model, 1).module
    tokens, positions = ragged_prompts((7,))[0][None], torch.arange(7)[None]
    hidden = torch.randn(1, 7, model.config.hidden_size, dtype=torch.float64)
    pair = [module.embed_norm(model.get_input_embeddings()(tokens)), module.hidden_norm(hidden)]
    projected = torch.cat(pair, dim=-1) @ module.projection.weight.T
    mask = torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = module.block.rotary_emb(projected, positions)
    expected = module.block.layers[0](projected, attention_mask=mask, position_embeddings=angles)
    torch.testing.assert_close(module(tokens, positions, hidden), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("architecture", "sizes", "options", "experts"),
    [("deepseek_v3", {}, {}, True), ("deepseek_v3", {"first_k_dense_replace": 2}, {}, False),
     ("deepseek_v3", {"first_k_dense_replace": 2}, {"mlp_type": "sparse"}, True),
     ("qwen3_moe", {"mlp_only_layers": [0]}, {}, True), ("qwen3_moe", {}, {"mlp_type": "dense"}, False),
     ("qwen3_moe", {"decoder_sparse_step": 2}, {}, True), ("mimo_v2_flash", {}, {}, True)],
)  # fmt: skip
def test_modules_have_experts_like_the_targets_last_layer_or_as_wanted(
    architecture: str, sizes: dict[str, Any], options: dict[str, Any], experts: bool
) -> None:
    (module,) = MtpDrafter.random(make_model(architecture, **sizes), MtpDraftConfig(**options)).module
    assert any("experts" in name for name, _ in module.block.named_parameters()) == experts


# inspect


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        ("step", [
            ("num_modules", "2", "tensors"), ("family", "target", "draft.family"),
            ("fed_hidden", "residual", "vLLM 0.33 (transformers: final_norm)"),
            ("layer_type", "sliding_attention", "mtp_layer_types of config.json"),
            ("mlp_type", "dense", "mtp_mlp_layer_types of config.json"),
        ]),
        ("mimo_v2", [("layer_type", "sliding_attention", "vLLM 0.33 and SGLang")]),
        ("deepseek", [("layer_type", "as the target's", "the target's layers")]),
        ("speculators", [("family", "chained", "default (speculators knows one module)"),
                         ("order", "embedding", "speculators")]),
    ],
)  # fmt: skip
def test_inspect_says_where_every_option_comes_from(
    layout: str, rows: list[tuple[str, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = example(layout, tmp_path)[2]
    given = ["draft.family=target"] if layout == "step" else []
    shown = shown_by_inspect(capsys, folder, folder, "draft.kind=mtp", *given)
    assert {("layout", layout), ("fits the target", "yes"), *rows} <= {*map(tuple, shown)}
