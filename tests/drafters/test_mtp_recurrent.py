"""The MTP module of Qwen3-Next and Qwen3.5: their own recurrent targets, published tensors, and arithmetic written out.

:mod:`tests.drafters.qwen_formula` is the oracle. It reads the tensors by the names that checkpoints have, and uses no
class of specgraph or transformers for the module.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

import specgraph
from specgraph import SpeculativeDecoder
from specgraph.cli import main
from specgraph.drafters.base import DraftHead
from specgraph.drafters.mtp import MtpDraftConfig, MtpDrafter
from specgraph.drafters.mtp_module import Mtp
from specgraph.drafters.registry import open_checkpoint
from specgraph.errors import ConfigError
from specgraph.frontend.recurrent import hooked_recurrence
from specgraph.training import format_question, train_head
from specgraph.training.config import HeadConfig
from tests.checkpoints.running import info
from tests.decoding import CONFIG, assert_same_tokens, compiled, forward_greedy
from tests.detectors import NextLogits
from tests.drafters.contract import CachedDraftContract, Case, planted
from tests.drafters.files_contract import shown_by_inspect
from tests.drafters.mtp_files import OPTIONS, random_modules, save_inside, tensors_of
from tests.drafters.mtp_formula import drafted_logits
from tests.drafters.qwen_formula import published_logits, split_experts
from tests.drafters.training_contract import run_of, small_target, tokenizer
from tests.harness import Options, Run, fresh_start
from tests.models import exact_norms, make_model, ragged_prompts

DENSE, MOE = "qwen3_5_text", "qwen3_5_moe_text"
LAYOUT = "qwen3_next"
PROMPTS = ragged_prompts((3, 9, 2))


def made(architecture: str) -> PreTrainedModel:
    """A target whose final norm scales: with its first weights, norming twice would be norming once."""
    model = make_model(architecture, dtype=torch.float64)
    scale = model.base_model.get_parameter("norm.weight").data
    scale += 0.5 * torch.randn(scale.shape, generator=torch.Generator().manual_seed(6), dtype=scale.dtype)
    return model


@functools.cache
def target(architecture: str) -> PreTrainedModel:
    """The same, computing in float64 throughout, but for routers of experts."""
    model = made(architecture)
    exact_norms(model)
    return model


@functools.cache
def module_of(architecture: str) -> tuple[DraftHead, Mapping[str, Tensor]]:
    """A random module for ``target(architecture)``, computing in float64 throughout, and its published tensors."""
    head = random_modules(target(architecture), 1, **OPTIONS[LAYOUT])
    tensors = tensors_of(LAYOUT, head, target(architecture))
    exact_norms(head.module)
    return head, tensors


@functools.cache
def oracle() -> NextLogits:
    return published_logits(target(DENSE), module_of(DENSE)[1])


# Histories


class TestDrafts(CachedDraftContract):
    """One module runs no row of an earlier step again, so the row before may not be there."""

    KIND, TOKENS_TOO = "mtp", True
    PASSES: ClassVar = {"recurrent": True}
    CASES = (Case(DENSE, 1), Case(DENSE, 3), Case(DENSE, 3, "probabilistic"), Case(DENSE, 7))
    REAL = (Case(DENSE, 3, "probabilistic"),)
    SEEDED = (Case(DENSE, 1), Case(DENSE, 7))
    POISONED = (Case(DENSE, 3, "probabilistic"),)
    POISONED_SEED = 3
    POISON_DETECTORS = ("fresh start", "oracle", "slots")
    BUGS = planted(Case(DENSE, 3), {
        "window instead of emitted, shifted": {"oracle"},
        "chained position off by one": {"oracle", "slots"},
        "proposals from the row before": {"fresh start", "oracle"},
    })  # fmt: skip
    PROMPTS = PROMPTS
    STEPS = 18
    REAL_PROMPTS = ragged_prompts((1, 17, 2))
    """Of one token, and longer than a chunk of a state."""

    @classmethod
    def target(cls) -> PreTrainedModel:
        return target(DENSE)

    @classmethod
    def draft(cls, name: str) -> DraftHead:
        return module_of(name)[0]

    @classmethod
    def oracle(cls, name: str) -> NextLogits:
        return oracle()

    @classmethod
    def reference(cls, prompts: Sequence[Tensor], count: int) -> list[Tensor]:
        """By the model's forward, whose recurrent functions are computed in float64, up to the end of a sequence."""
        found = forward_greedy(target(DENSE), prompts, count)
        ends = [(tokens == target(DENSE).config.eos_token_id).nonzero().flatten().tolist() for tokens in found]
        return [tokens[: own[0] + 1] if own else tokens for tokens, own in zip(found, ends, strict=True)]


# The formula


@pytest.mark.parametrize("architecture", [DENSE, MOE, "qwen3_next"])
def test_the_published_formula_and_every_other_use_of_its_tensors(architecture: str) -> None:
    head, tensors = module_of(architecture)
    expected = published_logits(target(architecture), tensors)
    text, drafted = ragged_prompts((9,), seed=2)[0].tolist(), [7, 40, 21]

    def error(found: NextLogits, count: int) -> float:
        given = [text], [drafted[:count]]
        return float((found(*given) - expected(*given)).abs().max())

    for count in range(4):
        assert error(drafted_logits(target(architecture), head), count) < 1e-5  # float32 in the target's functions
    wrong = {"order": "hidden", "target_hidden": "residual", "fed_hidden": "residual", "zero_first_embedding": True}
    for name, value in wrong.items():
        changed = copy.copy(head.module[0])
        changed.options = replace(changed.options, **{name: value})
        assert error(drafted_logits(target(architecture), DraftHead(Mtp([changed]), head.features)), 2) > 1e-2, name


# Files


def with_experts_in_one_tensor(head: DraftHead, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts as some checkpoints of Qwen3.5 hold them."""
    others = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    experts: Any = head.module[0].block.layers[0].mlp.experts
    joint = {name: getattr(experts, name).detach().clone() for name in ("gate_up_proj", "down_proj")}
    return others | {f"mtp.layers.0.mlp.experts.{name}": tensor for name, tensor in joint.items()}


def checkpoint_of(folder: Path, architecture: str, one_tensor: bool = False, **config: Any) -> Path:
    """A target's checkpoint with a module in it."""
    model = made(architecture)
    head = random_modules(model, 1)
    save_inside(folder, LAYOUT, model, head, **({"mtp_num_hidden_layers": 1} | config))
    if one_tensor:
        weights = with_experts_in_one_tensor(head, load_file(folder / "model.safetensors"))
        save_file(weights, folder / "model.safetensors")
    return folder


def drafts_of(tested: SpeculativeDecoder, accepted: list[int]) -> list[int]:
    program = tested.stages["insert_draft"]
    run = Run(program, [64], torch.zeros(1, 1), Options(temperature=(0.0,), top_k=(0,), seeds=(0,)))
    drafts: list[int] = fresh_start(run, 0, accepted)[1].tolist()
    return drafts


def check_drafts(tested: SpeculativeDecoder, expected: NextLogits) -> None:
    accepted = ragged_prompts((19,), seed=2)[0].tolist()
    drafts = drafts_of(tested, accepted)
    assert drafts == [int(expected([accepted], [drafts[:index]]).argmax()) for index in range(len(drafts))]


@pytest.mark.parametrize(
    ("architecture", "one_tensor", "k"), [("qwen3_next", False, 1), (DENSE, False, 3), (MOE, True, 7)]
)
def test_draft_mtp_takes_the_module_out_of_the_targets_checkpoint(
    architecture: str, one_tensor: bool, k: int, tmp_path: Path
) -> None:
    folder = checkpoint_of(tmp_path, architecture, one_tensor)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    tensors = split_experts(load_file(folder / "model.safetensors"))
    tested = compiled(model, "mtp", k)
    check_drafts(tested, published_logits(model, tensors))
    found = tested.generate(PROMPTS, max_new_tokens=12, eos_token_id=[]).new_tokens
    assert_same_tokens(model, PROMPTS, found, forward_greedy(model, PROMPTS, 12))


@pytest.mark.parametrize("one_tensor", [False, True])
@pytest.mark.parametrize("architecture", [MOE, "qwen3_next"])
def test_experts_in_one_tensor_and_one_by_one(architecture: str, one_tensor: bool, tmp_path: Path) -> None:
    model = make_model(architecture, dtype=torch.float64)
    expected = random_modules(model, 1).module.state_dict()
    found = open_checkpoint(checkpoint_of(tmp_path, architecture, one_tensor), "mtp")
    assert any("experts.gate_up_proj" in name for name in found.tensors) == one_tensor
    loaded = MtpDrafter.load(found, MtpDraftConfig(), model, info(model)).module.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.items())


def test_a_module_that_is_saved_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model(MOE, dtype=torch.float64)
    head = random_modules(model, 1)
    MtpDrafter.save_head(head, tmp_path / "head", target_name="target", algorithm="mtp", num_speculative_tokens=3,
                         shared=model.parameters())  # fmt: skip
    found = open_checkpoint(tmp_path / "head")
    assert (found.kind, found.layout) == ("mtp", "speculators")
    loaded = MtpDrafter.load(found, MtpDraftConfig(), model, info(model)).module
    assert all(torch.equal(*both) for both in zip(loaded.parameters(), head.module.parameters(), strict=True))
    model.save_pretrained(tmp_path / "target")
    assert main(["inspect", str(tmp_path / "head"), f"target={tmp_path / 'target'}"]) == 0
    assert "fits the target     yes" in capsys.readouterr().out


def test_inspect_names_the_layout_and_the_kind_of_layer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint_of(tmp_path, DENSE)
    shown = shown_by_inspect(capsys, folder, folder, "draft.kind=mtp")
    for expected in (
        ["layout", LAYOUT], ["fits the target", "yes"], ["num_modules", "1", "tensors"],
        ["layer_type", "full_attention", "vLLM 0.33"], ["fed_hidden", "final_norm", "vLLM 0.33"],
    ):  # fmt: skip
        assert expected in shown


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "words"),
    [
        (DENSE, "mtp.fc.weight", (32, 32), r"mtp\.fc\.weight has the shape \[32, 32\], but .* need \[32, 64\]"),
        (DENSE, "mtp.layers.0.self_attn.q_proj.weight", (32, 32), r"q_proj\.weight has .* need \[64, 32\]"),
        (MOE, "mtp.layers.0.mlp.experts.gate_up_proj", (4, 24, 32), r"gate_up_proj has .* need \[4, 48, 32\]"),
        (MOE, "mtp.layers.0.mlp.experts.down_proj", None, r"lacks mtp\.layers\.0\.mlp\.experts\.0\.down_proj\.weight"),
        (DENSE, "mtp.pre_fc_norm_hidden.weight", None, r"lacks mtp\.pre_fc_norm_hidden\.weight"),
        (DENSE, "mtp.layers.1.input_layernorm.weight", (32,), r"mtp\.layers\.1\.input_layernorm\.weight, which an MTP"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(
    architecture: str, name: str, shape: tuple[int, ...] | None, words: str, tmp_path: Path
) -> None:
    folder = checkpoint_of(tmp_path, architecture, one_tensor=architecture == MOE)
    weights = load_file(folder / "model.safetensors")
    weights.pop(name, None)
    save_file(weights | ({} if shape is None else {name: torch.ones(shape)}), folder / "model.safetensors")
    model: PreTrainedModel = make_model(architecture, dtype=torch.float64)
    with pytest.raises(ConfigError, match=words):
        MtpDrafter.load(open_checkpoint(folder, "mtp"), MtpDraftConfig(), model, info(model))


# Multimodal checkpoints


def test_the_text_model_of_a_multimodal_one_takes_the_module_of_its_checkpoint(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
              "patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 1}  # fmt: skip
    text = made(DENSE)
    config = Qwen3_5Config(text_config=text.config.to_dict(), vision_config=vision, image_token_id=90,
                           video_token_id=91, vision_start_token_id=92, vision_end_token_id=93)  # fmt: skip
    whole: Any = Qwen3_5ForConditionalGeneration(config).double()
    whole.model.language_model.load_state_dict(text.base_model.state_dict())
    whole.lm_head.load_state_dict(text.lm_head.state_dict())
    whole.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "model.language_model.layers.0.linear_attn.A_log" in weights
    weights |= tensors_of(LAYOUT, random_modules(text, 1), text)
    save_file(weights, tmp_path / "model.safetensors")
    written = json.loads((tmp_path / "config.json").read_text())
    written["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(written))
    loaded = Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    tested = compiled(loaded, "mtp", 3)
    assert f"- draft: mtp in the {LAYOUT} layout, {tmp_path}" in tested.report()
    check_drafts(tested, published_logits(text, weights))
    found = tested.generate(PROMPTS, max_new_tokens=12, eos_token_id=[]).new_tokens
    assert_same_tokens(text, PROMPTS, found, forward_greedy(text, PROMPTS, 12))


# Training


@torch.no_grad()
def test_what_is_trained_is_what_is_drafted() -> None:
    """Every draft behind the first is one of a chain, which training runs for all positions at once, with a mask."""
    text = ragged_prompts((21,), seed=7)[0]
    with hooked_recurrence(target(DENSE)):
        features = target(DENSE)(text[None], output_hidden_states=True, use_cache=False).hidden_states[-1]
    head, ids = module_of(DENSE)[0].module, text.tolist()
    for step, rows in enumerate(head.unroll(text[None], (features,), 4, None)):
        for row in range(len(ids) - 2 - step):
            expected = oracle()([ids[: row + 2]], [ids[row + 2 : row + 2 + step]])[0]
            torch.testing.assert_close(head.step_logits(rows[0, row], step), expected, rtol=0.0, atol=1e-11)


def test_a_module_of_a_recurrent_target_is_trained_and_used(tmp_path: Path) -> None:
    model = small_target(DENSE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = replace(run_of(tmp_path), draft="mtp", head=HeadConfig(layers=1), eval_drafts=3)
    config.chain.steps = 3
    losses = [loss for _, loss in train_head(model, tokenizer(), config).progress.losses]
    assert losses[-1] < losses[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    tested = specgraph.compile_speculative(model, CONFIG, draft=tmp_path / "head")
    assert "mtp in the speculators layout" in tested.report()
    prompts = [torch.tensor([3, 4, 9, 5]), torch.tensor([6])]
    found = tested.generate(prompts, max_new_tokens=9).new_tokens
    plain = compiled(model, "none", 1).generate(prompts, max_new_tokens=9).new_tokens
    assert_same_tokens(model, prompts, found, plain)


TRAINED = Path(__file__).parents[2] / "examples" / "models" / "tiny-hybrid"


def test_the_trained_head_changes_no_token_and_is_often_right() -> None:
    """The model card has 200 questions; these are enough to see that both files belong together."""
    target = AutoModelForCausalLM.from_pretrained(TRAINED / "target", dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(TRAINED / "target")
    lines = (TRAINED.parents[1] / "data" / "gsm8k_test_200.jsonl").read_text().splitlines()[:4]
    texts = [format_question(json.loads(line)["question"]) for line in lines]
    prompts = [torch.tensor(words(text)["input_ids"]) for text in texts]
    plain = specgraph.compile_speculative(target, CONFIG).generate(prompts, max_new_tokens=60)
    drafted = specgraph.compile_speculative(target, {**CONFIG, "draft": {"num_speculative_tokens": 5}},
                                            draft=TRAINED / "mtp").generate(prompts, max_new_tokens=60)  # fmt: skip
    assert_same_tokens(target, prompts, drafted.new_tokens, plain.new_tokens)
    assert drafted.stats.acceptance_length > 3
