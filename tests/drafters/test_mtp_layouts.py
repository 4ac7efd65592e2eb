"""MTP modules in files: every published layout, what is refused, and the same numbers from implementations of others.

Each layout was compared with: DeepSeek and GLM with transformers' ``MtpModel``; speculators and Qwen3-Next with the
layers of speculators; MiMo, MiMo-V2 and Step with the definition of :mod:`tests.drafters.mtp_formula` on a stand-in
target, with the options that are written out here.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from specgraph import compile_speculative
from specgraph.cli import main
from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.mtp_layouts import LAYOUTS
from specgraph.drafters.mtp_module import MtpOptions
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from tests.checkpoints.running import info
from tests.decoding import CONFIG, compiled
from tests.drafters.mtp_formula import drafted_logits
from tests.harness import Options, Run, fresh_start
from tests.models import make_model, ragged_prompts

pytestmark = pytest.mark.usefixtures("cached_traces")

QUICK: dict[str, Any] = {"pipeline": {"verify": False}}
BLOCK = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
PUBLISHED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "deepseek": ("llama", {}, [f"model.layers.{i}.{n}" for i in (2, 3) for n in (*DEEPSEEK, *BLOCK)]),
    "step": (
        "llama", {},
        [f"model.layers.{i}.{n}" for i in (2, 3) for n in (*DEEPSEEK, *(f"transformer.{name}" for name in BLOCK))],
    ),
    "mimo": (
        "qwen2", {},
        [f"model.mtp_layers.{i}.{n}" for i in (0, 1)
         for n in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", *BLOCK)],
    ),
    "mimo_v2": (
        "llama", {},
        [f"model.mtp.layers.{i}.{n}" for i in (0, 1)
         for n in ("enorm", "hnorm", "eh_proj", "final_layernorm", "pre_mlp_layernorm", *BLOCK[:-1])],
    ),
    "qwen3_next": (
        "qwen3", {},
        ["mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm",
         *(f"mtp.layers.0.{name}" for name in (*BLOCK, "self_attn.q_norm", "self_attn.k_norm"))],
    ),
    "speculators": (
        "qwen3", {"speculators_model_type": "mtp"},
        [f"mtp_layers.0.{name}" for name in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm",
                                             *BLOCK, "self_attn.q_norm", "self_attn.k_norm")],
    ),
}  # fmt: skip
"""Of every layout a target (a stand-in, except for speculators), keys of the configuration, and the tensors' names
without ``.weight`` and biases, as public loaders read them."""


OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"zero_first_embedding": True},
    "step": {"target_hidden": "residual", "fed_hidden": "residual"},
    "mimo": {"order": "hidden", "zero_first_embedding": True},
    "mimo_v2": {"family": "target"},
    "qwen3_next": {},
    "speculators": {},
}
"""How the layouts differ from chained modules that read the embedding first and normed hidden states."""


@functools.cache
def model_of(architecture: str) -> PreTrainedModel:
    return make_model(architecture, dtype=torch.float64, tie_word_embeddings=False)


def random_modules(model: PreTrainedModel, count: int, **options: Any) -> DraftHead:
    head = MtpDrafter.random(model, MtpDraftConfig(num_modules=count, **options))
    generator = torch.Generator().manual_seed(5)
    shared = {id(p) for p in model.parameters()}
    for name, parameter in head.module.named_parameters():
        if id(parameter) not in shared:
            noise = 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data = (noise + (1.0 if "norm" in name else 0.0)).to(parameter.dtype)
    return head


def tensors_of(layout: str, head: DraftHead, layers: int) -> dict[str, Tensor]:
    """The modules' tensors by the names of a layout; the embedding and the projection are left out."""
    config, found = {"num_hidden_layers": layers}, {}
    for index, module in enumerate(head.module):
        own = {name: p for name, p in module.named_parameters() if not name.startswith(("block.", "embed_", "lm_"))}
        own["embed_norm.weight"] = module.embed_norm.weight
        block = {n: t for n, t in module.block.state_dict().items() if n.startswith("layers.")}
        own |= {f"block.{name}": tensor for name, tensor in revert_weight_conversion(module.block, block).items()}
        found |= {LAYOUTS[layout].shown(config, index, name): tensor for name, tensor in own.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def save_inside(folder: Path, layout: str, model: PreTrainedModel, head: DraftHead, **config: Any) -> Path:
    """A target's checkpoint with the modules in it, as they are published."""
    model.save_pretrained(folder)
    weights, written = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    save_file(load_file(weights) | tensors_of(layout, head, model.config.num_hidden_layers), weights)
    (folder / "config.json").write_text(json.dumps(written | config))
    return folder


def example(layout: str, folder: Path) -> tuple[PreTrainedModel, DraftHead, Path]:
    architecture, config, names = PUBLISHED[layout]
    model = model_of(architecture)
    head = random_modules(model, 2 if any(".1." in name or ".3." in name for name in names) else 1, **OPTIONS[layout])
    return model, head, save_inside(folder, layout, model, head, **config)


@pytest.mark.parametrize("layout", [name for name in PUBLISHED if name != "speculators"])
def test_a_layout_is_found_inside_of_the_targets_checkpoint(layout: str, tmp_path: Path) -> None:
    model, head, folder = example(layout, tmp_path / "target")
    names = {name for name in load_file(folder / "model.safetensors") if name not in model.state_dict()}
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
    own: Any = loaded.module[0]
    assert own.embed_tokens.weight is model.get_input_embeddings().weight
    assert own.lm_head.weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("layout", PUBLISHED)
def test_modules_in_a_checkpoint_of_their_own(layout: str, tmp_path: Path) -> None:
    """Recognised without being asked for, and used by a target that does not hold them."""
    architecture, config, _ = PUBLISHED[layout]
    model, head = model_of(architecture), example(layout, tmp_path / "target")[1]
    (tmp_path / "head").mkdir()
    layers = model.config.num_hidden_layers
    (tmp_path / "head" / "config.json").write_text(json.dumps({"num_hidden_layers": layers} | config))
    save_file(tensors_of(layout, head, layers), tmp_path / "head" / "model.safetensors")
    assert open_checkpoint(tmp_path / "head").layout == layout
    decoder = compiled(model, "mtp", 2, draft=tmp_path / "head", **QUICK)
    assert f"- draft: mtp in the {layout} layout, {tmp_path / 'head'}" in decoder.report()
    assert len(decoder.stages["trace"].drafter.models) == len(head.module)


@pytest.mark.parametrize("layout", [name for name in PUBLISHED if name != "speculators"])
def test_a_loaded_target_drafts_by_the_definition(layout: str, tmp_path: Path) -> None:
    """From ``draft=mtp`` alone, with a target that was loaded by its folder."""
    _, head, folder = example(layout, tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    decoder = compiled(target, "mtp", 3, **QUICK)
    accepted = ragged_prompts((9,), seed=2)[0].tolist()
    program = decoder.stages["insert_draft"]
    run = Run(program, [64], torch.zeros(1, 1), Options(temperature=(0.0,), top_k=(0,), seeds=(0,)))
    drafts = fresh_start(run, 0, accepted)[1].tolist()
    expected = drafted_logits(target, head)
    assert drafts == [int(expected([accepted], [drafts[:index]]).argmax()) for index in range(3)]


# Implementations of others


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["deepseek_v3", "glm4_moe"])
def test_several_modules_are_those_of_transformers(architecture: str) -> None:
    """``MtpModel`` gives rotary embeddings the token's position, and keeps the embedding at row 0."""
    modeling_layers = pytest.importorskip("transformers.modeling_layers", reason="of transformers 5.23")
    cache_utils = pytest.importorskip("transformers.cache_utils")
    model = make_model(architecture, dtype=torch.float64, num_mtp_layers=3)
    head = random_modules(model, 3, rotary_position="token")
    theirs = modeling_layers.MtpModel(model, 3).double().eval()
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
    tensors = tensors_of("deepseek", head, layers)
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


# What is refused


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
    "fp8": (
        replaced("model.layers.2.mlp.up_proj.weight", torch.ones(48, 32).to(torch.float8_e4m3fn)), {},
        r"model\.layers\.2\.mlp\.up_proj\.weight of .* is torch\.float8_e4m3fn; convert it to bfloat16 or float32",
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


# inspect


def test_inspect_says_where_every_option_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = example("step", tmp_path / "target")[2]
    assert main(["inspect", str(folder), f"target={folder}", "draft.kind=mtp", "draft.family=target"]) == 0
    shown = [[cell.strip() for cell in row.split("  ") if cell] for row in capsys.readouterr().out.splitlines()]
    assert ["layout", "step"] in shown and ["fits the target", "yes"] in shown
    assert ["num_modules", "2", "tensors"] in shown and ["family", "target", "draft.family"] in shown
    assert ["fed_hidden", "residual", "vLLM 0.33 (transformers: final_norm)"] in shown
